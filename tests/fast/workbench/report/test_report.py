# SPDX-License-Identifier: Apache-2.0
"""The report: structure, escaping, missing values, the same bytes again, and errors; no browser."""

import base64
import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ngrpo import cli
from ngrpo.workbench import report
from ngrpo.workbench.compare import results
from ngrpo.workbench.report import write_report
from tests.support.report_example import ERROR, STRATEGIES, diagnosis, example
from tests.support.report_page import Page, check_numbers, written

SECTIONS = ["results", "learning", "pass-at-k", "cost", "diversity", "samples", "map", "runs", "made"]
EVIL = "</script><script>alert(1)</script>\"'&<b>\u202e\x07\ud800 😀 שלום\n"


def test_a_comparison_has_its_sections_in_order(tmp_path: Path) -> None:
    _, page = written(tmp_path, example())
    assert [attrs["id"] for attrs in page.all("section")] == SECTIONS
    check_numbers(page)


def test_ids_are_unique_and_drawings_are_named_by_them(tmp_path: Path) -> None:
    _, page = written(tmp_path, example())
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    label_ids = set()
    for attrs in page.all("svg"):
        label_ids.update((attrs.get("aria-labelledby") or "").split())
    assert label_ids
    assert label_ids <= set(ids)


def test_what_a_comparison_says(tmp_path: Path) -> None:
    _, page = written(tmp_path, example())
    assert "neighbor, gaussian sigma_of=vector and gumbel against none" in page.text
    assert "1 of 12 runs failed" in page.text
    assert ERROR in page.text
    assert "runs/gumbel-seed2/eval.log" in page.text
    assert "None of 3 arms is better than “none” in Mean@32 beyond noise." in page.text
    assert "+0.055, within noise" in page.text
    assert "−0.143, within noise" in page.text
    assert "×1.02" in page.text
    assert "10.27 GiB" in page.text
    assert re.search("before training 0.119 0.706 ", page.words)
    assert "One seed only" not in page.text
    assert "Bands run from the lowest to the highest seed" in page.text
    assert "by Holm's correction for 3 comparisons within each column" in page.text
    assert "find with a chance of 80%, by their spread: 0.117 to 0.243" in page.text, "no difference above 1"
    # An arm's reward is shown with its own change alone: from 0.146 to 0.620 is +0.474.
    assert re.search(r"\+0\.474 \+0\.227 to \+0\.720 0\.146 to 0\.620 of perturbed rollouts ", page.words)


def test_a_page_works_offline_and_allows_its_own_script_only(tmp_path: Path) -> None:
    text, page = written(tmp_path, example())
    assert not re.search(r"""(src|href)=["'](?!#|data:)|@import|url\(""", text), "something would be fetched"
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = page.all("meta")[1]["content"]
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_diagnosis_has_its_parts(tmp_path: Path) -> None:
    _, page = written(tmp_path, diagnosis())
    expected = ["results", "pass-at-k", "diversity", "samples", "map", "made"]
    assert [attrs["id"] for attrs in page.all("section")] == expected
    check_numbers(page)
    assert "16 problems × 8 responses" in page.text
    assert "neighbor: 67% of the answers reach the length" in page.text


def test_diagnosis_is_judged_by_its_paired_differences(tmp_path: Path) -> None:
    """As on the screen. Without them, by its intervals: none's validity ends at 0.92, and gumbel's begins at 0.924."""
    data = diagnosis()
    data["strategies"][0]["intervals"]["validity"] = [0.87, 0.92]
    _, page = written(tmp_path, data)
    assert "gumbel against none: diversity 0.637 against 0.672, within noise; validity 0.945" in page.text
    assert "Each difference is judged alone at 95%, whatever the number of arms" in page.text

    gumbel = data["strategies"][3]
    gumbel["difference"]["validity"]["within_noise"] = False
    _, page = written(tmp_path, data)
    assert "gumbel against none: diversity 0.637 against 0.672, within noise; more valid (0.945" in page.text

    gumbel["difference"] = None
    _, page = written(tmp_path, data)
    assert "gumbel against none: diversity 0.637 against 0.672, the intervals overlap; more valid (0.945" in page.text


def test_training_run_has_its_parts(tmp_path: Path) -> None:
    summary = {
        "format": 1,
        "perturbation": {"name": "neighbor", "rate": 0.1},
        "steps": [{"step": step, "reward": step / 4, "rate": 0.1} for step in (1, 2, 3)],
        "evaluation": {
            "eval/eval_default_pass1": {"0": 0.125, "3": 0.75},
            "eval/eval_num_samples": {"0": 16, "3": 16},
        },
        "openrlhf_args": ["--train.seed", "42"],
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))

    assert cli.main(["report", str(tmp_path)]) == 0

    by_command = (tmp_path / "report.html").read_text()
    text, page = written(tmp_path, summary)
    assert by_command == text
    assert [attrs["id"] for attrs in page.all("section")] == ["learning", "made"]
    assert "eval_default_pass1 0.125 (step 0) → 0.750 (step 3)" in page.words
    assert "eval_num_samples" not in page.text


