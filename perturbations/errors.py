"""The one error of bad input, so that a command line can tell it from a bug."""

from __future__ import annotations


class UsageError(ValueError):
    """A value, name or file that the user gave cannot be used; the message says what is allowed and how to fix it."""
