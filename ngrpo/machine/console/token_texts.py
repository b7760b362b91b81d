# SPDX-License-Identifier: Apache-2.0
"""Tokens as texts for people: of an answer, and of what was fed in place of some of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

    from perturbations import ReplayRecord

_DIGITS = 4


def pieces(tokens: Sequence[int], tokenizer: TokenizerLike) -> list[str]:
    """The text of each token. One that ends within a character is empty; the next one has the whole character."""
    result, pending = [], []
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending)
        if text.endswith("\ufffd") and len(pending) < 4:
            result.append("")
            continue
        result.append(text)
        pending = []
    return result


def fed(record: ReplayRecord, row: int, tokenizer: TokenizerLike) -> dict[str, Any]:
    """What was fed at a perturbed position: ``candidates``, pairs of text and weight, and ``sigma`` where noise was.

    Args:
        record: a `perturbations.replay.ReplayRecord`.
        row: which of its positions.
        tokenizer: of the model.
    """
    pairs = zip(record.ids[row].tolist(), record.weights[row].tolist())
    entry: dict[str, Any] = {"candidates": [[tokenizer.decode([c]), round(w, _DIGITS)] for c, w in pairs if w > 0.0]}
    if record.sigma is not None:
        entry["sigma"] = round(float(record.sigma[row]), _DIGITS + 2)
    return entry