def test_responses_stand_beside_the_curves_of_their_arm(tmp_path: Path) -> None:
    """Of the first finished run of each arm, as text: what a model writes is never markup."""
    data = example()
    assert "Responses along the curve" not in written(tmp_path, data)[1].text
    for run in data["runs"]:
        run["samples"] = [{"step": 1, "reward": 0.0, "text": f"{run['id']} <b>so</b>"}]
    _, page = written(tmp_path, data)
    assert "Responses along the curve" in page.text and "neighbor-seed0 <b>so</b>" in page.text
    assert "neighbor-seed1 <b>so</b>" not in page.text


def test_same_data_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = example()
    before = copy.deepcopy(data)
    write_report(data, tmp_path / "first.html")
    (tmp_path / "results.json").write_text(json.dumps(data), encoding="utf-8")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert cli.main(["report", str(tmp_path / "results.json"), "--out", str(tmp_path / "other.html")]) == 0
    assert data == before
    first = (tmp_path / "first.html").read_bytes()
    assert (tmp_path / "report.html").read_bytes() == first == (tmp_path / "other.html").read_bytes()
    assert str(tmp_path / "other.html") in capsys.readouterr().err


def evil_example(tame: dict[str, Any]) -> dict[str, Any]:
    """A comparison with ``EVIL`` in place of the arm gumbel and of every other text that is shown."""
    data = json.loads(json.dumps(tame).replace('"gumbel"', json.dumps(EVIL)))
    data |= {"task": EVIL, "command": ["ngrpo", EVIL], "versions": {EVIL: EVIL}, "machine": {"cpu": EVIL}}
    data["runs"][0] |= {"error": EVIL, "log": EVIL, "seed": EVIL}
    data["summary"][1]["verdict"] = EVIL
    sample = data["diagnosis"]["samples"][0]
    sample |= {"problem": EVIL, "answer": EVIL}
    mixture = {"text": EVIL, "perturbed": True, "candidates": [[EVIL, 0.7], ["\n", 0.3]]}
    sample["by_strategy"][0]["tokens"] = [mixture, {"text": EVIL, "perturbed": False}]
    data["diagnosis"]["embedding_map"]["tokens"][0]["text"] = EVIL
    return data


def attribute_names(page: Page) -> set[str]:
    names: set[str] = set()
    for _, attrs in page.tags:
        names.update(attrs)
    return names


def test_text_from_data_is_escaped(tmp_path: Path) -> None:
    tame = example(steps=3, seeds=2, strategies=("none", "gumbel"))
    tame["runs"][0] |= {"status": "failed", "error": ERROR}
    _, tame_page = written(tmp_path, tame)

    text, page = written(tmp_path, evil_example(tame))

    assert len(tame_page.all("script")) == 1
    assert len(page.all("script")) == 1
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in tame_page.tags}
    assert attribute_names(page) == attribute_names(tame_page)
    assert "\x07" not in text
    assert "␇\ufffd 😀 שלום" in page.text


def test_text_in_the_tip_of_a_token_is_escaped(tmp_path: Path) -> None:
    tame = example(steps=3, seeds=2, strategies=("none", "gumbel"))
    _, page = written(tmp_path, evil_example(tame))
    tips = [attrs["data-tip"] or "" for attrs in page.all("mark")]
    tip = json.loads(next(text for text in tips if "alert" in text))
    assert tip["mixture"][1] == ["⏎", "0.300", 0.3]
    assert tip["title"].startswith("</script><script>alert(1)</script>\"'&<b>")
    assert tip["title"].endswith("⏎")


def with_numbers(data: Any, number: Any) -> Any:
    """A copy in which every number, at any depth, is ``number``."""
    if isinstance(data, dict):
        return {key: with_numbers(value, number) for key, value in data.items()}
    if isinstance(data, list):
        return [with_numbers(value, number) for value in data]
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        return number
    return data


@pytest.mark.parametrize("data", [diagnosis(), example(steps=4, seeds=2)], ids=["diagnosis", "comparison"])
@pytest.mark.parametrize("number", [None, float("nan"), float("-inf"), 1e308])
def test_no_number_breaks_a_page(tmp_path: Path, number: Any, data: dict[str, Any]) -> None:
    _, page = written(tmp_path, with_numbers(data, number) | {"format": 1})
    check_numbers(page)
    # The specs are quoted as they are; elsewhere there are dashes.
    assert "–" in page.text
    assert "nan" not in page.prose.lower().split()


def test_a_comparison_without_runs(tmp_path: Path) -> None:
    """Only format, strategies and runs are needed."""
    _, page = written(tmp_path, {"format": 1, "strategies": [], "runs": []})
    assert "There are no runs" in page.text


