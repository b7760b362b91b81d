# SPDX-License-Identifier: Apache-2.0
"""The likeliest tokens: what most perturbations mix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import Perturbation, Step, UsageError, option
from perturbations.replay.packing import MOST_CANDIDATES

_UNITS = 2**40  # of probability, in a sum of integers


def truncated(step: Step, k: int, top_p: float, top_p_of: str = "top_k") -> tuple[Tensor, Tensor]:
    """The k most likely tokens after top-p, and probabilities that sum to 1: (B, k) each, most likely first.

    ``top_p_of``: whether top-p is a share of the ``top_k`` tokens' probability, or of the ``vocabulary``'s. In place of
    a token that top-p cuts, or that is not possible (its logit is -inf), the row repeats its first id with probability
    0.
    """
    values, ids = step.top(k)
    if top_p_of == "top_k":
        probabilities = torch.softmax(values, dim=-1)
    else:
        probabilities = (values - step.log_total().unsqueeze(-1)).exp()
    if top_p < 1.0:
        nucleus = within_top_p(probabilities, top_p)
        probabilities = torch.where(nucleus, probabilities, 0.0)
    ids = torch.where(probabilities > 0.0, ids, ids[:, :1])
    return ids, probabilities / probabilities.sum(dim=-1, keepdim=True)


def winners(ids: Tensor, scores: Tensor) -> Tensor:
    """The token of each row's largest score: (B, k) each to (B,)."""
    best = scores.argmax(dim=-1, keepdim=True)  # (B, 1)
    return ids.gather(-1, best).squeeze(-1)


def within_top_p(probabilities: Tensor, top_p: float) -> Tensor:
    """Which tokens, most likely first, are in the smallest set that holds ``top_p``, (B, n) bool; all of them at 1."""
    # At top_p = 1 nothing is cut, although a sum of rounded probabilities may reach 1 before the last token.
    limit = int(top_p * _UNITS) if top_p < 1.0 else 2 * _UNITS
    # Integers have the same sum in every order, so engine and trainer keep the same tokens on every device. PyTorch
    # refuses to cumulate floats on CUDA in its deterministic mode, which --train.full_determinism_enable sets.
    sum_is_below = (probabilities * _UNITS).long().cumsum(dim=-1) < limit
    # The set also holds the token that reaches the limit. The tokens before it are counted instead of shifting the mask
    # by one place, because the compiler fuses a count into one kernel and not a shift.
    places = torch.arange(probabilities.shape[-1], device=probabilities.device)
    return places <= sum_is_below.sum(dim=-1, keepdim=True)


def check_top_k(k: int, vocabulary: int, low: int = 1) -> None:
    """Raises ``UsageError`` where option ``k`` exceeds the vocabulary, or a record has no room for so many candidates.

    ``low``: the smallest k that the option allows, for the message.
    """
    most = min(vocabulary, MOST_CANDIDATES - 1)  # the sampled token may be a further candidate
    if k <= most:
        return
    reason = "the model's vocabulary"
    if most < vocabulary:
        reason = f"since a record holds at most {MOST_CANDIDATES} candidates of a position. Mix fewer tokens"
    raise UsageError(f"perturbation option k={k}: must be in [{low}, {most}], {reason}.")


@dataclass(frozen=True, kw_only=True)
class LikeliestTokens(Perturbation):
    """Base of the perturbations that mix the k most likely tokens."""

    k: int = option(5, "number of tokens mixed at most", low=1)

    @property
    def zero_mean_score(self) -> bool:
        # Without a density the loss weighs the text's token. If that is not the sampled one, it may be the likeliest
        # token or drawn among the k, so its score log π has a mean other than 0.
        return self.has_density or self.samples_text

    def check_model(self, vocabulary: int) -> None:
        lowest = type(self).__dataclass_fields__["k"].metadata["low"]
        check_top_k(self.k, vocabulary, lowest)


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
