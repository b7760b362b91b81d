# SPDX-License-Identifier: Apache-2.0
"""Tables on the screen."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Rows of as many cells each as lines of aligned columns; the first ``left`` columns stand to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    forms = [f"{'<' if i < left else '>'}{width}" for i, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]
