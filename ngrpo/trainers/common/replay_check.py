# SPDX-License-Identifier: Apache-2.0
"""The start-up check of a trainer's model: does a replayed row land where it belongs?"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ngrpo.machine.upstream.types import PreTrainedModel
from ngrpo.rollout import check_texts
from perturbations.replay.scope import ReplayScope

_LONGEST = 32


def check_replay(model: PreTrainedModel, log_probs: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Replays a row of one candidate of weight 1 and compares with the text that has this token.

    ``log_probs`` goes from sequences (B, T), action mask (B, A) and attention mask (B, T) to log π of the last A
    tokens, (B, A), through the trainer's wrappers of the model. Every rank of a sharded model does the same
    forwards.

    Raises ``CheckFailure`` if a replayed row does not reach the model, or others change.
    """
    embedding: Any = model.get_input_embeddings()
    reads_tokens = check_texts.reads_tokens_elsewhere(model.modules(), embedding)

    def text_outputs(texts: Mapping[str, list[int]]) -> dict[str, check_texts.TextOutput]:
        sequences = torch.tensor(list(texts.values()))
        ones = torch.ones_like(sequences)
        rows = log_probs(sequences, ones[:, 1:], ones).float().cpu().numpy()
        return {name: check_texts.TextOutput(row) for name, row in zip(texts, rows)}

    def compare(texts: check_texts.CheckTexts) -> list[check_texts.Comparison]:
        text = texts.text
        plain = text_outputs({"first": texts.first, "text": text, "last": texts.last, "swapped": texts.swapped})
        other = check_texts.record_of({texts.row: texts.other}, 1, len(text))
        own = check_texts.record_of({texts.row: texts.own}, 1, len(text))
        records = [None, other, own, None]
        mask = torch.ones(len(records), len(text), dtype=torch.int64)
        with ReplayScope(embedding, measure=False)(records, mask):
            fed = text_outputs({"first": texts.first, "other": text, "own": text, "last": texts.last})
        return check_texts.compared(plain, fed, texts.row, reads_tokens=reads_tokens, what="replayed", unit="sample")

    check_texts.check_texts(
        embedding.num_embeddings,
        _LONGEST,
        compare,
        half_precision=next(model.parameters()).dtype != torch.float32,
        where="the trainer",
        model=type(model).__name__,
    )
