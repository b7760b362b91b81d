# SPDX-License-Identifier: Apache-2.0
"""The tasks in OpenRLHF's conventions."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import tasks
from ngrpo.methods.scoring import answers
from ngrpo.methods.tasks import arithmetic, reasoning_gym
from perturbations.errors import UsageError

CHAT = "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n"


def reward_function_of(flags: Any) -> Any:
    """The function in a task's file, loaded as by OpenRLHF 0.11.2 (utils/agent.py)."""
    spec = importlib.util.spec_from_file_location("reward_func", flags["--reward.remote_url"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward_func


def rows_of(file: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def inputs_of(rows: list[dict[str, Any]]) -> set[str]:
    return {row["input"] for row in rows}


# --- arithmetic ----------------------------------------------------------------------------------------------


def test_problems_are_the_same_every_time_and_held_out_ones_are_others() -> None:
    train, held_out = arithmetic.problems(rows=96)
    assert arithmetic.problems(rows=96) == (train, held_out)
    assert len(inputs_of(train)) == 48
    assert len(held_out) == 16
    assert inputs_of(train).isdisjoint(inputs_of(held_out))


def test_problems_are_sums_of_two_digits() -> None:
    train, held_out = arithmetic.problems(rows=96)
    for row in train + held_out:
        words = row["input"].replace("?", "").split()
        a, b = (int(word) for word in words if word.isdigit())
        assert 2 <= a < 10
        assert 2 <= b < 10
        assert int(row["label"]) == a + b


@pytest.mark.parametrize(
    "text",
    [
        "12",
        "12<|im_end|>",
        "The answer is 12.<|im_end|>",
        "7 + 5 = 12",
        "**12**",
        "12.0",
        "17-12",
    ],
)
def test_right_texts(text: str) -> None:
    assert arithmetic.score(text, "12") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "12, not 13",
        "7 + 5 = 1",
        "112",
        "12.5",
        "x12",
        "-12",
        "twelve",
        "",
    ],
)
def test_wrong_texts(text: str) -> None:
    assert arithmetic.score(text, "12") == 0.0


def test_the_generated_text_is_what_follows_the_prompt() -> None:
    """A prompt cut from the left does not match; the last turn's opening does."""
    assert answers.generated(CHAT + "12", CHAT) == "12"
    assert answers.generated(CHAT[9:] + "12", CHAT) == "12"


def test_the_reward_does_not_read_the_prompt() -> None:
    """The prompt holds a 5."""
    assert arithmetic.reward_func([CHAT], [CHAT], ["5"])["rewards"].tolist() == [0.0]


def test_the_reward_s_file_for_openrlhf(tmp_path: Path) -> None:
    """The reward is consumed as by OpenRLHF 0.11.2 (utils/agent.py)."""
    reward_func = reward_function_of(tasks.prepare("arithmetic", tmp_path))
    info = reward_func([CHAT + "It is 12<|im_end|>"], [CHAT], ["12"])
    assert torch.tensor([info["rewards"]]).tolist() == [1.0]
    assert torch.tensor([info["scores"]]).shape == (1,)
    logged = {name: values.flatten()[0].item() for name, values in info["extra_logs"].items()}
    assert logged == {"answers_with_number": 1.0}


def test_the_prompts_file_for_openrlhf(tmp_path: Path) -> None:
    flags = tasks.prepare("arithmetic", tmp_path)
    rows = rows_of(flags["--data.prompt_dataset"])
    assert len(rows) == arithmetic.TRAIN_ROWS
    assert set(rows[0]) == {"input", "label"}


def test_a_task_leaves_the_user_s_flags_alone(tmp_path: Path) -> None:
    flags = Flags(["--data.prompt_dataset=mine.jsonl", "--data.apply_chat_template"])
    added = flags.with_defaults(tasks.prepare("arithmetic", tmp_path)).added
    assert "--data.prompt_dataset" not in added
    assert "--data.apply_chat_template" not in added
    assert added[added.index("--data.label_key") + 1] == "label"


# --- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("arithmetc", r"'arithmetc'\. Did you mean 'arithmetic'"),
        ("arithmetic:3", "arithmetic takes no argument. Write --task arithmetic"),
        ("reasoning_gym", "needs an argument: --task reasoning_gym:DATASET, such as"),
        ("math:nowhere.jsonl", "nowhere.jsonl: there is no such file"),
        ("shortcut:lat", r"unknown FORM 'lat'\. Did you mean 'late'"),
        ("verifiers:mine", "unknown task 'verifiers'.* --train.agent_func_path for an environment"),
    ],
)
def test_wrong_names_and_arguments(task: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tasks.check_name(task)


def test_an_argument_in_brackets_may_be_left_out() -> None:
    tasks.check_name("shortcut")


def test_usage_names_the_arguments() -> None:
    assert tasks.available() == [
        "arithmetic",
        "math",
        "minimum_sum",
        "reasoning_gym",
        "shortcut",
        "star_graph",
        "two_peaks",
    ]
    assert tasks.usage()[:5] == [
        "arithmetic",
        "math:FILE",
        "minimum_sum",
        "reasoning_gym:DATASET",
        "shortcut[:FORM]",
    ]


# --- reasoning_gym -------------------------------------------------------------------------------------------


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("reasoning_gym")

    def test_unknown_dataset(self) -> None:
        with pytest.raises(UsageError, match=r"'chainsum'\. Did you mean 'chain_sum'.*Available: .*word_ladder"):
            tasks.check_name("reasoning_gym:chainsum")

    @pytest.mark.more
    def test_files(self, tmp_path: Path) -> None:
        """ransom_note iterates over sets of strings: without a fixed hash seed its problems change with the process."""
        first = tmp_path / "one"
        second = tmp_path / "two"
        tasks.prepare("reasoning_gym:ransom_note", first)
        tasks.prepare("reasoning_gym:ransom_note", second)
        train = rows_of(first / "train.jsonl")
        held_out = rows_of(first / "eval.jsonl")
        assert rows_of(second / "train.jsonl") == train
        assert rows_of(second / "eval.jsonl") == held_out
        assert len(train) > 1000
        assert len(held_out) <= reasoning_gym.EVAL_ROWS
        assert inputs_of(train).isdisjoint(inputs_of(held_out))
        assert set(train[0]) == {"input", "label"}

    def test_its_own_scorer_decides(self) -> None:
        train, _ = reasoning_gym.generate("chain_sum", rows=4, held_out=4)
        label = train[0]["label"]
        answer = json.loads(label)["entry"]["answer"]
        right_texts = (
            f"I add them: <answer> {answer} </answer>",
            f"<think>12</think>\\boxed{{{answer}}}",
            f"{answer}<|im_end|>",
        )
        for text in right_texts:
            assert reasoning_gym.score(text, label) == 1.0
        for text in ("<answer>none</answer>", ""):
            assert reasoning_gym.score(text, label) == 0.0
        # The base class gives a share for an answer that holds the right one: its length over the whole's.
        share = len(answer) / (len(answer) + 1)
        assert reasoning_gym.score(f"<answer>={answer}</answer>", label) == share

    @pytest.mark.more
    def test_an_entry_survives_its_label(self) -> None:
        """Entries hold tuples and integer keys, which plain JSON turns into lists and text."""
        metadata = {"pair": (1, (2, [3])), "by": {4: "x", (5, 6): "y"}}
        entry = {"question": "?", "answer": "a", "metadata": metadata}
        label = reasoning_gym.label_of("chain_sum", entry)
        assert json.loads(label, object_hook=reasoning_gym._unpacked)["entry"] == entry

    @pytest.mark.more
    @pytest.mark.parametrize("name", ["arc_agi", "rearc", "sudoku", "graph_color", "knights_knaves", "countdown"])
    def test_every_dataset_survives_its_label(self, name: str) -> None:
        package = pytest.importorskip("reasoning_gym")
        dataset = package.create_dataset(name, seed=5, size=1)
        entry = dataset[0]
        answer = str(entry["answer"])
        label = reasoning_gym.label_of(name, entry)
        score = reasoning_gym.score(f"<answer>{answer}</answer>", label)
        assert score == dataset.score_answer(answer, entry)


# --- a file of problems --------------------------------------------------------------------------------------


def test_math_file(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    source = tmp_path / "mine.jsonl"
    source.write_text(json.dumps({"problem": "Half of one?", "answer": "1/2"}) + "\n")
    flags = tasks.prepare(f"math:{source}", tmp_path / "task")
    (row,) = rows_of(flags["--data.prompt_dataset"])
    assert row["label"] == "1/2"
    assert row["input"][0]["content"].startswith("Half of one?")
    assert "--eval.dataset" not in flags

    texts = [CHAT + "\\boxed{0.5}", CHAT + "2", CHAT + "hm"]
    info = reward_function_of(flags)(texts, [CHAT] * 3, ["1/2"] * 3)
    assert info["rewards"].tolist() == [1.0, 0.0, 0.0]
    assert info["extra_logs"]["answers_found"].tolist()[:2] == [1.0, 1.0]


def test_a_held_out_question_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both seeds draw b; of two entries with one question the first counts."""
    drawn = {0: [("a", "1"), ("b", "2")], 1: [("b", "2"), ("c", "3"), ("c", "4")]}

    def create_dataset(name: str, seed: int, size: int) -> list[dict[str, str]]:
        return [{"question": question, "answer": answer} for question, answer in drawn[seed]]

    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create_dataset))
    train, held_out = reasoning_gym.generate("any")
    assert [row["input"][0] for row in train] == ["c"]
    assert json.loads(train[0]["label"])["entry"]["answer"] == "3"
    assert [row["input"][0] for row in held_out] == ["a", "b"]
