"""Advantages of a group of answers to one prompt, as pure functions: `ngrpo train --advantage NAME`.

NGRPO, negative-enhanced GRPO (Nan et al., arXiv 2509.18851), stands here under ``ngrpo``. It is not N-GRPO, the
mixing of semantic neighbors (Zhu et al., arXiv 2606.10768), which is ``--perturbation neighbor``. The names are
nearly equal, the methods have nothing in common, and they can be combined.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ngrpo.openrlhf_flags import Flags
from perturbations.options import coerce, nearest, option

# What OpenRLHF 0.11.2 computes itself (--algo.advantage.estimator) and is not repeated here.
OPENRLHF_ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "dr_grpo", "flash_reinforce")

# Rewards are sums of float32; nearer to the maximum than this counts as the maximum.
_ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class Advantage(ABC):
    """An advantage with its options. Subclasses are frozen dataclasses whose fields come from ``option``."""

    name: ClassVar[str]
    paper: ClassVar[str]
    counted: ClassVar[bool] = False
    """Whether it needs to know how often each (prompt, answer) outcome was seen."""
    smallest_group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = coerce(type(self), field, getattr(self, field.name), what="advantage")
            object.__setattr__(self, field.name, value)

    def compute(self, rewards: Tensor, counts: Tensor | None = None) -> Tensor:
        """The advantages of P groups.

        Args:
            rewards: (P, G), one row per prompt.
            counts: (P, G), how often each answer's outcome was seen before; only where :attr:`counted`.

        Returns:
            Advantages (P, G), float32 or wider.

        Raises:
            ValueError: for a wrong shape, or rewards that the formula is not made for.
        """
        if rewards.dim() != 2 or rewards.shape[1] < self.smallest_group:
            raise ValueError(
                f"advantage {self.name}: rewards of shape {tuple(rewards.shape)}; (P, G) is needed, one row per prompt"
                f" with G of at least {self.smallest_group} answers (--rollout.n_samples_per_prompt)."
            )
        if self.counted and (counts is None or counts.shape != rewards.shape):
            shape = None if counts is None else tuple(counts.shape)
            raise ValueError(
                f"advantage {self.name}: counts={shape}; a tensor of the rewards' shape {tuple(rewards.shape)} is"
                " needed: how often each answer was seen before."
            )
        rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
        return self._compute(rewards) if counts is None else self._compute(rewards, counts)

    @abstractmethod
    def _compute(self, rewards: Tensor, counts: Tensor | None = None) -> Tensor:
        """As :meth:`compute`, with checked shapes and float32 or wider."""

    def flags(self, args: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """OpenRLHF flags that belong to the method, with their values (none: a switch), given the others."""
        # The estimator with groups, no critic, no discount and no further normalisation; its value is replaced.
        return {"--algo.advantage.estimator": ("group_norm",)}

    def notes(self, args: Sequence[str]) -> list[str]:
        """Warnings for the user about OpenRLHF's flags."""
        return []

    def spec(self) -> dict[str, Any]:
        """Name and every option: ``create(**spec)`` gives an equal advantage."""
        return {"name": self.name, **dataclasses.asdict(self)}


def group_norm(rewards: Tensor) -> Tensor:
    """(r − mean) / (std + 1e-9), with the sample standard deviation: what OpenRLHF 0.11.2's group_norm computes."""
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)


@dataclass(frozen=True, kw_only=True)
class GroupNorm(Advantage):
    """GRPO's: rewards normalised within the group."""

    name: ClassVar[str] = "group_norm"
    paper: ClassVar[str] = "GRPO, arXiv 2402.03300"
    smallest_group: ClassVar[int] = 2

    def _compute(self, rewards: Tensor, counts: Tensor | None = None) -> Tensor:
        return group_norm(rewards)


