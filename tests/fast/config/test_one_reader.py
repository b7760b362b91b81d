# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation read the same rows: prompts and labels are compared value by value, over odd files."""

import json
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo.config.dataset_file import CHECKED_ROWS
from ngrpo.config.input_checks import check_files
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import tasks
from ngrpo.methods.scoring import reward_calls
from ngrpo.trainers.openrlhf import prompt_rows
from ngrpo.workbench.evaluate import load_problems
from perturbations.errors import UsageError
from tests.support.run import run_with

DATASETS = pytest.importorskip("datasets")
UPSTREAM = pytest.importorskip("openrlhf.datasets.utils")
PROMPTS = pytest.importorskip("openrlhf.datasets.prompts_dataset")


def lines(*labels: Any) -> str:
    """JSONL with a row for each label."""
    return "".join(json.dumps({"input": f"Q{i}", "label": label}) + "\n" for i, label in enumerate(labels))


def array(*labels: Any) -> str:
    return json.dumps([{"input": f"Q{i}", "label": label} for i, label in enumerate(labels)])


def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: str, **options: Any) -> Any:
    """The `PromptDataset` of a training; its cache is the test's own."""
    monkeypatch.setattr(DATASETS.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = {
        "prompt_dataset": options.pop("prompt_dataset", names),
        "input_key": "input",
        "label_key": "label",
        "image_key": "images",
    }
    data |= {"apply_chat_template": False}
    args = SimpleNamespace(data=SimpleNamespace(**data), eval=SimpleNamespace(dataset=None))
    strategy = SimpleNamespace(args=args, print=lambda *_: None, is_rank_0=lambda: False)
    blending_datasets = prompt_rows.blending_datasets(UPSTREAM.blending_datasets)
    rows = blending_datasets(names, options.pop("probabilities", None), strategy, **options)
    rows = rows.select(range(len(rows)))  # as `prepare_datasets` does
    return PROMPTS.PromptDataset(rows, None, strategy)


def evaluated(tmp_path: Path, source: str) -> list[tuple[str, Any]]:
    """The question of each problem, and the label that `ngrpo eval` hands to a user's reward function."""
    file = tmp_path / "reward.py"
    body = "SEEN.extend(labels)\n    return {'rewards': 1.0}"
    file.write_text(f"SEEN = []\ndef reward_func(queries, prompts, labels):\n    {body}\n")
    problems = load_problems(source, scorer=str(file))
    for problem in problems:
        tasks.score(problem, "1")
    seen = reward_calls.load(str(file)).__globals__["SEEN"]
    labels = [*seen]
    seen[:] = []
    return [(problem.question, label) for problem, label in zip(problems, labels, strict=True)]


FILES = {
    "dates": ("a.jsonl", lines("2024-01-01", "2024-01-02"), ["2024-01-01", "2024-01-02"]),
    "times": ("a.jsonl", lines("2024-01-01T10:00:00", "12:30"), ["2024-01-01T10:00:00", "12:30"]),
    "a whole number beside a fraction": ("a.jsonl", lines(7, 7.5), ["7", "7.5"]),
    "a fraction that is whole": ("a.jsonl", lines(7.0, 8.25), ["7", "8.25"]),
    "more than 64 bits": ("a.jsonl", lines(12345678901234567890, 3), ["12345678901234567890", "3"]),
    "more than a double holds": ("a.jsonl", lines(2**53 + 1, 0.5), ["9007199254740993", "0.5"]),
    "texts of numbers beside numbers": ("a.jsonl", lines("007", 8), ["007", "8"]),
    "exponents": ("a.jsonl", lines("1e5", 3), ["1e5", "3"]),
    "true beside a text": ("a.jsonl", lines(True, "no"), ["True", "no"]),
    "a list of two types": ("a.jsonl", lines(["007"], [8]), [["007"], [8]]),
    "objects with different keys": ("a.jsonl", lines({"a": 1}, {"b": "x"}), [{"a": 1}, {"b": "x"}]),
    "blanks around a text": ("a.jsonl", lines(" 4\n", "5"), [" 4\n", "5"]),
    "the words of a table for nothing": ("a.jsonl", lines("null", "NA", "nan"), ["null", "NA", "nan"]),
    "an array": ("a.json", array("2024-01-01", 7), ["2024-01-01", "7"]),
    "objects by line in .json": ("a.json", lines("007", 7.5), ["007", "7.5"]),
    "leading zeros in CSV": ("a.csv", "input,label\nQ0,007\nQ1,8\n", ["007", "8"]),
    "dates and empty words in CSV": ("a.csv", "input,label\nQ0,2024-01-01\nQ1,NA\n", ["2024-01-01", "NA"]),
    "true in CSV": ("a.csv", "input,label\nQ0,true\nQ1,False\n", ["true", "False"]),
    "a byte order mark": ("a.csv", "\ufeffinput,label\nQ0,1.50\nQ1,2\n", ["1.50", "2"]),
    "a byte order mark in JSONL": ("a.jsonl", "\ufeff" + lines("1.50"), ["1.50"]),
    "quoted lines in CSV": ("a.csv", 'input,label\nQ0,"1\n2"\n', ["1\n2"]),
    "separators of lines": ("a.jsonl", lines("a\u2028b", "c\x85d"), ["a\u2028b", "c\x85d"]),
    "both halves of a pair": ("a.jsonl", '{"input": "Q0", "label": "\\ud83d\\ude00"}\n', ["\U0001f600"]),
}


@pytest.mark.parametrize("name", FILES)
def test_training_gets_what_evaluation_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    ending, text, labels = FILES[name]
    file = tmp_path / ending
    file.write_text(text, encoding="utf-8")
    check_files(Flags(["--data.prompt_dataset", str(file), "--data.label_key", "label"]))
    dataset = trained(monkeypatch, tmp_path, str(file))
    assert dataset.labels == labels
    assert [type(label) for label in dataset.labels] == [type(label) for label in labels]
    assert evaluated(tmp_path, str(file)) == list(zip(dataset.prompts, dataset.labels))


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ({"label": [7, 8]}, ["7", "8"]),
        ({"label": [0.5, 2.0]}, ["0.5", "2"]),
        ({"label": ["007", "8"]}, ["007", "8"]),
        ({"label": [date(2024, 1, 1), date(2024, 1, 2)]}, ["2024-01-01", "2024-01-02"]),
        ({"label": [["a"], ["b"]]}, [["a"], ["b"]]),
    ],
)
def test_parquet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: dict[str, Any], labels: list[Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"input": ["Q0", "Q1"], **columns}), tmp_path / "a.parquet")
    dataset = trained(monkeypatch, tmp_path, str(tmp_path / "a.parquet"))
    assert dataset.labels == labels
    assert evaluated(tmp_path, str(tmp_path / "a.parquet")) == list(zip(dataset.prompts, labels))


