# SPDX-License-Identifier: Apache-2.0
"""Datasets in every layout that is read as it is, and what is said of those that cannot be."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ngrpo import cli
from ngrpo.machine.models import packaged
from ngrpo.methods.scoring.problems import BENCHMARKS, BOXED, LETTER
from ngrpo.workbench.evaluate import load_problems, score
from perturbations.errors import UsageError

GPQA = {"Question": "Which of these is a noble gas?", "Correct Answer": "Neon\n"}
GPQA |= {f"Incorrect Answer {i}": name for i, name in enumerate(("Oxygen", "Nitrogen", "Chlorine"), start=1)}
ASKED = '{"question": "2 + 2?", "answer": 4}\n'
CHOICES = '{"question": "2 + 2?", "choices": %s, "answer": 1}\n'


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "truth", [{"target": "4"}, "4", '["4"]', {"target": ["4"]}, {"target": "", "solution": r"\boxed{4}"}]
)
def test_verl_parquet(tmp_path: Path, truth: Any) -> None:
    import pyarrow.parquet

    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    row = {"data_source": "a/set", "prompt": prompt, "reward_model": {"ground_truth": truth, "style": "rule"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "set.parquet")
    (problem,) = load_problems(str(tmp_path / "set.parquet"))
    assert (problem.id, problem.answer, problem.scorer) == ("set-0", "4", "math")
    assert [m["role"] for m in problem.messages] == ["system", "user"]
    assert problem.question == "2 + 2?"  # a prompt is left as it is
    assert problem.meta["data_source"] == "a/set"


def test_a_problem_without_an_answer_is_named(shared_data: Path) -> None:
    source = str(shared_data / "math_train.parquet")
    with pytest.raises(UsageError, match=r"row 5342 has no answer \(verl layout.*--skip-unanswered"):
        load_problems(source)
    kept = {problem.id for problem in load_problems(source, skip_unanswered=True)}
    # Rows 5342 and 5344 have neither a target nor anything in the box of their solution.
    assert len(kept) == 7498 and not {"math_train-5341", "math_train-5343"} & kept


def test_openrlhf_jsonl(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"input": "2 + 2?", "label": "4"}, {"input": "3 + 3?", "label": 6.0})
    first, second = load_problems(source)
    assert first.messages == ({"role": "user", "content": "2 + 2?"},)
    assert (first.answer, second.answer, second.id) == ("4", "6", "a-1")
    assert load_problems(source, limit=1) == [first]


def test_openrlhf_with_messages_and_own_keys(tmp_path: Path) -> None:
    chat = [{"role": role, "content": "2"} for role in ("user", "assistant", "user")]
    source = jsonl(tmp_path / "a.jsonl", {"context": chat, "truth": "4"})
    (problem,) = load_problems(source, input_key="context", label_key="truth")
    assert problem.messages == tuple(chat)
    with pytest.raises(UsageError, match="a column 'context', but no 'label'; name the reference's with --label-key"):
        load_problems(source, input_key="context")


VERL = {"prompt": [{"role": "user", "content": "verl's"}], "reward_model": {"ground_truth": "1"}}


@pytest.mark.parametrize(
    ("row", "keys", "question", "answer"),
    [
        ({"question": "2 + 2?", "answer": "Four.", "gold": "4"}, {"label_key": "gold"}, f"2 + 2?\n\n{BOXED}", "4"),
        ({**GPQA, "gold": "4"}, {"label_key": "gold"}, f"{GPQA['Question']}\n\n{BOXED}", "4"),
        ({**VERL, "gold": "4"}, {"label_key": "gold"}, f"verl's\n\n{BOXED}", "4"),
        ({**VERL, "mine": "2 + 2?", "gold": "4"}, {"input_key": "mine", "label_key": "gold"}, "2 + 2?", "4"),
        ({**VERL, "mine": "2 + 2?", "label": "4"}, {"input_key": "mine"}, "2 + 2?", "4"),
        ({**VERL, "input": "2 + 2?", "label": "4"}, {"input_key": "input"}, "2 + 2?", "4"),
        ({"question": "2 + 2?", "answer": "Four.", "label": "4"}, {"label_key": "label"}, f"2 + 2?\n\n{BOXED}", "4"),
    ],
)
def test_named_columns_are_read_before_any_layout(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, str], question: str, answer: str
) -> None:
    (problem,) = load_problems(jsonl(tmp_path / "a.jsonl", row), **keys)
    assert (problem.question, problem.answer) == (question, answer)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"input_key": "input"}, r"row 1 has no column 'input' \(--input-key\)\."),
        ({"label_key": "label"}, r"row 1 has no column 'label' \(--label-key\)\."),
        ({"input_key": "my_promt"}, r"row 1 has no column 'my_promt' \(--input-key\)\. Did you mean 'my_prompt'\?"),
        ({"label_key": "anwser"}, r"row 1 has no column 'anwser' \(--label-key\)\. Did you mean 'answer'\?"),
    ],
)
def test_a_named_column_must_be_there(tmp_path: Path, keys: dict[str, str], says: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"question": "2 + 2?", "my_prompt": "Add 2 and 2.", "answer": "4"})
    with pytest.raises(UsageError, match=f"{says} Its columns: question, my_prompt, answer"):
        load_problems(source, **keys)


def test_chat_messages_written_as_a_text_are_no_question(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("input,label\n\"[{'content': '2 + 2?', 'role': 'user'}]\",4\n")
    with pytest.raises(UsageError, match=r"row 1 .*chat messages written as a text.*in JSONL, JSON or parquet"):
        load_problems(str(path))


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"problem": "2 + 2?", "answer": "4", "solution": "long"}, "4"),
        ({"question": "2 + 2?", "answer": "Add.\n#### 4"}, "4"),  # GSM8K
        ({"problem": "2 + 2?", "solution": r"Add: $\boxed{4}$."}, "4"),  # MATH
        ({"question": "2 + 2?", "final_answer": ["4"]}, "4"),  # OlympiadBench
    ],
)
def test_hub_columns(tmp_path: Path, row: dict[str, Any], answer: str) -> None:
    (problem,) = load_problems(jsonl(tmp_path / "a.jsonl", row))
    assert (problem.answer, problem.scorer) == (answer, "math")
    assert problem.question == f"2 + 2?\n\n{BOXED}"
    (plain,) = load_problems(str(tmp_path / "a.jsonl"), instruction="")
    assert plain.question == "2 + 2?"


def test_a_split_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"input": "Q", "label": "1"})
    assert len(load_problems(source, split="train")) == 1
    with pytest.raises(UsageError, match=r"--split test: a file such as .* has the split train alone"):
        load_problems(source, split="test")
    with pytest.raises(UsageError, match=r"owner/name@test: names another split than --split dev"):
        load_problems("owner/name@test", split="dev")


def test_a_saved_dataset_is_read_as_in_training(tmp_path: Path) -> None:
    import pyarrow
    from datasets import Dataset, DatasetDict

    table = pyarrow.table({"input": ["Q", "R"], "label": pyarrow.array([0.1, 2.0], pyarrow.float32())})
    rows = Dataset(table)
    rows.save_to_disk(tmp_path / "one")
    DatasetDict({"dev": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "splits")
    assert [problem.answer for problem in load_problems(str(tmp_path / "one"))] == ["0.1", "2"]
    (tested,) = load_problems(str(tmp_path / "splits"))
    assert (tested.id, tested.answer) == ("splits-0", "2")
    assert len(load_problems(str(tmp_path / "splits"), split="dev")) == 2
    with pytest.raises(UsageError, match=r"has no split 'train'\. Its splits: dev, test"):
        load_problems(str(tmp_path / "splits"), split="train")
    (tmp_path / "files").mkdir()
    with pytest.raises(UsageError, match=r"is a folder of files\. Give one of its files"):
        load_problems(str(tmp_path / "files"))


@pytest.mark.parametrize("choices", ["null", "[]", '""'])
def test_a_column_of_choices_without_any_is_a_question(tmp_path: Path, choices: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(ASKED + CHOICES % choices)
    assert [problem.answer for problem in load_problems(str(path))] == ["4", "1"]


def test_options_with_a_reference_that_is_no_letter_are_warned_of(tmp_path: Path) -> None:
    question = "2 + 2?\nA) 3\nB) 4\nC) 5"
    letters = [
        {"question": question, "answer": answer}
        for answer in ("B", "(b)", "A, C", "A and C", "AC", "(B) 4", "{A,C}", r"\textbf{(B)}")
    ]
    reports: list[str] = []
    load_problems(jsonl(tmp_path / "letters.jsonl", *letters), report=reports.append)
    load_problems(jsonl(tmp_path / "plain.jsonl", {"question": "2 + 2?", "answer": 4}), report=reports.append)
    assert reports == []
    mixed = jsonl(
        tmp_path / "mixed.jsonl", letters[0], {"question": question, "answer": 1}, {**letters[0], "answer": "4"}
    )
    load_problems(mixed, report=reports.append)
    (warning,) = reports
    assert (
        "warning: 2 of 3 problems" in warning
        and "no letter ('1' in mixed-1)" in warning
        and "Write the letter" in warning
    )


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("at least 5", "'at least 5' in a-1, which is a bound and no value"),
        (r"\frac{1}{", r"in a-1, which has braces that do not close"),
        (
            "Blue light is scattered by air far better than red light, so it comes from everywhere.",
            "has more than 12 words",
        ),
        (r"\left\{1, 2\right\}", ""),
        ("Paris, France", ""),
        ("5 feet 6 inches", ""),
    ],
)
def test_references_that_math_can_hardly_equal_are_warned_of(tmp_path: Path, reference: str, says: str) -> None:
    rows = [{"input": "2 + 2?", "label": label} for label in ("4", reference)]
    source = jsonl(tmp_path / "a.jsonl", *rows)
    reports: list[str] = []
    load_problems(source, report=reports.append)
    if not says:
        assert reports == []
        return
    (warning,) = reports
    assert warning.startswith(f"warning: hardly any response equals 1 of 2 references of {source}") and says in warning


def test_gpqa_is_shuffled_alike_in_every_run(tmp_path: Path) -> None:
    rows = [{**GPQA, "Question": f"{GPQA['Question']} ({i})"} for i in range(64)]
    source = jsonl(tmp_path / "gpqa.jsonl", *rows)
    problems = load_problems(source)
    assert problems == load_problems(source)
    assert {p.scorer for p in problems} == {"choice"}
    for problem in problems:
        assert f"{problem.answer}) Neon\n" in problem.question and problem.question.endswith(LETTER)
        assert problem.meta["options"]["ABCD".index(problem.answer)] == "Neon"
    counts = {letter: sum(p.answer == letter for p in problems) for letter in "ABCD"}
    # 64 fair draws of four: each letter 16 ± 3.5; an unshuffled set would have 64 of A.
    assert all(5 <= count <= 29 for count in counts.values()), counts


def test_letters_listed_in_the_question(tmp_path: Path) -> None:
    listed = {"input": "Which?\n(A) one\n(B) two", "label": "B"}
    small = {**listed, "label": "b"}
    plain = {"input": "Which point is it?", "label": "B"}
    problems = load_problems(jsonl(tmp_path / "a.jsonl", listed, small, plain))
    assert [problem.scorer for problem in problems] == ["choice", "choice", "math"]
    assert [problem.answer for problem in problems] == ["B", "B", "B"]


def test_an_answer_of_0_is_an_answer(tmp_path: Path) -> None:
    row = {"prompt": "1 - 1?", "reward_model": {"ground_truth": {"target": 0}}}
    (problem,) = load_problems(jsonl(tmp_path / "a.jsonl", row))
    assert problem.answer == "0"


@pytest.mark.parametrize("ending", ["csv", "json"])  # parquet and JSONL above
def test_endings(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    rows = [{"problem": "2 + 2?", "answer": "4"}, {"problem": "3 + 3?", "answer": "6"}]
    path.write_text(json.dumps(rows, indent=1) if ending == "json" else "problem,answer\n2 + 2?,4\n3 + 3?,6\n")
    assert [p.answer for p in load_problems(str(path))] == ["4", "6"]
    assert [p.id for p in load_problems(str(path), limit=1)] == ["a-0"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("empty.jsonl", "", r"is empty\. Give a file"),
        ("a.jsonl", '{"problem": "x", "answer": "1"}\n{"problem"\n', "line 2 is not JSON"),
        ("a.parquet", "nothing", "cannot be read as parquet"),
        ("a.jsonl", '{"text": "x", "result": "1"}\n', "unknown layout: the columns are text, result"),
        ("a.jsonl", '{"problem": "x", "answer": "1"}\n{"problem": "y", "answer": ""}\n', "row 2 has no answer"),
        ("a.jsonl", '{"input": "x", "label": ["1", "2"]}\n', r"row 1 .*2 reference answers"),
        ("a.jsonl", f'{ASKED}{{"input": "x", "label": 1}}\n', "row 2 has the OpenRLHF layout, row 1 the question and"),
        ("a.jsonl", ASKED + CHOICES % '["3", "4"]', "row 2 .*the column 'choices' is not read .*A. first"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        load_problems(str(path))


def test_missing_answers_and_files(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "problems.jsonl", {"problem": "x", "answer": ""})
    with pytest.raises(UsageError, match="no row has an answer"):
        load_problems(source, skip_unanswered=True)
    with pytest.raises(UsageError, match=r"no such file\. Did you mean 'problems\.jsonl'"):
        load_problems(str(tmp_path / "problem.jsonl"))
    with pytest.raises(UsageError, match=r"'aime2052' names no problems.*Did you mean 'aime2025'"):
        load_problems("aime2052")


def test_benchmarks_go_through_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names, configurations and splits that are asked for, and how each one's columns are read."""
    import datasets

    asked: list[str] = []
    plain = {"problem": "2 + 2?", "answer": "4", "solution": "s"}
    rows = {
        "agentica-org/DeepScaleR-Preview-Dataset@train": plain,
        "HuggingFaceH4/aime_2024@train": plain,
        "math-ai/aime25@test": {"problem": "p", "answer": "70", "id": "0"},
        "math-ai/amc23@test": {"id": 0, "question": "p", "answer": "27.0", "url": "u"},
        "HuggingFaceH4/MATH-500@test": plain,
        "Idavidrein/gpqa:gpqa_diamond@train": GPQA,
        "math-ai/aime25:default@train": plain,
    }

    def load_dataset(name: str, config: str | None, split: str | None) -> Any:
        asked.append(f"{name}:{config}@{split}" if config else f"{name}@{split}")
        return datasets.Dataset.from_list([rows[asked[-1]]] * 2)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    scorers = {name: load_problems(name, limit=1)[0].scorer for name in BENCHMARKS}
    assert scorers == {**dict.fromkeys(BENCHMARKS, "math"), "gpqa_diamond": "choice"}
    load_problems("math-ai/aime25:default@train")
    assert asked == list(rows)


