# SPDX-License-Identifier: Apache-2.0
"""NGRPO, negative-enhanced GRPO. Not N-GRPO, which mixes neighbors: see `perturbations.methods.neighbor`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import ROUNDING, Advantage
from perturbations import UsageError, option


def _plain(number: float) -> str:
    """Without an exponent, which argparse takes for a flag where the number is negative."""
    return f"{number:.7f}".rstrip("0").rstrip(".")


@register("ngrpo")
@dataclass(frozen=True, kw_only=True)
class NegativeEnhanced(Advantage):
    """NGRPO's calibration (not N-GRPO): the group is normalised with virtual best answers appended."""

    paper = "NGRPO, arXiv 2509.18851"

    n: int = option(1, "virtual answers of the maximum reward", low=1)
    max_reward: float = option(1.0, "the maximum reward of the task")

    def check_rewards(self, rewards: Tensor) -> None:
        """Raises ``UsageError`` for rewards above the maximum."""
        highest = float(rewards.max()) if rewards.numel() else self.max_reward
        if highest > self.max_reward + self._rounding:
            raise UsageError(
                f"advantage ngrpo: a reward of {highest:g} is above the maximum reward {self.max_reward:g}. Give the"
                " task's maximum with --advantage.max_reward."
            )

    @property
    def _rounding(self) -> float:
        """How far float32 may be from the maximum: 0.7 is stored as 0.69999999, which is below 0.7."""
        return ROUNDING * max(1.0, abs(self.max_reward))

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        """(r − mean′) / (std′ + 1e-6), over the group and n virtual answers of the maximum reward."""
        # Measured from the maximum, so that the virtual answers are 0 and an all-correct group is exactly 0.
        below = rewards - self.max_reward
        below = torch.where(below > -self._rounding, 0.0, below)
        size = rewards.shape[1] + self.n
        mean = below.sum(-1, keepdim=True) / size
        squares = (below - mean).square().sum(-1, keepdim=True) + self.n * mean.square()
        return (below - mean) / ((squares / (size - 1)).sqrt() + 1e-6)

    def flags(self, flags: Flags) -> dict[str, Default]:
        """Also the asymmetric clipping, and the filter that drops all-correct prompts and keeps all-wrong ones."""
        added: dict[str, Default] = {
            **super().flags(flags),
            "--algo.dynamic_filtering_enable": None,
            # OpenRLHF keeps min < mean score < max; argparse takes no "-inf" or "-1e6" for a value.
            "--algo.dynamic_filtering_range": ("-1000000", _plain(self.max_reward - self._rounding)),
        }
        # The range is for ratios of tokens; GSPO's, of whole sequences, has another scale.
        if flags.value("--actor.policy_loss_type") != "gspo":
            added["--actor.eps_clip_low_high"] = ("0.16", "0.24")
        return added

    def notes(self, flags: Flags) -> list[str]:
        """Where the user's own filter drops the groups that the method is about."""
        lowest = flags.value("--algo.dynamic_filtering_range")
        if lowest is None or lowest.startswith("-"):
            return []
        return [
            f"--advantage ngrpo learns from all-wrong groups, but --algo.dynamic_filtering_range {lowest} … drops them"
            " from the batch."
        ]
