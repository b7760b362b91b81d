# SPDX-License-Identifier: Apache-2.0
"""The contract of a credit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ngrpo.methods.credits import registry as _registry
from perturbations import row_blocks
from perturbations.options import Options

_BLOCK_ELEMENTS = 2**24  # logits that are looked at in one go: 64 MiB


@dataclass(frozen=True)
class StepTokens:
    """The N generated tokens of one training step, answer by answer. Nothing here has a gradient.

    Attributes:
        advantages: of each one's answer, (N,) float32.
        entropies: of the policy where each was drawn, in nats, at the sampling temperature and over the perturbed
            history, (N,) float32.
        log_probs: of the policy before the step's updates, (N,) float32: each token's, or the density of the action
            where a perturbation has one.
        answers: which answer each belongs to, (N,) int64, from 0 on and ascending.
        groups: which prompt that answers, (N,) int64, from 0 on.
    """

    advantages: Tensor
    entropies: Tensor
    log_probs: Tensor
    answers: Tensor
    groups: Tensor

    @property
    def first(self) -> Tensor:
        """Whether each is the first one of its answer, (N,) bool."""
        return torch.cat([torch.ones_like(self.answers[:1], dtype=torch.bool), self.answers.diff() > 0])


@dataclass(frozen=True)
class LossTokens:
    """The N generated tokens of one forward that is differentiated, answer by answer.

    Attributes:
        logits: z̃ of the whole forward, (…, V), divided by the sampling temperature, with gradient.
        rows: where each token was drawn from, (N,) int64, an index into the logits without their last dimension.
        tokens: the tokens themselves, (N,) int64.
        log_probs: log π of them by the policy of this update, (N,), with gradient.
        advantages: of each, (N,), without gradient.
        answers: which answer each belongs to, (N,) int64, from 0 on and ascending.
    """

    logits: Float[Tensor, "*forward vocabulary"]
    rows: Int64[Tensor, " tokens"]
    tokens: Int64[Tensor, " tokens"]
    log_probs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    answers: Int64[Tensor, " tokens"]

    def entropies(self) -> Tensor:
        """Of the policy where each was drawn, in nats: (N,) float32, without gradient."""
        return self._by_blocks(self.rows, row_blocks.entropy)

    def likeliest(self, which: Tensor, k: int) -> Tensor:
        """The k likeliest tokens where some were drawn, the likeliest first, without gradient.

        Args:
            which: indices of M tokens, (M,) int64.
            k: at most V.

        Returns:
            Ids, (M, k) int64.
        """
        return self._by_blocks(self.rows[which], lambda block: row_blocks.largest(block, k)[1])

    def log_probs_of(self, which: Tensor, ids: Tensor) -> Tensor:
        """log π of other tokens in place of some that were drawn, with gradient.

        Args:
            which: indices of M tokens, (M,) int64.
            ids: K tokens for each, (M, K) int64.

        Returns:
            (M, K): log π(y) + z̃ − z̃_y, which needs no sum over the vocabulary. In the backward the gradient of what is
            picked here is sparse, and is added to the one that the logits have anyway.
        """
        rows = self.rows[which]
        flat = ids.new_zeros(self.logits.shape[:-1].numel(), ids.shape[1] + 1)
        flat[rows] = torch.cat([ids, self.tokens[which].unsqueeze(1)], dim=1)
        index = flat.view(*self.logits.shape[:-1], -1)
        scores = self.logits.gather(-1, index, sparse_grad=True).flatten(0, -2)[rows]
        return self.log_probs[which].unsqueeze(1) + scores[:, :-1] - scores[:, -1:]

    def _by_blocks(self, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        flat = self.logits.detach().flatten(0, -2)
        size = max(1, _BLOCK_ELEMENTS // flat.shape[-1])
        # One block at least, so that none at all has the right shape too.
        return torch.cat([function(flat[part]) for part in rows.split(size)])


@dataclass(frozen=True, kw_only=True)
class Credit(Options, ABC):
    """A credit with its options. Subclasses are frozen dataclasses whose fields come from ``option``."""

    kind: ClassVar[str] = "credit"
    registry: ClassVar[Any] = _registry
    paper: ClassVar[str] = "none named"
    keeps_sums: ClassVar[bool] = False
    """Whether each token keeps its answer's advantage or has none, whatever the advantages of its group are."""

    @abstractmethod
    def formula(self, tokens: StepTokens) -> Tensor:
        """The advantages that the tokens of one training step are trained with, (N,)."""

    def in_loss(self, tokens: LossTokens) -> tuple[Tensor, Tensor] | None:
        """What depends on the policy of each update, and not of the one before the step alone.

        Returns:
            The advantages that the tokens have in the loss, (N,), without gradient, and what joins the policy's score:
            (N,), whose gradient is added to that of log π of each token, while ratio, clip and KL term keep the value
            and the gradient that they have. None where nothing does.
        """
        return None

    @property
    def acts_in_loss(self) -> bool:
        """Whether :meth:`in_loss` has anything to say."""
        return type(self).in_loss is not Credit.in_loss
