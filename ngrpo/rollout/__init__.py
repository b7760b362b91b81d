# SPDX-License-Identifier: Apache-2.0
"""The vLLM side: perturbed rollouts and the pick-up of their records. Names are loaded on first use."""

from importlib import import_module
from typing import Any

__all__ = ["drop_records", "model_runner", "neighbor_drift", "set_perturbation", "take_records", "take_trajectories"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ngrpo.rollout' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module("ngrpo.rollout.records"), name)
