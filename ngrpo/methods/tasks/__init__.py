# SPDX-License-Identifier: Apache-2.0
"""Tasks by name, a module here for each, and :func:`score`, the one entry for all scorers.

A task's module has:

- ``problems()``: the training rows and the held-out rows, with ``input`` and ``label``; None where none are held out;
- ``reward_func``, since OpenRLHF loads the module's file as ``--reward.remote_url``;
- ``score(answer, label)`` and ``final_answer(answer)``, for evaluation;
- optionally ``RIGHT_FROM``, the least reward of a right response; 1 without it;
- optionally ``ARGUMENT``, for help: the task then is ``name:argument``, ``problems`` takes the argument, and ``check``
  refuses a wrong one. An argument in brackets, ``[:FORM]``, may be left out.
"""

import pkgutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ngrpo.machine.storage.result_folder import json_lines, write_text, writing
from ngrpo.machine.upstream.openrlhf_flags import Default
from ngrpo.methods.scoring import Problem, Verdict, reward_calls
from ngrpo.methods.scoring.answers import check_choice, check_math, generated, last_number, last_statement
from ngrpo.methods.scoring.problems import load_problems, reference
from ngrpo.methods.scoring.reward_files import OF_TASK, check_scorer_name
from perturbations.errors import UsageError, nearest

Rows = list[dict[str, str]]
Split = tuple[Rows, Rows]
"""Training and held-out rows."""
FULL_SCORE = 1.0 - 1e-6
"""A score from here on counts as 1, and its response as right: a float32 may be 0.99999994."""


def available() -> list[str]:
    """The names for ``--task``, without their arguments."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def usage() -> list[str]:
    """The forms of ``--task``, for help: ``arithmetic``, ``reasoning_gym:DATASET``, ``shortcut[:FORM]``."""
    return [name + _argument(name) for name in available()]


def check_name(task: str, *, argument_needed: bool = True) -> None:
    """Raises ``UsageError`` for an unknown ``name`` or ``name:argument``, or a missing argument if it is needed."""
    name, colon, argument = task.partition(":")
    if name not in available():
        raise UsageError(
            f"unknown task {name!r}.{nearest(name, available())} Available: {', '.join(usage())}. For your own data"
            " leave --task out and give OpenRLHF's --data.prompt_dataset and --reward.remote_url, or"
            " --train.agent_func_path for an environment."
        )
    form = _argument(name)
    if colon and not form:
        raise UsageError(f"task {task!r}: {name} takes no argument. Write --task {name}.")
    if form and argument:
        _module(name).check(argument)
    elif form.startswith(":") and argument_needed:
        raise UsageError(f"task {task!r} needs an argument: --task {name}{form}, {_module(name).EXAMPLE}.")


def prepare(task: str, folder: Path) -> dict[str, Default]:
    """Writes a task's ``train.jsonl`` and, if some problems are held out, ``eval.jsonl``; UsageError as check_name.

    Returns:
        OpenRLHF's flags for the task (None: a switch).
    """
    check_name(task)
    name, _, argument = task.partition(":")
    module = _module(name)
    train, held_out = module.problems(argument) if argument else module.problems()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    flags: dict[str, Default] = {
        "--data.prompt_dataset": str(folder / "train.jsonl"),
        "--data.input_key": "input",
        "--data.label_key": "label",
        "--data.apply_chat_template": None,
    }
    write_text(folder / "train.jsonl", json_lines(train))
    if held_out is not None:
        write_text(folder / "eval.jsonl", json_lines(held_out))
        flags["--eval.dataset"] = str(folder / "eval.jsonl")
    return {**flags, "--reward.remote_url": str(Path(module.__file__).resolve())}


def load_task(task: str, **options: Any) -> list[Problem]:
    """The held-out problems of a task such as ``reasoning_gym:chain_sum``, scored by its own reward.

    ``options`` are ``limit`` and ``template`` of `load_problems`. Raises ``UsageError`` for an unknown task.
    """
    with tempfile.TemporaryDirectory() as folder:
        prepare(task, Path(folder))
        held_out = Path(folder) / "eval.jsonl"
        if not held_out.is_file():
            raise UsageError(f"--task {task} has no held-out problems: give --data with a file of your own.")
        problems = load_problems(str(held_out), instruction="", **options)
    name = task.replace(":", "-")
    scorer = f"task:{task.partition(':')[0]}"
    return [replace(problem, id=f"{name}-{number}", scorer=scorer) for number, problem in enumerate(problems)]


def distinct_rows(draw: Callable[[], tuple[str, str]], count: int) -> Rows:
    """``count`` rows with different questions; ``draw`` returns a random question and its label."""
    labels: dict[str, str] = {}
    while len(labels) < count:
        question, label = draw()
        labels[question] = label
    return [{"input": question, "label": label} for question, label in labels.items()]


def number_score(answer: str, label: str) -> float:
    """1 where the last number of a response is the label, else 0. A response often repeats the question first."""
    return float(last_number(answer) == label)


def reward_function(judge: Callable[[str, str], tuple[float, bool]], log: str) -> Callable[..., dict[str, Any]]:
    """A reward function as OpenRLHF 0.11.2 calls it (``utils/agent.py``).

    It maps ``queries`` (prompts with responses, special tokens included), ``prompts`` and ``labels`` to ``rewards`` and
    ``scores``, (N,) float32.

    Args:
        judge: maps a response and its label, as evaluation reads them, to the response's reward, and whether the
            response has the form that is counted.
        log: the name under which the share of responses with that form is logged.
    """

    def reward_func(
        queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: object
    ) -> dict[str, Any]:
        import torch

        rewards_of_responses = []
        forms_of_responses = []
        for query, prompt, label in zip(queries, prompts, labels):
            response = generated(query, prompt)
            reward, has_form = judge(response, reference(label))
            rewards_of_responses.append(reward)
            forms_of_responses.append(float(has_form))
        rewards = torch.tensor(rewards_of_responses)
        has_form = torch.tensor(forms_of_responses)
        return {"rewards": rewards, "scores": rewards, "extra_logs": {log: has_form}}

    return reward_func


def _judge_number(response: str, label: str) -> tuple[float, bool]:
    has_number = last_number(response) is not None
    return number_score(response, label), has_number


number_reward = reward_function(_judge_number, "answers_with_number")
"""The reward function of :func:`number_score`; it logs the share of responses that have a number."""


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")


def _argument(name: str) -> str:
    """The form of a task's argument, ``:FILE``, or ``[:FORM]`` if it may be left out; empty without one."""
    return getattr(_module(name), "ARGUMENT", "")


