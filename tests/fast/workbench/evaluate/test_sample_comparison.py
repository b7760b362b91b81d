# SPDX-License-Identifier: Apache-2.0
"""``ngrpo report`` of several evaluations: read, paired by problem, and judged as by hand and by scipy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ngrpo import cli
from ngrpo.machine.storage.result_folder import ResultFolder
from ngrpo.workbench.evaluate.sample_comparison import lines, measures, read
from perturbations.errors import UsageError


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


RIGHT = {"correct": True, "finish": "stop", "parsed": True, "verdict": "right"}
WRONG = {"correct": False, "finish": "length", "parsed": False, "verdict": "timed_out"}


def of_eval(
    folder: Path,
    right: dict[str, list[int]],
    asked: str = "{}?",
    names: str | None = None,
    answers: dict[str, str] | None = None,
) -> str:
    """The folder of an evaluation, its samples in the order in which they finished.

    ``asked`` is each problem's text; ``names`` are their names, other than their keys; ``answers`` their references.
    """
    rows, problems = [], []
    for name, key in reversed([*zip(names or right, right)]):
        answer = (answers or {}).get(key, "7")
        problems.append({"id": name, "messages": [{"content": asked.format(key)}], "answer": answer})
        row = {"problem": name, "prompt": f"<user>{asked.format(key)}"}
        rows += [{**row, "sample": i, **(RIGHT if one else WRONG)} for i, one in enumerate(right[key])]
    written(folder / "evaluation.json", [{}])
    written(folder / "problems.jsonl", problems)
    return str(Path(written(folder / "samples.jsonl", rows)).parent)


BASE = {"a": [1, 0, 0, 0], "b": [1, 1, 1, 1], "c": [0, 0, 0, 0], "d": [1, 1, 0, 0], "e": [0, 1, 0, 0]}
OURS = {"a": [1, 1, 1, 0], "b": [1, 1, 1, 1], "c": [0, 0, 1, 0], "d": [1, 1, 1, 0], "e": [1, 1, 0, 0]}


def test_means_differences_and_p_by_hand(tmp_path: Path) -> None:
    files = [f"base={of_eval(tmp_path / 'x', BASE)}", f"ours={of_eval(tmp_path / 'y', OURS)}"]
    told = lines(files)
    assert told[:2] == ["5 problems, 4 responses to each", "paired by their text"]
    table = [row.split() for row in told if row.startswith(("mean", "Pass@", "Cover@"))]
    # c / n: 1/4 1 0 1/2 1/4 and 3/4 1 1/4 3/4 1/2; of the differences only b's is 0.
    values = ["0.400", "0.650", "0.800", "1.000", "0.800", "1.000", "0.400", "0.800", "0.200", "0.600"]
    measures_of_both = np.repeat(["mean", "Pass@4", "Cover@0.25", "Cover@0.5", "Cover@0.75"], 2)
    assert [row[:3] for row in table] == [[*row] for row in zip(measures_of_both, ["base", "ours"] * 5, values)]
    differences = np.array([0.5, 0.0, 0.25, 0.25, 0.25])
    low, high = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    ours = table[1]
    # Of 2^4 patterns of the four signs two are as far from 0.
    assert ours[10:] == ["+0.250", f"[{low:+.3f},", f"{high:+.3f}]", "0.125", ours[-1]]
    assert 0.25 < float(ours[-1]) < 0.5, "the spread of five problems shows no smaller difference reliably"


def test_pairs_are_by_problem_and_what_is_missing_is_said(tmp_path: Path) -> None:
    shuffled = {name: OURS[name] for name in ("d", "a", "e", "b")}
    told = lines([of_eval(tmp_path / "base", BASE), of_eval(tmp_path / "ours", {**shuffled, "z": [1, 1, 1, 1]})])
    assert told[0].startswith("4 problems") and "base: 1 of its 5 problems are not in all files" in told[2]
    assert "ours: 1 of its 5" in told[3]
    mean = next(row.split() for row in told if row.startswith("mean") and "+" in row)
    assert mean[2] == "0.750" and mean[10] == "+0.250"
    with pytest.raises(UsageError, match="no problem in common"):
        lines([of_eval(tmp_path / "base", BASE), of_eval(tmp_path / "other", {"y": [1]})])


def difference(told: list[str]) -> str:
    return next(row.split()[10] for row in told if row.startswith("mean") and "+" in row)


def test_problems_are_paired_by_what_they_ask(tmp_path: Path) -> None:
    """Rows in another order have other names; other problems of the same names are none of these."""
    base = of_eval(tmp_path / "base", BASE, names="12345")
    reordered = of_eval(tmp_path / "reordered", {name: OURS[name] for name in "edcba"}, names="12345")
    assert difference(lines([base, reordered])) == "+0.250"
    (Path(reordered) / "problems.jsonl").unlink()  # samples alone
    told = lines([base, reordered])
    assert told[1] == "paired by their prompt" and difference(told) == "+0.250"
    with pytest.raises(UsageError, match="no problem in common"):
        lines([base, of_eval(tmp_path / "other", OURS, asked="another {}", names="12345")])
    twice = [of_eval(tmp_path / names, {"a": [0], "b": [1]}, asked="the same", names=names) for names in ("ab", "xy")]
    assert lines(twice)[0].startswith("2 problems")


def test_names_never_pair(tmp_path: Path) -> None:
    """Not with equal references, nor in a file of another program, which has no prompts."""
    base, ours = of_eval(tmp_path / "base", BASE), of_eval(tmp_path / "ours", OURS, asked="Think. {}?")
    rows = [{"problem": name, "sample": i, "correct": one} for name, of in OURS.items() for i, one in enumerate(of)]
    bare = written(tmp_path / "bare.jsonl", rows)
    for other, fix in ((ours, "with the same --instruction"), (bare, rf"{bare} has neither\. Give an evaluation's")):
        with pytest.raises(UsageError, match=rf"no problem in common.*paired by their text.*: .*{fix}") as told:
            lines([base, other])
        assert ("--instruction" in str(told.value)) == (other == ours)
    assert any("– / – / –" in row for row in lines([bare]))


def test_responses_that_say_little_are_counted_beside_each_score(tmp_path: Path) -> None:
    """Of 20 answers 12 are wrong, each cut and timed out; of the other file's 2 of 20."""
    few = {name: [1, 1, 1, 1] for name in "abc"} | {"d": [0, 0, 1, 1], "e": [1, 1, 1, 1]}
    told = lines([of_eval(tmp_path / "base", BASE), of_eval(tmp_path / "few", few)])
    base, ours = [row for row in told if row.startswith("mean")]
    assert "60% / 0% / 60%" in base and "10% / 0% / 10%" in ours
    assert [line for line in told if line.startswith("warning")] == [
        "warning: base: 60% of the responses were cut by the length limit",
        "warning: base: 60% of the responses timed out in scoring",
    ]


