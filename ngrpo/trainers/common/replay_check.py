# SPDX-License-Identifier: Apache-2.0
"""The start-up check of a trainer's model: does a replayed row land where it belongs?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ngrpo.rollout.startup_check import CheckTexts, Comparison, check_texts, reads_tokens_elsewhere, record_of
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

    def values(texts: list[list[int]]) -> np.ndarray:  # log π of each token but the first, (B, T - 1)
        sequences = torch.tensor(texts)
        ones = torch.ones_like(sequences)
        return log_probs(sequences, ones[:, 1:], ones).float().cpu().numpy()

    def apart(one: np.ndarray, another: np.ndarray, start: int = 0, stop: int | None = None) -> float:
        return float(np.abs(one - another)[start:stop].mean())

    def comparisons(texts: CheckTexts) -> list[Comparison]:
        text, row, other = texts.text, texts.row, texts.other
        plain_first, plain, plain_last, as_text = values([texts.first, text, texts.last, texts.swapped])
        records = [None, record_of({row: other}, 1, len(text)), record_of({row: text[row]}, 1, len(text)), None]
        mask = torch.ones(len(records), len(text), dtype=torch.int64)
        with ReplayScope(embedding, measure=False)(records, mask):
            beside_first, replaced, own, beside_last = values([texts.first, text, text, texts.last])
        effect = apart(plain, as_text, row)
        found = [
            Comparison("rows before the replayed one", apart(replaced, plain, stop=row - 1), effect),
            Comparison("a row replayed with its own token's embedding", apart(own, plain, row), effect),
            Comparison("the sample in front", apart(beside_first, plain_first), effect),
            Comparison("the sample behind", apart(beside_last, plain_last), effect),
        ]
        if not partly:
            return [*found, Comparison("a replayed row", apart(replaced, as_text, row), effect)]
        # A table that follows the token in the text has a part in the row: only that this very row changes is known.
        here = apart(plain, as_text, row, row + 1)
        same = 1.0 - min(apart(replaced, plain, row, row + 1) / here, 1.0) if here else 1.0
        return [*found, Comparison("a replayed row, which must change", same * here, here, 0.9)]

    check_texts(
        embedding.num_embeddings,
        _LONGEST,
        comparisons,
        half_precision=next(model.parameters()).dtype != torch.float32,
        where="the trainer",
        model=type(model).__name__,
    )
