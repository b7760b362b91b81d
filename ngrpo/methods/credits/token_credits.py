# SPDX-License-Identifier: Apache-2.0
"""Credit by entropy (`entropy_bonus`, `top_entropy`), for first tokens (`first_token`), likely and unlikely ones.

`simko` shares credit with the likeliest tokens. `lp_reg` keeps unlikely ones of wrong responses, unless they are noise.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.methods.credits import register
from ngrpo.methods.credits.base import Credit, LossTokens, StepTokens
from perturbations import option


@register("entropy_bonus")
@dataclass(frozen=True, kw_only=True)
class EntropyBonus(Credit):
    """A token gets a bonus for the policy's uncertainty where it was drawn, at most a share of its advantage's size."""

    paper = "Reasoning with Exploration, arXiv 2506.14758"

    alpha: float = option(0.4, "α, the bonus for each nat of entropy", low=0.0)
    kappa: float = option(2.0, "κ: the bonus is at most |A| / κ, so that it turns no sign", above=1.0)

    def formula(self, tokens: StepTokens) -> Tensor:
        """A + min(α H, |A| / κ)."""
        advantages = tokens.advantages
        return advantages + torch.minimum(self.alpha * tokens.entropies, advantages.abs() / self.kappa)


@register("top_entropy")
@dataclass(frozen=True, kw_only=True)
class TopEntropy(Credit):
    """80/20: tokens outside the top fraction by entropy, over the whole step, get no advantage."""

    paper = "Beyond the 80/20 Rule, arXiv 2506.01939"
    keeps_sums = True

    fraction: float = option(0.2, "ρ, the share of tokens that keep their advantage", above=0.0, high=1.0)

    def formula(self, tokens: StepTokens) -> Tensor:
        """A · 1[H ≥ τ_ρ], τ_ρ the smallest entropy among the top ⌈ρ N⌉ tokens of the step."""
        advantages, entropies = tokens.advantages, tokens.entropies
        if not len(entropies):
            return advantages
        threshold = entropies.topk(math.ceil(self.fraction * len(entropies))).values[-1]
        return torch.where(entropies >= threshold, advantages, 0.0)


@register("first_token")
@dataclass(frozen=True, kw_only=True)
class FirstToken(Credit):
    """Of a prompt's responses with A > 0, only the one with the highest mean log-probability trains its first token."""

    paper = "Latent-GRPO, arXiv 2604.27998"

    wrong: str = option("zero", "what responses with A ≤ 0 get there: nothing, or A", choices=("zero", "keep"))

    def formula(self, tokens: StepTokens) -> Tensor:
        """A, but 0 at the first tokens of all other responses of a group in which any has A > 0."""
        if not len(tokens.answers):
            return tokens.advantages
        first, answer = tokens.first.nonzero().flatten(), tokens.first.cumsum(0) - 1
        mean = tokens.log_probs.new_zeros(len(first)).index_add(0, answer, tokens.log_probs) / torch.bincount(answer)
        advantages, number = tokens.advantages[first], torch.arange(len(first)).to(first)
        groups = tokens.groups[first].unique(return_inverse=True)[1]  # without responses that have no token
        positive = advantages > 0.0
        highest = mean.new_full((len(first),), -torch.inf)
        highest = highest.scatter_reduce(0, groups, torch.where(positive, mean, -torch.inf), "amax")
        winning = positive & (mean == highest[groups])
        # Of equal ones the first; none where a group has none with A > 0.
        winner = torch.full_like(number, len(first))
        winner = winner.scatter_reduce(0, groups, torch.where(winning, number, len(first)), "amin")[groups]
        silent = (winner < len(first)) & (winner != number)
        if self.wrong == "keep":
            silent = silent & positive
        return tokens.advantages.index_copy(0, first, advantages.masked_fill(silent, 0.0))


