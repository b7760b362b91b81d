# SPDX-License-Identifier: Apache-2.0
"""Multiplex Thinking: several tokens drawn at once and fed as one (arXiv 2601.08808)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import InputEdit, Perturbation, Proposal, Step, UsageError, option, register
from perturbations.base import Replayed
from perturbations.replay.packing import MOST_CANDIDATES
from perturbations.top_tokens import check_top_k


@register("multiplex")
@dataclass(frozen=True, kw_only=True)
class Multiplex(Perturbation):
    """Draws k tokens, feeds their mixture, and writes the first of them into the text."""

    paper = "Multiplex Thinking, arXiv 2601.08808"
    samples_text = True

    k: int = option(3, "tokens drawn at each position", low=1)
    weights: str = option(
        "weighted",
        "a drawn token's weight: its probability times how often it was drawn, or how often alone",
        choices=("weighted", "average"),
    )
    draws: str = option(
        "independent",
        "each from the whole policy, or without replacement (MoT-G, arXiv 2509.21482)",
        choices=("independent", "distinct"),
    )
    density: str = option(
        "token",
        "what the loss weighs: the first draw's probability, or that of all k draws",
        choices=("token", "joint"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draws == "distinct" and self.density == "joint":
            raise UsageError(
                "perturbation option density='joint': cannot be used with draws='distinct', whose probability is"
                " another than the product of the draws'. Take density token, or draws independent."
            )

    def propose(self, step: Step) -> Proposal:
        """w_j = p(k_j) / Σ_i p(k_i) over the k draws, or 1 / k; a token drawn twice stands there twice.

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
        mixture = torch.softmax(scores, dim=-1)
        return Proposal(InputEdit(ids, mixture), step.sampled)

    def log_density(self, replayed: Replayed) -> Tensor:
        """Σ_j log π(k_j), repeats counted.

        All draws share the normaliser of the first, which is the token in the text: so they are among the tokens that
        sampling left wherever that one's log-probability is (``--sampling.correct_mask``).
        """
        scores = replayed.at(replayed.edit.ids)
        return scores.sum(dim=-1) + self.k * (replayed.token_log_probs - scores[:, 0])

    def check_model(self, vocabulary: int) -> None:
        """k may exceed the vocabulary, since a token may be drawn again; but not what a record holds."""
        check_top_k(self.k, max(vocabulary, MOST_CANDIDATES))
