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
from ngrpo.workbench.report import write_report
from tests.support.report_example import ERROR, STRATEGIES, diagnosis, example
from tests.support.report_page import check_numbers, written

SECTIONS = ["results", "learning", "pass-at-k", "cost", "diversity", "samples", "map", "runs", "made"]
EVIL = "</script><script>alert(1)</script>\"'&<b>\u202e\x07\ud800 😀 שלום\n"


def test_comparison_has_its_parts_in_order(tmp_path: Path) -> None:
    text, page = written(tmp_path, example())
    assert [attrs["id"] for attrs in page.all("section")] == SECTIONS
    check_numbers(page)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    named = {name for attrs in page.all("svg") for name in (attrs.get("aria-labelledby") or "").split()}
    assert named and named <= set(ids)
    assert "neighbor, gaussian sigma_of=vector and gumbel against none" in page.text
    assert "1 of 12 runs failed" in page.text and ERROR in page.text and "runs/gumbel-seed2/eval.log" in page.text
    assert "None of 3 arms is better than “none” in Mean@32 beyond noise." in page.text
    assert "+0.055, within noise" in page.text and "−0.143, within noise" in page.text
    assert "×1.02" in page.text and "10.27 GiB" in page.text
    assert re.search("before training 0.119 0.706 ", page.words)
    assert "One seed only" not in page.text and "Bands run from the lowest to the highest seed" in page.text
    assert "by Holm's correction for 3 comparisons within each column" in page.text
    assert "find with a chance of 80%, by their spread: 0.117 to 0.243" in page.text, "no difference above 1"
    # A strategy's reward is shown with its own change alone: from 0.146 to 0.620 is +0.474.
    assert re.search(r"\+0\.474 \+0\.227 to \+0\.720 0\.146 to 0\.620 of perturbed rollouts ", page.words)
    # Offline: nothing that could be fetched, and no other script.
    assert not re.search(r"""(src|href)=["'](?!#|data:)|@import|url\(""", text)
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = page.all("meta")[1]["content"]
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_diagnosis_has_its_parts(tmp_path: Path) -> None:
    data = diagnosis()
    data["strategies"][0]["intervals"]["validity"] = [0.87, 0.92]
    _, page = written(tmp_path, data)
    expected = ["results", "pass-at-k", "diversity", "samples", "map", "made"]
    assert [attrs["id"] for attrs in page.all("section")] == expected
    check_numbers(page)
    # The interval of gumbel's validity begins at 0.924; its diversity's ends at 0.681, and none's begins at 0.634.
    assert "gumbel against none: diversity 0.637 against 0.672, the intervals overlap; more valid (0.945" in page.text
    assert "16 problems × 8 responses" in page.text and "neighbor: 67% of the answers reach the length" in page.text


def test_training_run_has_its_parts(tmp_path: Path) -> None:
    summary = {
        "format": 1,
        "perturbation": {"name": "neighbor", "rate": 0.1},
        "steps": [{"step": step, "reward": step / 4, "rate": 0.1} for step in (1, 2, 3)],
        "evaluation": {"eval/eval_default_pass1": {"0": 0.125, "3": 0.75}, "eval/eval_num_samples": {"0": 16, "3": 16}},
        "openrlhf_args": ["--train.seed", "42"],
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert cli.main(["report", str(tmp_path)]) == 0
    text, page = written(tmp_path, summary)
    assert (tmp_path / "report.html").read_text() == text
    assert [attrs["id"] for attrs in page.all("section")] == ["learning", "made"]
    assert "eval_default_pass1 0.125 (step 0) → 0.750 (step 3)" in page.words and "eval_num_samples" not in page.text


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


def test_text_from_data_is_escaped(tmp_path: Path) -> None:
    tame = example(steps=3, seeds=2, strategies=("none", "gumbel"))
    tame["runs"][0] |= {"status": "failed", "error": ERROR}
    _, plain = written(tmp_path, tame)
    data = json.loads(json.dumps(tame).replace('"gumbel"', json.dumps(EVIL)))
    data |= {"task": EVIL, "command": ["ngrpo", EVIL], "versions": {EVIL: EVIL}, "machine": {"cpu": EVIL}}
    data["runs"][0] |= {"error": EVIL, "log": EVIL, "seed": EVIL}
    data["summary"][1]["verdict"] = EVIL
    sample = data["diagnosis"]["samples"][0]
    sample |= {"problem": EVIL, "answer": EVIL}
    mixed = {"text": EVIL, "perturbed": True, "candidates": [[EVIL, 0.7], ["\n", 0.3]]}
    sample["by_strategy"][0]["tokens"] = [mixed, {"text": EVIL, "perturbed": False}]
    data["diagnosis"]["embedding_map"]["tokens"][0]["text"] = EVIL
    text, page = written(tmp_path, data)
    assert len(page.all("script")) == len(plain.all("script")) == 1
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in plain.tags}
    assert {key for _, attrs in page.tags for key in attrs} == {key for _, attrs in plain.tags for key in attrs}
    assert "\x07" not in text
    assert "␇\ufffd 😀 שלום" in page.text
    tip = json.loads(next(attrs["data-tip"] for attrs in page.all("mark") if "alert" in (attrs["data-tip"] or "")))
    assert tip["mixture"][1] == ["⏎", "0.300", 0.3]
    assert tip["title"].startswith("</script><script>alert(1)</script>\"'&<b>") and tip["title"].endswith("⏎")