def test_hub_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    one, two, three = (datasets.Dataset.from_list([{"problem": "p", "answer": "1"}] * rows) for rows in (1, 2, 3))
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: {"train": three, "test": two})
    assert len(load_problems("owner/name")) == 2
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: {"one": one, "two": two})
    with pytest.raises(UsageError, match=r"has the splits one, two\. Name one: --split one"):
        load_problems("owner/name")


def test_a_hub_out_of_reach_is_one_message_within_seconds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The libraries of the hub themselves, with an address where nobody answers."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"--data math-ai/aime25: cannot be loaded from the hub \(.*give a local file"):
        load_problems("aime2025")
    assert time.monotonic() - began < 20
    assert "Retry" not in capfd.readouterr().err
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_the_model_is_looked_for_before_the_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise UsageError(f"model {name!r}: there is no such folder")

    monkeypatch.setattr(packaged, "check_on_hub", missing)
    monkeypatch.setattr("ngrpo.methods.scoring.problems._rows", lambda *_: pytest.fail("the problems came first"))
    assert cli.main(["eval", "--model", "no-such", "--data", "aime2025"]) == 2


def test_scorers_by_name(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"problem": "x", "answer": "1"})
    with pytest.raises(UsageError, match=r"unknown scorer 'maths'\. Did you mean 'math'"):
        load_problems(source, scorer="maths")
    with pytest.raises(UsageError, match="the answer '1' is not a letter"):
        load_problems(source, scorer="choice")
    with pytest.raises(UsageError, match="there is no such file"):
        load_problems(source, scorer=str(tmp_path / "reward.py"))


