# SPDX-License-Identifier: Apache-2.0
"""The names of scorers: built in, a task's own, or a file with OpenRLHF's ``reward_func``."""

from __future__ import annotations

from pathlib import Path

from ngrpo.workbench.scoring.reward_files import REWARD_FUNC, check_python
from perturbations.errors import UsageError
from perturbations.options import nearest

BUILT_IN = ("math", "choice", "reasoning_gym")
OF_TASK = "task:"


def check_name(name: str) -> None:
    """Checks that there is such a scorer.

    Raises:
        UsageError: for an unknown one or a missing file, with the nearest match.
    """
    if name.startswith(OF_TASK):
        return  # which tasks there are is not known here: ngrpo.workbench.evaluate.scorers.check_scorer
    if name.endswith(".py"):
        path = Path(name).expanduser()
        if not path.is_file():
            near = nearest(path.name, [p.name for p in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
            raise UsageError(f"scorer {name!r}: there is no such file.{near} Give an existing Python file.")
        check_python("scorer", str(path), REWARD_FUNC)
    elif name not in BUILT_IN:
        raise UsageError(
            f"unknown scorer {name!r}.{nearest(name, BUILT_IN)} Scorers: {', '.join(BUILT_IN)}, task:NAME, or a Python"
            " file with OpenRLHF's reward_func(queries, prompts, labels)."
        )
