# SPDX-License-Identifier: Apache-2.0
"""The contract of an advantage, and what several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.methods.advantages import registry as _registry
from perturbations.errors import UsageError
from perturbations.options import Options, option

# A reward that is nearer to the maximum than this counts as the maximum: rewards are sums of float32.
ROUNDING = 1e-5

# The numbers besides the rewards that an advantage may need, (P, G, …). step_advantages.py in ngrpo/trainers/openrlhf/
# measures them.
FURTHER = {
    "counts": "how often each response was seen before",
    "log_probs": "the sum of each response's log-probabilities and the number of its tokens",
    "hidden": "the projected mean of each response's last hidden states",
    "values": "the value of each response's prompt, as earlier steps estimate it",
}


@dataclass(frozen=True, kw_only=True)
class Advantage(Options, ABC):
    """An advantage with its options. Subclasses are frozen dataclasses with fields from ``option``."""

    kind: ClassVar[str] = "advantage"
    registry: ClassVar[Any] = _registry
    paper: ClassVar[str] = "none named"
    # The numbers that it needs besides the rewards: a name of FURTHER, or none.
    needs: ClassVar[str] = ""
    # Whether each group's advantages sum to 0, whatever its rewards.
    sums_to_zero: ClassVar[bool] = False
    # Whether responses that the length limit has cut off are left out of their groups, with advantage 0.
    leaves_out_overlong: ClassVar[bool] = False
    # Whether all advantages of a training step are normalized together.
    normalized_over_step: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.needs not in ("", *FURTHER):
            raise UsageError(f"advantage {cls.__name__}: needs={cls.needs!r}; must be one of {', '.join(FURTHER)}.")

    @abstractmethod
    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """The advantages of P groups, (P, G): each row is a function of its own row.

        ``rewards``: (P, G) finite, float32 or wider. ``further``: the numbers that ``needs`` names, (P, G, …); None
        where it names none.
        """

    def at_step(self, step: int) -> Advantage:
        """The advantage at a training step, from 0 on: itself, unless an option changes over the run."""
        return self

    @property
    def changes_over_run(self) -> bool:
        """Whether :meth:`at_step` may give another advantage at a later step."""
        return type(self).at_step is not Advantage.at_step

    def compute(self, rewards: Tensor, further: Tensor | None = None, overlong: Tensor | None = None) -> Tensor:
        """As :meth:`formula`; ``UsageError`` for a wrong shape, or rewards that it cannot use.

        ``overlong``: which responses were cut off, (P, G) bool; ignored unless ``leaves_out_overlong``.
        """
        if not self.needs:
            further = None
        self._check_shapes(rewards, further)
        for row, column in (~rewards.isfinite()).nonzero().tolist():
            raise UsageError(
                f"advantage {self.name}: the reward of prompt {row}, response {column} is"
                f" {rewards[row, column].item()}. Finite rewards are needed: repair the reward function."
            )
        if further is not None:
            self.check_further(further)
        rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
        self.check_rewards(rewards)
        if overlong is None or not self.leaves_out_overlong:
            advantages = self.formula(rewards, further)
        else:
            advantages = self._of_complete(rewards, further, complete=~overlong)
        is_broken = (~advantages.isfinite()).any(-1)  # (P,)
        for row in is_broken.nonzero().flatten().tolist():
            raise UsageError(
                f"advantage {self.name}: formula() gives {advantages[row].tolist()} for the rewards"
                f" {rewards[row].tolist()}. Finite numbers are needed: clamp before divisions, logarithms and roots."
            )
        return advantages

    def _check_shapes(self, rewards: Tensor, further: Tensor | None) -> None:
        """Raises ``UsageError`` unless rewards are (P, G), and the numbers that are needed besides them (P, G, …)."""
        shape = tuple(rewards.shape)
        if len(shape) != 2:
            raise UsageError(
                f"advantage {self.name}: rewards of shape {shape}; (P, G) is needed, a row for each prompt."
            )
        if not self.needs:
            return
        further_shape = None if further is None else tuple(further.shape)
        if further_shape is None or further_shape[:2] != shape:
            raise UsageError(
                f"advantage {self.name}: {self.needs} has shape {further_shape}; its first two dimensions must be the"
                f" rewards', {shape}: {FURTHER[self.needs]}."
            )

    def _of_complete(self, rewards: Tensor, further: Tensor | None, complete: Tensor) -> Tensor:
        """The advantages within the complete responses of each group, and 0 for the other ones, (P, G)."""
        advantages = torch.zeros_like(rewards)
        group_sizes = complete.sum(-1, keepdim=True)  # (P, 1)
        # The formula takes groups of one size, so those with the same number of complete responses go together.
        for size in group_sizes[group_sizes > 0].unique().tolist():
            chosen = complete & (group_sizes == size)  # (P, G)
            chosen_rewards = rewards[chosen].view(-1, size)
            chosen_further = None if further is None else further[chosen].view(-1, size, *further.shape[2:])
            advantages[chosen] = self.formula(chosen_rewards, chosen_further).flatten().to(advantages)
        return advantages

    def check_rewards(self, rewards: Tensor) -> None:
        """Raises ``UsageError`` for rewards (P, G) that the formula is not made for."""

    def check_further(self, further: Tensor) -> None:
        """Raises ``UsageError`` unless the numbers that it needs besides the rewards, (P, G, …), are finite."""
        is_broken = (~further.isfinite()).unsqueeze(-1).flatten(2).any(-1)  # (P, G)
        for row, column in is_broken.nonzero().tolist():
            raise UsageError(
                f"advantage {self.name}: {self.needs} of prompt {row}, response {column} are"
                f" {further[row, column].tolist()}. Finite numbers are needed: {FURTHER[self.needs]}."
            )

    def refuse(self, rewards: Tensor, fault: str) -> None:
        """Raises ``UsageError`` for the first of the rewards, if there is one; ``fault`` ends the message."""
        if len(rewards):
            raise UsageError(f"advantage {self.name}: a reward of {float(rewards[0]):g} is {fault}")

    def largest(self, size: int) -> float:
        """A bound of |A| among ``size`` compared responses; a start widens OpenRLHF's clip of 10 to a larger one.

        0 leaves the clip as it is.
        """
        return 0.0

    def flags(self, flags: Flags) -> dict[str, Default]:
        """Defaults of OpenRLHF's flags that belong to the method, in view of the others."""
        # The estimator that has groups, and neither a critic nor a discount nor a further normalisation. Its values are
        # replaced by those of the formula.
        return {"--algo.advantage.estimator": "group_norm"}

    def notes(self, flags: Flags) -> list[str]:
        """Warnings for the user about OpenRLHF's flags."""
        return []


