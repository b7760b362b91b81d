# SPDX-License-Identifier: Apache-2.0
"""Warnings about a placement that does not fit on the GPUs by the estimate of `gpu_plan.py`, with what makes it fit."""

from collections.abc import Sequence
from itertools import combinations
from math import ceil
from typing import NamedTuple

from ngrpo.machine.hardware.gpu_plan import DOCS, SHARE, fits, models
from ngrpo.machine.models import architecture, packaged
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.placement import Args, Machine


class _Saving(NamedTuple):
    """Flags that make a run take less GPU memory.

    Attributes:
        flags: as a user writes them.
        args: the same as OpenRLHF's settings.
        effect: what they do, as the end of "with which ...".
    """

    flags: str
    args: dict[str, bool]
    effect: str

    @property
    def in_words(self) -> str:
        """As the end of a message that says how to fix something."""
        return f"{self.flags}, with which {self.effect}"


_TURNS = _Saving(
    "--vllm.enable_sleep --ds.enable_sleep",
    {"vllm.enable_sleep": True, "ds.enable_sleep": True},
    "engines and trainer take turns",
)
_CHECKPOINTING = _Saving(
    "--actor.gradient_checkpointing_enable",
    {"actor.gradient_checkpointing_enable": True},
    "activations are computed again in the backward pass",
)
_OFFLOAD = _Saving("--ds.adam_offload", {"ds.adam_offload": True}, "optimizer states stay on the host")
# With less of a GPU an engine holds its weights and hardly any KV cache, so it would draw one response at a time.
_LEAST_HUNDREDTHS = 10


def notes(args: Args, machine: Machine | None) -> list[str]:
    """Warnings about a model of unknown size, and a placement that by its estimate does not fit; none without GPUs."""
    if machine is None:
        return []
    names = models(args)
    held = {names[model] for group in placement.groups(args) for model in group.models}
    unknown = sorted(name for name in held if name is not None and architecture.size_of(name) is None)
    if unknown:
        return [_unknown_size(name) for name in unknown]
    if fits(args, machine.memory):
        return []
    name = args["actor.model_name_or_path"]
    remedy = _remedy(args, machine.memory)
    return [f"{name} does not fit on {machine}, by the estimate that --dry-run prints. Fix: {remedy}."]


def _remedy(args: Args, gpu: float) -> str:
    """What makes a placement fit on GPUs of ``gpu`` bytes: the fewest flags, or more GPUs where no flags do."""
    savings = [_CHECKPOINTING, _OFFLOAD]
    if placement.is_hybrid(args):
        savings.insert(0, _TURNS)
        if fits({**args, **_TURNS.args}, gpu):
            return _TURNS.in_words
    smaller = _fitting_share(args, gpu)
    if smaller is not None:
        return f"{SHARE} {smaller:g}"
    for count in range(1, len(savings) + 1):
        for chosen in combinations(savings, count):
            together = _together(chosen)
            if fits({**args, **together.args}, gpu):
                return together.in_words
    return "more GPUs, a smaller --data.max_len, or a smaller model"


def _together(savings: Sequence[_Saving]) -> _Saving:
    """Several savings as one."""
    args: dict[str, bool] = {}
    for saving in savings:
        args |= saving.args
    flags = " ".join(saving.flags for saving in savings)
    effect = ", and ".join(saving.effect for saving in savings)
    return _Saving(flags, args, effect)


def _fitting_share(args: Args, gpu: float) -> float | None:
    """The largest smaller share of a GPU for engines with which a placement fits; None without a reasonable one."""
    name = SHARE.removeprefix("--")
    for hundredths in range(ceil(100 * args[name]) - 1, _LEAST_HUNDREDTHS - 1, -1):
        share = hundredths / 100
        if fits({**args, name: share}, gpu):
            return share
    return None


def _unknown_size(name: str) -> str:
    """The warning about a model that the placement was not fitted to."""
    plan = f"the size of {name} is unknown, so the placement is that of a small model and its memory is not estimated:"
    if architecture.find_config(name) is None:
        if name in packaged.PACKAGED:
            return f"{plan} it is not made yet. Fix: run `ngrpo model {name}` first."
        return (
            f"{plan} its config.json is not here, and only a start asks the hub for it. Fix: run `hf download {name}"
            " config.json`, or give the model's folder."
        )
    return f"{plan} transformers cannot make a model from its config.json. Give the placement's flags ({DOCS})."
