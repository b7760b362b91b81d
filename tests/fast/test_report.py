# SPDX-License-Identifier: Apache-2.0
"""The report: structure, escaping, missing values, the same bytes again, and errors; no browser."""

import base64
import copy
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ngrpo import cli
from ngrpo.workbench.report import write_report
from tests.report_example import STRATEGIES, diagnosis, example, groups
from tests.report_page import Page, check_numbers, written

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
    assert "neighbor rate=0.1, gaussian rate=0.1 and gumbel against none" in page.text
    assert "1 of 12 runs failed" in page.text and "MemoryError: 'gumbel' <ran> out of memory" in page.text
    assert "runs/gumbel-2/train.log" in page.text
    assert "within noise of none in Mean@8 and Pass@8" in page.text
    assert "+0.037, beyond noise" in page.text and "−0.006, within noise" in page.text
    assert "×1.02" in page.text and "5.77 GiB" in page.text
    assert re.search("before training 0.131 0.220 0.341 0.484 –", page.words)
    assert "One seed only" not in page.text and "Bands run from the lowest to the highest seed" in page.text
    assert "by Holm's correction for 3 comparisons within each column" in page.text
    assert "find with a chance of 80%, by their spread: 0.045" in page.text  # 1.5 · 0.03 of each
    # A strategy's reward is shown with its own change alone: from 0.142 to 0.9 is +0.758.
    assert re.search(r"\+0\.758 \+0\.718 to \+0\.794 0\.142 to 0\.900 of perturbed rollouts ", page.words)
    # Offline: nothing that could be fetched.
    assert not re.search(r"""(src|href)=["'](?!#|data:)|@import|url\(""", text)


def test_diagnosis_has_its_parts(tmp_path: Path) -> None:
    _, page = written(tmp_path, diagnosis())
    expected = ["results", "pass-at-k", "diversity", "samples", "map", "made"]
    assert [attrs["id"] for attrs in page.all("section")] == expected
    check_numbers(page)
    # 0.39 against 0.31: [0.36, 0.425] and [0.28, 0.345] do not meet; 0.91 and 0.93: [0.885, 0.93], [0.905, 0.95] do.
    assert "neighbor rate=0.1 against none: more diverse (0.390 against 0.310); validity" in page.text
    assert "0.910 against 0.930, the intervals overlap" in page.text
    assert "64 problems × 8 responses" in page.text and "gumbel: 31% of the answers end in a loop" in page.text


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


def test_same_data_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, data in (("results.json", example()), ("diagnosis.json", diagnosis())):
        folder = tmp_path / name
        folder.mkdir()
        write_report(data, folder / "first.html")
        before = copy.deepcopy(data)
        (folder / name).write_text(json.dumps(data), encoding="utf-8")
        assert cli.main(["report", str(folder)]) == 0
        assert cli.main(["report", str(folder / name), "--out", str(folder / "other.html")]) == 0
        assert data == before
        first = (folder / "first.html").read_bytes()
        assert (folder / "report.html").read_bytes() == first == (folder / "other.html").read_bytes()
        assert str(folder / "other.html") in capsys.readouterr().err


def test_text_from_data_is_escaped(tmp_path: Path) -> None:
    data = example(steps=3, seeds=2, strategies=("none", EVIL))
    data |= {"task": EVIL, "command": ["ngrpo", EVIL], "versions": {EVIL: EVIL}, "machine": {"cpu": EVIL}}
    data["runs"][0] |= {"status": "failed", "error": EVIL, "log": EVIL, "seed": EVIL}
    for row in data["summary"]:
        row["verdict"] = EVIL
    sample = data["diagnosis"]["samples"][0]
    sample |= {"problem": EVIL, "answer": EVIL}
    mixed = {"text": EVIL, "perturbed": True, "candidates": [[EVIL, 0.7], ["\n", 0.3]]}
    sample["by_strategy"][0]["tokens"] = [mixed, {"text": EVIL, "perturbed": False}]
    for one in data["diagnosis"]["embedding_map"]["tokens"]:
        one["text"] = EVIL
    text, page = written(tmp_path, data)
    tame = example(steps=3, seeds=2, strategies=("none", "gumbel"))
    tame["runs"][0] |= {"status": "failed", "error": "out of memory"}
    _, plain = written(tmp_path, tame)
    assert len(page.all("script")) == len(plain.all("script")) == 1
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in plain.tags}
    assert {key for _, attrs in page.tags for key in attrs} == {key for _, attrs in plain.tags for key in attrs}
    assert "\x07" not in text
    assert "␇\ufffd 😀 שלום" in page.text
    tip = json.loads(next(attrs["data-tip"] for attrs in page.all("mark") if "alert" in (attrs["data-tip"] or "")))
    assert tip["mixture"][1] == ["⏎", "0.300", 0.3]
    assert tip["title"].startswith("</script><script>alert(1)</script>\"'&<b>") and tip["title"].endswith("⏎")


