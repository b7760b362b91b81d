# SPDX-License-Identifier: Apache-2.0
"""Perturbations of the tokens drawn: none, CUTS (one, uniformly), Multiplex Thinking (several at once)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import InputEdit, Perturbation, Proposal, Step, UsageError, option, register
from perturbations.base import Replayed, density_option
from perturbations.edit import one_hot
from perturbations.replay.packing import MOST_CANDIDATES
from perturbations.top_tokens import LikeliestTokens, check_top_k, winners


@register("none")
@dataclass(frozen=True, kw_only=True)
class NoPerturbation(Perturbation):
    """Feeds every token as it is. Nothing is installed in vLLM or OpenRLHF."""

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
        scale = step.temperature.unsqueeze(-1)
        values, ids = step.top(self.k)
        confident = (values * scale - step.log_total(scale).unsqueeze(-1)).exp() >= self.delta
        confident |= ~confident.any(dim=-1, keepdim=True)
        if step.drawable is not None:
            confident &= step.drawable.gather(-1, ids) > -torch.inf
        # A draw of each token's own: the largest is any of the candidates with the same probability.
        races = torch.where(confident, step.uniform(ids), -1.0)
        token = torch.where(confident.any(dim=-1), winners(ids, races), step.sampled)
        return Proposal(one_hot(token), token)


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
            why = "cannot be used with draws='distinct': its probability is no product"
            fix = "Take density='token' or draws='independent'"
            raise UsageError(f"perturbation option density='joint': {why}. {fix}.")

    def propose(self, step: Step) -> Proposal:
        """w_j = p(k_j) / Σ_i p(k_i) over the k draws, or 1 / k; a token drawn twice is two candidates.

        p is the probability before top-k, top-p and min-p, within which all k are drawn. Distinct draws are fewer
        where fewer tokens are left.
        """
        ids, distinct = step.sampled.unsqueeze(-1), self.draws == "distinct"
        if self.k > 1:
            ids = torch.cat([ids, step.draws(self.k - 1, distinct=distinct)], dim=-1)
        scores = step.logits.gather(-1, ids)
        if self.weights == "average":
            scores = torch.zeros_like(scores)
        if distinct:
            again = torch.cat([torch.zeros_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] == ids[:, :1]], dim=-1)
            scores = scores.masked_fill(again, -torch.inf)
        return Proposal(InputEdit(ids, torch.softmax(scores, dim=-1)), step.sampled)

    def log_density(self, replayed: Replayed) -> Tensor:
        """Σ_j log π(k_j), repeats counted.

        All draws share the normaliser of the first, the token in the text: they are among the tokens that sampling left
        wherever that log-probability is (``--sampling.correct_mask``).
        """
        scores = replayed.at(replayed.edit.ids)
        return scores.sum(dim=-1) + self.k * (replayed.token_log_probs - scores[:, 0])

    def check_model(self, vocabulary: int) -> None:
        # A token may be drawn again, so k may exceed the vocabulary.
        check_top_k(self.k, max(vocabulary, MOST_CANDIDATES))
