# SPDX-License-Identifier: Apache-2.0
"""What docs/ publishes of studies is what their results give; contrasts pooled over tasks; how intervals cover."""

import copy
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
from ngrpo.workbench.compare import summaries
from tests.conftest import ROOT
from tests.support.report_example import example

DOCS = ROOT / "docs"
STUDY3 = ROOT / "examples" / "study3"
PAIRS = {"neighbor helps": ["neighbor", "none"], "noise helps": ["gumbel", "none"]}


def with_scores(ours: list[int], baseline: list[int]) -> dict[str, Any]:
    """A comparison in which each run has one problem, of which so many of 16 answers are right, by seed."""
    results = example(steps=2, seeds=len(ours))
    for run in results["runs"]:
        by_seed = ours if run["strategy"] == "neighbor" else baseline
        problem = {"id": "a", "n": 16, "correct": by_seed[run["seed"]]}
        run |= {"status": "done", "evaluation": {"problems": [problem]}}
    return results


def test_contrasts_by_hand() -> None:
    """Differences of 2, 4, 6 sixteenths on one task and 1, 1, 4 on the other: means 4/16 and 2/16, pooled 3/16. The
    second contrast is of equal scores: its p is none, so the first one's is corrected for nothing."""
    tasks = {
        "one": with_scores([6, 8, 10], [4, 4, 4]),
        "other": with_scores([5, 5, 8], [4, 4, 4]),
    }
    neighbor_row, noise_row = study.contrasts(tasks, PAIRS, None)
    name, one, other, pooled_cell, p_cell, improvement = neighbor_row
    expected = pooled.mean_difference([np.array([2, 4, 6]) / 16, np.array([1, 1, 4]) / 16])
    assert expected["value"] == pytest.approx(3 / 16)
    assert name == "neighbor helps"
    assert one.startswith("+0.250 [")
    assert other.startswith("+0.125 [")
    least = pooled.detectable([np.array([2, 4, 6]) / 16, np.array([1, 1, 4]) / 16], comparisons=2)
    assert pooled_cell == f"+0.188 [{expected['low']:+.3f}, {expected['high']:+.3f}], detectable {least:.3f}"
    assert p_cell == f"{expected['p']:.3g} ({expected['p']:.3g})"
    assert improvement.startswith("1.000")
    _name, _one, _other, pooled_cell, p_cell, _improvement = noise_row
    assert pooled_cell.startswith("+0.000")
    assert p_cell == "–"


@pytest.mark.parametrize(("spreads", "comparisons"), [((1.0, 1.0), 1), ((1.0, 0.2), 3)])
def test_four_of_five_studies_find_the_detectable_pooled_difference(
    spreads: tuple[float, float], comparisons: int
) -> None:
    """4,000 studies of two tasks with 4 seeds; 0.8 within 3.2 standard errors of 0.0063.

    With fixed degrees of freedom, 6, and the mean spread, 71% of the studies of unequal tasks would find theirs.
    """
    shape = np.array([-1.0, -1.0, 1.0, 1.0]) / np.sqrt(4 / 3)  # of standard deviation 1
    least = pooled.detectable([shape * spread for spread in spreads], comparisons)
    assert least is not None
    draw = np.random.default_rng(1)
    found = 0
    for _ in range(4000):
        study_result = pooled.mean_difference([draw.normal(least, spread, size=4) for spread in spreads])
        p = study_result["p"]
        assert p is not None
        found += p < 0.05 / comparisons and study_result["value"] > 0
    assert found / 4000 == pytest.approx(0.8, abs=0.02)


def test_one_task_alone_has_the_detectable_difference_of_the_paired_t_test() -> None:
    formula = statistics.detectable(1.0, 5, 3)
    assert pooled.detectable([np.arange(5) / np.sqrt(2.5)], 3) == pytest.approx(formula, rel=0.01)


def test_two_seeds_that_disagree_leave_every_difference_possible() -> None:
    """Differences of 14 and -10 sixteenths: their t interval is wider than shares can differ. Of four pairs two are
    won and one is tied, and two seeds are too few for an interval of that."""
    neighbor_row, _ = study.contrasts({"one": with_scores([15, 1], [1, 11])}, PAIRS, None)
    _name, one, pooled_cell, _p, improvement = neighbor_row
    assert one == "+0.125 [-1.000, +1.000], detectable – (2 seeds)"
    assert pooled_cell == "+0.125 [-1.000, +1.000], detectable –"
    assert improvement == "0.625"