GSM8K = {"question": "2, 3?", "answer": "Add 2, 3.\n#### 5"}
PROMPT = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        (GSM8K, {}),
        (GSM8K, {"input_key": "question", "label_key": "answer"}),
        (GSM8K, {"label_key": "answer"}),
        ({"input": GSM8K["question"], "label": GSM8K["answer"]}, {}),
        ({"prompt": PROMPT, "reward_model": {"ground_truth": GSM8K["answer"]}}, {}),
    ],
)
def test_of_a_solution_the_result_counts_in_each_layout(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, str]
) -> None:
    (problem,) = load_problems(jsonl(tmp_path / "a.jsonl", row), **keys)
    assert problem.answer == "5"
    assert score(problem, r"\boxed{5}").correct
    assert not score(problem, r"\boxed{2, 3}").correct


@pytest.mark.parametrize("label", [{"answer": 4, "level": 2}, '{"inputs": ["1"], "outputs": ["4"]}'])
def test_math_compares_no_objects(tmp_path: Path, label: object) -> None:
    with pytest.raises(UsageError, match=r"row 1: the reference is an object with the keys .*--label-key"):
        load_problems(jsonl(tmp_path / "a.jsonl", {"input": "1 + 3?", "label": label}))


@pytest.mark.parametrize("column", ["image", "images", "video", "audio"])
def test_a_question_with_a_picture_or_sound_is_refused(tmp_path: Path, column: str) -> None:
    without = {"question": "How many?", "answer": "4", column: []}
    assert load_problems(jsonl(tmp_path / "a.jsonl", without))
    with pytest.raises(UsageError, match=f"row 2 has a value in the column '{column}'"):
        load_problems(jsonl(tmp_path / "a.jsonl", without, {**without, column: ["a.png"]}))


