# SPDX-License-Identifier: Apache-2.0
"""The kinds of extension: each is one row and one folder, and everything that deals with kinds goes by the rows."""

import contextlib
import io
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from inspect import isroutine
from pathlib import Path

import pytest

from ngrpo.config import kinds
from ngrpo.config.kinds import KINDS, Kind, of_registry, run_level_kinds
from perturbations import UsageError, option
from perturbations.registry import Registry
from tests.conftest import ROOT


def test_every_registry_has_its_row() -> None:
    of_ours = [one for one in Registry.instances if one.base.startswith(("ngrpo.", "perturbations:"))]
    assert {kind.registry for kind in KINDS.values()} == set(of_ours)
    for kind in KINDS.values():
        assert of_registry(kind.registry) is kind and issubclass(kind.registry.base_class(), object)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_an_option_named_as_a_method_is_refused(kind: Kind) -> None:
    base = kind.registry.base_class()
    for method in [name for name, part in vars(base).items() if isroutine(part) and not name.startswith("_")]:
        parts = {"__module__": __name__, "__annotations__": {method: int}, method: option(3, "a number"), "name": "own"}
        own = dataclass(frozen=True, kw_only=True)(type("Own", (base,), parts))
        own.__abstractmethods__ = frozenset()
        with pytest.raises(UsageError, match=rf"'own': Own: its option '{method}' hides {base.__name__}\.{method}"):
            kind.registry.check_complete(own, "own")


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_what_a_row_names_is_there(kind: Kind) -> None:
    assert (ROOT / kind.page).is_file()
    assert "${Class}" in kind.template() and "${Class}" in kind.template("test_")
    assert (kind in run_level_kinds()) == (not kind.flag.startswith("--perturbation"))


def test_a_further_kind_is_a_row_and_a_folder(tmp_path: Path) -> None:
    """In a process of its own, because kinds are read when a module is imported."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


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


def commands_go_by_rows() -> None:
    """Writes the folder here, adds the row, and asks the commands."""
    for name, text in FOLDER.items():
        path = Path("bonuses") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path.insert(0, os.getcwd())
    import bonuses  # type: ignore[import-not-found]

    about = {"about": "what is added to a reward", "page": "docs/bonuses.md", "templates": "bonuses"}
    row = kinds.Kind(registry=bonuses.registry, flag="--bonus", **about)
    kinds.ROWS += (row,)
    kinds.KINDS[row.name], kinds.FLAGS[row.registry] = row, row.flag
    from ngrpo import cli
    from ngrpo.config import parse
    from ngrpo.workbench.compare import runs
    from ngrpo.workbench.compare.plan import read_plan

    def says(words: str, *parts: str, code: int = 0) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            ended = cli.main(words.split())
        assert ended == code, out.getvalue()
        assert all(part in out.getvalue() for part in parts), out.getvalue()

    says("list", "short", "bonus")
    says("list short", "bonus", "--bonus.size")
    says("train --help", "--bonus NAME", "--bonus.size")
    says("new", "bonus              what is added to a reward", code=2)
    says("new bonus mine", "ngrpo train --bonus ./mine.py")
    assert Path("mine.py").read_text() == "# Mine, a bonus\n"
    assert Path("test_mine.py").read_text() == "# tests of Mine\n"
    says("check bonus short", "no conformance suite", code=2)
    says("train --bonus shrot", "unknown bonus 'shrot'. Did you mean 'short'?", code=2)
    says("train --bonus", "--bonus needs a bonus's name (see: ngrpo list)", code=2)
    says("train --bonus.size 1", "--bonus.size is given, but no bonus. Add --bonus NAME.", code=2)
    says("train --bonuss short", "unknown flag '--bonuss'. Did you mean '--bonus'?", code=2)
    says("train --bonus short --model m --task arithmetic --dry-run", "--bonus short: size=0.25")
    run = parse.run_config(["--bonus", "short", "--bonus.size", "0.5"])
    run.write(Path("run.yaml"))
    assert parse.run_config(parse.with_files(["--config", "run.yaml"])) == run
    assert pickle.loads(pickle.dumps(run)).part("bonus").size == 0.5 and run.conditions == ("bonus",)
    lines = ["--strategy", "none", "--strategy", "none bonus=short bonus.size=0.75"]
    plan = read_plan([*lines, "--model", "m", "--task", "arithmetic"])[0]
    assert runs.run_config(plan, plan.runs()[1], Path("x")).specs["bonus"] == {"name": "short", "size": 0.75}


if __name__ == "__main__":
    commands_go_by_rows()
