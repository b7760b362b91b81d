# SPDX-License-Identifier: Apache-2.0
"""Evaluation: problems, answer checking, and Mean@n and Pass@k over samples from vLLM.

Importing this loads nothing heavy; each name is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Problem": "ngrpo.scoring.problem",
    "Sampling": "ngrpo.evaluate.engine",
    "Verdict": "ngrpo.scoring.problem",
    "evaluate": "ngrpo.evaluate.evaluation",
    "load_problems": "ngrpo.scoring.problems",
    "load_task": "ngrpo.tasks",
    "mean_at_n": "ngrpo.statistics.estimators",
    "pass_at_k": "ngrpo.statistics.estimators",
    "rescore": "ngrpo.evaluate.evaluation",
    "score": "ngrpo.evaluate.scorers",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ngrpo.evaluate' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
