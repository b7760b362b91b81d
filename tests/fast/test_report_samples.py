# SPDX-License-Identifier: Apache-2.0
"""``ngrpo report`` of several evaluations: read, paired by problem, and judged as by hand and by scipy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ngrpo import cli
from ngrpo.workbench.evaluate.sample_comparison import lines, read
from ngrpo.workbench.statistics import cover_at
from perturbations.errors import UsageError


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def of_eval(folder: Path, right: dict[str, list[int]]) -> str:
    """The folder of an evaluation, its samples in the order in which they finished."""
    rows = [
        {"problem": name, "sample": i, "text": "", "correct": bool(one), "reward": float(one)}
        for name, answers in reversed(right.items())
        for i, one in enumerate(answers)
    ]
    written(folder / "evaluation.json", [{}])
    return str(Path(written(folder / "samples.jsonl", rows)).parent)


BASE = {"a": [1, 0, 0, 0], "b": [1, 1, 1, 1], "c": [0, 0, 0, 0], "d": [1, 1, 0, 0], "e": [0, 1, 0, 0]}
OURS = {"a": [1, 1, 1, 0], "b": [1, 1, 1, 1], "c": [0, 0, 1, 0], "d": [1, 1, 1, 0], "e": [1, 1, 0, 0]}


def test_means_differences_and_p_by_hand(tmp_path: Path) -> None:
    files = [f"base={of_eval(tmp_path / 'x', BASE)}", f"ours={of_eval(tmp_path / 'y', OURS)}"]
    told = lines(files)
    assert told[0] == "5 problems, 4 answers to each"
    table = [row.split() for row in told if row.startswith(("mean", "Pass@", "Cover@"))]
    assert [row[:2] for row in table] == [
        [measure, name] for measure in ("mean", "Pass@4", "Cover@0.25", "Cover@0.5", "Cover@0.75")
        for name in ("base", "ours")
    ]  # fmt: skip
    # c / n: 1/4 1 0 1/2 1/4 and 3/4 1 1/4 3/4 1/2; of the differences only b's is 0.
    values = ["0.400", "0.650", "0.800", "1.000", "0.800", "1.000", "0.400", "0.800", "0.200", "0.600"]
    assert [row[2] for row in table] == values
    differences = np.array([0.5, 0.0, 0.25, 0.25, 0.25])
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(0.95)
    ours = table[1]
    assert ours[5:] == ["+0.250", f"[{low:+.3f},", f"{high:+.3f}]", f"{test.pvalue:.3f}", "*", ours[-1]]
    assert 0.25 < float(ours[-1]) < 0.5, "the spread of five problems shows no smaller difference reliably"


def test_pairs_are_by_problem_and_what_is_missing_is_said(tmp_path: Path) -> None:
    shuffled = {name: OURS[name] for name in ("d", "a", "e", "b")}
    told = lines([of_eval(tmp_path / "base", BASE), of_eval(tmp_path / "ours", {**shuffled, "z": [1, 1, 1, 1]})])
    assert told[0].startswith("4 problems") and "base: 1 of its 5 problems are not in all files" in told[1]
    assert "ours: 1 of its 5" in told[2]
    mean = next(row.split() for row in told if row.startswith("mean") and "+" in row)
    assert mean[2] == "0.750" and mean[5] == "+0.250"
    with pytest.raises(UsageError, match="no problem in common"):
        lines([of_eval(tmp_path / "base", BASE), of_eval(tmp_path / "other", {"y": [1]})])


def test_several_files_are_corrected_for(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    base = {str(i): [int(draws.random() < 0.5)] for i in range(400)}
    files = [of_eval(tmp_path / "base", base)]
    for other, gain in enumerate((0.0, 0.02, 0.2)):
        right = {name: [max(score, int(draws.random() < gain))] for name, (score,) in base.items()}
        files.append(of_eval(tmp_path / str(other), right))
    table = [row for row in lines(files) if row.startswith("mean")]
    assert len(table) == 4 and table[3].count("<0.001 *") == 1
    assert "+0.000" in table[1] and "*" not in table[1]


@pytest.mark.parametrize("content", ["", "[1]\n", "{\n", '{"other": 1}\n', '{"problem": "a"}\n'])
def test_what_is_no_file_of_samples(tmp_path: Path, content: str) -> None:
    file = tmp_path / "samples_x.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match="samples_x"):
        read(str(file))


def test_a_file_of_samples_line_by_line(tmp_path: Path) -> None:
    """U+2028 within a line, a sample written twice, and a name before the path."""
    rows = [{"problem": "a\u2028", "sample": 0, "correct": right} for right in (True, False)]
    file = tmp_path / "other.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert read(str(file)) == ("other.jsonl", {"a\u2028": (1, 1)})
    assert read(f"ours={file}").name == "ours"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, ours = of_eval(tmp_path / "base", BASE), of_eval(tmp_path / "ours", OURS)
    assert cli.main(["report", base, ours, "--tau", "0.5", "--k", "1,2"]) == 0
    told = capsys.readouterr().out
    assert "Pass@2" in told
    assert "Cover@0.5" in told
    assert "Pass@4" not in told
    assert cli.main(["report", base]) == 0 and "Mean" not in capsys.readouterr().out
    for words, said in (
        ([base, ours, "--tau", "1.5"], "--tau 1.5: must be in (0, 1]"),
        ([base, ours, "--k", "x"], "--k x: must be numbers"),
        ([base, ours, "--k", "5"], "--k 5: must be in [1, 4]"),
        ([base, ours, "--out", "x.html"], "--out is for the page"),
        ([base, "nowhere"], "nowhere: there is no such file"),
    ):
        assert cli.main(["report", *words]) == 2 and said in capsys.readouterr().err


def test_cover() -> None:
    assert [cover_at(4, c, 0.5) for c in range(5)] == [False, False, True, True, True]
    assert cover_at(3, 1, 1 / 3) and cover_at(10, 7, 0.7)  # no rounding takes a problem away
    for n, c, tau in ((4, 2, 0.0), (4, 2, 1.1), (4, 2, True), (4, 5, 0.5)):
        with pytest.raises(ValueError, match="must be"):
            cover_at(n, c, tau)