@dataclass(frozen=True, kw_only=True)
class NegativeEnhanced(Advantage):
    """NGRPO's calibration (not N-GRPO): the group is normalised with virtual best answers appended."""

    name: ClassVar[str] = "ngrpo"
    paper: ClassVar[str] = "NGRPO, arXiv 2509.18851"

    n: int = option(1, "virtual answers of the maximum reward", low=1)
    max_reward: float = option(1.0, "the maximum reward of the task")

    def _compute(self, rewards: Tensor, counts: Tensor | None = None) -> Tensor:
        highest = float(rewards.max()) if rewards.numel() else self.max_reward
        if highest > self.max_reward + _ROUNDING:
            raise ValueError(
                f"advantage ngrpo: a reward of {highest:g} is above the maximum reward {self.max_reward:g}. Give the"
                " task's maximum with --advantage.max_reward."
            )
        # Measured from the maximum, so that the virtual answers are 0 and an all-correct group is exactly 0.
        below = (rewards - self.max_reward).clamp(max=0.0)
        size = rewards.shape[1] + self.n
        mean = below.sum(-1, keepdim=True) / size
        squares = (below - mean).square().sum(-1, keepdim=True) + self.n * mean.square()
        return (below - mean) / ((squares / (size - 1)).sqrt() + 1e-6)

    def flags(self, args: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Also the asymmetric clipping, and the filter that drops all-correct prompts and keeps all-wrong ones."""
        added = {
            **super().flags(args),
            "--algo.dynamic_filtering_enable": (),
            # OpenRLHF keeps min < mean score < max; argparse takes no "-inf" or "-1e6" for a value.
            "--algo.dynamic_filtering_range": ("-1000000", f"{self.max_reward:g}"),
        }
        # The range is for ratios of tokens; GSPO's, of whole sequences, has another scale.
        if Flags(args).value("--actor.policy_loss_type") != "gspo":
            added["--actor.eps_clip_low_high"] = ("0.16", "0.24")
        return added

    def notes(self, args: Sequence[str]) -> list[str]:
        """Where the user's own filter drops the groups that the method is about."""
        lowest = Flags(args).value("--algo.dynamic_filtering_range")
        if lowest is None or lowest.startswith("-"):
            return []
        return [
            f"--advantage ngrpo learns from all-wrong groups, but --algo.dynamic_filtering_range {lowest} … drops them"
            " from the batch."
        ]


@dataclass(frozen=True, kw_only=True)
class _Verified(Advantage):
    """For rewards in [0, 1] where 1 is a correct answer; no group, no normalisation."""

    paper: ClassVar[str] = "a baseline of NGRPO, arXiv 2509.18851"

    def compute(self, rewards: Tensor, counts: Tensor | None = None) -> Tensor:
        """As the base class's; rewards outside of [0, 1] raise ``ValueError``."""
        outside = rewards[(rewards < 0.0) | (rewards > 1.0 + _ROUNDING)]
        if len(outside):
            raise ValueError(
                f"advantage {self.name}: a reward of {float(outside[0]):g}; rewards in [0, 1] are needed, 1 for a"
                " correct answer. Let the reward function give those, or use --advantage group_norm or ngrpo."
            )
        return super().compute(rewards, counts)

    def flags(self, args: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Raises ``ValueError`` for penalties that would move the rewards out of [0, 1]."""
        for flag in ("--reward.overlong_buffer_len", "--reward.stop_properly_penalty_coef"):
            if Flags(args).has(flag):
                raise ValueError(
                    f"{flag} cannot be used with --advantage {self.name}: it makes rewards that are not in [0, 1]."
                    " Mend: leave it (or --preset dapo, which adds it) out, or use --advantage group_norm or ngrpo."
                )
        return super().flags(args)


@dataclass(frozen=True, kw_only=True)
class PositiveOnly(_Verified):
    """PSR, positive samples only: A = r."""

    name: ClassVar[str] = "psr"

    def _compute(self, rewards: Tensor, counts: Tensor | None = None) -> Tensor:
        return rewards.clone()


@dataclass(frozen=True, kw_only=True)
class NegativeOnly(_Verified):
    """NSR, negative samples only: A = r - 1."""

    name: ClassVar[str] = "nsr"

    def _compute(self, rewards: Tensor, counts: Tensor | None = None) -> Tensor:
        return rewards - 1.0


@dataclass(frozen=True, kw_only=True)
class WeightedReinforce(_Verified):
    """W-REINFORCE: lam * r for a correct answer, r - 1 for a wrong one."""

    name: ClassVar[str] = "w_reinforce"

    lam: float = option(0.1, "λ, the weight of the correct answers", low=0.0)

    def _compute(self, rewards: Tensor, counts: Tensor | None = None) -> Tensor:
        return torch.where(rewards >= 1.0 - _ROUNDING, self.lam * rewards, rewards - 1.0)


@dataclass(frozen=True, kw_only=True)
class CountBonus(Advantage):
    """COPO: a bonus of beta / sqrt(1 + N) on rarely seen (prompt, answer) outcomes, then as group_norm."""

    name: ClassVar[str] = "copo"
    paper: ClassVar[str] = "COPO, arXiv 2501.12735"
    counted: ClassVar[bool] = True
    smallest_group: ClassVar[int] = 2

    beta: float = option(0.1, "β, the bonus of an outcome never seen before", low=0.0)

    def notes(self, args: Sequence[str]) -> list[str]:
        """Where a run is resumed."""
        if not Flags(args).has("--ckpt.load_enable"):
            return []
        return ["--advantage copo: its counts are not part of a checkpoint; a resumed run starts counting at zero."]

    def _compute(self, rewards: Tensor, counts: Tensor | None = None) -> Tensor:
        return group_norm(rewards + self.beta / (1.0 + counts.to(rewards.dtype)).sqrt())


ADVANTAGES: dict[str, type[Advantage]] = {
    cls.name: cls for cls in (GroupNorm, NegativeEnhanced, PositiveOnly, NegativeOnly, WeightedReinforce, CountBonus)
}


def create(name: str, **options: Any) -> Advantage:
    """An advantage by its name.

    Args:
        name: a key of :data:`ADVANTAGES`.
        **options: its options; strings as they come from a command line are converted.

    Raises:
        ValueError: for an unknown name or option, or a value out of range; says what is allowed.
    """
    if name.lower() in ("n-grpo", "n_grpo"):
        raise ValueError(
            f"unknown advantage {name!r}: two methods have nearly this name. N-GRPO, the mixing of neighbors, is"
            " --perturbation neighbor; NGRPO, negative-enhanced GRPO, is --advantage ngrpo."
        )
    if name in OPENRLHF_ESTIMATORS:
        raise ValueError(
            f"unknown advantage {name!r}: OpenRLHF computes that one itself; leave --advantage out and give"
            f" --algo.advantage.estimator {name}. Ours: {', '.join(ADVANTAGES)}."
        )
    if name not in ADVANTAGES:
        raise ValueError(f"unknown advantage {name!r}.{nearest(name, ADVANTAGES)} Available: {', '.join(ADVANTAGES)}.")
    cls = ADVANTAGES[name]
    known = [field.name for field in dataclasses.fields(cls)]
    for word in options:
        if word not in known:
            has = f"its options are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"unknown option {word!r} of advantage {name}: {has}.{nearest(word, known)}")
    return cls(**options)


def compute(name: str, rewards: Tensor, *, counts: Tensor | None = None, **options: Any) -> Tensor:
    """The advantages of P groups of G answers.

    Args:
        name: ``group_norm``, ``ngrpo``, ``psr``, ``nsr``, ``w_reinforce`` or ``copo``.
        rewards: (P, G), one row per prompt.
        counts: (P, G) how often each answer's outcome was seen before; ``copo`` needs it, others do not use it.
        **options: of the advantage, such as ``n`` of ``ngrpo``.

    Returns:
        Advantages (P, G), float32 or wider.

    Raises:
        ValueError: for an unknown name or option, a bad value or a wrong shape.
    """
    return create(name, **options).compute(rewards, counts)
