# SPDX-License-Identifier: Apache-2.0
"""The one error of bad input, which a command line tells from a bug."""

import difflib
from collections.abc import Iterable
from typing import TypeVar

_Value = TypeVar("_Value")


class UsageError(ValueError):
    """A value, name or file of the user's cannot be used; the message says what is allowed and how to fix it."""


def require(value: _Value | None, what: str) -> _Value:
    """The value; ``ValueError`` that names ``what`` where it is None."""
    if value is None:
        raise ValueError(f"{what} is missing here: pass it.")
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for a near miss, else the empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return f" Did you mean {match[0]!r}?" if match else ""
