# SPDX-License-Identifier: Apache-2.0
"""Advantages relative to the group, for any rewards: `group_norm`, `copo`, `rs_grpo`, `ngrpo`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import ROUNDING, Advantage, normalised
from perturbations import option
from perturbations.errors import require


@register("group_norm")
@dataclass(frozen=True, kw_only=True)
class GroupNorm(Advantage):
    """GRPO's: rewards normalised within the group."""

    paper = "GRPO, arXiv 2402.03300"
    sums_to_zero = True

    overlong: str = option(
        "keep",
        "responses that were cut off: as any, or out of mean and deviation, with advantage 0",
        choices=("keep", "exclude"),
    )

    @property
    def leaves_out_overlong(self) -> bool:  # type: ignore[override]
        return self.overlong == "exclude"

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """(r − mean) / (std + 1e-9), with the sample standard deviation."""
        return normalised(rewards)

    def largest(self, size: int) -> float:
        """√n, which is above (n − 1) / √n, the advantage of an only right response."""
        return size**0.5


@register("copo")
@dataclass(frozen=True, kw_only=True)
class CountBonus(Advantage):
    """COPO: a bonus of beta / sqrt(1 + N) on rarely seen (prompt, response) outcomes, then as group_norm.

    In a group of equal rewards β cancels in the normalisation: there the advantages depend on the counts alone.
    """

    paper = "COPO, arXiv 2501.12735"
    sums_to_zero = True
    needs = "counts"

    beta: float = option(0.1, "β, the bonus of an outcome never seen before", low=0.0)

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """The normalised r + β / √(1 + N)."""
        counts = require(further, self.needs).to(rewards.dtype)
        bonus = self.beta / (1.0 + counts).sqrt()
        return normalised(rewards + bonus)


@register("rs_grpo")
@dataclass(frozen=True, kw_only=True)
class RiskSensitive(Advantage):
    """RS-GRPO: responses count by the exponential of their reward, so that rare good ones count most."""

    paper = "RS-GRPO, arXiv 2509.24261"
    sums_to_zero = True

    beta: float = option(2.0, "β; at 0 the reward less its group's mean, towards ∞ only the best response", low=0.0)

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """(exp(β r_i) / mean_j exp(β r_j) − 1) / β, its limit r_i − mean_j r_j at β = 0.

        The loss has the gradient of (1/β) log E[exp(β r)], up to 1/G, as the mean is of the same responses.
        """
        # Relative to the best reward, so that nothing overflows and equal rewards give exactly 0.
        below_best = rewards - rewards.amax(-1, keepdim=True)
        if self.beta == 0.0:
            return below_best - below_best.mean(-1, keepdim=True)
        utility = torch.expm1(self.beta * below_best)
        mean = utility.mean(-1, keepdim=True)
        return (utility - mean) / (1.0 + mean) / self.beta

    def largest(self, size: int) -> float:
        """A bound of the advantage of an only right response, which is below (n − 1) / β; none for β = 0."""
        return size / self.beta if self.beta > 0.0 else 0.0


@register("ngrpo")
@dataclass(frozen=True, kw_only=True)
class NegativeEnhanced(Advantage):
    """NGRPO's calibration (not N-GRPO): the group is normalised with virtual best responses appended."""

    paper = "NGRPO, arXiv 2509.18851"

    n: int = option(1, "virtual responses of the maximum reward", low=1)
    max_reward: float = option(1.0, "the maximum reward of the task")

    def check_rewards(self, rewards: Tensor) -> None:
        self.refuse(
            rewards[rewards > self.max_reward + self._rounding],
            f"above the maximum reward {self.max_reward:g}. Give the task's maximum with --advantage.max_reward.",
        )

    @property
    def _rounding(self) -> float:
        """How far float32 may be from the maximum: 0.7 is stored as 0.69999999, which is below 0.7."""
        return ROUNDING * max(1.0, abs(self.max_reward))

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """(r − mean′) / (std′ + 1e-6), over the group and n virtual responses of the maximum reward."""
        # Relative to the maximum, so that virtual responses have reward 0, and an all-correct group is exactly 0.
        below_maximum = rewards - self.max_reward
        below_maximum = torch.where(below_maximum > -self._rounding, 0.0, below_maximum)
        size = rewards.shape[1] + self.n
        mean = below_maximum.sum(-1, keepdim=True) / size
        squares = (below_maximum - mean).square().sum(-1, keepdim=True) + self.n * mean.square()
        deviation = (squares / (size - 1)).sqrt()
        return (below_maximum - mean) / (deviation + 1e-6)

    def flags(self, flags: Flags) -> dict[str, Default]:
        """Also the asymmetric clipping, and the filter that drops all-correct prompts and keeps all-wrong ones."""
        # Without an exponent: argparse takes a negative number with one for a flag.
        highest = f"{self.max_reward - self._rounding:.7f}".rstrip("0").rstrip(".")
        added: dict[str, Default] = {
            **super().flags(flags),
            "--algo.dynamic_filtering_enable": None,
            # OpenRLHF keeps a group where min < mean score < max. argparse takes "-inf" and "-1e6" for flags.
            "--algo.dynamic_filtering_range": ("-1000000", highest),
        }
        # The clip range is for ratios of tokens. GSPO's ratios, of whole sequences, have another scale.
        if flags.value("--actor.policy_loss_type") != "gspo":
            added["--actor.eps_clip_low_high"] = ("0.16", "0.24")
        return added

    def notes(self, flags: Flags) -> list[str]:
        """A warning where the user's own filter drops the groups that the method is about."""
        lowest = flags.value("--algo.dynamic_filtering_range")
        if lowest is None or lowest.startswith("-"):
            return []
        return [
            "--advantage ngrpo learns from all-wrong groups, but --algo.dynamic_filtering_range"
            f" {lowest} … drops them from the batch."
        ]
