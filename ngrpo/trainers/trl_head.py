# SPDX-License-Identifier: Apache-2.0
"""TRL's fused output layer with the sampling mask's correction: log-probabilities among the tokens left by sampling.

TRL 1.16 computes log-probabilities from hidden states, a tile of the vocabulary at a time, and never has the logits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from trl.trainer import utils

from ngrpo.trainers.common.log_probs import MaskCorrection, log_probs_in_sets, sampling_masks
from perturbations import FinishedTrajectory


@contextmanager
def corrected_head(
    trajectories: Sequence[FinishedTrajectory | None], attention_mask: Tensor, logits_to_keep: int
) -> Iterator[None]:
    """TRL's log-probabilities in this context are log π_S, over the tokens S left by sampling.

    Args:
        trajectories: of the batch.
        attention_mask: (B, T), padded on either side.
        logits_to_keep: the last tokens of each row, which TRL scores.

    Raises:
        RuntimeError: if a sample has no mask, a token is not in its set, or TRL's output layer was not called.
    """
    masks = sampling_masks(trajectories, len(attention_mask))
    plain = utils._ChunkedLogProbFunction
    head = CorrectedHead(plain, MaskCorrection(masks, attention_mask), attention_mask, logits_to_keep)
    utils._ChunkedLogProbFunction = head
    try:
        yield
    finally:
        utils._ChunkedLogProbFunction = plain
    if not head.was_called:
        raise RuntimeError(
            "correct_mask=True did not come into effect: the model's log-probabilities did not come from"
            " trl.trainer.utils.add_fused_lm_head (1.16.0)."
        )


class CorrectedHead:
    """Stands in for TRL's ``ChunkedLogProbFunction`` during one forward."""

    def __init__(
        self,
        plain: type[torch.autograd.Function],
        correction: MaskCorrection,
        attention_mask: Tensor,
        logits_to_keep: int,
    ) -> None:
        self._plain = plain
        self._correction = correction
        self._attention_mask = attention_mask.bool()
        self._logits_to_keep = logits_to_keep
        self.was_called = False

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """As ``ChunkedLogProbFunction.apply``: the log-probabilities (N,) are log π_S, other outputs are TRL's own.

        The logits of the rows with a set are computed as TRL's tiles are, all at once: n · V numbers.

        Args:
            hidden: the last hidden states, (N, D), as in :meth:`_rows_of_hidden`.
            weight: (V, D).
            bias: (V,).
            targets: the tokens drawn, (N,).
            temperature, softcap, logit_scale: z = temperature⁻¹ · softcap · tanh(logit_scale · hidden · Wᵀ / softcap).
            chunk_size, outputs: for TRL.
        """
        self.was_called = True
        log_probs, *more = self._plain.apply(
            hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
        )
        padded_rows, sets = self._correction.rows_and_sets(tuple(self._attention_mask.shape))
        if not sets:
            return (log_probs, *more)
        rows = self._rows_of_hidden(padded_rows.to(hidden.device), count=len(hidden))
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        own_bias = None if bias is None else bias.to(dtype)
        logits = torch.nn.functional.linear(hidden[rows].to(dtype), weight.to(dtype), own_bias).float() * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        in_order = torch.arange(len(rows), device=hidden.device)
        corrected = log_probs_in_sets(logits / temperature, in_order, targets[rows], sets)
        return (log_probs.index_copy(0, rows, corrected.to(log_probs.dtype)), *more)

    def _rows_of_hidden(self, rows: Tensor, count: int) -> Tensor:
        """The rows of TRL's hidden states, (n,), for rows of the padded batch (B, T).

        TRL leaves out the last column, which chooses no token. On a GPU it leaves out every row without a scored token
        too.
        """
        batch, length = self._attention_mask.shape
        row_of_batch = rows // length
        without_last_column = row_of_batch * (length - 1) + rows % length
        if count == batch * (length - 1):
            return without_last_column
        is_scored = self._attention_mask.clone()
        is_scored[:, : length - self._logits_to_keep] = False
        # Column t of the states chose the token of column t + 1.
        return is_scored[:, 1:].flatten().cumsum(0).to(rows.device)[without_last_column] - 1
