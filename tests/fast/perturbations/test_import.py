# SPDX-License-Identifier: Apache-2.0
"""Importing the two packages is fast and loads none of the heavy ones."""

import pytest

from tests.support.import_probe import HEAVY, probe


@pytest.mark.parametrize("package", ["perturbations", "ngrpo"])
def test_import_is_light(package: str) -> None:
    seconds, modules = probe(f"import {package}")
    assert package in modules
    assert not modules & set(HEAVY)
    assert seconds < 1.0


@pytest.mark.parametrize(
    "use",
    [
        "from perturbations import registry; registry.available()",
        "from perturbations import options; options.nearest('a', ['b'])",
        "import ngrpo.machine.hardware, ngrpo.trainers.openrlhf.launch",
        "from ngrpo.machine.upstream.openrlhf_flags import Flags; Flags(['--reward.remote_url', 'r.py']).args",
        "from benchmarks.gpu import run, stages; stages.stages(False)",
    ],
)
def test_this_needs_nothing_heavy(use: str) -> None:
    _, modules = probe(use)
    assert not modules & set(HEAVY)


def test_the_library_needs_only_torch_and_numpy() -> None:
    public = "import perturbations as p; [getattr(p, name) for name in p.__all__]"
    perturbations = (
        "from perturbations import registry; [registry.get(name) for name in registry.perturbations.in_tree()]"
    )
    _, modules = probe(f"{public}; {perturbations}")
    assert "torch" in modules
    assert not modules & (set(HEAVY) - {"torch"})


def test_public_names() -> None:
    import perturbations

    assert dir(perturbations) == perturbations.__all__
    for name in perturbations.__all__:
        assert callable(getattr(perturbations, name)), name
    assert perturbations.parameters.attach is not None  # a module of the package, as the pages write it
    with pytest.raises(AttributeError, match=r"'nothing'.*check_perturbation"):
        perturbations.nothing  # noqa: B018
