# SPDX-License-Identifier: Apache-2.0
"""The contract of a credit."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods.credits import registry as _registry
from perturbations import row_blocks
from perturbations.errors import UsageError
from perturbations.options import Options

_BLOCK_ELEMENTS = 2**24  # logits that are looked at in one go: 64 MiB


@dataclass(frozen=True)
class StepTokens:
    """The N generated tokens of one training step, response by response; (N,) float32 or int64, without gradient.

    ``advantages``: of each token's response. ``entropies``: of the policy where it was drawn, in nats, at the sampling
    temperature and the perturbed history. ``log_probs``: of the policy before the step's updates, of the token or the
    perturbation's density. ``answers``: its response, ascending from 0; ``groups``: its prompt, from 0. ``seeds``: its
    response's, from the run's seed and the step, for :func:`perturbations.streams.keys`.
    """

    advantages: Tensor
    entropies: Tensor
    log_probs: Tensor
    answers: Tensor
    groups: Tensor
    seeds: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @property
    def first(self) -> Tensor:
        """Whether each is the first one of its response, (N,) bool."""
        return torch.cat([torch.ones_like(self.answers[:1], dtype=torch.bool), self.answers.diff() > 0])

    @property
    def positions(self) -> Tensor:
        """The place of each in its response, from 0, (N,) int64."""
        place = torch.arange(len(self.answers), device=self.answers.device)
        return place - torch.where(self.first, place, 0).cummax(0).values


@dataclass(frozen=True)
class LossTokens:
    """The N generated tokens of one forward that is differentiated, response by response.

    ``logits`` are z̃, divided by the sampling temperature; ``rows`` the tokens' rows of them, flattened; ``log_probs``
    of the policy of this update. Only these two have a gradient. ``answers``: each token's response, ascending from 0.
    """

    logits: Float[Tensor, "*forward vocabulary"]
    rows: Int64[Tensor, " tokens"]
    tokens: Int64[Tensor, " tokens"]
    log_probs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    answers: Int64[Tensor, " tokens"]

    def entropies(self) -> Tensor:
        """As of :class:`StepTokens`, (N,) float32."""
        return self.by_blocks(self.rows, row_blocks.entropy)

    def likeliest(self, which: Tensor, k: int) -> Tensor:
        """The k likeliest tokens, best first, where the tokens ``which`` (M,) were drawn: ids (M, k)."""
        return self.by_blocks(self.rows[which], lambda block: row_blocks.largest(block, k)[1])

    def log_probs_of(self, which: Tensor, ids: Tensor) -> Tensor:
        """log π of other tokens ``ids`` (M, K) where the tokens ``which`` (M,) were drawn: (M, K), with gradient.

        log π(y) + z̃ − z̃_y needs no sum over the vocabulary, and its gradient to the logits is sparse.
        """
        rows = self.rows[which]
        flat = ids.new_zeros(self.logits.shape[:-1].numel(), ids.shape[1] + 1)
        flat[rows] = torch.cat([ids, self.tokens[which].unsqueeze(1)], dim=1)
        index = flat.view(*self.logits.shape[:-1], -1)
        scores = self.logits.gather(-1, index, sparse_grad=True).flatten(0, -2)[rows]
        return self.log_probs[which].unsqueeze(1) + scores[:, :-1] - scores[:, -1:]

    def by_blocks(self, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function from logits (B, V), without gradient, to (B, …), of some rows at a time, for ``rows`` (M,)."""
        flat = self.logits.detach().flatten(0, -2)
        size = max(1, _BLOCK_ELEMENTS // flat.shape[-1])
        # One block at least, so that none at all has the right shape too.
        return torch.cat([function(flat[part]) for part in rows.split(size)])


@dataclass(frozen=True, kw_only=True)
class Credit(Options, ABC):
    """A credit with its options. Subclasses are frozen dataclasses with fields from ``option``."""

    kind: ClassVar[str] = "credit"
    registry: ClassVar[Any] = _registry
    paper: ClassVar[str] = "none named"
    # Whether each token keeps its response's advantage or gets 0, whatever the advantages of its group are.
    keeps_sums: ClassVar[bool] = False
    # Whether it reads the drawn tokens' own probabilities, which some densities do not have.
    reads_log_probs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self).marks is not Credit.marks and type(self).marked_loss is Credit.marked_loss:
            fix = "Write marked_loss(self, tokens, marked, log_ratio), or leave marks out"
            raise UsageError(f"credit {self.name!r}: {type(self).__qualname__} has marks and no marked_loss. {fix}.")

    @abstractmethod
    def formula(self, tokens: StepTokens) -> Tensor:
        """The advantages that the tokens of one training step are trained with, (N,)."""

    def in_loss(self, tokens: LossTokens) -> tuple[Tensor, Tensor] | None:
        """The part that depends on the policy of each update: advantages (N,) without gradient, and a term (N,).

        The term's gradient is added to that of each token's log π. Ratio, clip and KL term do not change.
        """
        return None

    def marks(self, tokens: StepTokens) -> Tensor | None:
        """Which tokens of one training step have a :meth:`marked_loss` in its updates, (N,) bool; None for none."""
        return None

    def marked_loss(self, tokens: LossTokens, marked: Tensor, log_ratio: Tensor) -> Tensor:
        """A loss of the marked tokens, (M,), which advantage, ratio and clip do not change; only its gradient counts.

        Args:
            marked: which of ``tokens``, (M,) int64.
            log_ratio: their log π − log π_old as in PPO's ratio, (M,), with gradient.
        """
        raise NotImplementedError

    def notes(self, flags: Flags) -> list[str]:
        """Warnings for the user about OpenRLHF's flags, which are complete."""
        return []

    @property
    def acts_in_loss(self) -> bool:
        """Whether :meth:`in_loss` or :meth:`marked_loss` changes the loss."""
        return type(self).in_loss is not Credit.in_loss or type(self).marks is not Credit.marks


def check_shapes(credit: Credit, method: str, tokens: int, *parts: Tensor) -> None:
    """RuntimeError unless what a method of the credit returned has one number for each token."""
    if any(part.shape != (tokens,) for part in parts):
        shapes = " and ".join(str(tuple(part.shape)) for part in parts)
        needed = "one number for each is needed"
        raise RuntimeError(f"credit {credit.name!r}: {method} returns {shapes} for {tokens} tokens: {needed}.")
