# SPDX-License-Identifier: Apache-2.0
"""What is published of a study, from results alone: contrasts pooled over tasks, tables; and how intervals cover."""

import gzip
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks import coverage, pooled, study
from ngrpo.workbench import statistics
from tests.report_example import example

PAIRS = {"neighbor helps": ["neighbor", "none"], "noise helps": ["gumbel", "none"]}


def with_scores(ours: list[int], baseline: list[int]) -> dict[str, Any]:
    """A comparison in which each run has one problem, of which so many of 16 answers are right."""
    results = example(steps=2, seeds=len(ours))
    for run in results["runs"]:
        right = {"neighbor": ours, "none": baseline}.get(run["strategy"], baseline)[run["seed"]]
        run |= {"status": "done", "evaluation": {"problems": [{"id": "a", "n": 16, "correct": right}]}}
    return results


def test_contrasts_by_hand() -> None:
    """Differences of 2, 4, 6 sixteenths on one task and 1, 1, 4 on the other: means 4/16 and 2/16, pooled 3/16. The
    second contrast is of equal scores: its p is none, so the first one's is corrected for nothing."""
    tasks = {"one": with_scores([6, 8, 10], [4, 4, 4]), "other": with_scores([5, 5, 8], [4, 4, 4])}
    first, second = study.contrasts(tasks, PAIRS, None)
    whole = pooled.mean_difference([np.array([2, 4, 6]) / 16, np.array([1, 1, 4]) / 16])
    assert whole["value"] == pytest.approx(3 / 16)
    assert first[0] == "neighbor helps" and first[1].startswith("+0.250 [") and first[2].startswith("+0.125 [")
    # Spreads 2/16 and sqrt(3)/16: sqrt((4 + 3) / 2) / 16 = 0.1169 of both.
    least = statistics.detectable(0.11693, 3, 2, 2)
    assert first[3] == f"+0.188 [{whole['low']:+.3f}, {whole['high']:+.3f}], detectable {least:.3f}"
    assert first[4] == f"{whole['p']:.3g} ({whole['p']:.3g})"
    assert first[5].startswith("1.000") and second[3].startswith("+0.000") and second[4] == "–"


def test_seeds_without_a_partner_are_left_out_and_too_few_are_said() -> None:
    results = with_scores([6, 8, 10], [4, 4, 4])
    for run in results["runs"]:
        if run["strategy"] == "none" and run["seed"] > 0:
            run["status"] = "failed"
    ((_, cell, whole, p, chance), _) = study.contrasts({"one": results}, PAIRS, None)
    assert (cell, whole, p, chance) == ("– (1 seeds)", "–", "–", "–")


def test_a_study_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for name in ("sums", "products"):
        results = example()
        for run in results["runs"]:
            if run["strategy"] == "neighbor":
                run["steps"][-1][study._DRIFT] = 0.25
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "results.json").write_text(json.dumps(results))
    file = tmp_path / "contrasts.yaml"
    file.write_text("neighbor helps: [neighbor, none]\n")
    words = ["study", str(tmp_path / "runs"), "--contrasts", str(file), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    study.main()
    text = (tmp_path / "out" / "tables.md").read_text()
    published = json.loads(gzip.decompress((tmp_path / "out" / "sums" / "results.json.gz").read_bytes()))
    assert published == json.loads((tmp_path / "runs" / "sums" / "results.json").read_text())
    assert "11 of 12 runs finished" in text and "ngrpo compare --" in text
    assert "## Contrasts in Mean@n" in text and "## Contrasts in Pass@16" in text
    row = next(line for line in text.splitlines() if line.startswith("| neighbor |"))
    assert row.rstrip(" |").endswith("0.250")
    file.write_text("nobody: [neighbour, none]\n")
    with pytest.raises(SystemExit):
        study.main()
    assert "no strategy is called 'neighbour'" in capsys.readouterr().err


@pytest.mark.more
def test_students_t_covers_and_the_bootstrap_does_not() -> None:
    """400 trials, standard error 0.011 at 0.95. With five seeds a percentile interval reaches 1.96 · sqrt(4/5) standard
    errors where t reaches 2.776, which under a normal distribution is 85%."""
    spread = coverage.WORLDS[1]
    assert coverage.coverage(spread, 5, 400, coverage.student) == pytest.approx(0.95, abs=0.033)
    assert coverage.coverage(spread, 5, 400, coverage.percentile) < 0.90


def test_the_pooled_difference_by_hand() -> None:
    """Differences 1, 3 and 2, 6: means 2 and 4, so 3. Variances 2 and 8 of two each: (1 + 4) / 4 = 1.25 in all, with
    1.25² / (0.25² + 1²) = 1.4706 degrees of freedom."""
    found = pooled.mean_difference([np.array([1.0, 3.0]), np.array([2.0, 6.0])])
    half = stats.t.ppf(0.975, 1.25**2 / 1.0625) * math.sqrt(1.25)
    assert found["value"] == 3.0
    assert (found["low"], found["high"]) == pytest.approx((3 - half, 3 + half))
    assert found["p"] == pytest.approx(2 * stats.t.sf(3 / math.sqrt(1.25), 1.25**2 / 1.0625))


def test_the_probability_of_improvement_by_hand() -> None:
    """On the first task 3 of 4 pairs are won; on the second one is won, one tied, two lost: (0.75 + 0.375) / 2."""
    tasks = [(np.array([0.5, 0.9]), np.array([0.4, 0.6])), (np.array([0.2, 0.7]), np.array([0.7, 0.3]))]
    found = pooled.probability_of_improvement(tasks)
    assert found["value"] == pytest.approx((0.75 + 0.375) / 2)
    assert found["low"] < found["value"] < found["high"]
    certain = pooled.probability_of_improvement([(np.array([0.9, 0.8]), np.array([0.1, 0.2]))])
    assert certain == {"value": 1.0, "low": 1.0, "high": 1.0}