# --- scorers ----------------------------------------------------------------------------------------


def score(problem: Problem, text: str, *, prompt: str | None = None, end: str = "") -> Verdict:
    """The verdict on a response; one that cannot be read is wrong, not an error.

    Args:
        problem: with its answer, and the name of its scorer.
        text: the response.
        prompt: the prompt as the model saw it, None for the question's own text. A reward file reads it.
        end: the text of the response's end token, which a reward file reads too.

    Raises:
        UsageError: for an unknown scorer, a missing package, or a reward file that fails.
    """
    prompt = problem.question if prompt is None else prompt
    response = generated(prompt + text, prompt)
    if problem.scorer == "math":
        return check_math(problem.answer, response)
    if problem.scorer == "choice":
        return check_choice(problem.answer, response, problem.meta.get("options"))
    check_scorer(problem.scorer)
    if problem.scorer == "reasoning_gym" or problem.scorer.startswith(OF_TASK):
        return _score_by_task(problem, response)
    result = _call_reward_file(problem, prompt + text + end, prompt)
    # OpenRLHF takes the reward for the score where a reward function returns no score, or None.
    score_of_response = result["rewards"] if result.get("scores") is None else result["scores"]
    return Verdict.of(score_of_response >= FULL_SCORE, last_statement(response), result["rewards"])


def _label(problem: Problem) -> Any:
    """The label as the dataset has it, where the problem's answer is only a part of it."""
    return problem.meta.get("label", problem.answer)


def _score_by_task(problem: Problem, response: str) -> Verdict:
    """The verdict by the task's own reward, so that evaluation and training agree on every response."""
    task = _module(problem.scorer.removeprefix(OF_TASK).partition(":")[0])
    reward = float(task.score(response, _label(problem)))
    is_right = reward >= getattr(task, "RIGHT_FROM", FULL_SCORE)
    return Verdict.of(is_right, task.final_answer(response), reward)


def _call_reward_file(problem: Problem, query: str, prompt: str) -> dict[str, Any]:
    """What a user's reward function returns for a response; ``UsageError`` for a file that fails."""
    try:
        reward_func = reward_calls.load(problem.scorer)
    except (Exception, SystemExit) as error:
        raise UsageError(f"scorer {problem.scorer}: {type(error).__name__}: {error}. Correct the file.") from error
    raw_label = problem.meta.get("raw_label", _label(problem))  # as training gives it
    try:
        return reward_calls.call(reward_func, query, prompt, raw_label, reward_calls.seconds_allowed())
    except reward_calls.RewardFault as fault:
        raise UsageError(
            f"scorer {problem.scorer}: reward_func {fault}, for problem {problem.id!r}. {reward_calls.FIX}"
        ) from fault


def check_problems(problems: Sequence[Problem]) -> None:
    """Raises ``UsageError`` for no problems, two with one id, a missing package, or a reward file that fails."""
    if not problems:
        raise UsageError("there are no problems: the dataset is empty.")
    if len({problem.id for problem in problems}) < len(problems):
        raise UsageError("two problems have the same id; ids must be distinct.")
    one_of_each_scorer = {problem.scorer: problem for problem in problems}
    for problem in one_of_each_scorer.values():
        score(problem, problem.answer)


@lru_cache(maxsize=8)
def check_scorer(name: str) -> None:
    """Raises ``UsageError`` for an unknown scorer or task, or a missing file, with the nearest match."""
    check_scorer_name(name)
    if name.startswith(OF_TASK):
        task, _, _ = name.removeprefix(OF_TASK).partition(":")
        check_name(task, argument_needed=False)