@register("simko")
@dataclass(frozen=True, kw_only=True)
class SimKO(Credit):
    """At a response's most uncertain tokens: A > 0 also raises the k likeliest, A < 0 lowers a likeliest token more.

    Version 2 of the paper and its release. Version 3, CaSP, names the same two changes, with N for K.
    """

    paper = "SimKO, arXiv 2510.14807"

    k: int = option(3, "K, the likeliest tokens that share in a right response's credit", low=1)
    alpha: float = option(0.01, "α, their share of it", low=0.0, high=1.0)
    penalty: float = option(1.1, "λ, the factor of A < 0 where the token is the likeliest one", low=1.0)
    quantile: float = option(
        0.8, "concerns tokens with an entropy above this quantile of their response's", low=0.0, high=1.0
    )

    def formula(self, tokens: StepTokens) -> Tensor:
        """A: what changes, changes with the policy of each update (:meth:`in_loss`)."""
        return tokens.advantages

    def in_loss(self, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        """The gradient of γ̃ A, γ = π(y) / π_old(y), at tokens with H > τ.

        A > 0: γ̃ = (1 − α) γ + (α / K) Σ_k sg(γ / γ_k) γ_k over the K likeliest tokens, where sg stops gradients: its
        value is γ, its gradient γ ((1 − α) ∇log π(y) + (α / K) Σ_k ∇log π(k)). A < 0 and y the likeliest: γ̃ = λ γ.
        """
        advantages, term = tokens.advantages, torch.zeros_like(tokens.log_probs)
        entropies = tokens.entropies()
        wavering = entropies > quantiles(entropies, tokens.answers, self.quantile)
        right = (wavering & (advantages > 0.0)).nonzero().flatten()
        candidates = tokens.log_probs_of(right, tokens.likeliest(right, self.k))
        shared = self.alpha * (candidates.mean(dim=1) - tokens.log_probs[right])
        wrong = (wavering & (advantages < 0.0)).nonzero().flatten()
        likeliest = tokens.likeliest(wrong, 1).squeeze(1) == tokens.tokens[wrong]
        factor = torch.where(likeliest, self.penalty, 1.0).to(advantages)
        return advantages.index_copy(0, wrong, advantages[wrong] * factor), term.index_copy(0, right, shared)


def quantiles(values: Tensor, answers: Tensor, q: float) -> Tensor:
    """The linear q-quantile of each response's values, at each of them, (N,); ``answers`` (N,) ascend from 0."""
    counts = torch.bincount(answers).tolist() if len(answers) else []
    parts = [torch.quantile(part, q).expand(len(part)) for part in values.split(counts) if len(part)]
    return torch.cat(parts) if parts else values


@register("lp_reg")
@dataclass(frozen=True, kw_only=True)
class LpReg(Credit):
    """The least likely tokens with A < 0 have a KL penalty towards the policy without its noise tokens."""

    paper = "Lp-Reg, arXiv 2510.03222"
    reads_log_probs = True

    share: float = option(0.01, "ρ, the share of tokens that count as unlikely", above=0.0, high=1.0)
    kappa: float = option(
        0.02, "κ: a token is noise below this share of the likeliest one's probability", low=0.0, high=1.0
    )
    beta: float = option(1.0, "β, the penalty's weight", low=0.0)

    def formula(self, tokens: StepTokens) -> Tensor:
        """A: the penalty is a loss of its own."""
        return tokens.advantages

    def marks(self, tokens: StepTokens) -> Tensor:
        """A < 0 and π_old(y) ≤ δ, the largest probability among the least likely ⌈ρ N⌉ tokens of the training step."""
        log_probs = tokens.log_probs
        if not len(log_probs):
            return torch.zeros_like(log_probs, dtype=torch.bool)
        threshold = log_probs.topk(math.ceil(self.share * len(log_probs)), largest=False).values[-1]
        return (log_probs <= threshold) & (tokens.advantages < 0.0)

    def marked_loss(self, tokens: LossTokens, marked: Tensor, log_ratio: Tensor) -> Tensor:
        """β (q / π − 1 − log(q / π)) at the token y, 0 where y is noise, which estimates β KL(q ‖ π) by its gradient.

        q = sg(π / Z) of tokens with π ≥ κ max π; Z is the sum of their probabilities. Both are at the sampling
        temperature, by the policy of the update. The gradient is β (1 − 1 / Z) ∇log π(y).
        """

        def mass_and_least(logits: Tensor) -> Tensor:
            """Z and the smallest probability that is no noise, of rows of logits (B, V): (B, 2)."""
            probabilities = logits.softmax(dim=-1)
            least = self.kappa * probabilities.amax(dim=-1, keepdim=True)
            mass = torch.where(probabilities >= least, probabilities, 0.0).sum(dim=-1)
            return torch.stack([mass, least.squeeze(-1)], dim=-1)

        mass, least = tokens.by_blocks(tokens.rows[marked], mass_and_least).unbind(-1)
        log_probs = tokens.log_probs[marked]
        log_quotient = log_probs.detach() - mass.log() - log_probs
        kept = log_probs.detach().exp() >= least
        return self.beta * torch.where(kept, log_quotient.exp() - 1.0 - log_quotient, 0.0)