def normalised(rewards: Tensor, least: float = 1e-9) -> Tensor:
    """(r − mean) / (std + least) within each row of (P, G), with the sample standard deviation."""
    # Relative to the first reward, so that equal rewards give exactly 0. Their float32 mean may differ from them by a
    # rounding error, which the division by 1e-9 would make large.
    differences = rewards - rewards[:, :1]
    deviation = differences.std(-1, correction=min(1, rewards.shape[1] - 1), keepdim=True)  # 0 for a single response
    return (differences - differences.mean(-1, keepdim=True)) / (deviation + least)


@dataclass(frozen=True, kw_only=True)
class VerifiedAdvantage(Advantage):
    """For rewards in [0, 1] where 1 is a correct response."""

    paper: ClassVar[str] = "a baseline of NGRPO, arXiv 2509.18851"

    def check_rewards(self, rewards: Tensor) -> None:
        self.refuse(
            rewards[(rewards < 0.0) | (rewards > 1.0 + ROUNDING)],
            "not in [0, 1], where 1 is a correct response. Let the reward function give those, or use --advantage"
            " group_norm or ngrpo.",
        )


@dataclass(frozen=True, kw_only=True)
class AnnealedK(Advantage):
    """For objectives of the best of k responses, with a k that may change over the run."""

    k: int = option(4, "responses of which the best counts", low=1)
    k_end: int | None = option(None, "k at the end; none for the same k throughout", low=1)
    k_steps: int = option(100, "the training step from which k is k_end", low=1)
    k_change: str = option(
        "switch",
        "switch: k until step k_steps, then k_end; linear: evenly from k to k_end",
        choices=("switch", "linear"),
    )

    def at_step(self, step: int) -> AnnealedK:
        if self.k_end is None:
            return self
        share = min(step / self.k_steps, 1.0)
        if self.k_change == "switch":
            share = float(step >= self.k_steps)
        k = round(self.k + share * (self.k_end - self.k))
        return replace(self, k=k, k_end=None)

    @property
    def changes_over_run(self) -> bool:
        return self.k_end is not None

    def check_group(self, size: int) -> None:
        """Raises ``UsageError`` where k does not fit groups of this size."""
        if self.k > size:
            raise UsageError(
                f"advantage {self.name}: k={self.k}: must be in [1, {size}], the responses to each prompt"
                " (--rollout.n_samples_per_prompt). Lower k, or ask for more responses."
            )

    def check_rewards(self, rewards: Tensor) -> None:
        self.check_group(rewards.shape[1])

    def flags(self, flags: Flags) -> dict[str, Default]:
        size = flags.or_default("--rollout.n_samples_per_prompt")
        if size.isdecimal():
            at_the_end = self.at_step(self.k_steps)
            self.check_group(int(size))
            at_the_end.check_group(int(size))
        return super().flags(flags)
