# SPDX-License-Identifier: Apache-2.0
"""`ngrpo data`: each set's columns, made up here, as rows that OpenRLHF and `ngrpo eval` read."""

import json
from pathlib import Path
from typing import Any

import pytest

from ngrpo import cli
from ngrpo.config.input_checks import check_files
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods.scoring.problems import BOXED, LETTER
from ngrpo.workbench.evaluate import load_problems

AIME = {"ID": "2024-I-1", "problem": "Find 1 + 1.", "solution": r"It is \boxed{002}.", "answer": "002", "year": "2024"}
GPQA = {"Question": "Which is a noble gas?", "Correct Answer": "Neon", "Subdomain": "Chemistry"}
GPQA |= {f"Incorrect Answer {i}": name for i, name in enumerate(("Oxygen", "Nitrogen", "Chlorine"), start=1)}
# The columns that each set has on the hub, with problems of our own, and the first label.
SETS: dict[str, tuple[dict[str, Any], str, str]] = {
    "deepscaler": ({"problem": "Find 2 + 2.", "answer": "4", "solution": ""}, "4", BOXED),
    "aime2024": (AIME, "002", BOXED),
    "aime2025": ({"problem": "Find 3 + 3.", "answer": "6", "id": "0"}, "6", BOXED),
    "amc23": ({"id": 0, "question": "Find 4 + 4.", "answer": 8.0, "url": "u"}, "8", BOXED),
    "math500": ({"problem": "Find 5 + 5.", "solution": r"\boxed{10}", "answer": "10", "level": 1}, "10", BOXED),
    "gpqa_diamond": (GPQA, "", LETTER),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize("name", SETS)
def test_each_set_from_a_file_of_its_layout(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    row, label, form = SETS[name]
    Path("theirs.jsonl").write_text(json.dumps(row) + "\n")
    assert cli.main(["data", name, "--from", "theirs.jsonl"]) == 0
    assert f"1 problems of theirs.jsonl: data/{name}.jsonl" in capsys.readouterr().err
    (written,) = rows(f"data/{name}.jsonl")
    (message,) = written["input"]
    assert message["role"] == "user"
    assert message["content"].endswith(form)
    (before,) = load_problems("theirs.jsonl")
    (after,) = load_problems(f"data/{name}.jsonl")
    assert after.messages == before.messages
    assert after.answer == before.answer
    assert after.scorer == before.scorer
    assert written["label"] == (label or before.answer)
    args = ["--data.prompt_dataset", f"data/{name}.jsonl", "--data.label_key", "label"]
    check_files(Flags([*args, "--data.apply_chat_template"]))


def test_plain_texts_for_a_model_without_a_chat_template() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    Path("verl.jsonl").write_text(json.dumps({"prompt": prompt, "reward_model": {"ground_truth": "4"}}) + "\n")
    assert cli.main(["data", "verl.jsonl", "--plain"]) == 0
    assert rows("data/verl_plain.jsonl") == [{"input": "Be brief.\n\n2 + 2?", "label": "4"}]
    assert cli.main(["data", "verl.jsonl", "--out", "x.jsonl", "--instruction", "Say why."]) == 0
    assert rows("x.jsonl")[0]["input"][-1]["content"] == "2 + 2?\n\nSay why."


def test_rows_without_an_answer_are_left_out_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"problem": "Find it.", "answer": answer}) for answer in ("1", "", "3")]
    Path("s.jsonl").write_text("\n".join(lines))
    assert cli.main(["data", "s.jsonl"]) == 0
    assert [row["label"] for row in rows("data/s.jsonl")] == ["1", "3"]
    assert "1 of 3 problems" in capsys.readouterr().err
    assert cli.main(["data", "s.jsonl", "--limit", "1", "--out", "one.jsonl"]) == 0
    assert len(rows("one.jsonl")) == 1


def test_a_problem_of_reasoning_gym_keeps_what_its_scorer_needs() -> None:
    label = json.dumps({"dataset": "spell_backward", "entry": {"question": "Spell abc.", "answer": "cba"}})
    Path("s.jsonl").write_text(json.dumps({"input": "Spell abc.", "label": label}) + "\n")
    assert cli.main(["data", "s.jsonl"]) == 0
    assert rows("data/s.jsonl")[0]["label"] == label
    (problem,) = load_problems("data/s.jsonl")
    assert problem.scorer == "reasoning_gym"


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.jsonl").write_text(json.dumps(SETS["aime2025"][0]) + "\n")
    Path("data").mkdir()
    Path("data/s.jsonl").write_text("mine")
    assert cli.main(["data", "s.jsonl"]) == 2
    assert "data/s.jsonl exists" in capsys.readouterr().err
    assert Path("data/s.jsonl").read_text() == "mine"


def test_what_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "deepscalr"]) == 2
    assert "Did you mean 'deepscaler'?" in capsys.readouterr().err
    assert cli.main(["data", "aime2025", "--from", "none.jsonl"]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert not Path("data").exists()
