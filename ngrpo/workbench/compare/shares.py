# SPDX-License-Identifier: Apache-2.0
"""How many runs of each strategy end above a score, held against the baseline's by Fisher's exact test.

Where a run either finds the better way or does not, scores lie in two heaps: one run of the baseline among five that
found it hides a large difference from a t test, and counts say more than means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.workbench import statistics
from perturbations.errors import UsageError


def threshold(text: str) -> float:
    """The value of ``--threshold``.

    Raises:
        UsageError: unless it is a number in [0, 1).
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < 1.0:
        raise UsageError(f"--threshold {text}: the Mean@n that a run is to exceed, a number of at least 0 and below 1.")
    return value


def add(rows: Sequence[dict[str, Any]], scores: Mapping[str, Mapping[int, float]], baseline: str, above: float) -> None:
    """Adds ``above`` to each row of a comparison's summary, in place, and its sentence to the verdict.

    ``above`` holds the ``threshold``, how many ``runs`` end above it and ``of`` how many; for all but the baseline also
    ``p``, two-sided, of as many of the baseline's runs, and ``p_corrected``, Holm's for all strategies. Runs are not
    paired here: a strategy's may be of other seeds than the baseline's.

    Args:
        rows: of :func:`ngrpo.workbench.compare.results.summarise`.
        scores: by strategy, the Mean@n of each evaluated run by its seed.
        baseline: the strategy that the others are held against.
        above: the threshold.
    """
    counts = {name: (sum(score > above for score in of.values()), len(of)) for name, of in scores.items()}
    tested = [row for row in rows if row["strategy"] != baseline]
    p_values = [fisher(*counts[row["strategy"]], *counts[baseline]) for row in tested]
    corrected = statistics.holm(p_values)
    for row in rows:
        runs, of = counts[row["strategy"]]
        row["above"] = {"threshold": above, "runs": runs, "of": of}
        row["verdict"] += f"; {runs} of {of} runs end above {above:g}"
    for row, p, holm in zip(tested, p_values, corrected):
        row["above"] |= {"p": p, "p_corrected": holm}
        more = "" if len(tested) == 1 else f", {holm:.2g} corrected for {len(tested)} comparisons"
        row["verdict"] += f", of {baseline} {'{} of {}'.format(*counts[baseline])} (Fisher's exact p {p:.2g}{more})"


def fisher(ours: int, of_ours: int, theirs: int, of_theirs: int) -> float:
    """The two-sided p-value of Fisher's exact test of two shares (Fisher, J. R. Stat. Soc. 85, 1922).

    Given how many runs succeed in all, each side's number is hypergeometric where there is no difference. The p-value
    is the chance of all tables that are no likelier than the one seen; 1 where a side is empty.

    Args:
        ours: successes, at most ``of_ours``.
        of_ours: runs.
        theirs: successes of the other side, at most ``of_theirs``.
        of_theirs: its runs.

    Raises:
        ValueError: for more successes than runs, or a negative number of them.
    """
    if not (0 <= ours <= of_ours and 0 <= theirs <= of_theirs):
        raise ValueError(f"{ours} of {of_ours} and {theirs} of {of_theirs}: successes lie between 0 and the runs.")
    from scipy.stats import fisher_exact

    return float(fisher_exact([[ours, of_ours - ours], [theirs, of_theirs - theirs]]).pvalue)
