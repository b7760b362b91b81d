# SPDX-License-Identifier: Apache-2.0
"""Color for terminals, as ANSI escapes; text for files and pipes stays plain.

``NO_COLOR`` turns it off (https://no-color.org), and so does ``TERM=dumb``.
"""

import os
import sys
from typing import TextIO

_CODES = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}
STATES = {"ok": "green", "open": "yellow", "WRONG": "red", "not run": "yellow"}
"""The color of each state that a list of checks shows."""


def has_color(stream: TextIO) -> bool:
    """Whether text for this stream may have color."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def colored(text: str, style: str, stream: TextIO | None = None) -> str:
    """The text in a style, ``bold`` or a color; plain where the stream has no color.

    Args:
        text: to show; escapes take no columns, so align it first.
        style: one of the styles.
        stream: where it will be written; None for stdout.
    """
    if not has_color(sys.stdout if stream is None else stream):
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def state_column(state: str, width: int) -> str:
    """A state of :data:`STATES` in its color, filled up with spaces to ``width`` columns."""
    return colored(state, STATES[state]) + " " * (width - len(state))
