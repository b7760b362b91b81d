"""Soft Thinking: the deterministic mixture of the most likely tokens (arXiv 2505.15778)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perturbations.base import Perturbation, Proposal, Step
from perturbations.edit import InputEdit
from perturbations.errors import UsageError
from perturbations.options import option
from perturbations.registry import register


def truncated(logits: torch.Tensor, k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely tokens after top-p, with their probabilities renormalised.

    Args:
        logits: (B, V) float32, temperature-scaled.
        k: how many at most.
        top_p: keep the smallest set of most likely tokens that holds this probability.

    Returns:
        ids (B, k), most likely first, and probabilities (B, k) that sum to 1. In the place of a token cut by top-p
        the first one stands again, with probability 0.
    """
    values, ids = logits.topk(k, dim=-1)
    probabilities = (values - torch.logsumexp(logits, dim=-1, keepdim=True)).exp()
    if top_p < 1.0:  # at 1 nothing is cut, though a float32 sum may reach 1 before the last token
        before = probabilities.cumsum(dim=-1) - probabilities
        kept = before < top_p
        probabilities, ids = torch.where(kept, probabilities, 0.0), torch.where(kept, ids, ids[:, :1])
    return ids, probabilities / probabilities.sum(dim=-1, keepdim=True)


@register("soft")
@dataclass(frozen=True, kw_only=True)
class Soft(Perturbation):
    """Feeds the probability-weighted mixture of the top-k tokens; no randomness of its own."""

    paper = "Soft Thinking, arXiv 2505.15778"

    k: int = option(5, "number of tokens mixed at most", low=1)
    top_p: float = option(1.0, "keep the most likely tokens that hold this probability", above=0.0, high=1.0)

    def propose(self, step: Step) -> Proposal:
        """Weights are the renormalised probabilities; the text keeps the sampled token."""
        ids, probabilities = truncated(step.logits, self.k, self.top_p)
        return Proposal(InputEdit(ids, probabilities), step.sampled)

    @property
    def candidates(self) -> int:
        """k."""
        return self.k

    def check_model(self, vocabulary: int) -> None:
        """k cannot exceed the vocabulary."""
        check_top_k(self.k, vocabulary)


def check_top_k(k: int, vocabulary: int) -> None:
    """Raises ``UsageError`` where more tokens are asked for than there are."""
    if k > vocabulary:
        raise UsageError(
            f"perturbation option k={k}: must be in [1, {vocabulary}], the model's vocabulary; the paper uses 5."
        )
