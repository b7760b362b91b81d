# SPDX-License-Identifier: Apache-2.0
"""Credit by entropy (`entropy_bonus`, `top_entropy`), for first tokens (`first_token`), for likely and unlikely tokens.

`simko` shares credit with the likeliest tokens. `lp_reg` keeps unlikely tokens of wrong responses, but not noise.
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
        limit = tokens.advantages.abs() / self.kappa
        bonus = torch.minimum(self.alpha * tokens.entropies, limit)
        return tokens.advantages + bonus


@register("top_entropy")
@dataclass(frozen=True, kw_only=True)
class TopEntropy(Credit):
    """80/20: tokens outside the top fraction by entropy, over the whole step, get no advantage."""

    paper = "Beyond the 80/20 Rule, arXiv 2506.01939"
    keeps_sums = True

    fraction: float = option(0.2, "ρ, the share of tokens that keep their advantage", above=0.0, high=1.0)

    def formula(self, tokens: StepTokens) -> Tensor:
        """A · 1[H ≥ τ_ρ], τ_ρ the smallest entropy among the top ⌈ρ N⌉ tokens of the step."""
        entropies = tokens.entropies
        if not len(entropies):
            return tokens.advantages
        kept_count = math.ceil(self.fraction * len(entropies))
        threshold = entropies.topk(kept_count).values[-1]
        return torch.where(entropies >= threshold, tokens.advantages, 0.0)


@register("first_token")
@dataclass(frozen=True, kw_only=True)
class FirstToken(Credit):
    """Of a prompt's responses with A > 0, only the one with the highest mean log-probability trains its first token."""

    paper = "Latent-GRPO, arXiv 2604.27998"

    wrong: str = option("zero", "what responses with A ≤ 0 get there: nothing, or A", choices=("zero", "keep"))

    def formula(self, tokens: StepTokens) -> Tensor:
        """A, but 0 at some first tokens.

        In a group with responses of A > 0 the likeliest of these, by the mean log-probability of its tokens, keeps A
        at its first token. The first tokens of the group's other responses get 0; with ``wrong=keep`` only those of
        responses with A > 0.
        """
        if not len(tokens.responses):
            return tokens.advantages
        # R responses have a token. What follows is (R,), by response.
        first_tokens = tokens.first.nonzero().flatten()
        count = len(first_tokens)
        numbers = torch.arange(count).to(first_tokens)
        advantages = tokens.advantages[first_tokens]
        is_positive = advantages > 0.0
        _, groups = tokens.groups[first_tokens].unique(return_inverse=True)  # numbered without gaps

        response_of_token = tokens.first.cumsum(0) - 1  # (N,)
        sums = tokens.log_probs.new_zeros(count).index_add(0, response_of_token, tokens.log_probs)
        means = sums / torch.bincount(response_of_token)

        # The highest mean of each group among the responses with A > 0, and the first response that has it; its number
        # is R where a group has no response with A > 0.
        highest = means.new_full((count,), -torch.inf)
        highest = highest.scatter_reduce(0, groups, torch.where(is_positive, means, -torch.inf), "amax")
        is_highest = is_positive & (means == highest[groups])
        winners = torch.full_like(numbers, count)
        winners = winners.scatter_reduce(0, groups, torch.where(is_highest, numbers, count), "amin")
        winner_of_group = winners[groups]

        is_silenced = (winner_of_group < count) & (winner_of_group != numbers)
        if self.wrong == "keep":
            is_silenced = is_silenced & is_positive
        return tokens.advantages.index_copy(0, first_tokens, advantages.masked_fill(is_silenced, 0.0))


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
        """A, unchanged: the credit depends on the policy of each update (:meth:`in_loss`)."""
        return tokens.advantages

    def in_loss(self, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        """The gradient of γ̃ A, γ = π(y) / π_old(y), at tokens with H > τ.

        A > 0: γ̃ = (1 − α) γ + (α / K) Σ_k sg(γ / γ_k) γ_k over the K likeliest tokens, where sg stops gradients: its
        value is γ, its gradient γ ((1 − α) ∇log π(y) + (α / K) Σ_k ∇log π(k)). A < 0 and y the likeliest: γ̃ = λ γ.
        """
        entropies = tokens.entropies()
        is_uncertain = entropies > quantiles(entropies, tokens.responses, self.quantile)  # H > τ

        right = (is_uncertain & (tokens.advantages > 0.0)).nonzero().flatten()
        log_probs_of_likeliest = tokens.log_probs_of(right, tokens.likeliest(right, self.k))  # (M, K)
        shared = self.alpha * (log_probs_of_likeliest.mean(dim=1) - tokens.log_probs[right])
        term = torch.zeros_like(tokens.log_probs).index_copy(0, right, shared)

        wrong = (is_uncertain & (tokens.advantages < 0.0)).nonzero().flatten()
        is_likeliest = tokens.likeliest(wrong, 1).squeeze(1) == tokens.tokens[wrong]
        factor = torch.where(is_likeliest, self.penalty, 1.0).to(tokens.advantages)
        penalised = tokens.advantages[wrong] * factor
        return tokens.advantages.index_copy(0, wrong, penalised), term


def quantiles(values: Tensor, responses: Tensor, q: float) -> Tensor:
    """The q-quantile of each response's values, by linear interpolation, at each of the response's tokens, (N,).

    ``responses``: the number of each value's response, (N,), ascending from 0.
    """
    if not len(responses):
        return values
    quantile_of_tokens = []
    for values_of_response in values.split(torch.bincount(responses).tolist()):
        if len(values_of_response):
            quantile = torch.quantile(values_of_response, q)
            quantile_of_tokens.append(quantile.expand(len(values_of_response)))
    return torch.cat(quantile_of_tokens)


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
        unlikely_count = math.ceil(self.share * len(log_probs))
        threshold = log_probs.topk(unlikely_count, largest=False).values[-1]  # log δ
        return (log_probs <= threshold) & (tokens.advantages < 0.0)

    def marked_loss(self, tokens: LossTokens, marked: Tensor, log_ratio: Tensor) -> Tensor:
        """β (q / π − 1 − log(q / π)) at the token y, and 0 where y is noise. Only its gradient counts.

        q = sg(π / Z) of tokens with π ≥ κ max π; Z is the sum of their probabilities. Both are at the sampling
        temperature, by the policy of the update. The gradient is β (1 − 1 / Z) ∇log π(y). With β ∇log π(y) at noise it
        would be that of β KL(q ‖ π) on average over y.
        """

        def mass_and_threshold(logits: Tensor) -> Tensor:
            """Z and κ max π of rows of logits (B, V): (B, 2)."""
            probabilities = logits.softmax(dim=-1)
            threshold = self.kappa * probabilities.amax(dim=-1, keepdim=True)
            mass = torch.where(probabilities >= threshold, probabilities, 0.0).sum(dim=-1)
            return torch.stack([mass, threshold.squeeze(-1)], dim=-1)

        mass, threshold = tokens.by_blocks(tokens.rows[marked], mass_and_threshold).unbind(-1)  # (M,) each
        log_probs = tokens.log_probs[marked]
        log_quotient = log_probs.detach() - mass.log() - log_probs  # log(q / π)
        is_kept = log_probs.detach().exp() >= threshold
        divergence = log_quotient.exp() - 1.0 - log_quotient
        return self.beta * torch.where(is_kept, divergence, 0.0)
