# SPDX-License-Identifier: Apache-2.0
"""Importing the two packages is fast and loads none of the heavy ones."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "vllm", "openrlhf", "ray", "deepspeed", "transformers"]
PROBE = """
import json, sys, time
before = time.perf_counter()
{statement}
seconds = time.perf_counter() - before
print(json.dumps([seconds, sorted(name for name in sys.modules if "." not in name)]))
"""


def probe(statement: str) -> tuple[float, set[str]]:
    """Runs a statement in a fresh interpreter: its seconds, and the top-level modules loaded after it."""
    command = [sys.executable, "-c", PROBE.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds, modules = json.loads(done.stdout)
    return seconds, set(modules)


@pytest.mark.parametrize("package", ["perturbations", "ngrpo"])
def test_import_is_light(package: str) -> None:
    seconds, modules = probe(f"import {package}")
    assert package in modules
    assert not modules & set(HEAVY)
    assert seconds < 1.0


@pytest.mark.parametrize("use", ["registry as m; m.available()", "options as m; m.nearest('a', ['b'])"])
def test_names_and_options_need_no_torch(use: str) -> None:
    _, modules = probe(f"import perturbations.{use}")
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
        assert getattr(perturbations, name).__name__ == name
    with pytest.raises(AttributeError, match=r"'nothing'.*check_perturbation"):
        perturbations.nothing  # noqa: B018
