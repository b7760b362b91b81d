# SPDX-License-Identifier: Apache-2.0
"""Tasks by name: each module here writes a dataset and names the OpenRLHF flags that use it.

A module has ``prepare(folder)``, and for evaluation ``score(answer, label)`` and ``final_answer(answer)``; an answer is
right from a reward of ``RIGHT_FROM`` on, or of 1 where the module has no such constant. A module
with a constant ``ARGUMENT`` (its name in upper case, for help) is asked for as ``name:argument``: its ``prepare``
takes the argument too, and its ``check`` refuses a wrong one; with ``OPTIONAL`` it may be left out.
"""

from __future__ import annotations

import pkgutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ngrpo.machine.storage.result_folder import json_lines, write_text, writing
from ngrpo.machine.upstream.openrlhf_flags import Default
from ngrpo.workbench.scoring.answers import generated
from ngrpo.workbench.scoring.problem import Problem
from ngrpo.workbench.scoring.problems import load_problems
from perturbations.errors import UsageError
from perturbations.options import nearest

Rows = Iterable[Mapping[str, Any]]


def available() -> list[str]:
    """The names for ``--task``, without their arguments."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def usage() -> list[str]:
    """What ``--task`` takes, for help: ``arithmetic``, ``reasoning_gym:DATASET``."""
    return [name + _argument_usage(name) for name in available()]


def check_name(task: str, *, argument_needed: bool = True) -> None:
    """Raises ``UsageError`` for an unknown task, or a wrong or missing argument, with the nearest match.

    Args:
        task: ``name`` or ``name:argument``.
        argument_needed: whether a task that takes an argument must have one here.
    """
    name, colon, argument = task.partition(":")
    if name not in available():
        raise UsageError(
            f"unknown task {name!r}.{nearest(name, available())} Available: {', '.join(usage())}. For your own data leave"
            " --task out and give OpenRLHF's --data.prompt_dataset and --reward.remote_url, or --train.agent_func_path"
            " for an environment."
        )
    placeholder = _argument(name)
    if placeholder is None and colon:
        raise UsageError(f"task {task!r}: {name} takes no argument. Write --task {name}.")
    if placeholder is not None and argument:
        _module(name).check(argument)
    elif placeholder is not None and argument_needed and not _optional(name):
        raise UsageError(f"task {task!r} needs an argument: --task {name}:{placeholder}, {_module(name).EXAMPLE}.")


def check_choice(task: str, argument: str, choices: Iterable[str]) -> None:
    """Raises ``UsageError`` unless a task's argument is one of its choices, with the nearest match."""
    if argument not in (names := list(choices)):
        raise UsageError(
            f"task {task}:{argument}: unknown {_argument(task)} {argument!r}.{nearest(argument, names)}"
            f" Available: {', '.join(names)}."
        )


def prepare(task: str, folder: Path) -> dict[str, Default]:
    """Writes a task's dataset.

    Args:
        task: ``name`` or ``name:argument``, the name from :func:`available`.
        folder: where to write, inside the run's folder.

    Returns:
        OpenRLHF's flags for the task.

    Raises:
        UsageError: as :func:`check_name`.
    """
    check_name(task)
    name, _, argument = task.partition(":")
    write = _module(name).prepare
    return write(folder, argument) if argument else write(folder)


def load_task(task: str, *, limit: int | None = None) -> list[Problem]:
    """The held-out problems of a task, scored by its own reward.

    Args:
        task: as ``--task`` takes it: ``arithmetic``, ``reasoning_gym:chain_sum``.
        limit: only the first so many.

    Raises:
        UsageError: for an unknown task.
    """
    with tempfile.TemporaryDirectory() as folder:
        prepare(task, Path(folder))
        held_out = Path(folder) / "eval.jsonl"
        if not held_out.is_file():
            raise UsageError(f"--task {task} has no held-out problems: give --data with a file of your own.")
        problems = load_problems(str(held_out), limit=limit, instruction="")
    name = task.replace(":", "-")
    scorer = f"task:{task.partition(':')[0]}"
    return [replace(p, id=f"{name}-{i}", scorer=scorer) for i, p in enumerate(problems)]


def write(folder: Path, reward_file: Path, train: Rows, held_out: Rows | None = None) -> dict[str, Default]:
    """Writes ``train.jsonl`` and ``eval.jsonl`` with the columns ``input`` and ``label``.

    Args:
        folder: made if missing.
        reward_file: the file with ``reward_func``.
        train: the training rows.
        held_out: rows for evaluation, if any.

    Returns:
        As :func:`flags`.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("eval", held_out)):
        if rows is not None:
            write_text(folder / f"{name}.jsonl", json_lines(rows))
    return flags(folder, reward_file)


def flags(folder: Path, reward_file: Path) -> dict[str, Default]:
    """OpenRLHF's flags for what :func:`write` wrote (None: a switch)."""
    held_out = folder / "eval.jsonl"
    return {
        "--data.prompt_dataset": str(folder / "train.jsonl"),
        "--data.input_key": "input",
        "--data.label_key": "label",
        "--data.apply_chat_template": None,
        **({"--eval.dataset": str(held_out)} if held_out.is_file() else {}),
        "--reward.remote_url": str(reward_file.resolve()),
    }


def rewards(
    queries: Sequence[str],
    prompts: Sequence[str],
    labels: Sequence[str],
    judge: Callable[[str, str], tuple[float, bool]],
    log: str,
) -> dict[str, Any]:
    """What OpenRLHF 0.11.2 takes from a reward function (``utils/agent.py``).

    Args:
        queries: prompt and answer, decoded with special tokens.
        prompts: the prompts alone, chat template applied.
        labels: one per answer.
        judge: an answer and its label to the reward, and whether the answer has the form that was asked for.
        log: under which name the share of such answers is logged.

    Returns:
        ``rewards`` and ``scores``, (N,) float32, and in ``extra_logs`` 1 for an answer of that form, else 0.
    """
    import torch

    judged = [judge(generated(query, prompt), label) for query, prompt, label in zip(queries, prompts, labels)]
    indicators = torch.tensor([float(formed) for _, formed in judged])
    values = torch.tensor([reward for reward, _ in judged])
    return {"rewards": values, "scores": values, "extra_logs": {log: indicators}}


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")


def _argument(name: str) -> str | None:
    return getattr(_module(name), "ARGUMENT", None)


def _optional(name: str) -> bool:
    return getattr(_module(name), "OPTIONAL", False)


def _argument_usage(name: str) -> str:
    argument = _argument(name)
    return "" if argument is None else f"[:{argument}]" if _optional(name) else f":{argument}"
