# SPDX-License-Identifier: Apache-2.0
"""Makes the mutations: see `tests.mutations`."""

import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.mutations import MUTATIONS, survives
from tests.mutations.mutation import COPIED, ROOT, run_pytest


def main(words: list[str]) -> int:
    """Makes each mutation in a copy and reports those that survive; the exit status."""
    chosen = [m for m in MUTATIONS if not words or any(word in m.file or word in m.wrong for word in words)]
    if not chosen:
        print(f"no mutation's file or reason contains {' or '.join(words)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "setup.py", "README.md", "Makefile"):
            shutil.copy(ROOT / name, root / name)
        print("the tests without a mutation", flush=True)
        clean = run_pytest(root, sorted({test for m in chosen for test in m.tests.split()}))
        if clean.returncode:
            print(f"they fail already, so they show nothing:\n{clean.stdout[-4000:]}", file=sys.stderr)
            return 2
        alive = []
        for mutation in chosen:
            start = time.monotonic()
            survived = survives(mutation, root)
            alive += [mutation] * survived
            outcome = "SURVIVES" if survived else "caught"
            print(f"{outcome:8} {time.monotonic() - start:5.1f} s  {mutation.file}: {mutation.wrong}", flush=True)
    print(f"{len(alive)} of {len(chosen)} mutations survive")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
