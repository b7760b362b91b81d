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


def test_looks_of_twelve_arms_differ_without_colour() -> None:
    """Any two of twelve differ in dash, or in the marker's shape or fill."""
    looks = set()
    for index in range(12):
        series = Series(index, "x")
        _, dash = series.classes.split()[:2]
        looks.add((dash, series.shape, series.hollow))
    assert len(looks) == 12


def test_classes_of_37_arms_differ() -> None:
    assert len({Series(index, "x").classes for index in range(37)}) == 37


def test_seeds_are_averaged_per_bin() -> None:
    """Steps 1 and 2 share a bin. Seed a: (0.2 + 0.4) / 2 = 0.3; seed b: 0.5. Mean 0.4, band from 0.3 to 0.5."""
    seed_a = {1: {"reward": 0.2}, 2: {"reward": 0.4}, 3: {"reward": float("nan")}}
    seed_b = {2: {"reward": 0.5}}
    first, second = _seed_means([seed_a, seed_b], "reward", [[1, 2], [3]])
    # The middle of the bin's steps, the mean, and the band's ends.
    assert first == pytest.approx((1.5, 0.4, 0.3, 0.5))
    assert second == (3.0, None, None, None)


def test_one_seed_has_no_band() -> None:
    seed = {1: {"reward": 0.2}, 2: {"reward": 0.4}}
    assert _seed_means([seed], "reward", [[1, 2]])[0] == pytest.approx((1.5, 0.3, None, None))


def test_a_scale_of_shares() -> None:
    """Steps of 1, 2, 2.5 or 5: 0.13 to 0.92 in five is 0.158 each, so 0.2."""
    scale = spread([0.13, 0.92], (100.0, 0.0), share=True)
    assert scale.labels == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert scale(0.5) == 50.0
    assert scale(7.0) == 0.0, "what is beyond the scale stands at its end"


@pytest.mark.parametrize(
    ("values", "options", "labels"),
    [
        ([0.8, 0.81], {}, ["0.800", "0.802", "0.804", "0.806", "0.808", "0.810"]),
        ([0.0, 4e-8], {"count": 4}, ["0", "1e−8", "2e−8", "3e−8", "4e−8"]),
        ([0.0, 1.4e-5], {"count": 3}, ["0", "5e−6", "1e−5", "1.5e−5"]),
        ([0.30012, 0.3002], {"count": 4}, ["3.0012e−1", "3.0014e−1", "3.0016e−1", "3.0018e−1", "3.002e−1"]),
        ([0.0, 4e6], {"count": 4}, ["0", "1e6", "2e6", "3e6", "4e6"]),
        ([0.0, 0.0004], {"count": 4}, ["0.0000", "0.0001", "0.0002", "0.0003", "0.0004"]),
        ([1, 40], {"count": 4, "least": 1.0}, ["0", "10", "20", "30", "40"]),
        ([1, 3], {"count": 7, "least": 1.0}, ["1", "2", "3"]),
    ],
)
def test_labels_of_scales(values: list[float], options: dict[str, Any], labels: list[str]) -> None:
    assert spread(values, (0, 1), **options).labels == labels


def test_a_single_value_is_in_the_middle_of_its_scale() -> None:
    assert spread([3.0, 3.0], (0.0, 1.0))(3.0) == 0.5


@pytest.mark.parametrize(
    ("values", "share", "note"),
    [
        ([0.8, 0.81], False, ", axis from 0.800"),
        ([0.13, 0.92], True, ""),
        ([-0.4, 0.2], False, ""),
        ([-0.4, -0.3], False, ", axis up to −0.30"),
        ([2e-6, 2.1e-6], False, ", axis from 2e−6"),
    ],
)
def test_an_axis_that_leaves_out_zero_says_so(values: list[float], share: bool, note: str) -> None:
    assert beginning(spread(values, (0.0, 1.0), share=share)) == note


