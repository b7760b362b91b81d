# SPDX-License-Identifier: Apache-2.0
"""The kinds of extension: each is one row and one folder, and everything that deals with kinds goes by the rows."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from inspect import isroutine
from pathlib import Path

import pytest

from ngrpo.config.kinds import KINDS, Kind, of_registry, run_level_kinds
from perturbations import option
from perturbations.errors import UsageError
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
    command = [sys.executable, "-m", "tests.fast.further_kind"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("list", "of name"):
        assert found[name][0] == 0, name
        assert "short" in found[name][1], name
        assert "bonus" in found[name][1], name
    assert "--bonus.size" in found["of name"][1]
    assert "--bonus NAME" in found["help"][1] and "--bonus.size" in found["help"][1]
    assert "bonus              what is added to a reward" in found["kinds"][1]
    assert found["new"][0] == 0 and found["new"][2:] == ["# Mine, a bonus\n", "# tests of Mine\n"]
    assert "ngrpo train --bonus ./mine.py" in found["new"][1]
    assert found["check"][0] == 2 and "no conformance suite" in found["check"][1]
    assert found["unknown"][0] == 2 and "unknown bonus 'shrot'. Did you mean 'short'?" in found["unknown"][1]
    assert "--bonus needs a bonus's name (see: ngrpo list)" in found["alone"][1]
    assert "--bonus.size is given, but no bonus. Add --bonus NAME." in found["without"][1]
    assert "unknown flag '--bonuss'. Did you mean '--bonus'?" in found["misspelt"][1]
    assert "--bonus short: size=0.25" in found["dry run"][1]
    assert found["again"]
    assert found["worker"] == 0.5
    assert found["conditions"] == ["bonus"]
    assert found["compare"] == {"name": "short", "size": 0.75}
