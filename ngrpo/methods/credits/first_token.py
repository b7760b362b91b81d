# SPDX-License-Identifier: Apache-2.0
"""Latent-GRPO's rule for first tokens: only the best answer of a group trains its first one (arXiv 2604.27998)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.methods.credits import register
from ngrpo.methods.credits.base import Credit, StepTokens
from perturbations import option


@register("first_token")
@dataclass(frozen=True, kw_only=True)
class FirstToken(Credit):
    """Of a prompt's answers with A > 0, the one with the highest mean log-probability alone trains its first token."""

    paper = "Latent-GRPO, arXiv 2604.27998"

    wrong: str = option("zero", "what answers with A ≤ 0 get there: nothing, or A", choices=("zero", "keep"))

    def formula(self, tokens: StepTokens) -> Tensor:
        """A, but 0 at the first tokens of all other answers of a group in which any has A > 0."""
        if not len(tokens.answers):
            return tokens.advantages
        first, answer = tokens.first.nonzero().flatten(), tokens.first.cumsum(0) - 1
        mean = tokens.log_probs.new_zeros(len(first)).index_add(0, answer, tokens.log_probs) / torch.bincount(answer)
        advantages, number = tokens.advantages[first], torch.arange(len(first)).to(first)
        groups = tokens.groups[first].unique(return_inverse=True)[1]  # without those that have no token
        positive = advantages > 0.0
        highest = mean.new_full((len(first),), -torch.inf)
        highest = highest.scatter_reduce(0, groups, torch.where(positive, mean, -torch.inf), "amax")
        winning = positive & (mean == highest[groups])
        # Of equal ones the first; no answer where a group has none with A > 0.
        winner = torch.full_like(number, len(first))
        winner = winner.scatter_reduce(0, groups, torch.where(winning, number, len(first)), "amin")[groups]
        silent = (winner < len(first)) & (winner != number)
        if self.wrong == "keep":
            silent = silent & positive
        return tokens.advantages.index_copy(0, first, advantages.masked_fill(silent, 0.0))
