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

_BLOCK_ELEMENTS = 2**24  # logits that a function gets at once: 64 MiB in float32


@dataclass(frozen=True)
class StepTokens:
    """The N generated tokens of one training step, response by response; (N,) float32 or int64, without gradient.

    Attributes:
        advantages: the advantage of each token's response.
        entropies: the policy's entropy where the token was drawn, in nats, at the sampling temperature and with the
            perturbed history.
        log_probs: log π of the policy before the step's updates, of the token or by the perturbation's density.
        responses: the number of the token's response, ascending from 0.
        groups: the number of its prompt, from 0.
        seeds: the seed of its response, from the run's seed and the step, for :func:`perturbations.streams.keys`.
    """

    advantages: Tensor
    entropies: Tensor
    log_probs: Tensor
    responses: Tensor
    groups: Tensor
    seeds: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @property
    def first(self) -> Tensor:
        """Whether each token is the first one of its response, (N,) bool."""
        first_of_all = torch.ones_like(self.responses[:1], dtype=torch.bool)
        return torch.cat([first_of_all, self.responses.diff() > 0])

    @property
    def positions(self) -> Tensor:
        """The place of each token in its response, from 0, (N,) int64."""
        places = torch.arange(len(self.responses), device=self.responses.device)
        place_of_first = torch.where(self.first, places, 0).cummax(0).values
        return places - place_of_first


@dataclass(frozen=True)
class LossTokens:
    """The N generated tokens of one forward that is differentiated, response by response.

    Only ``logits`` and ``log_probs`` have a gradient.

    Attributes:
        logits: z̃, divided by the sampling temperature.
        rows: the row of the flattened logits from which each token was drawn.
        tokens: their ids.
        log_probs: log π of the policy of this update.
        advantages: the advantages that the tokens are trained with.
        responses: the number of each token's response, ascending from 0.
    """

    logits: Float[Tensor, "*forward vocabulary"]
    rows: Int64[Tensor, " tokens"]
    tokens: Int64[Tensor, " tokens"]
    log_probs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    responses: Int64[Tensor, " tokens"]

    def entropies(self) -> Tensor:
        """The policy's entropy where each token was drawn, in nats, at the sampling temperature, (N,) float32."""
        return self.by_blocks(self.rows, row_blocks.entropy)

    def likeliest(self, which: Tensor, k: int) -> Tensor:
        """The k likeliest tokens, best first, where the tokens ``which`` (M,) were drawn: ids (M, k)."""

        def ids_of_largest(logits: Tensor) -> Tensor:
            _, ids = row_blocks.largest(logits, k)
            return ids

        return self.by_blocks(self.rows[which], ids_of_largest)

    def log_probs_of(self, which: Tensor, ids: Tensor) -> Tensor:
        """log π of other tokens ``ids`` (M, K) where the tokens ``which`` (M,) were drawn: (M, K), with gradient.

        log π(y) + z̃ − z̃_y needs no sum over the vocabulary, and its gradient to the logits is sparse.
        """
        rows = self.rows[which]
        row_count = self.logits.shape[:-1].numel()
        # One gather for all rows of the logits, since the gradient is sparse for a gather and not for an index. Rows
        # that are not asked for gather token 0.
        ids_and_drawn = ids.new_zeros(row_count, ids.shape[1] + 1)
        ids_and_drawn[rows] = torch.cat([ids, self.tokens[which].unsqueeze(1)], dim=1)
        index = ids_and_drawn.view(*self.logits.shape[:-1], -1)
        scores_of_all_rows = self.logits.gather(-1, index, sparse_grad=True).flatten(0, -2)
        scores = scores_of_all_rows[rows]  # (M, K + 1), the drawn token's last
        return self.log_probs[which].unsqueeze(1) + scores[:, :-1] - scores[:, -1:]

    def by_blocks(self, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function's results for ``rows`` (M,) of the logits, in blocks of bounded memory.

        ``function`` maps logits (B, V), without gradient, to (B, …).
        """
        flat_logits = self.logits.detach().flatten(0, -2)
        block_size = max(1, _BLOCK_ELEMENTS // flat_logits.shape[-1])
        # split() gives one block of no rows where M is 0, so the result has the right shape.
        results = [function(flat_logits[block]) for block in rows.split(block_size)]
        return torch.cat(results)


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
        has_marks = type(self).marks is not Credit.marks
        has_marked_loss = type(self).marked_loss is not Credit.marked_loss
        if has_marks and not has_marked_loss:
            raise UsageError(
                f"credit {self.name!r}: {type(self).__qualname__} has marks and no marked_loss."
                " Write marked_loss(self, tokens, marked, log_ratio), or leave marks out."
            )
        if has_marked_loss and not has_marks:
            raise UsageError(
                f"credit {self.name!r}: {type(self).__qualname__} has marked_loss and no marks, so nothing calls it."
                " Write marks(self, tokens), or leave marked_loss out."
            )

    @abstractmethod
    def formula(self, tokens: StepTokens) -> Tensor:
        """The advantages that the tokens of one training step are trained with, (N,)."""

    def in_loss(self, tokens: LossTokens) -> tuple[Tensor, Tensor] | None:
        """The part that depends on the policy of each update: advantages (N,) without gradient, and a term (N,).

        The term's gradient is added to that of each token's log π. Ratio, clip and KL term do not change. None where
        the credit has no such part.
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


def check_results(credit: Credit, method: str, tokens: int, *results: Tensor) -> None:
    """Raises ``RuntimeError`` unless a method of the credit returned tensors of one finite number for each token."""
    if any(result.shape != (tokens,) for result in results):
        shapes = " and ".join(str(tuple(result.shape)) for result in results)
        raise RuntimeError(
            f"credit {credit.name!r}: {method} returns {shapes} for {tokens} tokens: one number for each is needed."
        )
    for result in results:
        not_finite = result[~result.isfinite()]
        if len(not_finite):
            raise RuntimeError(
                f"credit {credit.name!r}: {method} gives {not_finite[0].item()} for {len(not_finite)} of {tokens}"
                " tokens. Finite numbers are needed: clamp before divisions and logarithms."
            )
