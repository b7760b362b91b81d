# SPDX-License-Identifier: Apache-2.0
"""Files of a user for the tests: a perturbation and a gate, written where the test runs and forgotten after it."""

import sys
from pathlib import Path

import pytest

from perturbations import registry, user_files

PERTURBATION = '''
from __future__ import annotations

from dataclasses import dataclass

from perturbations import Perturbation, Proposal, Step, option, register
from perturbations.edit import one_hot

{decorator}
@dataclass(frozen=True, kw_only=True)
class {name}(Perturbation):
    """Feeds the sampled token as it is."""

    paper = "a test"
    strength: float | None = option({default}, "a number", low=0.0, high=1.0)
    loud: bool = option(False, "a switch")

    def propose(self, step: Step) -> Proposal:
        return Proposal(one_hot(step.sampled), step.sampled)
'''

GATE = '''
from dataclasses import dataclass

from perturbations import Gate, option, register_gate


@register_gate("their_gate")
@dataclass(frozen=True, kw_only=True)
class Above(Gate):
    """Open where the sampled token's id is large."""

    least: int = option(3, "an id", low=0)
    strict: bool = option(False, "a switch")

    def open(self, step):
        return step.sampled > self.least if self.strict else step.sampled >= self.least
'''


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Each test in a folder of its own; what it loads or registers is gone after it."""
    for kept in registry.Registry.instances:
        for name in kept.in_tree():
            kept.get(name)
        monkeypatch.setattr(kept, "registered", dict(kept.registered))
    monkeypatch.setattr(user_files, "_loaded", dict(user_files._loaded))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("perturbation_file_", "their_")):
            del sys.modules[name]


def write(path: str, name: str = "Mine", decorator: str = "", default: str = "0.5", more: str = "") -> str:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(PERTURBATION.format(name=name, decorator=decorator, default=default) + more)
    return path


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, registry_of_kind: registry.Registry, entries: str) -> None:
    """Writes what pip leaves behind for a package ``their_dist`` with entry points: lines ``name = module:Class``."""
    info = folder / "their_dist-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their_dist\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry_of_kind.group}]\n{entries}")
    monkeypatch.syspath_prepend(folder)
    # Entry points with a name of the tree are read once in a process, which may have been before this test.
    monkeypatch.setattr(registry_of_kind, "hidden", registry.Registry.hidden.func(registry_of_kind))


def message(call) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)
