# SPDX-License-Identifier: Apache-2.0
"""Shares of runs above a score, and Fisher's exact test of them: tables counted by hand."""

from __future__ import annotations

import pytest

from ngrpo.workbench.compare import arguments, results, shares
from perturbations.errors import UsageError


@pytest.mark.parametrize(
    ("table", "p"),
    [
        # 5 of 5 and 0 of 5: one table of C(10, 5) = 252 at each end.
        ((5, 5, 0, 5), 2 / 252),
        # 5 of 5 and 1 of 5: C(10, 6) = 210; with 5 of ours C(5, 5) C(5, 1) = 5 ways, and as many with 1.
        ((5, 5, 1, 5), 10 / 210),
        # 4 of 5 and 1 of 5: of 252, C(5, 4) C(5, 1) = 25 with 4 and with 1, 1 with 5 and with 0.
        ((4, 5, 1, 5), 52 / 252),
        # Fisher's lady tasting tea, two-sided: 16 ways of 3 right, 1 of 4, the same at the other end, of 70.
        ((3, 4, 1, 4), 34 / 70),
        # Sides of different length: 2 of 2 and 0 of 3; C(5, 2) = 10, ways 3 (0), 6 (1), 1 (2).
        ((2, 2, 0, 3), 1 / 10),
        ((3, 5, 3, 5), 1.0),
        ((0, 5, 0, 5), 1.0),
        ((0, 0, 3, 5), 1.0),
    ],
)
def test_fishers_exact_test(table: tuple[int, int, int, int], p: float) -> None:
    assert shares.fisher(*table) == pytest.approx(p, rel=1e-12)
    ours, theirs = table[:2], table[2:]
    assert shares.fisher(*theirs, *ours) == pytest.approx(p, rel=1e-12)


def test_scipy_agrees() -> None:
    stats = pytest.importorskip("scipy.stats")
    for ours in range(8):
        for theirs in range(6):
            expected = stats.fisher_exact([[ours, 7 - ours], [theirs, 5 - theirs]]).pvalue
            assert shares.fisher(ours, 7, theirs, 5) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("table", [(6, 5, 0, 5), (-1, 5, 0, 5), (0, 5, 6, 5)])
def test_impossible_tables(table: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="between 0 and the runs"):
        shares.fisher(*table)


def _run(strategy: str, seed: int, correct: int, status: str = "done") -> dict:
    problems = [{"id": "a", "n": 10, "correct": correct}]
    evaluation = {"problems": problems, "mean_at_n": correct / 10, "pass_at_k": {}} if status == "done" else None
    return {
        "strategy": strategy, "seed": seed, "status": status, "steps": [], "peak_memory_bytes": None,
        "evaluation": evaluation,
    }  # fmt: skip


def test_a_summary_with_shares() -> None:
    """Exactly the threshold is not above it; what failed is no run; p is Holm's over the strategies."""
    runs = [_run("none", seed, 8 if seed == 0 else 6) for seed in range(5)]
    runs += [_run("away", seed, 9) for seed in range(5)]
    runs += [_run("some", seed, 9 if seed else 6) for seed in range(4)] + [_run("some", 4, 0, "failed")]
    rows = results.summarise(runs, ["none", "away", "some"], "none", 0.8)
    none, away, some = (row["above"] for row in rows)
    assert none == {"threshold": 0.8, "runs": 0, "of": 5}
    assert (away["runs"], away["of"], some["runs"], some["of"]) == (5, 5, 3, 4)
    assert away["p"] == pytest.approx(2 / 252) and away["p_corrected"] == pytest.approx(4 / 252)
    # 3 of 4 and 0 of 5: 4 ways of C(9, 3) = 84; none of the others (30, 40, 10) is as rare.
    assert some["p"] == pytest.approx(4 / 84) == some["p_corrected"]
    assert rows[0]["verdict"].endswith("the baseline; 0 of 5 runs end above 0.8")
    assert "5 of 5 runs end above 0.8, of none 0 of 5 (Fisher's exact p 0.0079, 0.016 corrected" in rows[1]["verdict"]
    assert all("above" not in row for row in results.summarise(runs, ["none", "away", "some"], "none"))


def test_the_threshold_is_read() -> None:
    words = ["--perturbations", "none", "--model", "m", "--task", "arithmetic"]
    assert arguments.parse([*words, "--threshold", "0.8"])[0].threshold == 0.8
    plan = arguments.parse(words)[0]
    assert plan.threshold is None and plan.common() == arguments.parse([*words, "--threshold", "0.8"])[0].common()
    for bad in ("1", "-0.1", "much", "nan"):
        with pytest.raises(UsageError, match="--threshold"):
            arguments.parse([*words, "--threshold", bad])
    with pytest.raises(UsageError, match=r"--threshold 0\.8 counts evaluated runs"):
        arguments.parse([*words, "--threshold", "0.8", "--eval.data", "none"])