def test_seeds_without_a_partner_are_left_out_and_too_few_are_said() -> None:
    results = with_scores([6, 8, 10], [4, 4, 4])
    for run in results["runs"]:
        if run["strategy"] == "none" and run["seed"] > 0:
            run["status"] = "failed"
    neighbor_row, _ = study.contrasts({"one": results}, PAIRS, None)
    assert neighbor_row == ["neighbor helps", "– (1 seed)", "–", "–", "–"]


@pytest.mark.parametrize(
    ("program", "results", "page", "options"),
    [
        (study, "", "study", []),
        (study, "study3", "study3", ["--contrasts", str(STUDY3 / "contrasts.yaml"), "--design", "study3.md"]),
        *((trap_results, name, name, []) for name in ("study2", "study2_pilot", "study2_pilot_larger_rate")),
    ],
)
def test_published_tables_are_those_of_the_results(
    program: ModuleType, results: str, page: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DOCS / "results" / results
    monkeypatch.setattr(publishing, "write_report", lambda data, path: None)
    monkeypatch.setattr(sys, "argv", [page, str(folder), "--out", str(tmp_path), *options])
    program.main()
    assert (tmp_path / "tables.md").read_text() == (DOCS / "studies" / "tables" / f"{page}.md").read_text()
    assert publishing.published(tmp_path) == publishing.published(folder)


def part(results: dict[str, Any], seeds: set[int]) -> dict[str, Any]:
    """Those runs of a comparison that have one of the seeds."""
    runs = [run for run in results["runs"] if run["seed"] in seeds]
    names = [strategy["id"] for strategy in results["strategies"]]
    return {**results, "runs": runs, "summary": summaries.summarise(runs, names, results["baseline"])}


def test_parts_of_a_study_are_joined_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of its own, and seeds one after the other: the first on another machine than those after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(publishing, "write_report", lambda data, path: None)
    Path("contrasts.yaml").write_text("helps: [neighbor, none]\n")
    whole = example(steps=2)
    parts = [("more", whole)]
    for seed, cpu in ((0, "one"), (1, "other"), (2, "other")):
        machine = {**whole["machine"], "cpu": cpu, "gpu": f"card of {cpu}"}
        command = ["ngrpo", "compare", "--seeds", str(seed)]
        parts.append(("sums", {**part(whole, {seed}), "machine": machine, "command": command}))
    for number, (task, results) in enumerate(parts):
        folder = Path(f"part{number}", task)
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(results))
        monkeypatch.setattr(
            sys, "argv", ["study", str(folder.parent), "--out", "out", "--join", "--contrasts", "contrasts.yaml"]
        )
        study.main()
    together = publishing.published(Path("out"))
    assert sorted(together) == ["more", "sums"]
    assert together["sums"]["summary"] == whole["summary"]
    assert {run["id"] for run in together["sums"]["runs"]} == {run["id"] for run in whole["runs"]}
    assert together["sums"]["machine"]["cpu"] == "one; other", "each processor once"
    assert together["sums"]["machine"]["gpu"] == "card of one; card of other"
    of_all_runs = comparison.warnings_of(together["sums"])
    assert together["sums"]["warnings"] == of_all_runs, "no part has warnings of its own"
    assert sum("none: " in line and "cut" in line for line in of_all_runs) == 1
    tables = Path("out/tables.md").read_text()
    assert "(3 seeds)" in tables
    for seed in range(3):
        assert f"\nngrpo compare --seeds {seed}\n" in tables


def test_a_run_that_the_first_part_did_not_finish_is_taken_from_the_second() -> None:
    whole = example(steps=2)
    first, *others = whole["runs"]
    unfinished = {**whole, "runs": [{**first, "status": "failed", "evaluation": None}, *others]}
    together = publishing.joined(unfinished, whole)
    assert together["summary"] == whole["summary"]
    assert first["id"] not in {run["id"] for run in together["repeated"]}
    assert len(together["repeated"]) == len(others)
    assert publishing.joined(whole, unfinished)["summary"] == whole["summary"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "other"}, "parts with different models are not joined: smollm2-135m and other"),
        ({"task": "math:elsewhere/train.jsonl"}, "different tasks"),
        ({"openrlhf_args": ["--actor.adam.lr", "1e-6"]}, "different flags"),
        ({"untrained": {"n": 1}}, "different numbers of responses"),
        ({"summary": [{"strategy": "neighbor"}]}, r"\['neighbor'\] has no runs of none"),
    ],
)
def test_parts_that_were_run_differently_are_not_joined(changed: dict[str, Any], message: str) -> None:
    whole = example(steps=2)
    with pytest.raises(ValueError, match=message):
        publishing.joined(whole, {**whole, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n": 8}, "evaluations with different numbers of responses"),
        ({"sampling": {"temperature": 0.3}}, "different sampling"),
        ({"scorer": "numeric"}, "different scorers"),
        ({"digest": "of another file"}, "different contents of the problem file"),
        ({"problems": [{"id": "another", "n": 4, "correct": 4}]}, "different problems"),
    ],
)
def test_a_part_with_a_run_that_was_evaluated_differently_is_not_joined(changed: dict[str, Any], message: str) -> None:
    whole = example(steps=2, strategies=["none", "neighbor"])
    whole["runs"][0]["evaluation"]["digest"] = "of the file"  # which the results published so far lack
    for run in whole["runs"]:
        run["evaluation"]["sampling"]["seed"] = run["seed"]
    publishing.joined(whole, whole)
    more = copy.deepcopy(whole)
    more["runs"][-1]["evaluation"] |= changed
    with pytest.raises(ValueError, match=message):
        publishing.joined(whole, more)