def test_numbers_as_text() -> None:
    numbers = [format_number(value) for value in (0.12345, -1, 1234.5, None, float("nan"), True, "3")]
    assert numbers == ["0.123", "−1.000", "1,234.500", "–", "–", "–", "–"]
    assert format_number(3.2e-6, 5) == "3.2e−6"
    signed = [format_number(value, sign=True) for value in (0.03, -0.03, 0, None)]
    assert signed == ["+0.030", "−0.030", "0.000", "–"]


def test_intervals_as_text() -> None:
    assert between(-0.1, 0.2, 1, sign=True) == "−0.1 to +0.2"
    assert between(None, 1) == "–"


def test_sizes_and_durations_as_text() -> None:
    assert size(0) == "0 B"
    assert size(1536) == "1.50 KiB"
    assert size(2 * 1024**3) == "2.00 GiB"
    assert duration(59.6) == "60 s"
    assert duration(720) == "12 min"
    assert duration(11100) == "3 h 05 min"


def test_texts_and_tokens_without_control_characters() -> None:
    texts = [shown(value) for value in (None, "", float("nan"), 0, "ab\x07\ud800")]
    assert texts == ["–", "–", "–", "0", "ab␇\ufffd"]
    assert token("\n\n") == "⏎⏎"
    assert token(" ") == "␣"
    assert token("\ta") == "⇥a"


MEAN = headline.Metric("Mean@8", ("mean_at_n",))


def change(value: float, *, noise: bool, least: float = 0.1) -> dict[str, Any]:
    """A difference over three seeds, with the interval ``value`` ± 0.05; ``least`` is what could be seen."""
    return {
        "value": value,
        "low": value - 0.05,
        "high": value + 0.05,
        "within_noise": noise,
        "seeds": 3,
        "over": "seeds",
        "detectable": least,
    }


def summary(**differences: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Rows of the summary by arm: the baseline's and one for each difference in Mean@8."""
    rows: dict[str, dict[str, Any]] = {"none": {"strategy": "none", "difference": None}}
    for name, difference in differences.items():
        by_measure = difference and {"mean_at_n": difference}
        rows[name] = {"strategy": name, "difference": by_measure, "verdict": f"words on {name}"}
    return rows


BETTER = change(0.2, noise=False)
WORSE = change(-0.2, noise=False)
WITHIN = change(0.3, noise=True)
TWO_SEEDS = {**BETTER, "seeds": 2}
ONE_SEED = {**BETTER, "seeds": 1, "over": "problems"}


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [
        pytest.param(
            {"a": BETTER, "b": WORSE, "c": WITHIN},
            "Better than “none” in Mean@8 beyond noise: a; worse: b.",
            id="better and worse",
        ),
        pytest.param(
            {"a": WITHIN, "b": WORSE},
            "None of 2 arms is better than “none” in Mean@8 beyond noise; worse: b.",
            id="none better",
        ),
        pytest.param(
            {"a": WITHIN, "b": None, "c": None},
            "None of 3 arms is better than “none” in Mean@8 beyond noise (2 arms could not be compared).",
            id="two not compared",
        ),
        pytest.param(
            {"a": TWO_SEEDS},
            "Fewer than 3 seeds each: no arm can be called better or worse than “none” in Mean@8.",
            id="two seeds",
        ),
        pytest.param(
            {"a": ONE_SEED, "b": TWO_SEEDS},
            "Fewer than 3 seeds each: no arm can be called better or worse than “none” in Mean@8.",
            id="one seed and two",
        ),
        pytest.param(
            {"a": ONE_SEED, "b": WORSE, "c": TWO_SEEDS},
            "None of 3 arms is better than “none” in Mean@8 beyond noise; worse: b."
            " Fewer than 3 seeds, and so not judged: a, c.",
            id="arms with few seeds beside one with three",
        ),
        pytest.param(
            {"a": None},
            "Nothing could be compared with “none” in Mean@8: no evaluation has finished for both.",
            id="nothing compared",
        ),
        pytest.param({}, None, id="the baseline alone"),
    ],
)
def test_the_sentence(differences: dict[str, Any], sentence: str | None) -> None:
    assert headline.sentence(summary(**differences), "none", MEAN) == sentence


