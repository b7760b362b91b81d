# SPDX-License-Identifier: Apache-2.0
"""The kinds of extension: each is one row and one folder."""

from dataclasses import dataclass
from inspect import isroutine

import pytest

from ngrpo.config.kinds import KINDS, Kind, of_registry, run_level_kinds
from perturbations import UsageError, option
from perturbations.registry import Registry
from tests.conftest import ROOT


def test_every_registry_has_its_row() -> None:
    of_ours = [one for one in Registry.instances if one.base.startswith(("ngrpo.", "perturbations:"))]
    assert {kind.registry for kind in KINDS.values()} == set(of_ours)
    for kind in KINDS.values():
        assert of_registry(kind.registry) is kind
        assert issubclass(kind.registry.base_class(), object)


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
    assert "${Class}" in kind.template()
    assert "${Class}" in kind.template("test_")
    assert (kind in run_level_kinds()) == (not kind.flag.startswith("--perturbation"))
