# SPDX-License-Identifier: Apache-2.0
"""``ngrpo report`` of several evaluations: read, paired by problem, and judged as by hand and by scipy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ngrpo import cli
from ngrpo.machine.storage.result_folder import ResultFolder, write_json
from ngrpo.workbench.evaluate.missing_samples import DRAWN_BY
from ngrpo.workbench.evaluate.sample_comparison import lines, measures, read
from perturbations.errors import UsageError

RIGHT = {"correct": True, "finish": "stop", "parsed": True, "verdict": "right"}
WRONG = {"correct": False, "finish": "length", "parsed": False, "verdict": "timed_out"}

# By problem, which of its four responses are right. The shares c / n are
# 1/4, 1, 0, 1/2, 1/4 of BASE and 3/4, 1, 1/4, 3/4, 1/2 of OURS.
BASE = {
    "a": [1, 0, 0, 0],
    "b": [1, 1, 1, 1],
    "c": [0, 0, 0, 0],
    "d": [1, 1, 0, 0],
    "e": [0, 1, 0, 0],
}
OURS = {
    "a": [1, 1, 1, 0],
    "b": [1, 1, 1, 1],
    "c": [0, 0, 1, 0],
    "d": [1, 1, 1, 0],
    "e": [1, 1, 0, 0],
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Writes one line of JSON for each row and returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_evaluation(
    folder: Path,
    right: dict[str, list[int]],
    question: str = "{}?",
    names: str | None = None,
    references: dict[str, str] | None = None,
) -> str:
    """Writes the folder of an evaluation and returns its path; the problems are in reverse order, as if finished so.

    Args:
        folder: where to write it.
        right: by problem, whether each of its responses is right.
        question: the text of a problem, with ``{}`` for its key in ``right``.
        names: one letter for each problem, its id in the files; None for its key.
        references: by problem, its reference answer; "7" where it has none.
    """
    keys = list(right)
    ids = list(names or keys)
    rows = []
    problems = []
    for problem_id, key in reversed(list(zip(ids, keys))):
        text = question.format(key)
        reference = (references or {}).get(key, "7")
        problems.append({"id": problem_id, "messages": [{"content": text}], "answer": reference})
        for sample, is_right in enumerate(right[key]):
            outcome = RIGHT if is_right else WRONG
            rows.append({"problem": problem_id, "prompt": f"<user>{text}", "sample": sample, **outcome})
    write_rows(folder / "evaluation.json", [{}])
    write_rows(folder / "problems.jsonl", problems)
    write_rows(folder / "samples.jsonl", rows)
    return str(folder)


def mean_rows(report: list[str]) -> list[str]:
    """The lines of the measure "mean", the baseline's first."""
    return [line for line in report if line.startswith("mean")]


def compared_mean(report: list[str]) -> list[str]:
    """The words of the line that compares a gain in the mean with the baseline's: words 2 and 10 are value and gain."""
    return next(line.split() for line in mean_rows(report) if "+" in line)


def mean_difference(report: list[str]) -> str:
    return compared_mean(report)[10]


def test_means_differences_and_p_by_hand(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "x", BASE)
    ours = write_evaluation(tmp_path / "y", OURS)

    report = lines([f"base={base}", f"ours={ours}"])

    assert report[:2] == ["5 problems, 4 responses to each", "paired by their text"]
    table = [line.split() for line in report if line.startswith(("mean", "Pass@", "Cover@"))]
    assert [row[:3] for row in table] == [
        ["mean", "base", "0.400"],
        ["mean", "ours", "0.650"],
        ["Pass@4", "base", "0.800"],
        ["Pass@4", "ours", "1.000"],
        ["Cover@0.25", "base", "0.800"],
        ["Cover@0.25", "ours", "1.000"],
        ["Cover@0.5", "base", "0.400"],
        ["Cover@0.5", "ours", "0.800"],
        ["Cover@0.75", "base", "0.200"],
        ["Cover@0.75", "ours", "0.600"],
    ]
    # The differences of the shares c / n; only b's is 0.
    differences = np.array([0.5, 0.0, 0.25, 0.25, 0.25])
    low, high = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    difference, low_text, high_text, p, could_be_seen = table[1][10:]
    assert difference == "+0.250"
    assert low_text == f"[{low:+.3f},"
    assert high_text == f"{high:+.3f}]"
    # Of the 2^4 patterns of four signs two are as far from 0.
    assert p == "0.125"
    assert 0.25 < float(could_be_seen) < 0.5, "the spread of five problems shows no smaller difference reliably"