def test_an_evaluation_that_is_still_running_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    row = {"problem": "a", "sample": 0, "correct": False}
    ResultFolder(tmp_path).append("samples.jsonl", [row, {**row, "sample": 1}])
    file = tmp_path / "samples.jsonl"
    cut = file.read_text()[:-20]
    file.write_text(cut)
    told: list[str] = []
    assert read(str(file), told.append).counts == {"a": (1, 0)}
    assert "cut off half-way" in told[0] and file.read_text() == cut


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    base, ours = of_eval(tmp_path / "x" / "evaluation", BASE), of_eval(tmp_path / "y" / "evaluation", OURS)
    with pytest.raises(UsageError, match="two have one name"):
        lines([f"a={base}", f"a={ours}"])
    assert difference(lines([base, ours])) == "+0.250", "two folders of one name have their paths"
    with pytest.raises(UsageError, match="two have one name"):
        lines([base, base])


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


@pytest.mark.parametrize("content", ["", "[1]\n", '{"problem": "a"}\n'])
def test_what_is_no_file_of_samples(tmp_path: Path, content: str) -> None:
    file = tmp_path / "samples_x.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match="samples_x"):
        read(str(file))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, ours = of_eval(tmp_path / "base", BASE), of_eval(tmp_path / "ours", OURS)
    assert cli.main(["report", base, ours, "--tau", "0.5", "--k", "1,2"]) == 0
    told = capsys.readouterr().out
    assert "Pass@2" in told and "Cover@0.5" in told and "Pass@4" not in told
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
    cover = measures("1", "0.5,0.7", 4)
    assert [cover["Cover@0.5"](4, c, 4) for c in range(5)] == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert cover["Cover@0.7"](10, 7, 10) == 1.0, "no rounding takes a problem away"
    # Two of four right; at least one of two drawn, unless both others are: 1 − 1/6.
    assert cover["Cover@0.5"](4, 2, 2) == pytest.approx(5 / 6)


