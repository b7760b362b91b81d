# SPDX-License-Identifier: Apache-2.0
"""The start-up check of a trainer's model: does a replayed row land where it belongs?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.rollout import override_probe
from ngrpo.rollout.override_probe import Comparison, ProbeFailure
from perturbations.replay import ReplayRecord
from perturbations.replay.scope import ReplayScope

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTEMPTS, _LONGEST = 3, 32
LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]


def check_replay(model: PreTrainedModel, log_probs: LogProbs) -> None:
    """Replays a row of one candidate of weight 1 and compares with the text that has this token.

    Every rank of a sharded model does the same forwards.

    Args:
        model: Hugging Face's.
        log_probs: from sequences (B, T), action mask (B, A) and attention mask (B, T) to log π of the last A tokens,
            (B, A), through all that the trainer puts around the model.

    Raises:
        ProbeFailure: if a replayed row does not reach the model, or others change.
    """
    embedding: Any = model.get_input_embeddings()
    half = next(model.parameters()).dtype != torch.float32
    for attempt in range(_ATTEMPTS):
        texts = override_probe.text_of_probe(embedding.num_embeddings, _LONGEST, attempt)
        try:
            partly = override_probe.reads_tokens_elsewhere(model.modules(), embedding)
            comparisons = _comparisons(texts, embedding, log_probs, partly)
            override_probe.judge(comparisons, half_precision=half, where="the trainer", model=type(model).__name__)
            return
        except ProbeFailure as error:
            if error.is_certain or attempt == _ATTEMPTS - 1:
                raise


def _comparisons(
    texts: override_probe.ProbeTexts, embedding: nn.Module, log_probs: LogProbs, partly: bool
) -> list[Comparison]:
    text, row, other = texts.text, texts.row, texts.other

    def values(*batch: list[int]) -> np.ndarray:
        """log π of each token but the first, (B, T - 1)."""
        sequences = torch.tensor(batch)
        ones = torch.ones_like(sequences)
        return log_probs(sequences, ones[:, 1:], ones).float().cpu().numpy()

    def record(fed: int) -> ReplayRecord:
        ids, ones = np.array([[fed]], dtype=np.int32), np.ones((1, 1), dtype=np.float32)
        return ReplayRecord(0, 1, len(text), np.array([row], dtype=np.int32), ids, ones, None, ones[:, 0] > 0)

    def apart(one: np.ndarray, another: np.ndarray, start: int = 0, stop: int | None = None) -> float:
        return float(np.abs(one - another)[start:stop].mean())

    changed = [*text[:row], other, *text[row + 1 :]]
    plain_first, plain, plain_last, as_text = values(texts.first, text, texts.last, changed)
    records = [None, record(other), record(text[row]), None]
    with ReplayScope(embedding, measure=False)(records, torch.ones(len(records), len(text), dtype=torch.int64)):
        beside_first, replaced, own, beside_last = values(texts.first, text, text, texts.last)
    effect = apart(plain, as_text, row)
    comparisons = [
        Comparison("rows before the replayed one", apart(replaced, plain, stop=row - 1), effect),
        Comparison("a row replayed with its own token's embedding", apart(own, plain, row), effect),
        Comparison("the sample in front", apart(beside_first, plain_first), effect),
        Comparison("the sample behind", apart(beside_last, plain_last), effect),
    ]
    if partly:
        # A table that follows the token in the text has a part in the row: only that this very row changes is known.
        here = apart(plain, as_text, row, row + 1)
        same = 1.0 - min(apart(replaced, plain, row, row + 1) / here, 1.0) if here else 1.0
        return [*comparisons, Comparison("a replayed row, which must change", same * here, here, 0.9)]
    return [*comparisons, Comparison("a replayed row", apart(replaced, as_text, row), effect)]
