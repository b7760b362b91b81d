# SPDX-License-Identifier: Apache-2.0
"""Mean@n, Pass@k and Cover@τ from the number of right answers among n."""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k answers, drawn without replacement from n, is right.

    The unbiased estimator 1 − C(n−c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1). It is evaluated in
    whole numbers with one division at the end, so it is exact up to the rounding of that division.

    Args:
        n: answers, at least 1.
        c: right ones among them, in [0, n].
        k: answers drawn, in [1, n].

    Raises:
        ValueError: for a number outside its range.
    """
    _check_counts(n, c)
    if not _whole(k) or not 1 <= k <= n:
        raise ValueError(f"k={k!r}: must be a whole number in [1, n={n}]; Pass@k needs at least k answers per problem.")
    ways = comb(n, k)
    return (ways - comb(n - c, k)) / ways


def mean_at_n(n: int, c: int) -> float:
    """The share of right answers, c / n; n and c as in :func:`pass_at_k`."""
    _check_counts(n, c)
    return c / n


def cover_at(n: int, c: int, tau: float) -> bool:
    """Whether at least the share τ of the answers is right; Cover@τ is the share of problems of which that holds.

    Dragoi et al. 2025 (arXiv 2510.08325) define it by the chance that an answer is right; c / n is put in its place.

    Args:
        n: answers, at least 1.
        c: right ones among them, in [0, n].
        tau: in (0, 1].

    Raises:
        ValueError: for a number outside its range.
    """
    _check_counts(n, c)
    if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0.0 < tau <= 1.0:
        raise ValueError(f"tau={tau!r}: must be a number in (0, 1].")
    return c / n >= tau


def _check_counts(n: int, c: int) -> None:
    if not _whole(n) or n < 1:
        raise ValueError(f"n={n!r}: must be a whole number of answers, at least 1.")
    if not _whole(c) or not 0 <= c <= n:
        raise ValueError(f"c={c!r}: must be a whole number of right answers in [0, n={n}].")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
