# SPDX-License-Identifier: Apache-2.0
"""One row of the compatibility table: a pair of features that is refused."""

from collections.abc import Iterable
from dataclasses import dataclass

from ngrpo.config.feature_kinds import Feature


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pair of features that is refused.

    The message is "WHAT cannot be used with CONFLICTS_WITH: WHY. Fix: FIX.", and the page has a column for each.

    Attributes:
        what: the feature that the message begins with.
        conflicts_with: the other feature.
        why: the reason, as a clause; "it" is ``what``.
        fix: what the user can do instead, as an order.
    """

    what: Feature
    conflicts_with: Feature
    why: str
    fix: str = "leave one of them out"


def rows(whats: Iterable[Feature], *, conflicts_with: Feature, why: str, fix: str = Row.fix) -> list[Row]:
    """A row for each of ``whats``, where several features conflict with the same one for the same reason."""
    return [Row(what=what, conflicts_with=conflicts_with, why=why, fix=fix) for what in whats]
