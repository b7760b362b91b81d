# SPDX-License-Identifier: Apache-2.0
"""Tokens of large covariance, which lower the entropy: without advantage (`clip_cov`), with a KL penalty (`kl_cov`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import SIZES, Flags
from ngrpo.methods.credits import register
from ngrpo.methods.credits.base import Credit, LossTokens, StepTokens
from perturbations import option
from perturbations.errors import UsageError
from perturbations.streams import Stream, keys

_PAPER = "The Entropy Mechanism, arXiv 2505.22617"


@register("clip_cov")
@dataclass(frozen=True, kw_only=True)
class ClipCov(Credit):
    """A few random tokens with a covariance between two bounds get no advantage."""

    paper = _PAPER
    reads_log_probs = True

    share: float = option(2e-4, "r, the share of all tokens that is chosen", above=0.0, high=1.0)
    low: float = option(1.0, "ω_low, the smallest covariance of a token that may be chosen")
    high: float = option(5.0, "ω_high, the largest one")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise UsageError(f"credit option low={self.low}: must be at most high={self.high}.")

    def formula(self, tokens: StepTokens) -> Tensor:
        """0 at random tokens with ω_low ≤ Cov ≤ ω_high, at most max(1, ⌊r N⌋) of them, else A (§4.2 of the paper).

        A token's draw follows from its seed and its position, in any order of the responses.
        """
        covariance = covariances(tokens)
        is_candidate = (covariance >= self.low) & (covariance <= self.high)
        candidates = is_candidate.nonzero().flatten()
        draws = keys(tokens.seeds[candidates], tokens.positions[candidates], Stream.CREDIT)
        chosen = candidates[draws.argsort()[: count(self.share, covariance)]]
        return tokens.advantages.index_fill(0, chosen, 0.0)


@register("kl_cov")
@dataclass(frozen=True, kw_only=True)
class KLCov(Credit):
    """The tokens of largest covariance have a KL penalty towards the policy before the step's updates."""

    paper = _PAPER
    reads_log_probs = True

    share: float = option(2e-3, "k, the share of tokens with the penalty", above=0.0, high=1.0)
    beta: float = option(1.0, "β, the penalty's weight", low=0.0)

    def formula(self, tokens: StepTokens) -> Tensor:
        """A: the penalty is a loss of its own."""
        return tokens.advantages

    def marks(self, tokens: StepTokens) -> Tensor:
        """The max(1, ⌊k N⌋) tokens of largest covariance."""
        covariance = covariances(tokens)
        chosen_count = min(len(covariance), count(self.share, covariance))
        chosen = covariance.topk(chosen_count).indices
        return torch.zeros_like(covariance, dtype=torch.bool).index_fill(0, chosen, True)

    def marked_loss(self, tokens: LossTokens, marked: Tensor, log_ratio: Tensor) -> Tensor:
        """β |log π(y) − log π_old(y)|, the estimate of KL(π_old ‖ π) in §4.2 of the paper."""
        return self.beta * log_ratio.abs()

    def notes(self, flags: Flags) -> list[str]:
        """A warning where a rollout has one update: the policy is the old one, and the penalty has no gradient."""
        prompts, responses, batch, epochs = (int(flags.or_default(name)) for name in SIZES)
        if prompts * responses * epochs > batch:
            return []
        return [
            f"--credit kl_cov has no effect with one update a rollout: --train.batch_size {batch} takes all"
            f" {prompts * responses} responses of a step, so that its penalty's gradient is exactly 0. Lower"
            " --train.batch_size, or raise --train.max_epochs."
        ]


def covariances(tokens: StepTokens) -> Tensor:
    """(log π_old(y) − mean) · (A − mean) of each token, (N,); both means are over all tokens of the training step."""
    log_probs = tokens.log_probs.double()
    advantages = tokens.advantages.double()
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def count(share: float, tokens: Tensor) -> int:
    """How many tokens a share of them is, at least one."""
    return max(1, int(share * len(tokens)))
