# SPDX-License-Identifier: Apache-2.0
"""The start-up check of a trainer's model: does a replayed row land where it belongs?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ngrpo.rollout.startup_check import (
    Answer,
    CheckTexts,
    Comparison,
    check_texts,
    compared,
    reads_tokens_elsewhere,
    record_of,
)
from perturbations.replay.scope import ReplayScope

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LONGEST = 32


def check_replay(model: PreTrainedModel, log_probs: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Replays a row of one candidate of weight 1 and compares with the text that has this token.

    ``log_probs`` goes from sequences (B, T), action mask (B, A) and attention mask (B, T) to log π of the last A
    tokens, (B, A), through the trainer's wrappers of the model. Every rank of a sharded model does the same
    forwards.

    Raises ``CheckFailure`` if a replayed row does not reach the model, or others change.
    """
    embedding: Any = model.get_input_embeddings()
    partly = reads_tokens_elsewhere(model.modules(), embedding)

    def answers(*texts: list[int]) -> list[Answer]:
        sequences = torch.tensor(texts)
        ones = torch.ones_like(sequences)
        return [Answer(row) for row in log_probs(sequences, ones[:, 1:], ones).float().cpu().numpy()]

    def compare(texts: CheckTexts) -> list[Comparison]:
        first, text, last, row, other = texts.first, texts.text, texts.last, texts.row, texts.other
        plain = answers(first, text, last, texts.swapped)
        records = [None, *(record_of({row: token}, 1, len(text)) for token in (other, text[row])), None]
        mask = torch.ones(len(records), len(text), dtype=torch.int64)
        with ReplayScope(embedding, measure=False)(records, mask):
            fed = answers(first, text, text, last)
        return compared(plain, fed, row, partly=partly, what="replayed", each="sample")

    check_texts(
        embedding.num_embeddings,
        _LONGEST,
        compare,
        half_precision=next(model.parameters()).dtype != torch.float32,
        where="the trainer",
        model=type(model).__name__,
    )
