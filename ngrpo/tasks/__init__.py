"""Tasks by name: each module here writes a dataset and names the OpenRLHF flags that use it.

A module has ``prepare(folder)``, and for evaluation ``score(answer, label)`` and ``final_answer(answer)``. A module
with a constant ``ARGUMENT`` (its name in upper case, for help) is asked for as ``name:argument``: its ``prepare``
takes the argument too, and its ``check`` refuses a wrong one.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Any

from ngrpo.openrlhf_flags import Default
from perturbations.options import nearest


def available() -> list[str]:
    """The names for ``--task``, without their arguments."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def usage() -> list[str]:
    """What ``--task`` takes, for help: ``arithmetic``, ``reasoning_gym:DATASET``."""
    return [name + (f":{argument}" if (argument := _argument(name)) else "") for name in available()]


def check_name(task: str, *, argument_needed: bool = True) -> None:
    """Raises ``ValueError`` for an unknown task, or a wrong or missing argument, with the nearest match.

    Args:
        task: ``name`` or ``name:argument``.
        argument_needed: whether a task that takes an argument must have one here.
    """
    name, colon, argument = task.partition(":")
    if name not in available():
        raise ValueError(
            f"unknown task {name!r}.{nearest(name, available())} Available: {', '.join(usage())}; for"
            " your own data leave --task out and give OpenRLHF's --data.prompt_dataset and"
            " --reward.remote_url."
        )
    wanted = _argument(name)
    if wanted is None and colon:
        raise ValueError(f"task {task!r}: {name} takes no argument. Write --task {name}.")
    if wanted is not None and argument:
        _module(name).check(argument)
    elif wanted is not None and argument_needed:
        raise ValueError(f"task {task!r} needs an argument: --task {name}:{wanted}, {_module(name).EXAMPLE}.")


def prepare(task: str, folder: Path) -> dict[str, Default]:
    """Writes a task's dataset.

    Args:
        task: ``name`` or ``name:argument``, the name from :func:`available`.
        folder: where to write, inside the run's folder.

    Returns:
        OpenRLHF's flags for the task.

    Raises:
        ValueError: as :func:`check_name`.
    """
    check_name(task)
    name, _, argument = task.partition(":")
    write = _module(name).prepare
    return write(folder, argument) if argument else write(folder)


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")


def _argument(name: str) -> str | None:
    return getattr(_module(name), "ARGUMENT", None)
