"""Evaluation: problems, answer checking, and Mean@n and Pass@k over samples from vLLM.

Importing this loads nothing heavy; each name is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngrpo.evaluate.engine import Sampling
    from ngrpo.evaluate.estimators import mean_at_n, pass_at_k
    from ngrpo.evaluate.problem import Problem, Verdict
    from ngrpo.evaluate.problems import load_problems, load_task
    from ngrpo.evaluate.sampling import evaluate, rescore
    from ngrpo.evaluate.scoring import score

__all__ = [
    "Problem",
    "Sampling",
    "Verdict",
    "evaluate",
    "load_problems",
    "load_task",
    "mean_at_n",
    "pass_at_k",
    "rescore",
    "score",
]

_HOMES = {
    "Problem": "problem",
    "Sampling": "engine",
    "Verdict": "problem",
    "evaluate": "sampling",
    "load_problems": "problems",
    "load_task": "problems",
    "mean_at_n": "estimators",
    "pass_at_k": "estimators",
    "rescore": "sampling",
    "score": "scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ngrpo.evaluate' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"ngrpo.evaluate.{_HOMES[name]}"), name)
