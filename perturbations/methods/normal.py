# SPDX-License-Identifier: Apache-2.0
"""Normal noise on the top-k probabilities, the third noise of SofT-GRPO's release (arXiv 2511.06411)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import InputEdit, Proposal, Step, option, register
from perturbations import density as densities
from perturbations.base import Replayed, input_gradient_option
from perturbations.top_tokens import TopTokens


@register("normal")
@dataclass(frozen=True, kw_only=True)
class Normal(TopTokens):
    """Feeds the top-k tokens mixed with their probabilities plus normal noise, renormalised.

    A weight may be negative, as in the release: p_i = 0.01 with noise of 0.05 often is.
    """

    paper = "SofT-GRPO (release), arXiv 2511.06411"
    mixture = "affine"
    draws_text = True

    # More than ten noises of 0.05 may bring their sum, by which the weights are divided, near 0.
    k: int = option(5, "number of tokens mixed at most", low=1, high=10)
    density: str = option(
        "token",
        "what the loss weighs: the token's probability, or the normal density of the draws",
        choices=("token", "normal"),
    )
    input_gradient: str = input_gradient_option("none")

    @property
    def zero_mean_score(self) -> bool:
        """Not of the token, which is drawn from the top-k alone."""
        return self.has_density

    def propose(self, step: Step) -> Proposal:
        """y_i ~ N(p_i, 0.05²); weights = y / Σy; the text takes the largest weight."""
        ids, probabilities = self.top(step)
        draws = probabilities + densities.NORMAL_SIGMA * step.normal(ids)
        draws = torch.where(probabilities > 0.0, draws, 0.0)
        tokens = ids.gather(-1, draws.argmax(dim=-1, keepdim=True)).squeeze(-1)
        return Proposal(InputEdit(ids, draws / draws.sum(dim=-1, keepdim=True)), tokens)

    def log_density(self, replayed: Replayed) -> Tensor:
        """Mean over ids with p_i(θ) > 0.05 of log N(y_i; p_i(θ), 0.05²), y_i clamped to p_i(θ) ± 0.15.

        At the policy that drew y: y_i − p_i is the noise as it was drawn, and not a difference of what rollout and
        trainer computed, whose p differ by a seventh of 0.05 where their logits differ by 0.03.
        """
        edit = replayed.edit
        support = densities.distinct(edit.ids) & (edit.weights != 0.0)
        probabilities = densities.renormalised(replayed.at(edit.ids), support)
        draws = probabilities.detach() + densities.NORMAL_SIGMA * replayed.normal(edit.ids)
        return densities.normal(draws, probabilities, support)

    @property
    def score_only(self) -> bool:
        """For its narrow noise."""
        return self.has_density
