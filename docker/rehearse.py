# SPDX-License-Identifier: Apache-2.0
"""Runs a Dockerfile's COPY and RUN steps without Docker: in a clean folder, with a new Python environment.

    python docker/rehearse.py docker/Dockerfile.cpu FOLDER [--no-command]

The image's command comes last; ``--no-command`` leaves it out. Docker's own part is not rehearsed: the running
Python replaces the base image's, and the system's packages stay. Pip's options in the environment (PIP_FIND_LINKS and
so on) hold. FOLDER must not exist; it takes about 5 GB.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction of a Dockerfile with its words; continued lines are joined, comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(name, words) for name, _, words in (line.partition(" ") for line in whole.splitlines())]


def main(dockerfile: str, folder: str, *options: str) -> None:
    """Runs the steps; the first that fails ends the program with an error."""
    target = Path(folder).resolve()
    target.mkdir(parents=True)
    venv.create(target / "venv", with_pip=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env = {**kept, "PATH": f"{target / 'venv' / 'bin'}:{os.environ['PATH']}", "NGRPO_CACHE": str(target / "cache")}
    here = target / "root"
    here.mkdir()
    kinds = ("RUN",) if "--no-command" in options else ("RUN", "CMD")
    for name, words in instructions(Path(dockerfile).read_text()):
        if name == "WORKDIR":
            here = target / "root" / words.lstrip("/")
            here.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, place = shlex.split(words)
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, here / place, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, here / place)
        elif name == "ARG":
            key, _, value = words.partition("=")
            env.setdefault(key, value)
        elif name in kinds and not words.startswith("apt-get"):
            command = shlex.join(json.loads(words)) if name == "CMD" else words
            print(f"== {command}", flush=True)
            subprocess.run(["bash", "-c", command], cwd=here, env=env, check=True)
    print("== all steps ran", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