def test_arms_that_differ_in_more_than_their_methods_are_named() -> None:
    """Options, presets and credits are methods. Of a flag that all share, a value of its own counts alone."""
    settings = {
        "none": {"actor.freezing": ""},
        "method": {"perturbation.rate": "0.2", "base": "gspo", "credit": "clip_cov", "credit.top": "0.1"},
        "small": {"data.max_samples": "48", "actor.freezing": ""},
        "small too": {"data.max_samples": "48", "actor.freezing": ""},
        "as all": {"data.max_samples": "96", "actor.freezing": ""},
    }
    steps = {"none": 12, "method": 12, "small": 12, "small too": 12, "as all": 11}
    data = {
        "baseline": "none",
        "strategies": [{"id": arm, "settings": own} for arm, own in settings.items()],
        "openrlhf_args": ["--data.max_samples", "96"],
        "runs": [{"strategy": arm, "steps": [{}] * count} for arm, count in steps.items()],
    }
    assert headline.trained_otherwise(data) == [
        "method: --actor.freezing not given (none: on)",
        "small, small too: --data.max_samples 48 (none: 96)",
        "as all: training steps 11 (none: 12)",
    ]
    assert headline.trained_otherwise({**data, "baseline": None}) == []


def test_failed_runs_that_a_finding_leaves_out_are_said() -> None:
    rows = summary(a=BETTER, b=WITHIN)
    rows["none"]["failed"] = []
    rows["a"]["failed"] = [3, 4]
    rows["b"]["failed"] = [0]
    sentence = headline.sentence(rows, "none", MEAN)
    assert sentence == "Better than “none” in Mean@8 beyond noise: a. Failed runs are left out: 2 of a."
    rows["a"]["difference"] = rows["b"]["difference"]
    assert "Failed" not in headline.sentence(rows, "none", MEAN), "there is no finding that it could qualify"


def test_without_a_measure_or_the_baseline_there_is_no_sentence() -> None:
    rows = summary(a=change(0.2, noise=False))
    assert headline.sentence(rows, "none", None) is None
    assert headline.sentence(rows, "another", MEAN) is None


def test_the_picture_by_hand() -> None:
    """The longest length, 0.25, is 92 wide beside the middle at 100; the best stands first."""
    rows = summary(
        worse=change(-0.2, noise=False),
        missing=None,
        better=change(0.1, noise=True, least=0.125),
    )
    series = {name: Series(index, name) for index, name in enumerate(rows)}

    better, worse, missing = headline.forest(series, rows, "none", MEAN)

    assert better.series.name == "better"
    assert better.at == 136.8  # 100 + 92 · 0.1 / 0.25
    assert better.ends == (118.4, 155.2)
    assert better.band == (54.0, 146.0)
    assert better.text == "+0.100 (+0.050 to +0.150), within noise"
    assert list(better.hint) == [
        "better",
        f"Mean@8 {better.text}",
        "words on better",
        "a difference below about 0.125 would often have been missed",
    ]
    assert worse.series.name == "worse"
    assert worse.at == 26.4  # 100 - 92 · 0.2 / 0.25
    assert worse.ends == (8.0, 44.8)
    assert worse.band == (63.2, 136.8)
    assert missing.series.name == "missing"
    assert missing.at is None
    assert missing.ends is None
    assert missing.band is None
    assert missing.text == "words on missing"


NAME = "neighbor rate=0.1"
SERIES = {NAME: Series(0, NAME)}


def kept_run(kept: list[dict[str, Any]]) -> dict[str, Any]:
    return {"strategy": NAME, "seed": 1, "groups": kept}


def bars_of(rewards: list[float]) -> tuple[list[dict[str, Any]], str]:
    """The bars and the mean of a step with these rewards, of whose responses one with reward 1 is kept."""
    answer = {"reward": 1.0, "tokens": ["a"]}
    kept = [{"step": 1, "rewards": rewards, "groups": [{"answers": [answer]}]}]
    (step,) = responses.groups([kept_run(kept)], SERIES)["runs"][0]["steps"]
    return step["bars"], step["mean"]


