# SPDX-License-Identifier: Apache-2.0
"""Parts of the report: scales, figures as text, means over seeds, looks, its head, and the kept groups."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ngrpo.workbench.report import headline, responses
from ngrpo.workbench.report.charts import _seed_means
from ngrpo.workbench.report.drawing import Series, beginning, spread
from ngrpo.workbench.report.values import between, duration, format_number, shown, size, token
from tests.support.report_example import example
from tests.support.report_example import groups as kept_steps
from tests.support.report_page import check_numbers, written


def test_looks_of_twelve_strategies_differ_without_colour() -> None:
    """Any two of twelve differ in dash, or in the marker's shape or fill."""
    looks = [Series(index, "x") for index in range(12)]
    assert len({(one.classes.split()[1], one.shape, one.hollow) for one in looks}) == 12
    assert len({one.classes for one in (Series(index, "x") for index in range(37))}) == 37


def test_seeds_are_averaged_per_bin() -> None:
    """Steps 1 and 2 share a bin. Seed a: (0.2 + 0.4) / 2 = 0.3; seed b: 0.5. Mean 0.4, band from 0.3 to 0.5."""
    runs = [{1: {"reward": 0.2}, 2: {"reward": 0.4}, 3: {"reward": float("nan")}}, {2: {"reward": 0.5}}]
    first, second = _seed_means(runs, "reward", [[1, 2], [3]])
    assert first == pytest.approx((1.5, 0.4, 0.3, 0.5))
    assert second == (3.0, None, None, None)
    assert _seed_means(runs[:1], "reward", [[1, 2]])[0] == pytest.approx((1.5, 0.3, None, None))


def test_scales() -> None:
    """Steps of 1, 2, 2.5 or 5: 0.13 to 0.92 in five is 0.158 each, so 0.2."""
    scale = spread([0.13, 0.92], (100.0, 0.0), share=True)
    assert scale.labels == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert scale(0.5) == 50.0 and scale(7.0) == 0.0
    assert spread([0.8, 0.81], (0, 1)).labels == ["0.800", "0.802", "0.804", "0.806", "0.808", "0.810"]
    assert spread([3.0, 3.0], (0.0, 1.0))(3.0) == 0.5
    assert spread([0.0, 4e-8], (0, 1), count=4).labels == ["0", "1e−8", "2e−8", "3e−8", "4e−8"]
    assert spread([0.0, 1.4e-5], (0, 1), count=3).labels == ["0", "5e−6", "1e−5", "1.5e−5"]
    assert spread([0.0, 4e6], (0, 1), count=4).labels == ["0", "1e6", "2e6", "3e6", "4e6"]
    assert spread([0.0, 0.0004], (0, 1), count=4).labels[1] == "0.0001"
    assert spread([1, 40], (0, 1), count=4, least=1.0).labels == ["0", "10", "20", "30", "40"]
    assert spread([1, 3], (0, 1), count=7, least=1.0).labels == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("values", "share", "said"),
    [
        ([0.8, 0.81], False, ", axis from 0.800"),
        ([0.13, 0.92], True, ""),
        ([-0.4, 0.2], False, ""),
        ([-0.4, -0.3], False, ", axis up to −0.30"),
        ([2e-6, 2.1e-6], False, ", axis from 2e−6"),
    ],
)
def test_an_axis_that_leaves_out_zero_says_so(values: list[float], share: bool, said: str) -> None:
    assert beginning(spread(values, (0.0, 1.0), share=share)) == said


def test_values() -> None:
    numbers = [format_number(value) for value in (0.12345, -1, 1234.5, None, float("nan"), True, "3")]
    assert numbers == ["0.123", "−1.000", "1,234.500", "–", "–", "–", "–"]
    assert format_number(3.2e-6, 5) == "3.2e−6"
    signed = [format_number(value, sign=True) for value in (0.03, -0.03, 0, None)]
    assert signed == ["+0.030", "−0.030", "0.000", "–"]
    assert between(-0.1, 0.2, 1, sign=True) == "−0.1 to +0.2" and between(None, 1) == "–"
    assert (size(0), size(1536), size(2 * 1024**3)) == ("0 B", "1.50 KiB", "2.00 GiB")
    assert (duration(59.6), duration(720), duration(11100)) == ("60 s", "12 min", "3 h 05 min")
    assert [shown(v) for v in (None, "", float("nan"), 0, "ab\x07\ud800")] == ["–", "–", "–", "0", "ab␇\ufffd"]
    assert (token("\n\n"), token(" "), token("\ta")) == ("⏎⏎", "␣", "⇥a")


MEAN, PASS = headline.Metric("Mean@8", ("mean_at_n",)), headline.Metric("Pass@8", ("pass_at_k", "8"))


def change(value: float, *, noise: bool, least: float = 0.1) -> dict[str, Any]:
    ends = {"low": value - 0.05, "high": value + 0.05}
    return {"value": value, **ends, "within_noise": noise, "seeds": 3, "over": "seeds", "detectable": least}