def test_pictures_of_a_parquet_file_are_decoded_as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from PIL import Image

    row = {"input": ["Q"], "label": ["1"], "images": [[Image.new("RGB", (2, 3))]]}
    features = {"input": DATASETS.Value("string"), "label": DATASETS.Value("string")}
    features |= {"images": DATASETS.List(DATASETS.Image())}
    DATASETS.Dataset.from_dict(row, DATASETS.Features(features)).to_parquet(tmp_path / "a.parquet")
    run_with(monkeypatch, openrlhf=("--data.max_images_per_prompt", "1"))
    (picture,) = trained(monkeypatch, tmp_path, str(tmp_path / "a.parquet")).images[0]
    assert picture.size == (2, 3)


def test_files_of_different_types_and_a_column_that_is_null_for_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`datasets` takes a column's type from the first rows, and cannot join files of different types."""
    rows = [{"input": "Q", "label": "1", "note": None}] * 10_000 + [{"input": "Q", "label": 2, "note": "x"}]
    first = tmp_path / "a.jsonl"
    second = tmp_path / "b.csv"
    first.write_text("".join(json.dumps(row) + "\n" for row in rows))
    second.write_text("input,label,note\nR,03,7\n")
    check_files(Flags(["--data.prompt_dataset", f"{first},{second}", "--data.label_key", "label"]))
    dataset = trained(monkeypatch, tmp_path, f"{first}, {second}")
    assert dataset.labels == ["1"] * 10_000 + ["2", "03"]
    assert dataset.prompts[-1] == "R"