def test_one_seed_is_said_plainly(tmp_path: Path) -> None:
    text, page = written(tmp_path, example(seeds=1))
    note = "With one seed the interval is over problems only, and so is the test, corrected for 3 comparisons."
    assert note in page.text
    assert "beyond noise" not in page.text
    assert "+0.064, only 1 seed" in page.text
    assert "Student" not in page.text
    assert "Holm" not in page.text
    assert "One seed only: the intervals show noise over problems, not over training runs." in page.text
    learning = text.split('<section id="learning">')[1].split("</section>")[0]
    assert 'class="band' not in learning
    assert 'class="line"' in learning


def test_flags_of_an_arm_stand_beside_the_finding(tmp_path: Path) -> None:
    strategies = ("none", "none rollout.temperature=1.05", "gumbel")
    data = example(strategies=strategies)
    _, page = written(tmp_path, data)
    assert "Arms differ in more than their methods, and a difference to none may come from this" in page.text
    line = "none rollout.temperature=1.05: --rollout.temperature 1.05 (none: not given)"
    assert line in page.text
    assert f"not only another method: {line}" in results.table({**data, "warnings": []})
    _, page = written(tmp_path, example())
    assert "more than their methods" not in page.text


def test_two_seeds_rank_no_arm(tmp_path: Path) -> None:
    data = example(seeds=2, strategies=("none", "gumbel"))
    data["summary"][1]["difference"]["mean_at_n"] |= {"within_noise": False}
    _, page = written(tmp_path, data)
    assert "Fewer than 3 seeds each: no arm can be called better or worse than “none” in Mean@32." in page.text
    assert "Two seeds only: two differences may agree by luck" in page.text
    assert "only 2 seeds" in page.text
    assert "better than" not in page.text.replace("better or worse than", "").casefold()


def test_a_curve_of_pass_at_n_stands_beside_that_of_mean_at_n(tmp_path: Path) -> None:
    """Results of before these curves have Mean@n alone."""
    before, _ = written(tmp_path, example())
    assert 'id="learning-mean_at_n-title"' in before
    assert 'id="learning-pass_at_n-title"' not in before

    results = example()
    for run in results["runs"]:
        for evaluation in run["evaluations"]:
            evaluation["pass_at_n"] = 0.875
    text, _ = written(tmp_path, results)
    assert 'id="learning-mean_at_n-title"' in text
    assert 'id="learning-pass_at_n-desc">Last values: none: 0.875;' in text


@pytest.mark.parametrize(
    ("steps", "strategies", "points"),
    [
        (1, ["none"], 1),
        (1000, [*STRATEGIES, "soft", "multiplex"], 59),  # ⌈1000 / 17⌉
    ],
)
def test_sizes(tmp_path: Path, steps: int, strategies: list[str], points: int) -> None:
    text, page = written(tmp_path, example(steps, seeds=2, strategies=strategies))

    check_numbers(page)
    assert len(text) < 1_500_000
    averaged = "Each point is the mean of 17 steps" in page.text  # ⌈1000 / 60⌉
    assert averaged == (steps == 1000)
    (chart,) = [
        json.loads(attrs["data-chart"])
        for attrs in page.all("div")
        if attrs.get("data-chart") and "Reward of the training rollouts" in (attrs["aria-label"] or "")
    ]
    assert len(chart["x"]) == points
    assert len(chart["series"]) == len(strategies)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file or folder"),
        ('{"format": 1, "runs": [', "is damaged: it is not JSON"),
        ('{"steps": []}', "not a training run of ngrpo: format is None, must be 1"),
        ('{"format": 2, "runs": []}', r"format 2 is newer than 1, the newest"),
        ('{"format": 1, "runs": {}, "strategies": []}', "'runs' must be a list, found dict"),
    ],
)
def test_files_that_are_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content)
    assert cli.main(["report", str(file)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert str(file) in error
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no result is given. Give one folder or file"),
        (["results.json", "--out", "results.json"], "is the result itself"),
        (["results.json", "--out", "no/r.html"], "cannot be written: No such file or directory"),
    ],
)
def test_command_line_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps(example(steps=1)))
    assert cli.main(["report", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "has neither results.json nor diagnosis.json nor summary.json" in capsys.readouterr().err


def test_every_class_of_the_page_has_a_rule() -> None:
    folder = Path(report.__file__).parent
    rules = "".join((folder / name).read_text() for name in ("style.css", "script.js"))
    templates = "".join(path.read_text() for path in (folder / "templates").glob("*.html"))
    classes: set[str] = set()
    for names in re.findall('class="([^"{}]+)"', templates):
        classes.update(names.split())
    classes -= {"tick"}
    assert len(classes) > 30
    assert [name for name in classes if not re.search(rf"\.{name}\b", rules)] == []
