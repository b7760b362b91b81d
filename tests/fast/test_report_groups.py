# SPDX-License-Identifier: Apache-2.0
"""The look into groups: bars of rewards, answers with their tokens, and how much of it a page holds."""

from __future__ import annotations

import copy
import functools
import html
import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest

from ngrpo.workbench.report import responses
from ngrpo.workbench.report.drawing import Series
from tests.report_example import example
from tests.report_example import groups as kept_steps
from tests.report_page import check_numbers, written

NAME = "neighbor rate=0.1"
SERIES = {NAME: Series(0, NAME)}


def run(kept: list[dict[str, Any]]) -> dict[str, Any]:
    return {"strategy": NAME, "seed": 1, "groups": kept}


def test_one_bar_for_each_reward_and_ten_of_many() -> None:
    few = [{"step": 1, "rewards": [0.0, 1.0, 1.0, 0.5], "groups": [{"answers": [{"reward": 1.0, "tokens": ["a"]}]}]}]
    (step,) = responses.groups([run(few)], SERIES)["runs"][0]["steps"]
    assert [(bar["label"], bar["count"], bar["share"], bar["held"]) for bar in step["bars"]] == [
        ("0.00", 1, 50, 0),
        ("0.50", 1, 50, 0),
        ("1.00", 2, 100, 1),
    ]
    assert step["mean"] == "0.625"
    few[0]["rewards"] = [float(i) for i in range(21)]
    (step,) = responses.groups([run(few)], SERIES)["runs"][0]["steps"]
    assert [bar["count"] for bar in step["bars"]] == [2] * 9 + [3] and step["bars"][0]["held"] == 1
    assert step["bars"][1]["label"] == "2.00 to 4.00"


def test_of_each_strategy_the_first_run_that_kept_any() -> None:
    kept = kept_steps(steps=2)
    runs = [{**run([]), "seed": 0}, run(kept), {**run(kept), "seed": 2}]
    (found,) = responses.groups(runs, SERIES)["runs"]
    assert found["seed"] == 1 and [step["step"] for step in found["steps"]] == [1, 11]
    assert responses.groups([run([])], SERIES) is None and responses.groups([], {}) is None


def test_a_page_holds_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = kept_steps(steps=9)
    one = len(json.dumps(kept[0]))
    monkeypatch.setattr(responses, "MOST_BYTES", int(3.5 * one))
    found = responses.groups([run(kept)], SERIES)
    assert [step["step"] for step in found["runs"][0]["steps"]] == [1, 41, 81] and found["left_out"] == 6
    data = example(steps=3)
    data["runs"][0]["groups"] = kept
    text, _ = written(tmp_path, data)
    assert "6 kept steps are left out" in text


@pytest.mark.more
def test_many_steps_of_ten_strategies_are_under_five_megabytes(tmp_path: Path) -> None:
    names = ("none", *(f"neighbor rate=0.{i}" for i in range(1, 10)))
    data = example(steps=40, seeds=1, strategies=names)
    for one in data["runs"]:
        one["groups"] = kept_steps(one["strategy"], steps=6, answers=16)
    text, _ = written(tmp_path, data)
    assert len(text.encode()) < 5_000_000 and "are left out" in text


def test_the_section(tmp_path: Path) -> None:
    summary = {"format": 1, "perturbation": {"name": "neighbor"}, "steps": [], "groups": kept_steps(), "seed": 4}
    text, page = written(tmp_path, summary)
    section = text.split('<section id="groups">')[1].split("</section>")[0]
    check_numbers(page)
    assert section.count('<details class="step"') == 3 and section.count('<details class="problem"') == 6
    assert section.count('class="answer"') == 48 and "4 different answers of 8 · distinct-2 0.31" in section
    assert "two answers part after 12.5 tokens on average" in section and "41 more tokens" in section
    # Each element inside of an answer is a token, and has its line.
    for notes, tokens in re.findall(r'data-notes="([^"]*)">(.*?)</div>', section, re.DOTALL):
        listed = json.loads(html.unescape(notes))
        assert len(listed) == len(re.findall("<(?:i|mark)[ >]", tokens)) > 20
        assert all(line[0].startswith("gap ") for line in listed)
    assert "and the gap" not in section and len(page.all("script")) == 1


def test_all_answers_the_same_are_said() -> None:
    (kept,) = kept_steps(steps=1)
    kept["groups"][0]["diversity"] = {"different": 1.0, "distinct_2": 0.1, "common_prefix": 30.0}
    (step,) = responses.groups([run([kept])], SERIES)["runs"][0]["steps"]
    assert step["groups"][0]["told"] == "all 8 answers are the same · distinct-2 0.10"


@pytest.mark.parametrize("gone", [True, False])
def test_missing_parts_never_break_it(tmp_path: Path, gone: bool) -> None:
    """Each key of a kept step, of a group and of an answer, absent or null."""
    (kept,) = kept_steps(steps=1, answers=2)
    kept["groups"] = kept["groups"][:1]
    data = example(steps=2, seeds=1, strategies=("none",))
    for path in ((), ("groups", 0), ("groups", 0, "answers", 0)):
        for key in functools.reduce(operator.getitem, path, kept):
            changed = copy.deepcopy(kept)
            place = functools.reduce(operator.getitem, path, changed)
            place[key] = None
            if gone:
                del place[key]
            data["runs"][0]["groups"] = [changed]
            written(tmp_path, data)