@pytest.mark.parametrize("tau", ["0", "0.5,1.1"])
def test_a_share_that_cover_does_not_take(tau: str) -> None:
    with pytest.raises(UsageError, match=r"--tau [\d.]+: must be in \(0, 1\]"):
        measures(None, tau, 4)


def test_cover_is_compared_at_as_many_responses(tmp_path: Path) -> None:
    """The same success rates at 8 and at 4 responses have the same Cover@τ in expectation."""
    draws = np.random.default_rng(1)
    rates = draws.random(400)
    eight = {str(i): (draws.random(8) < rate).astype(int).tolist() for i, rate in enumerate(rates)}
    four = {str(i): (draws.random(4) < rate).astype(int).tolist() for i, rate in enumerate(rates)}
    told = lines([of_eval(tmp_path / "eight", eight), of_eval(tmp_path / "four", four)])
    assert told[0] == "400 problems, 4 to 8 responses to each"
    compared = [row.split() for row in told if row.startswith("Cover@") and "four" in row]
    assert len(compared) == 3 and "*" not in {word for row in compared for word in row}
    assert all(abs(float(row[10])) < 0.04 for row in compared), compared
    assert told[-1].startswith("Cover@τ is of as many responses")


def test_few_problems_that_gain_are_judged_by_their_signs(tmp_path: Path) -> None:
    base = {str(i): [int(i >= 5)] for i in range(30)}
    told = lines([of_eval(tmp_path / "base", base), of_eval(tmp_path / "ours", {name: [1] for name in base})])
    (row,) = [row.split() for row in told if row.startswith("mean") and "+" in row]
    assert row[-2] == "0.062" and "*" not in row, "a t test has p 0.023"


def test_shares_of_cut_responses_are_those_of_the_compared_problems(tmp_path: Path) -> None:
    more = {"a": [1, 1, 1, 1], "b": [1, 1, 1, 1], "z": [0, 0, 0, 0]}
    told = lines([of_eval(tmp_path / "base", {"a": [0, 1, 1, 1], "b": [1, 1, 1, 1]}), of_eval(tmp_path / "more", more)])
    base, ours = [row for row in told if row.startswith("mean")]
    assert "12% / 0% / 12%" in base and "0% / 0% / 0%" in ours
    assert not [line for line in told if line.startswith("warning: more")]


def test_one_question_with_two_references_is_two_problems(tmp_path: Path) -> None:
    base = of_eval(tmp_path / "base", {"a": [1], "b": [0]}, answers={"a": "1", "b": "2"})
    other = of_eval(tmp_path / "other", {"a": [1], "b": [1]}, answers={"a": "1", "b": "3"})
    assert lines([base, other])[0].startswith("1 problems")
    with pytest.raises(UsageError, match="paired by their text and reference"):
        lines([base, of_eval(tmp_path / "third", {"a": [1]}, answers={"a": "4"})])


@pytest.mark.parametrize("value", ["NaN", '"false"', "0.5", "null", "2", "[]"])
def test_a_response_is_right_or_not(value: str, tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(f'{{"problem": "a", "sample": 3, "correct": {value}}}\n')
    with pytest.raises(UsageError, match=r"problem 'a', sample 3: 'correct' is .*, and must be true or false"):
        read(str(file))


def test_rows_without_a_number_all_count(tmp_path: Path) -> None:
    rows = [{"problem": "a", "correct": value} for value in (True, False, 1.0, 0)]
    assert read(written(tmp_path / "of_another.jsonl", rows)).counts == {"a": (4, 2)}
    numbered = [{**row, "sample": 0} for row in rows]
    assert read(written(tmp_path / "numbered.jsonl", numbered)).counts == {"a": (1, 1)}