def summary(**changes: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    found = {"none": {"strategy": "none", "difference": None}}
    for name, one in changes.items():
        found[name] = {"strategy": name, "difference": one and {"mean_at_n": one}, "verdict": f"words on {name}"}
    return found


BETTER, WORSE, WITHIN = change(0.2, noise=False), change(-0.2, noise=False), change(0.3, noise=True)
TWO_SEEDS, ONE_SEED = {**BETTER, "seeds": 2}, {**BETTER, "seeds": 1, "over": "problems"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"a": BETTER, "b": WORSE, "c": WITHIN}, "Better than “none” in Mean@8 beyond noise: a; worse: b."),
        ({"a": WITHIN, "b": WORSE}, "None of 2 arms is better than “none” in Mean@8 beyond noise; worse: b."),
        (
            {"a": WITHIN, "b": None, "c": None},
            "None of 3 arms is better than “none” in Mean@8 beyond noise (2 arms could not be compared).",
        ),
        (
            {"a": TWO_SEEDS},
            "Better than “none” in Mean@8 beyond noise: a. Of 2 seeds: too few to tell a method from luck.",
        ),
        ({"a": ONE_SEED}, "One seed each: no arm can be called better or worse than “none” in Mean@8."),
        ({"a": None}, "Nothing could be compared with “none” in Mean@8: no evaluation has finished for both."),
        ({}, None),
    ],
)
def test_the_sentence(rows: dict[str, Any], said: str | None) -> None:
    assert headline.sentence(summary(**rows), "none", [MEAN]) == said


def test_another_measure_is_named_for_who_is_not_named_already() -> None:
    rows = summary(a=change(0.2, noise=False), b=change(0.0, noise=True))
    for name, value in (("a", 0.3), ("b", -0.3)):
        rows[name]["difference"]["pass_at_k"] = {"8": change(value, noise=False)}
    said = headline.sentence(rows, "none", [MEAN, PASS])
    assert said == "Better than “none” in Mean@8 beyond noise: a; worse in Pass@8: b."
    assert headline.sentence(rows, "none", []) is None and headline.sentence(rows, "another", [MEAN]) is None


def test_the_picture_by_hand() -> None:
    """The longest length, 0.25, is 92 wide beside the middle at 100; the best stands first."""
    rows = summary(worse=change(-0.2, noise=False), missing=None, better=change(0.1, noise=True, least=0.125))
    series = {name: Series(i, name) for i, name in enumerate(rows)}
    better, worse, missing = headline.forest(series, rows, "none", MEAN)
    assert [one.series.name for one in (better, worse, missing)] == ["better", "worse", "missing"]
    assert (better.at, better.ends, better.band) == (136.8, (118.4, 155.2), (54.0, 146.0))
    assert (worse.at, worse.ends, worse.band) == (26.4, (8.0, 44.8), (63.2, 136.8))
    assert (missing.at, missing.ends, missing.band, missing.text) == (None, None, None, "words on missing")
    assert better.text == "+0.100 (+0.050 to +0.150), within noise"
    missed = "a difference below about 0.125 would often have been missed"
    assert list(better.hint) == ["better", f"Mean@8 {better.text}", "words on better", missed]


NAME = "neighbor rate=0.1"
SERIES = {NAME: Series(0, NAME)}


def kept_run(kept: list[dict[str, Any]]) -> dict[str, Any]:
    return {"strategy": NAME, "seed": 1, "groups": kept}


def test_one_bar_for_each_reward_and_ten_of_many() -> None:
    few = [{"step": 1, "rewards": [0.0, 1.0, 1.0, 0.5], "groups": [{"answers": [{"reward": 1.0, "tokens": ["a"]}]}]}]
    (step,) = responses.groups([kept_run(few)], SERIES)["runs"][0]["steps"]
    bars = [(bar["label"], bar["count"], bar["share"], bar["held"]) for bar in step["bars"]]
    assert bars == [("0.00", 1, 50, 0), ("0.50", 1, 50, 0), ("1.00", 2, 100, 1)]
    assert step["mean"] == "0.625"
    few[0]["rewards"] = [float(i) for i in range(21)]
    (step,) = responses.groups([kept_run(few)], SERIES)["runs"][0]["steps"]
    assert [bar["count"] for bar in step["bars"]] == [2] * 9 + [3] and step["bars"][0]["held"] == 1
    assert step["bars"][1]["label"] == "2.00 to 4.00"


def test_a_page_holds_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each strategy the first run that kept any."""
    kept = kept_steps(steps=9)
    one = len(json.dumps(kept[0]))
    monkeypatch.setattr(responses, "MOST_BYTES", int(3.5 * one))
    found = responses.groups([{**kept_run([]), "seed": 0}, kept_run(kept), {**kept_run(kept), "seed": 2}], SERIES)
    assert [step["step"] for step in found["runs"][0]["steps"]] == [1, 41, 81] and found["left_out"] == 6
    assert found["runs"][0]["seed"] == 1 and responses.groups([kept_run([])], SERIES) is None
    data = example(steps=3)
    data["runs"][0]["groups"] = kept
    text, _ = written(tmp_path, data)
    assert "6 kept steps are left out" in text


def test_the_section(tmp_path: Path) -> None:
    kept = kept_steps()
    kept[0]["groups"][0]["diversity"] = {"different": 1.0, "distinct_2": 0.1, "common_prefix": 30.0}
    summary = {"format": 1, "perturbation": {"name": "neighbor"}, "steps": [], "groups": kept, "seed": 4}
    text, page = written(tmp_path, summary)
    section = text.split('<section id="groups">')[1].split("</section>")[0]
    check_numbers(page)
    assert section.count('<details class="step"') == 3 and section.count('<details class="problem"') == 6
    assert section.count('class="answer"') == 48 and "4 different responses of 8 · distinct-2 0.31" in section
    assert "all 8 responses are the same · distinct-2 0.10<" in section
    assert "two responses part after 12.5 tokens on average" in section and "41 more tokens" in section
    # Each element inside of an answer is a token, and has its line.
    for notes, tokens in re.findall(r'data-notes="([^"]*)">(.*?)</div>', section, re.DOTALL):
        listed = json.loads(html.unescape(notes))
        assert len(listed) == len(re.findall("<(?:i|mark)[ >]", tokens)) > 20
        assert all(line[0].startswith("mismatch ") for line in listed)