def test_an_arm_with_another_value_of_an_option_is_not_joined() -> None:
    """An option that one part alone records is of a later release and no difference."""
    whole = example(steps=2)
    more = copy.deepcopy(whole)
    (arm,) = (arm for arm in more["strategies"] if arm["id"] == "neighbor")
    arm["perturbation"]["new_option"] = 1
    publishing.joined(whole, more)
    arm["perturbation"]["rate"] = 0.9
    with pytest.raises(ValueError, match=r"arms 'neighbor' with different rate are not joined: 0.1 and 0.9"):
        publishing.joined(whole, more)


def test_a_seed_whose_runs_came_from_different_code_is_named() -> None:
    whole = example(steps=2)
    for run in whole["runs"]:
        run["code"] = "aaa" if run["seed"] == 0 else "bbb"
    assert not any("code" in line for line in publishing.joined(whole, whole)["warnings"])
    (changed,) = (run for run in whole["runs"] if run["strategy"] == "neighbor" and run["seed"] == 0)
    changed["code"] = "bbb"
    *_, warning = publishing.joined(whole, whole)["warnings"]
    assert warning.startswith("seed 0: its runs differ in the code of this project (aaa, bbb), and not only in their")


@pytest.mark.parametrize(
    ("program", "flags", "message"),
    [
        (study, ["--contrasts", "contrasts.yaml"], "no strategy is called 'neighbour'"),
        (trap_results, [], "2 runs are not finished: none-seed0"),
    ],
)
def test_what_cannot_be_published(
    program: ModuleType,
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = example()
    results["runs"][0]["status"] = "pending"
    monkeypatch.chdir(tmp_path)
    Path("runs/sums").mkdir(parents=True)
    Path("runs/sums/results.json").write_text(json.dumps(results))
    Path("contrasts.yaml").write_text("nobody: [neighbour, none]\n")
    monkeypatch.setattr(sys, "argv", ["publish", "runs", "--out", "out", *flags])
    with pytest.raises(SystemExit):
        program.main()
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def leaves(value: object, path: str = "") -> dict[str, object]:
    """The numbers and words of a result, each under its path."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return {path: value}
    inner: dict[str, object] = {}
    for key, item in items:
        inner |= leaves(item, f"{path}/{key}")
    return inner


def test_published_results_are_computed_again() -> None:
    """From the runs that docs/ holds; docs/studies/study2.md has the ends of intervals that are others since."""
    changes: list[tuple[str, Any, Any]] = []  # path, published, computed
    for file in DOCS.glob("results/**/results.json.gz"):
        results = json.loads(gzip.decompress(file.read_bytes()))
        threshold = results["summary"][0].get("above", {}).get("threshold")
        names = [strategy["id"] for strategy in results["strategies"]]
        computed = leaves(summaries.summarise(results["runs"], names, results["baseline"], threshold))
        for path, published in leaves(results["summary"]).items():
            if computed.get(path, ()) != published:
                changes.append((path, published, computed[path]))
    ends = [path for path, _, _ in changes if path.endswith(("/low", "/high"))]
    verdicts = [(published, computed) for path, published, computed in changes if path.endswith("verdict")]
    units = [computed for path, _, computed in changes if path.endswith("/over")]
    none_detectable = [
        computed for path, published, computed in changes if path.endswith("detectable") and published == 0.0
    ]
    assert len(ends) == 76
    for published, computed in verdicts:
        assert published.partition(" [")[0] == computed.partition(" [")[0]
    assert set(none_detectable) == {None}
    assert set(units) == {"problems"}
    assert len(changes) == len(ends) + len(verdicts) + len(none_detectable) + len(units)


def test_methods_md_says_what_was_measured() -> None:
    """The last column of the perturbations' table: of each that was run, the study's first arm, with its options."""
    file = DOCS / "results" / "study2" / "shortcut-late" / "results.json.gz"
    results = json.loads(gzip.decompress(file.read_bytes()))
    measured: dict[str, str] = {}
    for strategy, _by_seed, above, mean, *_tests in trap_results.ends(results):
        name, _, options = strategy.strip("`").partition(" ")
        suffix = f" (`{options}`)" if options else ""
        measured.setdefault(name, f"{above}, {mean}{suffix}")
    page = (DOCS / "methods.md").read_text(encoding="utf-8")
    table = page.partition("| method | what is fed |")[2].partition("\n\n")[0]
    all_names: set[str] = set()
    for line in table.splitlines()[2:]:
        cells = line.removesuffix(" |").split(" | ")
        names = re.findall(r"`(\w+)`", cells[0])
        assert cells[-1] == "; ".join(measured.get(name, "–") for name in names), names
        all_names.update(names)
    assert set(measured) <= all_names


@pytest.mark.parametrize(
    ("draws", "same_arms", "same_seeds"),
    [("own", False, False), ("of a seed", True, False), ("of all seeds", True, True)],
)
def test_simulated_strategies_share_draws(draws: coverage.Draws, same_arms: bool, same_seeds: bool) -> None:
    """Runs that do not differ, of equal strategies: only their draws can make their scores differ."""
    alike = coverage.World("alike", shared=0.0, run=0.0, problem=0.0)
    ((first, second),) = alike.scores(np.random.default_rng(0), 1, 3, (0.0, 0.0), draws)
    assert np.array_equal(first, second) is same_arms
    assert np.array_equal(first[0], first[1]) is same_seeds


@pytest.mark.more
def test_students_t_covers_and_the_bootstrap_does_not() -> None:
    """400 trials, standard error 0.011 at 0.95. With five seeds a percentile interval reaches 1.96 · sqrt(4/5) standard
    errors where t reaches 2.776, which under a normal distribution is 85%."""
    spread = coverage.WORLDS[1]
    assert coverage.coverage(spread, 5, 400, coverage.student) == pytest.approx(0.95, abs=0.033)
    assert coverage.coverage(spread, 5, 400, coverage.percentile) < 0.90


@pytest.mark.more
def test_with_few_problems_equal_strategies_are_seldom_called_different() -> None:
    """1000 trials, standard error 0.007 at 0.05."""
    percentile_share, expanded_share = coverage.found_with_one_seed(8, 1000)
    assert percentile_share > 0.075
    assert expanded_share < 0.075


def test_the_pooled_difference_by_hand() -> None:
    """Differences 1, 3 and 2, 6: means 2 and 4, so 3. Variances 2 and 8 of two each: (1 + 4) / 4 = 1.25 in all, with
    1.25² / (0.25² + 1²) = 1.4706 degrees of freedom."""
    difference = pooled.mean_difference([np.array([1.0, 3.0]), np.array([2.0, 6.0])])
    error = math.sqrt(1.25)
    freedom = 1.25**2 / (0.25**2 + 1)
    half_width = stats.t.ppf(0.975, freedom) * error
    assert difference["value"] == 3.0
    assert difference["low"] == pytest.approx(3 - half_width)
    assert difference["high"] == pytest.approx(3 + half_width)
    assert difference["p"] == pytest.approx(2 * stats.t.sf(3 / error, freedom))


def test_the_probability_of_improvement_by_hand() -> None:
    """On the first task 3 of 4 pairs are won; on the second one is won, one tied, two lost: (0.75 + 0.375) / 2."""
    first_task = (np.array([0.5, 0.9]), np.array([0.4, 0.6]))
    second_task = (np.array([0.2, 0.7]), np.array([0.7, 0.3]))
    improvement = pooled.probability_of_improvement([first_task, second_task])
    assert improvement["value"] == pytest.approx((0.75 + 0.375) / 2)
    assert improvement["low"] < improvement["value"] < improvement["high"]
    always_better = (np.array([0.9, 0.8]), np.array([0.1, 0.2]))
    certain = pooled.probability_of_improvement([always_better])
    assert certain == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_scores_that_differ_by_rounding_are_equal() -> None:
    """0.3 − 0.2 and 0.4 − 0.3 differ in their last bits; so do the means of the same Pass@k in another order."""
    difference = pooled.mean_difference([np.array([0.3, 0.4]) - np.array([0.2, 0.3])])
    assert difference == {"value": pytest.approx(0.1), "low": None, "high": None, "p": None}
    ours = np.array([0.1 + 0.2, 0.9])
    improvement = pooled.probability_of_improvement([(ours, np.array([0.3, 0.9]))])
    assert improvement["value"] == pytest.approx((0.5 + 0.0 + 1.0 + 0.5) / 4)