def test_pairs_are_by_problem_and_what_is_missing_is_said(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "base", BASE)
    shuffled = {name: OURS[name] for name in ("d", "a", "e", "b")}
    ours = write_evaluation(tmp_path / "ours", {**shuffled, "z": [1, 1, 1, 1]})

    report = lines([base, ours])

    assert report[0].startswith("4 problems")
    assert "base: 1 of its 5 problems are not in all files" in report[2]
    assert "ours: 1 of its 5" in report[3]
    # Without c the shares are 3/4, 1, 3/4, 1/2: mean 0.75; those of BASE have the mean 0.5.
    mean = compared_mean(report)
    assert mean[2] == "0.750"
    assert mean[10] == "+0.250"


def test_files_without_a_common_problem_are_refused(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "base", BASE)
    other = write_evaluation(tmp_path / "other", {"y": [1]})
    with pytest.raises(UsageError, match="no problem in common"):
        lines([base, other])


def test_reordered_problems_are_paired_by_their_text(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "base", BASE, names="12345")
    reordered_right = {name: OURS[name] for name in "edcba"}
    reordered = write_evaluation(tmp_path / "reordered", reordered_right, names="12345")
    assert mean_difference(lines([base, reordered])) == "+0.250"


def test_problems_without_texts_are_paired_by_their_prompt(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "base", BASE, names="12345")
    reordered_right = {name: OURS[name] for name in "edcba"}
    reordered = write_evaluation(tmp_path / "reordered", reordered_right, names="12345")
    (Path(reordered) / "problems.jsonl").unlink()

    report = lines([base, reordered])

    assert report[1] == "paired by their prompt"
    assert mean_difference(report) == "+0.250"


def test_equal_names_of_other_problems_do_not_pair(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "base", BASE, names="12345")
    other = write_evaluation(tmp_path / "other", OURS, question="another {}", names="12345")
    with pytest.raises(UsageError, match="no problem in common"):
        lines([base, other])


def test_equal_texts_within_a_file_are_several_problems(tmp_path: Path) -> None:
    right = {"a": [0], "b": [1]}
    first = write_evaluation(tmp_path / "ab", right, question="the same", names="ab")
    second = write_evaluation(tmp_path / "xy", right, question="the same", names="xy")
    assert lines([first, second])[0].startswith("2 problems")


def test_equal_references_do_not_pair_and_the_error_says_instruction(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "base", BASE)
    ours = write_evaluation(tmp_path / "ours", OURS, question="Think. {}?")
    message = r"no problem in common.*paired by their text.*: .*with the same --instruction"
    with pytest.raises(UsageError, match=message):
        lines([base, ours])


def test_a_file_of_another_program_has_no_prompts_to_pair_by(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "base", BASE)
    rows = []
    for problem, right in OURS.items():
        rows += [{"problem": problem, "sample": sample, "correct": correct} for sample, correct in enumerate(right)]
    bare = write_rows(tmp_path / "bare.jsonl", rows)

    message = rf"no problem in common.*paired by their text.*: .*{bare} has neither\. Give an evaluation's"
    with pytest.raises(UsageError, match=message) as error:
        lines([base, bare])

    assert "--instruction" not in str(error.value)
    # Its shares of cut, unreadable and timed-out responses are not in its rows.
    assert any("– / – / –" in line for line in lines([bare]))


