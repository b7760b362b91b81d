"""Tasks by name: each module here writes a dataset and names the OpenRLHF flags that use it."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ngrpo.hardware.profile import flag_value
from perturbations.options import nearest


def available() -> list[str]:
    """The names for ``--task``."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check_name(name: str) -> None:
    """Raises ``ValueError`` for an unknown task."""
    if name not in available():
        raise ValueError(
            f"unknown task {name!r}.{nearest(name, available())} Available: {', '.join(available())}; for"
            " your own data leave --task out and give OpenRLHF's --data.prompt_dataset and"
            " --reward.remote_url."
        )


def expand(name: str, folder: Path, args: Sequence[str]) -> list[str]:
    """Writes a task's dataset and returns the flags for it that the user did not give.

    Args:
        name: a name of :func:`available`.
        folder: where to write, inside the run's folder.
        args: OpenRLHF's flags as the user gave them.

    Returns:
        Flags to put in front of ``args``.
    """
    check_name(name)
    flags: dict[str, str | None] = import_module(f"{__name__}.{name}").prepare(folder)
    added: list[str] = []
    for flag, value in flags.items():
        if flag_value(args, flag) is None:
            added += [flag] if value is None else [flag, value]
    return added
