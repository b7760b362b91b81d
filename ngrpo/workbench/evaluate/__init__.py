# SPDX-License-Identifier: Apache-2.0
"""Evaluation: problems, answer checking, and Mean@n and Pass@k over vLLM's samples; names are imported on first use."""

from importlib import import_module
from typing import Any

_HOMES = {
    "Problem": "ngrpo.methods.scoring",
    "Sampling": "ngrpo.workbench.evaluate.engine",
    "Verdict": "ngrpo.methods.scoring",
    "evaluate": "ngrpo.workbench.evaluate.evaluation",
    "load_problems": "ngrpo.methods.scoring.problems",
    "load_task": "ngrpo.methods.tasks",
    "mean_at_n": "ngrpo.workbench.statistics",
    "pass_at_k": "ngrpo.workbench.statistics",
    "rescore": "ngrpo.workbench.evaluate.evaluation",
    "score": "ngrpo.methods.tasks",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
