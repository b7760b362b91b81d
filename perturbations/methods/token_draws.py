# SPDX-License-Identifier: Apache-2.0
"""Perturbations of the tokens drawn: none, CUTS (one, uniformly), Multiplex Thinking (several at once)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import InputEdit, Perturbation, Proposal, Step, UsageError, option, register, row_blocks
from perturbations.base import Replayed, density_option
from perturbations.edit import one_hot
from perturbations.replay.packing import MOST_CANDIDATES
from perturbations.top_tokens import LikeliestTokens, check_top_k, winners


@register("none")
@dataclass(frozen=True, kw_only=True)
class NoPerturbation(Perturbation):
    """Feeds every token as it is: the unperturbed baseline."""

    paper = "the unperturbed baseline"
    samples_text = True

    rate: float = option(0.0, "always 0: nothing is perturbed", low=0.0, high=0.0)

    def propose(self, step: Step) -> Proposal:
        """The sampled tokens, unchanged."""
        return Proposal(one_hot(step.sampled), step.sampled)


@register("cuts")
@dataclass(frozen=True, kw_only=True)
class CUTS(LikeliestTokens):
    """Draws uniformly among the k likeliest tokens with enough probability; the token drawn is fed and written."""

    paper = "CUTS, arXiv 2604.18493"

    k: int = option(5, "K, number of likely tokens", low=1)
    delta: float = option(0.03, "δ, the least probability of a candidate at temperature 1", low=0.0, high=1.0)
    burn_in: int = option(5, "T_warm, first tokens of a response that are drawn as usual", low=0)

    def propose(self, step: Step) -> Proposal:
        """Uniform over S = {v among the k likeliest: p(v) ≥ δ}, over all k where S is empty.

        What the request's top-k, top-p and min-p exclude is not drawn.
        """
        scale = step.temperature.unsqueeze(-1)  # z̃ times the temperature is z
        values, ids = step.top(self.k)  # (B, k) each
        is_candidate = self._are_candidates(values * scale, step.log_total(scale))
        if step.drawable is not None:
            is_candidate &= step.drawable.gather(-1, ids) > -torch.inf
        # The largest of the candidates' uniform draws, one for each token, is any of them with the same probability.
        draws = torch.where(is_candidate, step.uniform(ids), -1.0)
        token = torch.where(is_candidate.any(dim=-1), winners(ids, draws), step.sampled)
        return Proposal(one_hot(token), token)

    def text_probabilities(self, logits: Tensor, temperature: float, left: Tensor) -> Tensor:
        """1 / |S| at the candidates S of :meth:`propose`; the filtered policy where the filters left none of them."""
        values, ids = row_blocks.largest(logits, self.k)  # (N, k) each
        is_candidate = self._are_candidates(values * temperature, row_blocks.log_total(logits * temperature))
        is_candidate &= left.gather(-1, ids)
        count = is_candidate.sum(dim=-1, keepdim=True)  # (N, 1)
        uniform = torch.zeros_like(logits).scatter(-1, ids, is_candidate.to(logits) / count.clamp_min(1))
        filtered_policy = logits.masked_fill(~left, -torch.inf).softmax(dim=-1)
        return torch.where(count > 0, uniform, filtered_policy)

    def _are_candidates(self, scores: Tensor, log_total: Tensor) -> Tensor:
        """Which of the k likeliest tokens have p ≥ δ, or all possible ones where none has, (N, k) bool.

        ``scores``: their z, (N, k). ``log_total``: log Σ exp z over the vocabulary, (N,).
        """
        probabilities = (scores - log_total.unsqueeze(-1)).exp()
        is_candidate = probabilities >= self.delta
        is_possible = scores > -torch.inf  # a grammar may leave fewer than k tokens
        return (is_candidate | ~is_candidate.any(dim=-1, keepdim=True)) & is_possible


@register("multiplex")
@dataclass(frozen=True, kw_only=True)
class Multiplex(Perturbation):
    """Draws k tokens, feeds their mixture, and writes the first of them into the text."""

    paper = "Multiplex Thinking, arXiv 2601.08808"
    samples_text = True

    k: int = option(3, "tokens drawn at each position", low=1)
    weights: str = option("weighted", "a draw's weight: its probability, or equal", choices=("weighted", "average"))
    draws: str = option("independent", "distinct: without replacement (MoT-G)", choices=("independent", "distinct"))
    density: str = density_option("or that of all k draws", "joint")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draws == "distinct" and self.density == "joint":
            raise UsageError(
                "perturbation option density='joint': cannot be used with draws='distinct': its probability is no"
                " product. Take density='token' or draws='independent'."
            )

    def propose(self, step: Step) -> Proposal:
        """w_j = p(k_j) / Σ_i p(k_i) over the k draws, or 1 / k; a token drawn twice is two candidates.

        p is the probability before top-k, top-p and min-p, within which all k are drawn. Distinct draws are fewer
        where fewer tokens are left.
        """
        distinct = self.draws == "distinct"
        ids = step.sampled.unsqueeze(-1)  # (B, 1)
        if self.k > 1:
            further_draws = step.draws(self.k - 1, distinct=distinct)  # (B, k − 1)
            ids = torch.cat([ids, further_draws], dim=-1)
        scores = step.logits.gather(-1, ids)  # (B, k)
        if self.weights == "average":
            scores = torch.zeros_like(scores)
        if distinct:
            # Where no other token was left to draw, draws() repeats the sampled one.
            first_column = torch.zeros_like(ids[:, :1], dtype=torch.bool)
            is_repeated = torch.cat([first_column, ids[:, 1:] == ids[:, :1]], dim=-1)
            scores = scores.masked_fill(is_repeated, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        return Proposal(InputEdit(ids, weights), step.sampled)

    def log_density(self, replayed: Replayed) -> Tensor:
        """Σ_j log π(k_j), repeats counted.

        All draws have the normaliser of the first one, the token in the text: with ``--sampling.correct_mask`` its
        log-probability is among the tokens that sampling left, and so are those of the other draws.
        """
        scores = replayed.at(replayed.edit.ids)  # z̃, (N, k)
        minus_log_total = replayed.token_log_probs - scores[:, 0]  # (N,)
        return scores.sum(dim=-1) + self.k * minus_log_total

    def check_model(self, vocabulary: int) -> None:
        # A token may be drawn again, so k may exceed the vocabulary.
        check_top_k(self.k, max(vocabulary, MOST_CANDIDATES))
