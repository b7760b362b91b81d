# SPDX-License-Identifier: Apache-2.0
"""The stages, and what a case of one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

STAGES = {
    "a": "benchmarks.gpu.exactness",
    "b": "benchmarks.gpu.throughput",
    "c": "benchmarks.gpu.neighbor_table",
    "d": "benchmarks.gpu.trainer_step",
    "e": "benchmarks.gpu.training",
    "f": "benchmarks.gpu.decode_steps",
}
"""Each stage's letter and its module. The module's own imports are light: torch and vLLM are for its cases."""

MINUTES = 8.0
"""What a stage may take. Cases that have not begun by then are left for the next call."""


@dataclass(frozen=True)
class Case:
    """One process of a stage.

    Attributes:
        name: unique in the stage, and its heading in the result file.
        arguments: what the stage's ``measure`` is given; JSON can hold it.
        env: environment variables that must be set before torch and vLLM are imported.
        needs: modules without which the case is skipped, each with the reason and the fix.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str:
        """Why the case cannot run here; empty where it can."""
        absent = [f"{name} is not installed ({fix})" for name, fix in self.needs.items() if find_spec(name) is None]
        return "; ".join(absent)


def stage(letter: str) -> ModuleType:
    """The module of a stage."""
    return import_module(STAGES[letter])
