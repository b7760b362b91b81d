# SPDX-License-Identifier: Apache-2.0
"""Run by test_kinds.py: a further kind of extension, which is a folder and a row, and the commands that go by rows.

Prints one JSON object. A process of its own, because kinds are read when a module is imported.
"""

import contextlib
import io
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

FOLDER = {
    "__init__.py": """
from perturbations.registry import Registry

registry = Registry("bonus", "bonuses:Bonus", "bonuses", "ngrpo.bonuses")
__getattr__ = registry.base_of_package
""",
    "base.py": '''
from dataclasses import dataclass

from bonuses import registry
from perturbations.options import Options


@dataclass(frozen=True, kw_only=True)
class Bonus(Options):
    """What is added to a reward."""

    kind, registry, paper = "bonus", registry, ""
''',
    "short.py": '''
from dataclasses import dataclass

from bonuses import registry
from bonuses.base import Bonus
from perturbations.options import option


@registry.register("short")
@dataclass(frozen=True, kw_only=True)
class Short(Bonus):
    """A bonus for short answers."""

    size: float = option(0.25, "the largest bonus", low=0.0)
''',
    "templates/bonus.txt": "# $Class, a bonus\n",
    "templates/test_bonus.txt": "# tests of $Class\n",
}


def main() -> None:
    for name, text in FOLDER.items():
        path = Path("bonuses") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path.insert(0, os.getcwd())
    import bonuses  # type: ignore[import-not-found]

    from ngrpo.config import kinds

    about = {"about": "what is added to a reward", "page": "docs/bonuses.md", "templates": "bonuses"}
    row = kinds.Kind(registry=bonuses.registry, flag="--bonus", **about)
    kinds.ROWS += (row,)
    kinds.KINDS[row.name], kinds.FLAGS[row.registry] = row, row.flag
    from ngrpo import cli
    from ngrpo.config import parse
    from ngrpo.workbench.compare import runs
    from ngrpo.workbench.compare.plan import read_plan

    def said(words: str) -> list[Any]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = cli.main(words.split())
        return [code, out.getvalue()]

    run = parse.run_config(["--bonus", "short", "--bonus.size", "0.5"])
    run.write(Path("run.yaml"))
    lines = ["--strategy", "none", "--strategy", "none bonus=short bonus.size=0.75"]
    plan = read_plan([*lines, "--model", "m", "--task", "arithmetic"])[0]
    result = {
        "list": said("list"),
        "of name": said("list short"),
        "help": said("train --help"),
        "kinds": said("new"),
        "new": [*said("new bonus mine"), Path("mine.py").read_text(), Path("test_mine.py").read_text()],
        "check": said("check bonus short"),
        "unknown": said("train --bonus shrot"),
        "alone": said("train --bonus"),
        "without": said("train --bonus.size 1"),
        "misspelt": said("train --bonuss short"),
        "dry run": said("train --bonus short --model m --task arithmetic --dry-run"),
        "again": parse.run_config(parse.with_files(["--config", "run.yaml"])) == run,
        "worker": pickle.loads(pickle.dumps(run)).part("bonus").size,
        "conditions": run.conditions,
        "compare": runs.run_config(plan, plan.runs()[1], Path("x")).specs["bonus"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
