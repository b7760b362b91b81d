"""Gumbel soft-thinking: the rollout of SofT-GRPO (Zheng and Lee, arXiv 2511.06411)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perturbations.base import Perturbation, Proposal, Step
from perturbations.edit import InputEdit
from perturbations.options import option
from perturbations.registry import register
from perturbations.strategies.soft import check_top_k, truncated

_NOISE_RANGE = (-1.5, 3.0)
_LOG_FLOOR = 1e-6


@register("gumbel")
@dataclass(frozen=True, kw_only=True)
class Gumbel(Perturbation):
    """Adds Gumbel noise to the log-probabilities of the top-k tokens and feeds their softmax mixture."""

    paper = "SofT-GRPO, arXiv 2511.06411"

    k: int = option(5, "number of tokens mixed at most", low=1)
    top_p: float = option(0.95, "keep the most likely tokens that hold this probability", above=0.0, high=1.0)
    tau: float = option(0.1, "temperature of the Gumbel-softmax, τ_g", above=0.0)
    clamp: bool = option(True, "clamp the noise to [-1.5, 3], as the paper does")

    def propose(self, step: Step) -> Proposal:
        """y_i = log(p_i + 1e-6) + g_i; weights = softmax(y / τ_g); the text takes the largest weight."""
        ids, probabilities = truncated(step.logits, self.k, self.top_p)
        noise = step.gumbel(ids)
        if self.clamp:
            noise = noise.clamp(*_NOISE_RANGE)
        kept = probabilities > 0.0
        scores = torch.where(kept, (probabilities + _LOG_FLOOR).log() + noise, -torch.inf)
        weights = torch.softmax(scores / self.tau, dim=-1)
        tokens = ids.gather(-1, scores.argmax(dim=-1, keepdim=True)).squeeze(-1)
        return Proposal(InputEdit(ids, weights), tokens)

    @property
    def candidates(self) -> int:
        """k."""
        return self.k

    def check_model(self, vocabulary: int) -> None:
        """k cannot exceed the vocabulary."""
        check_top_k(self.k, vocabulary)
