# SPDX-License-Identifier: Apache-2.0
"""Hardware profiles: what differs between a CPU and a CUDA cluster. Trainer and rollout engine are the same on both."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from perturbations.errors import UsageError, nearest


@dataclass(frozen=True)
class Profile:
    """Everything that depends on the machine, as data.

    Attributes:
        name: also the condition of this hardware's rows in the patch table.
        env: environment variables for every process. A value that the user exported wins.
        forced_env: environment variables of Ray's workers that win over the user's.
        default_flags: OpenRLHF flags that are added where the command line does not have them.
        ray_init: of the final OpenRLHF flags, keyword arguments of `ray.init` for a Ray started here.
        check: raises `UsageError` for final flags that it cannot do; returns why it could not check, or None.
        notes: of final flags, lines about what takes the place of something that this machine lacks.
        engine_options: of ``vllm.LLM``, for an evaluation or a diagnosis without others.
    """

    name: Literal["cpu", "cuda"]
    env: dict[str, str] = field(default_factory=dict)
    forced_env: dict[str, str] = field(default_factory=dict)
    default_flags: dict[str, Default] = field(default_factory=dict)
    ray_init: Callable[[Flags], dict[str, Any]] = lambda flags: {}
    check: Callable[[Flags], str | None] = lambda flags: None
    notes: Callable[[Flags], list[str]] = lambda flags: []
    engine_options: dict[str, Any] = field(default_factory=dict)


def profile_for(hardware: str) -> Profile:
    """The profile of ``"cpu"``, ``"cuda"`` or ``"auto"``: CUDA if torch sees a device, a CPU if there is none.

    Raises ``UsageError`` for an unknown name, and with ``"auto"`` for a GPU that torch cannot use.
    """
    if hardware == "auto":
        import torch

        if torch.cuda.is_available():
            hardware = "cuda"
        else:
            import_module("ngrpo.machine.hardware.cuda").check_unused()
            hardware = "cpu"
    if hardware not in ("cpu", "cuda"):
        hint = nearest("cuda" if hardware == "gpu" else hardware, ("cpu", "cuda", "auto"))
        raise UsageError(f"Unknown hardware {hardware!r}: choose 'auto', 'cpu' or 'cuda'.{hint}")
    return import_module(f"ngrpo.machine.hardware.{hardware}").PROFILE