def test_rows_are_bounded_and_drawn_as_upstream_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = []
    for letter in "ab":
        file = tmp_path / f"{letter}.jsonl"
        file.write_text("".join(json.dumps({"input": f"{letter}{i}", "label": "x"}) + "\n" for i in range(9)))
        names.append(str(file))
    strategy = SimpleNamespace(print=lambda *_: None, is_rank_0=lambda: False)
    options: dict[str, Any] = {"probabilities": "0.7,0.3", "seed": 5, "max_count": 6}
    ours = trained(monkeypatch, tmp_path, ",".join(names), **options)
    theirs = UPSTREAM.blending_datasets(",".join(names), strategy=strategy, **options)
    assert ours.prompts == [row["input"] for row in theirs]
    assert len(ours) > 6
    assert trained(monkeypatch, tmp_path, names[0], max_count=2).prompts == ["a0", "a1"]


def test_a_folder_is_loaded_upstream_with_labels_by_the_same_rule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    DATASETS.Dataset.from_dict({"input": ["Q"], "label": [7.0]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "b.jsonl").write_text(lines("007"))
    dataset = trained(monkeypatch, tmp_path, f"{tmp_path / 'saved'},{tmp_path / 'b.jsonl'}")
    assert dataset.labels == ["7", "007"]
    DATASETS.Dataset.from_dict({"input": ["Q", "R"], "label": ["7", None]}).save_to_disk(tmp_path / "other")
    with pytest.raises(UsageError, match=r"--data\.prompt_dataset \S+other: row 2 has no 'label'"):
        trained(monkeypatch, tmp_path, str(tmp_path / "other"))


TEMPLATE = "--data.apply_chat_template"
QUESTION = {"role": "user", "content": "2 + 2?"}
UNUSABLE = {
    "blank": (["a", " "], (), "row 2: the input 'input' is empty. A prompt is a text"),
    "a number": ([1], (), "row 1: the input 'input' is a number. A prompt is a text"),
    "messages as text": ([str([QUESTION])], (TEMPLATE,), "row 1: the input 'input' is chat messages written as a text"),
    "messages without a template": ([[QUESTION]], (), f"row 1: the input 'input' is chat messages. Add {TEMPLATE}"),
    "an answer": (
        [[QUESTION, {"role": "assistant", "content": "4"}]],
        (TEMPLATE,),
        "row 1: the input 'input' is chat messages that end with the assistant's text. Leave the last message out",
    ),
}


def test_datasources_of_a_saved_evaluation_are_checked_when_it_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    rows = {"input": ["Q", "Q"], "label": ["7", "7"], "datasource": ["easy", "hard"]}
    DATASETS.Dataset.from_dict(rows).save_to_disk(saved)
    run_with(monkeypatch)
    assert trained(monkeypatch, tmp_path, saved).datasources == ["easy", "hard"]  # a training reads none
    with pytest.raises(UsageError, match=r"^--eval\.dataset .*saved: row 2 has the datasource 'hard'.*in .*row 1"):
        trained(monkeypatch, tmp_path, saved, prompt_dataset="train.jsonl")


@pytest.mark.parametrize(("prompts", "flags", "says"), UNUSABLE.values(), ids=UNUSABLE)
def test_prompts_of_a_saved_dataset_are_checked_as_those_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: list[Any], flags: tuple[str, ...], says: str
) -> None:
    saved = tmp_path / "saved"
    DATASETS.Dataset.from_dict({"input": prompts, "label": ["4"] * len(prompts)}).save_to_disk(saved)
    run_with(monkeypatch, openrlhf=flags)
    with pytest.raises(UsageError, match=re.escape(f"--data.prompt_dataset {saved}: {says}")):
        trained(monkeypatch, tmp_path, str(saved))


@pytest.mark.parametrize(("column", "value"), [("images", ["a.png"]), ("tools", [{"type": "function"}])])
def test_columns_of_a_saved_dataset_that_no_prompt_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, column: str, value: list[Any]
) -> None:
    rows = {"input": ["Q", "R"], "label": ["1", "2"], column: [[], value]}
    DATASETS.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    with pytest.raises(UsageError, match=rf"saved: row 2 has {column}, which no prompt shows\. Add --data"):
        trained(monkeypatch, tmp_path, str(tmp_path / "saved"))


