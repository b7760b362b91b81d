# SPDX-License-Identifier: Apache-2.0
"""Sampling of the rollouts, and its correction in the loss, that OpenRLHF 0.11.2 has no flags for: ``--sampling.*``.

Temperature and top-p are OpenRLHF's own (``--rollout.temperature``, ``--rollout.top_p``).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError
from perturbations.options import Options, nearest, option

# docs/figures.md, `python -m benchmarks.sampling_mask`.
_BIAS = (
    "On SmolLM2-135M each log-probability is off by 0.04 on average with top-p 0.95, by 0.06 with top-k 50 (at worst"
    " 0.96) and by 0.15 with min-p 0.05, always downwards, and a baseline is not free."
)
OURS = ("correct_mask", "mask_gib", "correction_warmup")  # which say nothing of how tokens are drawn
_OPENRLHF = {"temperature": "--rollout.temperature", "top_p": "--rollout.top_p"}


@dataclass(frozen=True, kw_only=True)
class Sampling(Options):
    """Masks of the rollout's token distribution; the defaults mask nothing."""

    kind = "sampling"

    top_k: int | None = option(None, "draw rollout tokens from the k likeliest", low=1)
    min_p: float | None = option(None, "… from those with at least this share of the likeliest one's p", low=0, high=1)
    correct_mask: bool = option(False, "take log-probabilities among the tokens that top-p, top-k and min-p left")
    mask_gib: float | None = option(None, "memory of a worker's records of these tokens, in GiB; 8 if none", above=0.0)
    correction_warmup: int | None = option(
        None, "training steps over which the importance weights of the loss grow from 1 to their whole", low=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_gib is not None and not self.correct_mask:
            raise UsageError(
                f"--sampling.mask_gib {self.mask_gib:g} is the memory of what --sampling.correct_mask records, which is"
                " not asked for. Add that flag, or leave this one out."
            )

    def given(self) -> dict[str, Any]:
        """The settings that are on."""
        return {name: value for name, value in self.spec().items() if value not in (None, False)}

    def notes(self, flags: Flags) -> list[str]:
        """A warning where rollouts are drawn from a truncated distribution and the loss does not know."""
        top_p = _openrlhf(flags)["top_p"]
        cut = {name: value for name, value in self.given().items() if name not in OURS}
        cut |= {} if top_p >= 1.0 else {"top_p": top_p}
        if not cut or self.correct_mask:
            return []
        return [
            f"rollouts are drawn from a truncated distribution ({', '.join(f'{k} {v}' for k, v in cut.items())}), but"
            f" the loss is of the whole one. {_BIAS} Add --sampling.correct_mask."
        ]


def create(**options: Any) -> Sampling:
    """The sampling of some ``--sampling.<option>`` words.

    Raises:
        UsageError: for an unknown option or a value out of range.
    """
    option_names = [field.name for field in dataclasses.fields(Sampling)]
    for name in options:
        if name in _OPENRLHF:
            raise UsageError(f"--sampling.{name}: that is OpenRLHF's own flag; give {_OPENRLHF[name]}.")
        if name not in option_names:
            flags = [*option_names, "schedule"]
            raise UsageError(
                f"unknown flag '--sampling.{name}'.{nearest(name, flags)} Available:"
                f" {', '.join('--sampling.' + k for k in flags)}; OpenRLHF's own: {', '.join(_OPENRLHF.values())}."
            )
    return Sampling(**options)


def described(sampling: Sampling, flags: Flags) -> dict[str, float | int | None]:
    """All settings of the rollout's token sampling, for the results; None: not cut."""
    spec = {name: value for name, value in sampling.spec().items() if name not in ("mask_gib", "correction_warmup")}
    return {**_openrlhf(flags), **spec}


def _openrlhf(flags: Flags) -> dict[str, float]:
    values = {}
    for name, flag in _OPENRLHF.items():
        try:
            values[name] = float(flags.value(flag) or 1.0)
        except ValueError:
            raise UsageError(f"{flag} {flags.value(flag)}: must be a number.") from None
    return values