def test_responses_that_say_little_are_counted_beside_each_score(tmp_path: Path) -> None:
    """In the test data a wrong response is also cut and timed out: 12 of the 20 of BASE, and 2 of the other 20."""
    base = write_evaluation(tmp_path / "base", BASE)
    few_wrong = {key: [1, 1, 1, 1] for key in BASE}
    few_wrong["d"] = [0, 0, 1, 1]
    few = write_evaluation(tmp_path / "few", few_wrong)

    report = lines([base, few])

    base_row, few_row = mean_rows(report)
    assert "60% / 0% / 60%" in base_row
    assert "10% / 0% / 10%" in few_row
    assert [line for line in report if line.startswith("warning")] == [
        "warning: base: 60% of the responses were cut by the length limit",
        "warning: base: 60% of the responses timed out in scoring",
    ]


def test_an_evaluation_that_is_still_running_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    row = {"problem": "a", "sample": 0, "correct": False}
    ResultFolder(tmp_path).append("samples.jsonl", [row, {**row, "sample": 1}])
    file = tmp_path / "samples.jsonl"
    cut = file.read_text()[:-20]
    file.write_text(cut)

    messages: list[str] = []
    assert read(str(file), messages.append).counts == {"a": (1, 0)}

    assert "cut off half-way" in messages[0]
    assert file.read_text() == cut, "the file of a running evaluation is not mended"


def test_an_unfinished_evaluation_is_warned_of(tmp_path: Path) -> None:
    """Its samples are of the responses that ended first."""
    unfinished = write_evaluation(tmp_path / "unfinished", BASE)
    finished = write_evaluation(tmp_path / "finished", OURS)
    for folder, n in ((unfinished, 5), (finished, 4)):
        (Path(folder) / "settings.json").write_text(json.dumps({"problems": 5, "n": n}))
    warnings = [line for line in lines([unfinished, finished]) if " is unfinished" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: unfinished is unfinished: 5 samples are missing.")


def test_other_settings_of_sampling_and_scoring_are_warned_of(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "x", BASE)
    ours = write_evaluation(tmp_path / "y", OURS)
    settings = {"sampling": {"temperature": 1.0, "seed": 0}, "scorer": "math"}
    write_json(tmp_path / "x" / "settings.json", settings)
    write_json(tmp_path / "y" / "settings.json", {**settings, "sampling": {"temperature": 1.0, "seed": 1}})
    assert not any("temperature" in line or "seed" in line for line in lines([base, ours]))
    write_json(tmp_path / "y" / "settings.json", {"sampling": {"temperature": 0.6}, "scorer": "own.py"})
    report = lines([base, ours])
    assert "warning: y has temperature 0.6, and x has 1.0." in report
    assert "warning: y has the scorer own.py, and x has math." in report


def test_other_numbers_prompts_and_releases_are_warned_of(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "x", BASE)
    ours = write_evaluation(tmp_path / "y", OURS)

    def warnings_of_how(report: list[str]) -> list[str]:
        warnings = [line.removeprefix("warning: ") for line in report if line.startswith("warning")]
        return [line for line in warnings if "% of the responses" not in line]

    def leave(folder: str, engine: dict[str, Any], vllm: str) -> None:
        write_json(tmp_path / folder / "settings.json", {"engine": engine})
        conditions = {"versions": {"vllm": vllm, "torch": "2.13"}, "machine": {"cpu": "AMD EPYC"}}
        write_rows(tmp_path / folder / DRAWN_BY, [conditions])

    leave("x", {"dtype": "float32", "block_size": 32}, "0.28.0")
    leave("y", {"dtype": "float32", "block_size": 16, "quantization": None}, "0.28.0")
    assert not warnings_of_how(lines([base, ours])), "blocks change no number"

    leave("y", {}, "0.29.0")
    samples = tmp_path / "y" / "samples.jsonl"
    samples.write_text(samples.read_text().replace("<user>a?", "<system>Think.<user>a?"))
    report = lines([base, ours])

    assert report[1] == "paired by their text"
    assert warnings_of_how(report) == [
        "y has the engine's dtype auto, and x has float32.",
        "y rendered 1 of 5 prompts otherwise than x, as another chat template does.",
        "the responses were drawn with different vllm (0.28.0, 0.29.0).",
    ]


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "x" / "evaluation", BASE)
    ours = write_evaluation(tmp_path / "y" / "evaluation", OURS)
    with pytest.raises(UsageError, match="two have one name"):
        lines([f"a={base}", f"a={ours}"])
    with pytest.raises(UsageError, match="two have one name"):
        lines([base, base])


