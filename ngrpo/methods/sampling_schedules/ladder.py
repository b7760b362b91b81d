# SPDX-License-Identifier: Apache-2.0
"""A ladder of temperatures over the answers to a prompt: the first is the coldest, the last the hottest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.methods.sampling_schedules import register
from ngrpo.methods.sampling_schedules.base import NextTokens, SamplingSchedule
from perturbations.errors import UsageError
from perturbations.options import option


@register("ladder")
@dataclass(frozen=True, kw_only=True)
class Ladder(SamplingSchedule):
    """Each answer to a prompt has a temperature of its own, from the lowest to the highest in equal ratios."""

    least: float = option(0.8, "the temperature of a prompt's first answer", above=0.0)
    most: float = option(1.25, "… and of its last one", above=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise UsageError(f"sampling schedule option least={self.least}: must be at most most={self.most}.")

    def factor(self, at: NextTokens) -> Tensor | None:
        """least · (most / least)^(i / (n − 1)) for answer i of n, from 0; an only answer has the one asked for."""
        if at.answer is None or at.answers is None:
            return None
        share = at.answer / (at.answers - 1).clamp_min(1)
        return torch.where(at.answers > 1, self.least * (self.most / self.least) ** share, 1.0)
