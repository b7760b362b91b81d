# SPDX-License-Identifier: Apache-2.0
"""`UsageError`, which a command line reports without a traceback, and parts of its messages."""

import difflib
from collections.abc import Iterable
from typing import TypeVar

_Value = TypeVar("_Value")

SCALARS = (
    "an option is a number, a text, true or false, or None, as a command line gives it. Write a list as a text, such as"
    " '1,2', and split it where you use it."
)
"""What an option may be, for messages about another default."""


class UsageError(ValueError):
    """A value, name or file of the user's cannot be used; the message says what is allowed and how to fix it."""


def require(value: _Value | None, what: str) -> _Value:
    """Returns the value; raises ``ValueError``, with ``what`` as the value's name, where it is None."""
    if value is None:
        raise ValueError(f"{what} is missing here: pass it.")
    return value


def nearest(word: str, words: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` where one of the ``words`` is similar to ``word``, else the empty string."""
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.55)
    return f" Did you mean {matches[0]!r}?" if matches else ""
