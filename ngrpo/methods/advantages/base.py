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

# Rewards are sums of float32; nearer to the maximum than this counts as the maximum.
ROUNDING = 1e-5

# What else an advantage may need, (P, G, …); ngrpo/trainers/openrlhf/step_advantages.py has it measured.
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
    # What else it needs, a name of FURTHER, where `counted = True` is "counts"; whether each group's advantages sum
    # to 0, whatever its rewards; whether responses beyond the length limit are no part of their groups, and get 0; and
    # whether all advantages of a training step are normalized together.
    needs: ClassVar[str] = ""
    counted: ClassVar[bool] = False
    sums_to_zero: ClassVar[bool] = False
    leaves_out_overlong: ClassVar[bool] = False
    normalized_over_step: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if vars(cls).get("counted"):
            cls.needs = "counts"
        if cls.needs not in ("", *FURTHER):
            raise UsageError(f"advantage {cls.__name__}: needs={cls.needs!r}; must be one of {', '.join(FURTHER)}.")

    @abstractmethod
    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """The advantages of P groups, (P, G): each row is a function of its own row.

        ``rewards``: (P, G) finite, float32 or wider. ``further``: (P, G, …), what ``needs`` names; None where nothing.
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
        label, shape = f"advantage {self.name}:", tuple(rewards.shape)
        if len(shape) != 2:
            raise UsageError(f"{label} rewards of shape {shape}; (P, G) is needed, a row for each prompt.")
        further = further if self.needs else None
        if self.needs and (further is None or further.shape[:2] != rewards.shape):
            given = f"{self.needs}={None if further is None else tuple(further.shape)}"
            needed = f"a tensor of the rewards' shape {shape} is needed: {FURTHER[self.needs]}"
            raise UsageError(f"{label} {given}; {needed}.")
        for row, column in (~rewards.isfinite()).nonzero().tolist():
            given = f"the reward of prompt {row}, response {column} is {rewards[row, column].item()}"
            raise UsageError(f"{label} {given}. Finite rewards are needed: repair the reward function.")
        if further is not None:
            self.check_further(further)
        rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
        self.check_rewards(rewards)
        if overlong is None or not self.leaves_out_overlong:
            return self.formula(rewards, further)
        result, complete = torch.zeros_like(rewards), ~overlong
        left = complete.sum(-1, keepdim=True)
        for size in left[left > 0].unique().tolist():  # groups with as many responses left go together
            here = complete & (left == size)
            of_size = None if further is None else further[here].view(-1, size, *further.shape[2:])
            result[here] = self.formula(rewards[here].view(-1, size), of_size).flatten().to(result)
        return result

    def check_rewards(self, rewards: Tensor) -> None:
        """Raises ``UsageError`` for rewards (P, G) that the formula is not made for."""

    def check_further(self, further: Tensor) -> None:
        """Raises ``UsageError`` for what else it needs, (P, G, …), if that is not finite."""
        for row, column in (~further.isfinite()).unsqueeze(-1).flatten(2).any(-1).nonzero().tolist():
            raise UsageError(
                f"advantage {self.name}: {self.needs} of prompt {row}, response {column} are"
                f" {further[row, column].tolist()}. Finite numbers are needed: {FURTHER[self.needs]}."
            )

    def refuse(self, rewards: Tensor, fault: str) -> None:
        """Raises ``UsageError`` for the first of these rewards, if any."""
        if len(rewards):
            raise UsageError(f"advantage {self.name}: a reward of {float(rewards[0]):g} is {fault}")

    def largest(self, size: int) -> float:
        """The size that an advantage can reach among ``size`` compared responses; 0 where OpenRLHF's clip, 10, fits."""
        return 0.0

    def flags(self, flags: Flags) -> dict[str, Default]:
        """Defaults of OpenRLHF's flags that belong to the method, in view of the others."""
        # The estimator with groups, no critic, no discount and no further normalisation; its value is replaced.
        return {"--algo.advantage.estimator": "group_norm"}

    def notes(self, flags: Flags) -> list[str]:
        """Warnings for the user about OpenRLHF's flags."""
        return []


def normalised(rewards: Tensor, least: float = 1e-9) -> Tensor:
    """(r − mean) / (std + least) within each row of (P, G), with the sample standard deviation."""
    # A row of equal values gives exactly 0; its float32 mean may be off, which division by 1e-9 would blow up.
    apart = rewards - rewards[:, :1]
    deviation = apart.std(-1, correction=min(1, rewards.shape[1] - 1), keepdim=True)
    return (apart - apart.mean(-1, keepdim=True)) / (deviation + least)


@dataclass(frozen=True, kw_only=True)
class VerifiedAdvantage(Advantage):
    """For rewards in [0, 1] where 1 is a correct response."""

    paper: ClassVar[str] = "a baseline of NGRPO, arXiv 2509.18851"

    def check_rewards(self, rewards: Tensor) -> None:
        outside = rewards[(rewards < 0.0) | (rewards > 1.0 + ROUNDING)]
        fix = "Let the reward function give those, or use --advantage group_norm or ngrpo."
        self.refuse(outside, f"not in [0, 1], where 1 is a correct response. {fix}")


@dataclass(frozen=True, kw_only=True)
class AnnealedK(Advantage):
    """For objectives of the best of k responses, with a k that may change over the run."""

    k: int = option(4, "responses of which the best counts", low=1)
    k_end: int | None = option(None, "k at the end; none for the same k throughout", low=1)
    k_steps: int = option(100, "training steps from k to k_end", low=1)
    k_change: str = option("switch", "k until then and k_end from there on, or evenly", choices=("switch", "linear"))

    def at_step(self, step: int) -> AnnealedK:
        if self.k_end is None:
            return self
        share = float(step >= self.k_steps) if self.k_change == "switch" else min(step / self.k_steps, 1.0)
        return replace(self, k=round(self.k + share * (self.k_end - self.k)), k_end=None)

    @property
    def changes_over_run(self) -> bool:
        return self.k_end is not None

    def check_group(self, size: int) -> None:
        """Raises ``UsageError`` where k does not fit groups of this size."""
        if self.k > size:
            limit = f"must be in [1, {size}], the responses to each prompt (--rollout.n_samples_per_prompt)"
            raise UsageError(f"advantage {self.name}: k={self.k}: {limit}. Lower k, or ask for more responses.")

    def check_rewards(self, rewards: Tensor) -> None:
        self.check_group(rewards.shape[1])

    def flags(self, flags: Flags) -> dict[str, Default]:
        size = flags.or_default("--rollout.n_samples_per_prompt")
        for advantage in (self, self.at_step(self.k_steps)):
            if size.isdecimal():
                advantage.check_group(int(size))
        return super().flags(flags)
