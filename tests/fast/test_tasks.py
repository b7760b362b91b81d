"""The arithmetic task in OpenRLHF's conventions."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from ngrpo import tasks
from ngrpo.tasks import arithmetic

CHAT = "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n"


def test_problems() -> None:
    train, held_out = arithmetic.problems(rows=96)
    assert (train, held_out) == arithmetic.problems(rows=96)
    assert train != arithmetic.problems(rows=96, seed=1)[0]
    assert len({row["input"] for row in train}) == 48 and len(held_out) == 16
    assert {row["input"] for row in train}.isdisjoint(row["input"] for row in held_out)
    for row in train + held_out:
        words = row["input"].replace("?", "").split()
        a, b = (int(word) for word in words if word.isdigit())
        assert 2 <= a <= 9 and 2 <= b <= 9 and int(row["label"]) == a + b
    with pytest.raises(ValueError, match=r"held_out=4: must be in \[0, 3\]"):
        arithmetic.problems(low=1, high=2, held_out=4)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("12", 1.0),
        ("12<|im_end|>", 1.0),
        ("The answer is 12.<|im_end|>", 1.0),
        ("7 + 5 = 12", 1.0),
        ("**12**", 1.0),
        ("12.0", 1.0),
        ("12, not 13", 0.0),
        ("7 + 5 = 1", 0.0),
        ("112", 0.0),
        ("12.5", 0.0),
        ("x12", 0.0),
        ("-12", 0.0),
        ("twelve", 0.0),
        ("", 0.0),
    ],
)
def test_score(answer: str, expected: float) -> None:
    assert arithmetic.score(answer, "12") == expected


def test_minus_between_numbers_is_not_a_sign() -> None:
    assert arithmetic.score("17-12", "12") == 1.0


def test_reward_reads_the_answer_only() -> None:
    assert arithmetic.answer_of(CHAT + "12", CHAT) == "12"
    # A prompt cut from the left does not match; the last turn's opening does.
    assert arithmetic.answer_of(CHAT[9:] + "12", CHAT) == "12"
    assert arithmetic.reward_func([CHAT], [CHAT], ["5"])["rewards"].tolist() == [0.0]


def test_file_for_openrlhf(tmp_path: Path) -> None:
    """Loads the file and consumes its answer as OpenRLHF 0.11.2 does (utils/agent.py)."""
    import torch

    flags = arithmetic.prepare(tmp_path)
    spec = importlib.util.spec_from_file_location("reward_func", flags["--reward.remote_url"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    info = module.reward_func([CHAT + "It is 12<|im_end|>"], [CHAT], ["12"])
    assert torch.tensor([info["rewards"]]).tolist() == [1.0]
    assert torch.tensor([info["scores"]]).shape == (1,)
    assert {key: value.flatten()[0].item() for key, value in info["extra_logs"].items()} == {"answers_with_number": 1.0}
    rows = [json.loads(line) for line in Path(flags["--data.prompt_dataset"]).read_text().splitlines()]
    assert len(rows) == arithmetic.TRAIN_ROWS and set(rows[0]) == {"input", "label"}


def test_expand_adds_only_what_is_missing(tmp_path: Path) -> None:
    added = tasks.expand("arithmetic", tmp_path, ["--data.prompt_dataset=mine.jsonl", "--data.apply_chat_template"])
    assert "--data.prompt_dataset" not in added and "--data.apply_chat_template" not in added
    assert added[added.index("--data.label_key") + 1] == "label"


def test_unknown_task() -> None:
    with pytest.raises(ValueError, match=r"'arithmetc'\. Did you mean 'arithmetic'"):
        tasks.check_name("arithmetc")