def test_two_folders_of_one_name_are_called_by_their_paths(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "x" / "evaluation", BASE)
    ours = write_evaluation(tmp_path / "y" / "evaluation", OURS)
    report = lines([base, ours])
    assert mean_difference(report) == "+0.250"
    assert [row.split()[1] for row in mean_rows(report)] == [base, ours]


def test_several_files_are_corrected_for(tmp_path: Path) -> None:
    """Six of eight problems gain 1: p = 2 / 2^6 = 0.031 is beyond noise alone, and 0.0625 for two such files is not."""
    base = write_evaluation(tmp_path / "base", {name: [0] for name in "abcdefgh"})
    right = {name: [int(name in "abcdef")] for name in "abcdefgh"}
    files = [write_evaluation(tmp_path / str(number), right) for number in range(2)]
    (_, alone) = mean_rows(lines([base, files[0]]))
    assert "0.031 *" in alone
    for row in mean_rows(lines([base, *files]))[1:]:
        assert "0.062" in row
        assert "*" not in row


@pytest.mark.parametrize("content", ["", "[1]\n", '{"problem": "a"}\n'])
def test_a_file_that_holds_no_samples_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "samples_x.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match="samples_x"):
        read(str(file))


def test_the_command_prints_the_measures_that_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_evaluation(tmp_path / "base", BASE)
    ours = write_evaluation(tmp_path / "ours", OURS)
    assert cli.main(["report", base, ours, "--tau", "0.5", "--k", "1,2"]) == 0
    output = capsys.readouterr().out
    assert "Pass@2" in output
    assert "Cover@0.5" in output
    assert "Pass@4" not in output


