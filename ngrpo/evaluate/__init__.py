# SPDX-License-Identifier: Apache-2.0
"""Evaluation: problems, answer checking, and Mean@n and Pass@k over samples from vLLM.

Importing this loads nothing heavy; each name is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Problem": "problem",
    "Sampling": "engine",
    "Verdict": "problem",
    "evaluate": "evaluation",
    "load_problems": "problems",
    "load_task": "problems",
    "mean_at_n": "estimators",
    "pass_at_k": "estimators",
    "rescore": "evaluation",
    "score": "scoring",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ngrpo.evaluate' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"ngrpo.evaluate.{_HOMES[name]}"), name)