@pytest.mark.parametrize(
    ("row", "keys", "label"),
    [
        ({"input": "Capital?", "label": ["Paris", "paris"]}, {}, ["Paris", "paris"]),
        ({"question": "Capital?", "answer": ["Paris", "paris"]}, {}, ["Paris", "paris"]),
        ({"question": "q", "answer": ["42"]}, {}, ["42"]),
        ({"question": "q", "answer": ["42"]}, {"input_key": "question", "label_key": "answer"}, ["42"]),
        ({"question": "q", "answer": {"value": "42"}}, {"label_key": "answer"}, {"value": "42"}),
        (
            {"prompt": PROMPT, "reward_model": {"ground_truth": {"target": "4", "tol": 1}}},
            {},
            {"target": "4", "tol": 1},
        ),
        (GSM8K, {}, GSM8K["answer"]),
    ],
)
def test_a_reward_file_is_given_the_label_that_a_training_gives_it(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, str], label: object
) -> None:
    source = jsonl(tmp_path / "a.jsonl", row)
    (tmp_path / "reward.py").write_text(
        f"def reward_func(queries, prompts, labels):\n    return {{'rewards': float(labels[0] == {label!r})}}\n"
    )
    (problem,) = load_problems(source, scorer=str(tmp_path / "reward.py"), **keys)
    assert score(problem, "").correct