def test_rows_beyond_those_that_a_start_looks_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(*["1"] * CHECKED_ROWS) + '{"input": "", "label": "1"}\n')
    check_files(Flags(["--data.prompt_dataset", str(tmp_path / "a.jsonl"), "--data.label_key", "label"]))
    with pytest.raises(UsageError, match=f"row {CHECKED_ROWS + 1}: the input 'input' is empty"):
        trained(monkeypatch, tmp_path, str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (["4", ""], "the label 'label' is empty in row 2; the reward is given it as it is."),
        ([True, False], "the label 'label' is a bool in row 1; the reward is given the text 'True'."),
        ([date(2024, 1, 1)], "the label 'label' is a date in row 1; the reward is given the text '2024-01-01'."),
        ([["4"], ["5"]], "the label 'label' is a list in row 1; the reward is given it as it is."),
        (["4", "5"], ""),
    ],
)
def test_labels_of_a_saved_dataset_are_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], labels: list[Any], says: str
) -> None:
    saved = tmp_path / "saved"
    DATASETS.Dataset.from_dict({"input": ["Q"] * len(labels), "label": labels}).save_to_disk(saved)
    trained(monkeypatch, tmp_path, str(saved))
    expected = f"ngrpo: warning: --data.prompt_dataset {saved}: {says}\n" if says else ""
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("kind", "values", "labels"),
    [
        (DATASETS.Value("float32"), [0.1, 7.0], ["0.1", "7"]),
        (DATASETS.List(DATASETS.Value("float32")), [[0.1], [0.7]], [[0.1], [0.7]]),
        ({"x": DATASETS.Value("float32")}, [{"x": 0.1}, {"x": 0.7}], [{"x": 0.1}, {"x": 0.7}]),
    ],
)
def test_labels_of_a_saved_dataset_are_the_shortest_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Any, values: list[Any], labels: list[Any]
) -> None:
    features = DATASETS.Features({"input": DATASETS.Value("string"), "label": kind})
    DATASETS.Dataset.from_dict({"input": ["Q", "R"], "label": values}, features).save_to_disk(tmp_path / "saved")
    assert trained(monkeypatch, tmp_path, str(tmp_path / "saved")).labels == labels


def test_a_split_that_a_dataset_lacks_is_an_error_with_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = DATASETS.Dataset.from_dict({"input": ["Q"], "label": ["7"]})
    DATASETS.DatasetDict({"test": rows, "dev": rows}).save_to_disk(tmp_path / "saved")
    name = str(tmp_path / "saved")
    assert trained(monkeypatch, tmp_path, name, dataset_split="test").labels == ["7"]
    says = r"--data\.prompt_dataset \S+saved: has no split 'train' \(--data\.prompt_split\)\. Its splits: test, dev\."
    with pytest.raises(UsageError, match=says):
        trained(monkeypatch, tmp_path, name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"input": "\\ud83d", "label": "1"}\n', r"line 1 has \\ud83d, half of a surrogate pair"),
        ('[{"input": "Q", "label": "\\uDC00"}]', r"row 1 has \\udc00, half of a surrogate pair"),
        (lines("1") + '{"input": "Q"}\n', "row 2 has no 'label'"),
        (lines("1") + '{"label": "1"}\n', "row 2 has no 'input'"),
    ],
)
def test_rows_that_no_side_can_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / ("a.json" if text.startswith("[") else "a.jsonl")
    file.write_text(text)
    readers: list[Callable[[], object]] = [
        lambda: check_files(Flags(["--data.prompt_dataset", str(file), "--data.label_key", "label"])),
        lambda: trained(monkeypatch, tmp_path, str(file)),
    ]
    for read in readers:
        with pytest.raises(UsageError, match=says):
            read()


def test_our_rewards_read_a_label_as_evaluation_does() -> None:
    from ngrpo.methods.tasks.arithmetic import reward_func

    for label in ("4", " 4 ", ["4"], 4, 4.0):
        assert reward_func(["2 + 2? 4"], ["2 + 2?"], [label])["rewards"].tolist() == [1.0]
