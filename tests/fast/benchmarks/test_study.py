# SPDX-License-Identifier: Apache-2.0
"""What docs/ publishes of studies is what their results give; contrasts pooled over tasks; how intervals cover."""

import gzip
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks import coverage, pooled, publishing, study, trap_results
from ngrpo.workbench import statistics
from ngrpo.workbench.compare import results as comparison
from tests.conftest import ROOT
from tests.support.report_example import example

DOCS = ROOT / "docs"
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


@pytest.mark.parametrize(
    ("program", "results", "page"),
    [
        (study, "", "study"),
        *((trap_results, name, name) for name in ("study2", "study2_pilot", "study2_pilot_larger_rate")),
    ],
)
def test_published_tables_are_those_of_the_results(
    program: ModuleType, results: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DOCS / "results" / results
    monkeypatch.setattr(publishing, "write_report", lambda data, path: None)
    monkeypatch.setattr(sys, "argv", [page, str(folder), "--out", str(tmp_path)])
    program.main()
    assert (tmp_path / "tables.md").read_text() == (DOCS / "studies" / "tables" / f"{page}.md").read_text()
    assert publishing.published(tmp_path) == publishing.published(folder)


def test_what_cannot_be_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "sums").mkdir(parents=True)
    results = example()
    results["runs"][0]["status"] = "pending"
    (tmp_path / "runs" / "sums" / "results.json").write_text(json.dumps(results))
    (tmp_path / "contrasts.yaml").write_text("nobody: [neighbour, none]\n")
    words = [str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    for program, more, said in (
        (study, ["--contrasts", str(tmp_path / "contrasts.yaml")], "no strategy is called 'neighbour'"),
        (trap_results, [], "2 runs are not finished: none-seed0"),
    ):
        monkeypatch.setattr(sys, "argv", ["publish", *words, *more])
        with pytest.raises(SystemExit):
            program.main()
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def leaves(value: object, path: str = "") -> dict[str, object]:
    """The numbers and words of a result, each under its path."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        return {path: value}
    return {place: leaf for key, each in inner for place, leaf in leaves(each, f"{path}/{key}").items()}


def test_published_results_are_computed_again() -> None:
    """From the runs that docs/ holds; docs/studies/study2.md has the ends of intervals that are others since."""
    changed = []
    for file in DOCS.glob("results/**/results.json.gz"):
        found = json.loads(gzip.decompress(file.read_bytes()))
        threshold = found["summary"][0].get("above", {}).get("threshold")
        names = [strategy["id"] for strategy in found["strategies"]]
        again = leaves(comparison.summarise(found["runs"], names, found["baseline"], threshold))
        before = leaves(found["summary"])
        changed += [(path, leaf, again[path]) for path, leaf in before.items() if again.get(path, ()) != leaf]
    ends = [path for path, _, _ in changed if path.endswith(("/low", "/high"))]
    words = [(was.partition(" [")[0], now.partition(" [")[0]) for path, was, now in changed if path.endswith("verdict")]
    over = [now for path, _, now in changed if path.endswith("/over")]
    none_detectable = [now for path, was, now in changed if path.endswith("detectable") and was == 0.0]
    assert len(ends) == 76 and all(was == now for was, now in words) and set(none_detectable) == {None}
    assert set(over) == {"problems"} and len(changed) == len(ends) + len(words) + len(none_detectable) + len(over)


def test_methods_md_says_what_was_measured() -> None:
    """The last column of the perturbations' table: of each that was run, the study's first arm, with its options."""
    published = DOCS / "results" / "study2" / "shortcut-late" / "results.json.gz"
    measured: dict[str, str] = {}
    for strategy, _, above, mean, *_ in trap_results.ends(json.loads(gzip.decompress(published.read_bytes()))):
        name, _, options = strategy.strip("`").partition(" ")
        measured.setdefault(name, f"{above}, {mean}" + (f" (`{options}`)" if options else ""))
    table = (DOCS / "methods.md").read_text(encoding="utf-8").partition("| method | what is fed |")[2]
    rows = [line.split(" | ") for line in table.partition("\n\n")[0].splitlines()[2:]]
    told = {tuple(re.findall(r"`(\w+)`", row[0])): row[-1].removesuffix(" |") for row in rows}
    assert told == {names: "; ".join(measured.get(name, "–") for name in names) for names in told}
    assert set(measured) <= {name for names in told for name in names}


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