def with_numbers(data: Any, put: Any) -> Any:
    """A copy in which every number is another, at any depth."""
    if isinstance(data, dict):
        return {key: with_numbers(value, put) for key, value in data.items()}
    if isinstance(data, list):
        return [with_numbers(value, put) for value in data]
    return put if isinstance(data, (int, float)) and not isinstance(data, bool) else data


@pytest.mark.parametrize("put", [None, float("nan"), float("-inf"), 1e308])
def test_no_number_breaks_it(tmp_path: Path, put: Any) -> None:
    for data in (diagnosis(), example(steps=4, seeds=2)):
        _, page = written(tmp_path, with_numbers(data, put) | {"format": 1})
        check_numbers(page)
    # The specs are quoted as they are; elsewhere there are dashes.
    assert "–" in page.text and "nan" not in page.prose.lower().split()


def test_without_runs(tmp_path: Path) -> None:
    """Only format, strategies and runs are needed."""
    assert "There are no runs" in written(tmp_path, {"format": 1, "strategies": [], "runs": []})[1].text


def test_one_seed_is_said_plainly(tmp_path: Path) -> None:
    text, page = written(tmp_path, example(seeds=1))
    assert "With one seed the interval is over problems only." in page.text
    assert "beyond noise" not in page.text and "+0.064, one seed" in page.text
    assert "Student" not in page.text and "Holm" not in page.text
    assert "One seed only: the intervals show noise over problems, not over training runs." in page.text
    learning = text.split('<section id="learning">')[1].split("</section>")[0]
    assert 'class="band' not in learning and 'class="line"' in learning


@pytest.mark.parametrize(("steps", "strategies"), [(1, ["none"]), (1000, [*STRATEGIES, "soft", "multiplex"])])
def test_sizes(tmp_path: Path, steps: int, strategies: list[str]) -> None:
    text, page = written(tmp_path, example(steps, seeds=2, strategies=strategies))
    check_numbers(page)
    assert len(text) < 1_500_000
    assert ("Each point is the mean of 17 steps" in page.text) == (steps == 1000)  # ⌈1000 / 60⌉
    charts = {a["aria-label"]: json.loads(a["data-chart"] or "") for a in page.all("div") if a.get("data-chart")}
    chart = next(found for label, found in charts.items() if "Reward of the training rollouts" in (label or ""))
    assert len(chart["x"]) == min(steps, 59)  # ⌈1000 / 17⌉
    assert len(chart["series"]) == len(strategies)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file or folder"),
        ('{"format": 1, "runs": [', "is damaged: it is not JSON"),
        ('{"steps": []}', "not a training run of ngrpo: format is None, must be 1"),
        ('{"format": 2, "runs": []}', r"format 2 is newer than this ngrpo knows \(1\). Update ngrpo"),
        ('{"format": 1, "runs": {}, "strategies": []}', "'runs' must be a list, found dict"),
    ],
)
def test_files_that_are_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content)
    assert cli.main(["report", str(file)]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and str(file) in error
    assert not (tmp_path / "report.html").exists()


def test_command_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    for words, said in (
        ([str(tmp_path)], "has neither results.json nor diagnosis.json nor summary.json"),
        ([], "takes one folder or file, got 0"),
        ([str(file), "--out", str(file)], "is the result itself"),
        ([str(file), "--out", str(tmp_path / "no" / "r.html")], "cannot be written: No such file or directory"),
    ):
        assert cli.main(["report", *words]) == 2 and said in capsys.readouterr().err
        file.write_text(json.dumps(example(steps=1)))


def test_every_class_of_the_page_has_a_rule() -> None:
    ours = Path(report.__file__).parent
    rules = "".join((ours / name).read_text() for name in ("style.css", "script.js"))
    pages = "".join(path.read_text() for path in (ours / "templates").glob("*.html"))
    named = {name for names in re.findall('class="([^"{}]+)"', pages) for name in names.split()} - {"tick"}
    assert len(named) > 30 and not [name for name in named if not re.search(rf"\.{name}\b", rules)]
