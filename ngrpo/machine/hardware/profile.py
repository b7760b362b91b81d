# SPDX-License-Identifier: Apache-2.0
"""What a hardware profile is, and how one is chosen."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from ngrpo.machine.upstream import machine
from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from perturbations.errors import UsageError

HARDWARE = ("cpu", "cuda")


@dataclass(frozen=True)
class Profile:
    """Everything that depends on the machine, as data.

    Attributes:
        name: ``"cpu"`` or ``"cuda"``; also the condition under which the rows of
            `ngrpo.patches` that this hardware needs are put in place.
        env: Environment variables for every process. A value that the user already exported wins.
        default_flags: OpenRLHF flags that are added where the command line does not have them.
        ray_init: Given the final OpenRLHF flags, keyword arguments of `ray.init` for a Ray started
            here (an existing cluster has its own resources).
        check: Given the final OpenRLHF flags, raises `UsageError` for what this hardware cannot do; returns why it
            could not look, or None.
        engine_options: Of ``vllm.LLM``, for an evaluation or a diagnosis that has no others.
    """

    name: Literal["cpu", "cuda"]
    env: dict[str, str] = field(default_factory=dict)
    default_flags: dict[str, Default] = field(default_factory=dict)
    ray_init: Callable[[Flags], dict[str, Any]] = lambda flags: {}
    check: Callable[[Flags], str | None] = lambda flags: None
    engine_options: dict[str, Any] = field(default_factory=dict)


def detect() -> Literal["cpu", "cuda"]:
    """Returns the profile name for this machine: ``"cuda"`` if torch sees a device, else ``"cpu"``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def profile_for(hardware: str) -> Profile:
    """Returns the profile of a name.

    Args:
        hardware: ``"cpu"``, ``"cuda"`` or ``"auto"`` (see `detect`).

    Raises:
        UsageError: For any other name, with the nearest match.
    """
    if hardware == "auto":
        hardware = detect()
    if hardware not in HARDWARE:
        near = ["cuda"] if hardware == "gpu" else difflib.get_close_matches(str(hardware), (*HARDWARE, "auto"), n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UsageError(f"Unknown hardware {hardware!r}: choose 'auto', 'cpu' or 'cuda'.{hint}")
    return import_module(f"ngrpo.machine.hardware.{hardware}").PROFILE


def profile_of_run(hardware: str) -> Profile:
    """:func:`profile_for` for a training: ``"auto"`` is CUDA as well where it joins a cluster whose nodes name GPUs."""
    if hardware == "auto" and detect() == "cpu":
        joined = machine.cluster()
        hardware = "cuda" if joined is not None and joined[1] else "cpu"
    return profile_for(hardware)
