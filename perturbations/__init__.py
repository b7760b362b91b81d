# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401
"""Rollout perturbations for LLM reinforcement learning: perturbations, gates, records and their replay.

Needs torch, numpy and jaxtyping, whose annotations state the shapes of tensors. Names are loaded on first use, so that
importing the package costs nothing.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names below, for type checkers
    from perturbations.base import Perturbation
    from perturbations.edit import InputEdit, Proposal, dense_edit
    from perturbations.errors import UsageError
    from perturbations.gates import Gate
    from perturbations.neighbors import ExactIndex, NeighborIndex
    from perturbations.options import option
    from perturbations.registry import available, create, create_gate, register, register_buffer, register_gate
    from perturbations.replay.buffers import ReplayBuffer
    from perturbations.replay.scope import replaying
    from perturbations.replay.trajectory import FinishedTrajectory, ReplayRecord
    from perturbations.step import GateStep, Positions, Step
    from perturbations.testing import check_buffer, check_gate, check_perturbation

_NAMES_OF_MODULES = {
    "base": ("Perturbation",),
    "edit": ("InputEdit", "Proposal", "dense_edit"),
    "errors": ("UsageError",),
    "gates": ("Gate",),
    "neighbors": ("ExactIndex", "NeighborIndex"),
    "options": ("option",),
    "registry": ("available", "create", "create_gate", "register", "register_buffer", "register_gate"),
    "replay.buffers": ("ReplayBuffer",),
    "replay.scope": ("replaying",),
    "replay.trajectory": ("FinishedTrajectory", "ReplayRecord"),
    "step": ("GateStep", "Positions", "Step"),
    "testing": ("check_buffer", "check_gate", "check_perturbation"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)
__version__ = "0.1.0"
"""The version of the project; everything else that states it reads it from here."""


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"perturbations.{_MODULE_OF[name]}"), name)
    if find_spec(f"perturbations.{name}") is not None:
        return import_module(f"perturbations.{name}")
    raise AttributeError(f"module 'perturbations' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
