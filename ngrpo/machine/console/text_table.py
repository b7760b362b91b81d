# SPDX-License-Identifier: Apache-2.0
"""Tables on the screen."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Rows of as many cells each as lines of aligned columns; the first ``left`` columns stand to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    forms = [f"{'<' if i < left else '>'}{width}" for i, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]


def defined(term: str, text: str, *, column: int, width: int = 80) -> list[str]:
    """A term and what it means, as in a help: the text from a column on, below the term where that is too long."""
    lines = textwrap.wrap(text, width - column, break_long_words=False, break_on_hyphens=False)
    head = [term] if len(term) + 2 > column else [f"{term:<{column}}{lines.pop(0)}"] if lines else [term]
    return [*head, *(" " * column + line for line in lines)]