def test_few_rewards_have_a_bar_each() -> None:
    bars, mean = bars_of([0.0, 1.0, 1.0, 0.5])
    assert [bar["label"] for bar in bars] == ["0.00", "0.50", "1.00"]
    assert [bar["count"] for bar in bars] == [1, 1, 2]
    assert [bar["share"] for bar in bars] == [50, 50, 100]
    assert [bar["held"] for bar in bars] == [0, 0, 1]
    assert mean == "0.625"


def test_many_rewards_have_ten_bars() -> None:
    bars, _ = bars_of([float(reward) for reward in range(21)])
    assert [bar["count"] for bar in bars] == [2, 2, 2, 2, 2, 2, 2, 2, 2, 3]
    assert bars[0]["held"] == 1
    assert bars[1]["label"] == "2.00 to 4.00"


def test_different_rewards_have_different_labels() -> None:
    bars, _ = bars_of([0.901, 0.904, -0.001, 0.001])
    assert [bar["label"] for bar in bars] == ["−0.001", "0.001", "0.901", "0.904"]


@pytest.fixture
def nine_steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Nine kept steps, of which three fit on a page."""
    kept = kept_steps(steps=9)
    monkeypatch.setattr(responses, "MOST_BYTES", int(3.5 * len(json.dumps(kept[0]))))
    return kept


def test_a_page_holds_so_much_of_the_first_run_that_kept_any(nine_steps: list[dict[str, Any]]) -> None:
    nothing_kept = {**kept_run([]), "seed": 0}
    second_kept = {**kept_run(nine_steps), "seed": 2}
    on_page = responses.groups([nothing_kept, kept_run(nine_steps), second_kept], SERIES)
    assert on_page["runs"][0]["seed"] == 1
    assert [step["step"] for step in on_page["runs"][0]["steps"]] == [1, 41, 81]
    assert on_page["left_out"] == 6
    assert responses.groups([nothing_kept], SERIES) is None
    cut_before = {**kept_run(nine_steps), "groups_left_out": 12}
    assert responses.groups([cut_before], SERIES)["left_out"] == 18


def test_the_page_says_how_many_kept_steps_it_leaves_out(nine_steps: list[dict[str, Any]], tmp_path: Path) -> None:
    data = example(steps=3)
    data["runs"][0]["groups"] = nine_steps
    text, _ = written(tmp_path, data)
    assert "6 kept steps are left out" in text


def test_the_section(tmp_path: Path) -> None:
    kept = kept_steps()
    kept[0]["groups"][0]["diversity"] = {"different": 1.0, "distinct_2": 0.1, "common_prefix": 30.0}
    summary = {"format": 1, "perturbation": {"name": "neighbor"}, "steps": [], "groups": kept, "seed": 4}

    text, page = written(tmp_path, summary)

    check_numbers(page)
    section = text.split('<section id="groups">')[1].split("</section>")[0]
    # Three steps with two prompts of eight responses each.
    assert section.count('<details class="step"') == 3
    assert section.count('<details class="problem"') == 6
    assert section.count('class="answer"') == 48
    assert "4 different responses of 8 · distinct-2 0.31" in section
    assert "all 8 responses are the same · distinct-2 0.10<" in section
    assert "two responses part after 12.5 tokens on average" in section
    assert "41 more tokens" in section
    # Each element inside of a response is a token, and has its line.
    responses_on_page = re.findall(r'data-notes="([^"]*)">(.*?)</div>', section, re.DOTALL)
    assert len(responses_on_page) == 48
    for notes, tokens in responses_on_page:
        note_lines = json.loads(html.unescape(notes))
        assert len(note_lines) > 20
        assert len(note_lines) == len(re.findall("<(?:i|mark)[ >]", tokens))
        for line in note_lines:
            assert line[0].startswith("mismatch ")
