# SPDX-License-Identifier: Apache-2.0
"""Tasks by name: one module here for each, with its problems and its reward.

A module has ``problems()``: training and held-out rows with ``input`` and ``label`` (None: nothing is held out);
``reward_func``, since OpenRLHF loads its file as ``--reward.remote_url``; for evaluation ``score(answer, label)``,
``final_answer(answer)`` and ``RIGHT_FROM``, the least reward of a right answer [1]. With ``ARGUMENT``, a name for help,
the task is ``name:argument``: ``problems`` takes it and ``check`` refuses a wrong one; ``OPTIONAL``: may be left out.
"""

import pkgutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ngrpo.machine.storage.result_folder import json_lines, write_text, writing
from ngrpo.machine.upstream.openrlhf_flags import Default
from ngrpo.workbench.scoring import Problem
from ngrpo.workbench.scoring.answers import generated, last_number
from ngrpo.workbench.scoring.problems import load_problems
from perturbations.errors import UsageError, nearest

Rows = list[dict[str, str]]
Split = tuple[Rows, Rows]
"""Training and held-out rows."""


def available() -> list[str]:
    """The names for ``--task``, without their arguments."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def usage() -> list[str]:
    """The forms of ``--task``, for help: ``arithmetic``, ``reasoning_gym:DATASET``, ``shortcut[:FORM]``."""
    forms = []
    for name in available():
        argument, optional = _argument(name)
        forms.append(name if argument is None else f"{name}[:{argument}]" if optional else f"{name}:{argument}")
    return forms


def check_name(task: str, *, argument_needed: bool = True) -> None:
    """Raises ``UsageError`` for an unknown ``name`` or ``name:argument``, or a missing argument if it is needed."""
    name, colon, argument = task.partition(":")
    if name not in available():
        raise UsageError(
            f"unknown task {name!r}.{nearest(name, available())} Available: {', '.join(usage())}. For your own data"
            " leave --task out and give OpenRLHF's --data.prompt_dataset and --reward.remote_url, or"
            " --train.agent_func_path for an environment."
        )
    placeholder, optional = _argument(name)
    if placeholder is None and colon:
        raise UsageError(f"task {task!r}: {name} takes no argument. Write --task {name}.")
    if placeholder is not None and argument:
        _module(name).check(argument)
    elif placeholder is not None and argument_needed and not optional:
        raise UsageError(f"task {task!r} needs an argument: --task {name}:{placeholder}, {_module(name).EXAMPLE}.")


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
    return [replace(p, id=f"{name}-{i}", scorer=scorer) for i, p in enumerate(problems)]


def distinct_rows(draw: Callable[[], tuple[str, str]], count: int) -> Rows:
    """``count`` rows with different questions; ``draw`` gives a random question and its label."""
    labels: dict[str, str] = {}
    while len(labels) < count:
        question, label = draw()
        labels[question] = label
    return [{"input": question, "label": label} for question, label in labels.items()]


def number_score(answer: str, label: str) -> float:
    """1 where the last number of a response is the label, else 0: ``7 + 5 = 12`` repeats the question first."""
    return float(last_number(answer) == label)


def reward_function(judge: Callable[[str, str], tuple[float, bool]], log: str) -> Callable[..., dict[str, Any]]:
    """A reward function as OpenRLHF 0.11.2 calls it (``utils/agent.py``).

    From ``queries`` (prompts with responses, special tokens included), ``prompts`` and ``labels`` to ``rewards`` and
    ``scores``, (N,) float32. ``judge`` gives a response's reward, and whether it has the form that is counted.
    """

    def reward_func(
        queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object
    ) -> dict[str, Any]:
        import torch

        judged = [judge(generated(query, prompt), label) for query, prompt, label in zip(queries, prompts, labels)]
        rewards = torch.tensor([reward for reward, _ in judged])
        formed = torch.tensor([float(formed) for _, formed in judged])
        return {"rewards": rewards, "scores": rewards, "extra_logs": {log: formed}}

    return reward_func


number_reward = reward_function(lambda a, b: (number_score(a, b), last_number(a) is not None), "answers_with_number")
"""Of :func:`number_score`, with the fraction of responses that have a number."""


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")


def _argument(name: str) -> tuple[str | None, bool]:
    """The name of a task's argument, None without one, and whether it may be left out."""
    return getattr(_module(name), "ARGUMENT", None), getattr(_module(name), "OPTIONAL", False)