def test_the_command_takes_one_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_evaluation(tmp_path / "base", BASE)
    assert cli.main(["report", base]) == 0
    output = capsys.readouterr().out
    assert "5 problems" in output
    assert "Mean" not in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tau", "1.5"], "--tau 1.5: must be in (0, 1]"),
        (["--k", "x"], "--k x: must be numbers"),
        (["--k", "5"], "--k 5: must be in [1, 4]"),
        (["--out", "x.html"], "--out is for the page"),
    ],
)
def test_flags_that_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    base = write_evaluation(tmp_path / "base", BASE)
    ours = write_evaluation(tmp_path / "ours", OURS)
    assert cli.main(["report", base, ours, *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_command_refuses_a_file_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_evaluation(tmp_path / "base", BASE)
    assert cli.main(["report", base, "nowhere"]) == 2
    assert "nowhere: there is no such file" in capsys.readouterr().err


def test_cover_counts_a_problem_whose_share_reaches_tau() -> None:
    cover = measures("1", "0.5,0.7", 4)
    values = [cover["Cover@0.5"](4, right, 4) for right in range(5)]
    assert values == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert cover["Cover@0.7"](10, 7, 10) == 1.0, "no rounding takes a problem away"
    # Two of four are right. One of two drawn ones is, unless the two wrong ones are drawn: 1 − 1/6.
    assert cover["Cover@0.5"](4, 2, 2) == pytest.approx(5 / 6)


@pytest.mark.parametrize("tau", ["0", "0.5,1.1"])
def test_a_share_that_cover_does_not_take(tau: str) -> None:
    with pytest.raises(UsageError, match=r"--tau [\d.]+: must be in \(0, 1\]"):
        measures(None, tau, 4)


def test_cover_is_compared_at_as_many_responses(tmp_path: Path) -> None:
    """The same success rates at 8 and at 4 responses have the same Cover@τ in expectation."""
    draws = np.random.default_rng(1)
    rates = draws.random(400)

    def right_at_these_rates(responses: int) -> dict[str, list[int]]:
        return {str(i): (draws.random(responses) < rate).astype(int).tolist() for i, rate in enumerate(rates)}

    eight = write_evaluation(tmp_path / "eight", right_at_these_rates(8))
    four = write_evaluation(tmp_path / "four", right_at_these_rates(4))

    report = lines([eight, four])

    assert report[0] == "400 problems, 4 to 8 responses to each"
    assert report[-1].startswith("Cover@τ: files differ")
    compared = [line.split() for line in report if line.startswith("Cover@") and "four" in line]
    assert len(compared) == 3
    for row in compared:
        assert "*" not in row
        assert abs(float(row[10])) < 0.04, row


def test_few_problems_that_gain_are_judged_by_their_signs(tmp_path: Path) -> None:
    """Five of 30 problems gain 1. Of the 2^5 patterns of their signs two are as far from 0: p = 1/16 = 0.0625."""
    base_right = {str(problem): [int(problem >= 5)] for problem in range(30)}
    base = write_evaluation(tmp_path / "base", base_right)
    ours = write_evaluation(tmp_path / "ours", {name: [1] for name in base_right})

    row = compared_mean(lines([base, ours]))

    assert row[-2] == "0.062", "a t test has p 0.023"
    assert "*" not in row


def test_shares_of_cut_responses_are_those_of_the_compared_problems(tmp_path: Path) -> None:
    """The responses to z are all cut, but z is in one file only. Of the baseline's eight responses one is cut."""
    base = write_evaluation(tmp_path / "base", {"a": [0, 1, 1, 1], "b": [1, 1, 1, 1]})
    more = write_evaluation(tmp_path / "more", {"a": [1, 1, 1, 1], "b": [1, 1, 1, 1], "z": [0, 0, 0, 0]})

    report = lines([base, more])

    base_row, more_row = mean_rows(report)
    assert "12% / 0% / 12%" in base_row
    assert "0% / 0% / 0%" in more_row
    assert not any(line.startswith("warning: more") for line in report)


def test_one_question_with_two_references_is_two_problems(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "base", {"a": [1], "b": [0]}, references={"a": "1", "b": "2"})
    one_in_common = write_evaluation(tmp_path / "other", {"a": [1], "b": [1]}, references={"a": "1", "b": "3"})
    none_in_common = write_evaluation(tmp_path / "third", {"a": [1]}, references={"a": "4"})

    assert lines([base, one_in_common])[0].startswith("1 problems")
    with pytest.raises(UsageError, match="paired by their text and reference"):
        lines([base, none_in_common])


@pytest.mark.parametrize("value", ["NaN", '"false"', "0.5", "null", "2", "[]"])
def test_a_response_is_right_or_not(value: str, tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(f'{{"problem": "a", "sample": 3, "correct": {value}}}\n')
    with pytest.raises(UsageError, match=r"problem 'a', sample 3: 'correct' is .*, and must be true or false"):
        read(str(file))


def test_rows_without_a_sample_number_all_count(tmp_path: Path) -> None:
    rows = [{"problem": "a", "correct": value} for value in (True, False, 1.0, 0)]
    file = write_rows(tmp_path / "of_another.jsonl", rows)
    assert read(file).counts == {"a": (4, 2)}


def test_rows_with_one_sample_number_count_once(tmp_path: Path) -> None:
    rows = [{"problem": "a", "correct": value, "sample": 0} for value in (True, False, 1.0, 0)]
    file = write_rows(tmp_path / "numbered.jsonl", rows)
    assert read(file).counts == {"a": (1, 1)}
