# SPDX-License-Identifier: Apache-2.0
"""Tables and tokens as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

    from perturbations import ReplayRecord

_DIGITS = 4


def text_table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Rows of equal length as lines; the first ``left`` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    forms = [f"{'<' if i < left else '>'}{width}" for i, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]


def help_entry(term: str, text: str, *, column: int, width: int = 80) -> list[str]:
    """A term and its description from a column on, on the next line where the term is too long."""
    lines = textwrap.wrap(text, width - column, break_long_words=False, break_on_hyphens=False)
    head = [term] if len(term) + 2 > column else [f"{term:<{column}}{lines.pop(0)}"] if lines else [term]
    return [*head, *(" " * column + line for line in lines)]


def token_texts(tokens: Sequence[int], tokenizer: TokenizerLike) -> list[str]:
    """The text of each token. A token that ends within a character is empty; the next one has the whole character."""
    texts, pending = [], []
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending)
        if text.endswith("\ufffd") and len(pending) < 4:
            texts.append("")
            continue
        texts.append(text)
        pending = []
    return texts


def fed_texts(record: ReplayRecord, row: int, tokenizer: TokenizerLike) -> dict[str, Any]:
    """The input at the record's perturbed position ``row``: ``candidates`` (text and weight), ``sigma`` if noisy."""
    pairs = zip(record.ids[row].tolist(), record.weights[row].tolist())
    entry: dict[str, Any] = {"candidates": [[tokenizer.decode([c]), round(w, _DIGITS)] for c, w in pairs if w > 0.0]}
    if record.sigma is not None:
        entry["sigma"] = round(float(record.sigma[row]), _DIGITS + 2)
    return entry
