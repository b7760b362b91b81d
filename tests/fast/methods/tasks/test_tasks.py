# SPDX-License-Identifier: Apache-2.0
"""The tasks in OpenRLHF's conventions."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import tasks
from ngrpo.methods.scoring import answers
from ngrpo.methods.tasks import arithmetic, reasoning_gym
from perturbations.errors import UsageError

CHAT = "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n"


def reward_of(flags: Any) -> Any:
    """The function in a task's file, loaded as by OpenRLHF 0.11.2 (utils/agent.py)."""
    spec = importlib.util.spec_from_file_location("reward_func", flags["--reward.remote_url"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward_func


def rows_of(file: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_problems() -> None:
    train, held_out = arithmetic.problems(rows=96)
    assert (train, held_out) == arithmetic.problems(rows=96)
    assert len({row["input"] for row in train}) == 48 and len(held_out) == 16
    assert {row["input"] for row in train}.isdisjoint(row["input"] for row in held_out)
    for row in train + held_out:
        words = row["input"].replace("?", "").split()
        a, b = (int(word) for word in words if word.isdigit())
        assert {a, b} <= {*range(2, 10)} and int(row["label"]) == a + b


def test_score() -> None:
    right = ("12", "12<|im_end|>", "The answer is 12.<|im_end|>", "7 + 5 = 12", "**12**", "12.0", "17-12")
    wrong = ("12, not 13", "7 + 5 = 1", "112", "12.5", "x12", "-12", "twelve", "")
    assert [text for text in right if arithmetic.score(text, "12") != 1.0] == []
    assert [text for text in wrong if arithmetic.score(text, "12") != 0.0] == []


def test_reward_reads_the_answer_only() -> None:
    assert answers.generated(CHAT + "12", CHAT) == "12"
    # A prompt cut from the left does not match; the last turn's opening does.
    assert answers.generated(CHAT[9:] + "12", CHAT) == "12"
    assert arithmetic.reward_func([CHAT], [CHAT], ["5"])["rewards"].tolist() == [0.0]


def test_file_for_openrlhf(tmp_path: Path) -> None:
    """The reward is consumed as by OpenRLHF 0.11.2 (utils/agent.py)."""
    import torch

    flags = tasks.prepare("arithmetic", tmp_path)
    reward_func = reward_of(flags)
    info = reward_func([CHAT + "It is 12<|im_end|>"], [CHAT], ["12"])
    assert torch.tensor([info["rewards"]]).tolist() == [1.0]
    assert torch.tensor([info["scores"]]).shape == (1,)
    assert {key: value.flatten()[0].item() for key, value in info["extra_logs"].items()} == {"answers_with_number": 1.0}
    rows = rows_of(flags["--data.prompt_dataset"])
    assert len(rows) == arithmetic.TRAIN_ROWS and set(rows[0]) == {"input", "label"}
    given = Flags(["--data.prompt_dataset=mine.jsonl", "--data.apply_chat_template"])
    added = given.with_defaults(flags).added
    assert "--data.prompt_dataset" not in added and "--data.apply_chat_template" not in added
    assert added[added.index("--data.label_key") + 1] == "label"


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("arithmetc", r"'arithmetc'\. Did you mean 'arithmetic'"),
        ("arithmetic:3", "arithmetic takes no argument. Write --task arithmetic"),
        ("reasoning_gym", "needs an argument: --task reasoning_gym:DATASET, such as"),
        ("math:nowhere.jsonl", "nowhere.jsonl: there is no such file"),
        ("shortcut:lat", r"unknown FORM 'lat'\. Did you mean 'late'"),
        ("verifiers:mine", "unknown task 'verifiers'.* --train.agent_func_path for an environment"),
    ],
)
def test_arguments(task: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        tasks.check_name(task)


def test_usage_names_the_arguments() -> None:
    names = ["arithmetic", "math", "minimum_sum", "reasoning_gym", "shortcut", "star_graph", "two_peaks"]
    assert tasks.available() == names
    tasks.check_name("shortcut")
    assert tasks.usage()[:5] == ["arithmetic", "math:FILE", "minimum_sum", "reasoning_gym:DATASET", "shortcut[:FORM]"]


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("reasoning_gym")

    def test_unknown_dataset(self) -> None:
        with pytest.raises(UsageError, match=r"'chainsum'\. Did you mean 'chain_sum'.*Available: .*word_ladder"):
            tasks.check_name("reasoning_gym:chainsum")

    @pytest.mark.more
    def test_files(self, tmp_path: Path) -> None:
        # ransom_note iterates over sets of strings: without a fixed hash seed its problems change with the process.
        names, folders = ("train.jsonl", "eval.jsonl"), [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            tasks.prepare("reasoning_gym:ransom_note", folder)
        (train, held_out), again = ([rows_of(folder / name) for name in names] for folder in folders)
        assert [train, held_out] == again
        assert len(held_out) <= reasoning_gym.EVAL_ROWS and len(train) > 1000
        assert {row["input"] for row in train}.isdisjoint(row["input"] for row in held_out)
        assert set(train[0]) == {"input", "label"}

    def test_its_own_scorer_decides(self) -> None:
        train, _ = reasoning_gym.generate("chain_sum", rows=4, held_out=4)
        label = train[0]["label"]
        answer = json.loads(label)["entry"]["answer"]
        right = (f"I add them: <answer> {answer} </answer>", f"<think>12</think>\\boxed{{{answer}}}")
        assert {reasoning_gym.score(text, label) for text in (*right, f"{answer}<|im_end|>")} == {1.0}
        assert {reasoning_gym.score(text, label) for text in ("<answer>none</answer>", "")} == {0.0}
        # The base class gives a share for an answer that holds the right one: its length over the whole's.
        assert reasoning_gym.score(f"<answer>={answer}</answer>", label) == len(answer) / (len(answer) + 1)

    @pytest.mark.more
    def test_every_dataset_survives_its_label(self) -> None:
        """Entries hold tuples and integer keys, which plain JSON turns into lists and text."""
        entry = {"question": "?", "answer": "a", "metadata": {"pair": (1, (2, [3])), "by": {4: "x", (5, 6): "y"}}}
        label = reasoning_gym.label_of("chain_sum", entry)
        assert json.loads(label, object_hook=reasoning_gym._unpacked)["entry"] == entry
        package = pytest.importorskip("reasoning_gym")
        for name in ("arc_agi", "rearc", "sudoku", "graph_color", "knights_knaves", "countdown"):
            data = package.create_dataset(name, seed=5, size=1)
            entry, answer = data[0], str(data[0]["answer"])
            label = reasoning_gym.label_of(name, entry)
            assert reasoning_gym.score(f"<answer>{answer}</answer>", label) == data.score_answer(answer, entry), name


def test_math_file(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    source = tmp_path / "mine.jsonl"
    source.write_text(json.dumps({"problem": "Half of one?", "answer": "1/2"}) + "\n")
    flags = tasks.prepare(f"math:{source}", tmp_path / "task")
    (row,) = rows_of(flags["--data.prompt_dataset"])
    assert row["label"] == "1/2" and row["input"][0]["content"].startswith("Half of one?")
    assert "--eval.dataset" not in flags
    reward_func = reward_of(flags)
    prompts = [CHAT] * 3
    info = reward_func([CHAT + text for text in ("\\boxed{0.5}", "2", "hm")], prompts, ["1/2"] * 3)
    assert info["rewards"].tolist() == [1.0, 0.0, 0.0]
    assert info["extra_logs"]["answers_found"].tolist()[:2] == [1.0, 1.0]
