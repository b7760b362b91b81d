# SPDX-License-Identifier: Apache-2.0
"""The likeliest tokens: what most perturbations mix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import Perturbation, Step, UsageError, option
from perturbations.replay.packing import MOST_CANDIDATES


def truncated(step: Step, k: int, top_p: float, top_p_of: str = "top_k") -> tuple[Tensor, Tensor]:
    """The k most likely tokens after top-p, and probabilities that sum to 1: (B, k) each, most likely first.

    ``top_p_of``: the share is of the ``top_k``'s probability, or of the ``vocabulary``'s. The first id, with
    probability 0, replaces a token cut by top-p.
    """
    values, ids = step.top(k)
    if top_p_of == "top_k":
        probabilities = torch.softmax(values, dim=-1)
    else:
        probabilities = (values - step.log_total().unsqueeze(-1)).exp()
    if top_p < 1.0:
        nucleus = within_top_p(probabilities, top_p)
        probabilities, ids = torch.where(nucleus, probabilities, 0.0), torch.where(nucleus, ids, ids[:, :1])
    return ids, probabilities / probabilities.sum(dim=-1, keepdim=True)


def winners(ids: Tensor, scores: Tensor) -> Tensor:
    """The token of each row's largest score: (B, k) each to (B,)."""
    return ids.gather(-1, scores.argmax(dim=-1, keepdim=True)).squeeze(-1)


def within_top_p(probabilities: Tensor, top_p: float) -> Tensor:
    """Which tokens, most likely first, are in the smallest set that holds ``top_p``, (B, n) bool; all of them at 1."""
    # At 1 nothing is cut, though a float32 sum may reach 1 before the last token.
    held = probabilities.cumsum(dim=-1) < (top_p if top_p < 1.0 else torch.inf)
    # Counted rather than shifted by one: a shift would keep a GPU from doing it all in one kernel.
    places = torch.arange(probabilities.shape[-1], device=probabilities.device)
    return places <= held.sum(dim=-1, keepdim=True)


def check_top_k(k: int, vocabulary: int, low: int = 1) -> None:
    """Raises ``UsageError`` where option ``k`` exceeds the vocabulary or a record's candidates, the token included."""
    most = min(vocabulary, MOST_CANDIDATES - 1)
    if k > most:
        limit = f"since a record holds at most {MOST_CANDIDATES} candidates of a position. Mix fewer tokens"
        why = limit if most < vocabulary else "the model's vocabulary"
        raise UsageError(f"perturbation option k={k}: must be in [{low}, {most}], {why}.")


@dataclass(frozen=True, kw_only=True)
class LikeliestTokens(Perturbation):
    """Base of the perturbations that mix the k most likely tokens."""

    k: int = option(5, "number of tokens mixed at most", low=1)

    @property
    def zero_mean_score(self) -> bool:
        # Without a density the loss weighs the text's token, which may be the likeliest, or drawn from the k alone.
        return self.has_density or self.samples_text

    def check_model(self, vocabulary: int) -> None:
        check_top_k(self.k, vocabulary, type(self).__dataclass_fields__["k"].metadata["low"])


@dataclass(frozen=True, kw_only=True)
class TopTokens(LikeliestTokens):
    """Base of the perturbations that mix the k most likely tokens after top-p."""

    top_p: float = option(0.95, "keep the most likely tokens that hold this share", above=0.0, high=1.0)
    top_p_of: str = option(
        "top_k",
        "the share is of the k likeliest tokens' probability, as the releases cut, or of the whole vocabulary's",
        choices=("top_k", "vocabulary"),
    )

    def top(self, step: Step) -> tuple[Tensor, Tensor]:
        """Ids and probabilities of :func:`truncated`."""
        return truncated(step, self.k, self.top_p, self.top_p_of)
