# SPDX-License-Identifier: Apache-2.0
"""The head of a comparison's report: one sentence that says what was found, and a picture of the differences."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ngrpo.workbench.compare import results
from ngrpo.workbench.report import forest
from ngrpo.workbench.report.marks import Series
from tests.report_example import example
from tests.report_page import Page, check_numbers, written

MEAN, PASS = ("Mean@8", ("mean_at_n",)), ("Pass@8", ("pass_at_k", "8"))


def change(value: float, *, noise: bool, seeds: int = 3, over: str = "seeds", least: float | None = 0.1) -> dict:
    ends = {"low": value - 0.05, "high": value + 0.05}
    return {"value": value, **ends, "within_noise": noise, "seeds": seeds, "over": over, "detectable": least}


def summary(**changes: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    found = {"none": {"strategy": "none", "difference": None}}
    for name, one in changes.items():
        found[name] = {"strategy": name, "difference": one and {"mean_at_n": one}, "verdict": f"words on {name}"}
    return found


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            {"a": change(0.2, noise=False), "b": change(-0.2, noise=False), "c": change(0.3, noise=True)},
            "Better than “none” in Mean@8 beyond noise: a; worse: b.",
        ),
        (
            {"a": change(0.2, noise=True), "b": change(-0.2, noise=False)},
            "None of 2 strategies is better than “none” in Mean@8 beyond noise; worse: b.",
        ),
        ({"a": change(0.2, noise=True)}, "a is not better than “none” in Mean@8 beyond noise."),
        (
            {"a": change(0.2, noise=True), "b": None, "c": None},
            "None of 3 strategies is better than “none” in Mean@8 beyond noise (2 strategies could not be compared).",
        ),
        (
            {"a": change(0.2, noise=False, seeds=2)},
            "Better than “none” in Mean@8 beyond noise: a. Of 2 seeds: too few to tell a method from luck.",
        ),
        (
            {"a": change(0.2, noise=False, seeds=1, over="problems")},
            "One seed each: no strategy can be called better or worse than “none” in Mean@8.",
        ),
        ({"a": None}, "Nothing could be compared with “none” in Mean@8: no evaluation has finished for both."),
        ({}, None),
    ],
)
def test_the_sentence(rows: dict[str, Any], said: str | None) -> None:
    assert forest.sentence(summary(**rows), "none", [MEAN]) == said


def test_another_measure_is_named_for_who_is_not_named_already() -> None:
    rows = summary(a=change(0.2, noise=False), b=change(0.0, noise=True))
    for name, value in (("a", 0.3), ("b", -0.3)):
        rows[name]["difference"]["pass_at_k"] = {"8": change(value, noise=False)}
    said = forest.sentence(rows, "none", [MEAN, PASS])
    assert said == "Better than “none” in Mean@8 beyond noise: a; worse in Pass@8: b."
    assert forest.sentence(rows, "none", []) is None and forest.sentence(rows, "another", [MEAN]) is None


def test_the_picture_by_hand() -> None:
    """The longest length, 0.25, is 92 wide beside the middle at 100; the best stands first."""
    rows = summary(worse=change(-0.2, noise=False), missing=None, better=change(0.1, noise=True, least=0.125))
    series = {name: Series(i, name) for i, name in enumerate(rows)}
    better, worse, missing = forest.forest(series, rows, "none", MEAN)
    assert [one.series.name for one in (better, worse, missing)] == ["better", "worse", "missing"]
    assert (better.at, better.ends, better.band) == (136.8, (118.4, 155.2), (54.0, 146.0))
    assert (worse.at, worse.ends, worse.band) == (26.4, (8.0, 44.8), (63.2, 136.8))
    assert (missing.at, missing.ends, missing.band, missing.text) == (None, None, None, "words on missing")
    assert better.text == "+0.100 (+0.050 to +0.150), within noise"
    assert list(better.hint) == [
        "better",
        "Mean@8 +0.100 (+0.050 to +0.150), within noise",
        "words on better",
        "a difference below about 0.125 would often have been missed",
    ]


def test_as_many_seeds_as_the_verdicts_ask_for() -> None:
    assert forest.ENOUGH_SEEDS == results.ENOUGH_SEEDS


def head_alone(text: str) -> str:
    return text[text.index("<figure>") :]


def test_the_head_has_one_sentence_and_the_rest_within_reach(tmp_path: Path) -> None:
    data = example()
    text, page = written(tmp_path, data)
    head = text[: text.index("<nav")]
    assert "Better than “none” in Mean@8 beyond noise: neighbor rate=0.1; worse: gumbel." in head
    assert head.count('class="finding"') == 1 and "the runs do not tell them apart" not in Page(head_alone(head)).prose
    assert "the runs do not tell them apart" in page.prose  # below the table
    hints = {row[0]: row for each in page.all("li") if (row := json.loads(each.get("data-hint") or "null"))}
    verdict_of = {row["strategy"]: row["verdict"] for row in data["summary"] if row["strategy"] != "none"}
    assert {name: row[2] for name, row in hints.items()} == verdict_of
    order = list(hints)
    assert order[0] == "neighbor rate=0.1" and order[-1] == "gumbel"
    assert len(re.findall('class="band"', head)) == 3 and "would often have been missed" in head
    check_numbers(page)


def test_one_seed_has_no_band(tmp_path: Path) -> None:
    text, _ = written(tmp_path, example(seeds=1))
    head = text[: text.index("<nav")]
    assert "One seed each: no strategy" in head
    assert 'class="band"' not in head
    assert "pale band" not in head


def test_without_a_baseline_there_is_no_picture(tmp_path: Path) -> None:
    data = copy.deepcopy(example(steps=3))
    data["baseline"] = None
    text, _ = written(tmp_path, data)
    assert 'class="forest"' not in text and 'class="finding"' not in text
