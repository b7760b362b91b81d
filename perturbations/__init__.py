"""Rollout perturbations for LLM reinforcement learning: operators, gates, records and their replay.

Needs only torch and numpy. Names are loaded on first use, so that importing the package costs nothing.
"""
# ruff: noqa: F401 (the imports below are for type checkers; __getattr__ serves the names)

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perturbations.base import GateStep, Perturbation, Proposal, Step
    from perturbations.edit import InputEdit, dense_edit
    from perturbations.gates import Gate, Places
    from perturbations.neighbors import ExactIndex, NeighborIndex
    from perturbations.options import option
    from perturbations.registry import available, create, create_gate, register, register_gate
    from perturbations.replay import InMemoryReplayBuffer, ReplayBuffer, ReplayRecord
    from perturbations.replay_scope import replaying
    from perturbations.testing import check_gate, check_perturbation

_HOME = {
    "GateStep": "base",
    "Perturbation": "base",
    "Proposal": "base",
    "Step": "base",
    "InputEdit": "edit",
    "dense_edit": "edit",
    "Gate": "gates",
    "Places": "gates",
    "ExactIndex": "neighbors",
    "NeighborIndex": "neighbors",
    "option": "options",
    "available": "registry",
    "create": "registry",
    "create_gate": "registry",
    "register": "registry",
    "register_gate": "registry",
    "InMemoryReplayBuffer": "replay",
    "ReplayBuffer": "replay",
    "ReplayRecord": "replay",
    "replaying": "replay_scope",
    "check_gate": "testing",
    "check_perturbation": "testing",
}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'perturbations' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"perturbations.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