def test_script_is_the_only_one_allowed(tmp_path: Path) -> None:
    text, page = written(tmp_path, example(steps=2))
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = page.all("meta")[1]["content"] or ""
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


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


def without_each(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Copies that each lack one key, or have null or an empty list in its place; of a list in its fullest entry."""
    if isinstance(data, list) and data:
        at = max(range(len(data)), key=lambda i: len(repr(data[i])))
        yield from ((label, [*data[:at], entry, *data[at + 1 :]]) for label, entry in without_each(data[at], name))
    for key, value in data.items() if isinstance(data, dict) else ():
        yield f"{name}.{key} gone", {other: data[other] for other in data if other != key}
        puts = (None, []) if isinstance(value, list) else (None,)
        yield from ((f"{name}.{key} {put}", {**data, key: put}) for put in puts)
        yield from ((label, {**data, key: changed}) for label, changed in without_each(value, f"{name}.{key}"))


@pytest.mark.more
def test_missing_parts_never_break_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only format, strategies and runs are needed."""
    # A thousand pages are rendered whole; each one safe on the disk would take most of the time.
    monkeypatch.setattr("ngrpo.workbench.report.write_text", Path.write_text)
    small = example(steps=2, seeds=2, strategies=("none", "neighbor rate=0.1"))
    small["runs"][-1]["groups"] = groups(steps=1, answers=2)
    for perturbation in small["diagnosis"]["embedding_map"]["perturbations"]:
        perturbation["points"] = perturbation["points"][:3]
    copies = list(without_each(small))
    assert len(copies) > 400
    for label, changed in copies:
        try:
            write_report(changed, tmp_path / "report.html")
        except Exception as error:
            pytest.fail(f"{label}: {error!r}")
    least = {"format": 1, "strategies": [], "runs": []}
    assert "There are no runs" in written(tmp_path, least)[1].text


def test_one_seed_is_said_plainly(tmp_path: Path) -> None:
    text, page = written(tmp_path, example(seeds=1))
    assert "With one seed the interval is over problems only." in page.text
    table = Page(text.split('<section id="results">')[1].split("</section>")[0]).text
    assert "beyond noise" not in table and "+0.037, one seed" in table
    assert "Student" not in page.text and "Holm" not in page.text
    assert "One seed only: the intervals show noise over problems, not over training runs." in page.text
    learning = text.split('<section id="learning">')[1].split("</section>")[0]
    assert 'class="band' not in learning and 'class="line"' in learning


@pytest.mark.parametrize(
    ("steps", "strategies"),
    [(1, ("none",)), (1, STRATEGIES), (1000, ("none", *(f"soft top_k={k}" for k in range(11))))],
)
def test_sizes(tmp_path: Path, steps: int, strategies: tuple[str, ...]) -> None:
    text, page = written(tmp_path, example(steps=steps, seeds=2, strategies=strategies))
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
        ("[1]", "a JSON object was expected, found list"),
        ('{"steps": []}', "not a training run of ngrpo: format is None, must be 1"),
        ('{"format": 2, "runs": []}', r"format 2 is newer than this ngrpo knows \(1\). Update ngrpo"),
        ('{"format": true, "runs": []}', "format is True"),
        ('{"format": 1, "n": 8, "problems": []}', "'strategies' must be a list, found NoneType"),
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
