# SPDX-License-Identifier: Apache-2.0
"""One entry for all scorers: a response's text in, a verdict out."""

import runpy
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ngrpo.workbench import tasks
from ngrpo.workbench.scoring import Problem, Verdict
from ngrpo.workbench.scoring.answers import check_choice, check_math, generated, last_statement
from ngrpo.workbench.scoring.reward_files import OF_TASK, check_scorer_name
from perturbations.errors import UsageError

# A score such as a float32 0.99999994 is a full one.
_FULL = 1.0 - 1e-6


def score(problem: Problem, text: str, *, prompt: str | None = None) -> Verdict:
    """The verdict on a response; one that cannot be read is wrong, not an error.

    ``prompt`` is the prompt as the model saw it, for a reward file; None: the question's own text.

    Raises:
        UsageError: for an unknown scorer, a missing package, or a reward file that fails.
    """
    prompt = problem.question if prompt is None else prompt
    said = generated(prompt + text, prompt)
    if problem.scorer == "math":
        return check_math(problem.answer, said)
    if problem.scorer == "choice":
        return check_choice(problem.answer, said, problem.meta.get("options"))
    label = problem.meta.get("label", problem.answer)
    if problem.scorer == "reasoning_gym" or problem.scorer.startswith(OF_TASK):
        # The task's own reward, so that evaluation and training agree on every response.
        task = _task(problem.scorer)
        reward = float(task.score(said, label))
        return Verdict.of(reward >= getattr(task, "RIGHT_FROM", _FULL), task.final_answer(said), reward)
    check_scorer(problem.scorer)
    try:
        result = _reward_func(problem.scorer)(queries=[prompt + text], prompts=[prompt], labels=[label])
        outcome = result if isinstance(result, dict) else {"rewards": result}
        values = (outcome["rewards"], outcome.get("scores", outcome["rewards"]))
        reward, value = (float(np.asarray(each, dtype=np.float64).flat[0]) for each in values)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise UsageError(f"scorer {problem.scorer}: reward_func failed on problem {problem.id!r} ({cause}).") from error
    return Verdict.of(value >= _FULL, last_statement(text), reward)


def check_problems(problems: Sequence[Problem]) -> None:
    """Raises ``UsageError`` for no problems, two with one id, a missing package, or a reward file that fails."""
    if not problems:
        raise UsageError("there are no problems: the dataset is empty.")
    if len({problem.id for problem in problems}) < len(problems):
        raise UsageError("two problems have the same id; ids must be distinct.")
    for problem in {problem.scorer: problem for problem in problems}.values():
        score(problem, problem.answer)


def check_scorer(name: str) -> None:
    """Raises ``UsageError`` for an unknown scorer, a task's too, or a missing file, with the nearest match."""
    check_scorer_name(name)
    if name.startswith(OF_TASK):
        tasks.check_name(name[len(OF_TASK) :].partition(":")[0], argument_needed=False)


@lru_cache(maxsize=8)
def _task(scorer: str) -> Any:
    check_scorer(scorer)
    return import_module(f"ngrpo.workbench.tasks.{scorer.removeprefix(OF_TASK).partition(':')[0]}")


@lru_cache(maxsize=8)
def _reward_func(path: str) -> Any:
    sys.path.append(str(Path(path).expanduser().resolve().parent))  # for what the file imports from its folder
    return runpy.run_path(str(Path(path).expanduser()))["reward_func"]
