# SPDX-License-Identifier: Apache-2.0
"""The sandbox: its problems and their habits, its tokenizer, its model, and the tasks made for it."""

import itertools
import json
import random
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ngrpo.config import rules
from ngrpo.config.parse import run_config
from ngrpo.machine.models import packaged, sandbox
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import tasks
from ngrpo.methods.scoring import Problem
from ngrpo.methods.scoring.answers import generated
from ngrpo.methods.tasks import minimum_sum, shortcut, star_graph, two_peaks
from ngrpo.workbench.compare.plan import read_plan
from tests.conftest import ROOT

NAMES = ("minimum_sum", "shortcut", "shortcut:late", "shortcut:first-plain", "star_graph", "two_peaks")


@pytest.mark.parametrize("easy", [True, False])
def test_the_shortcut_is_right_on_easy_problems_alone(easy: bool) -> None:
    chance = random.Random(0)
    for _ in range(200):
        digits = sandbox.digit_problem(chance, easy)
        assert len(digits) == 6
        assert set(digits) <= set(range(10))
        assert (digits[0] == sum(digits) % 10) == easy == (sum(digits[1:]) % 10 == 0)


DIGITS = [3, 7, 1, 8, 5, 2]  # 3 + 7 + 1 + 8 + 5 + 2 = 26, of which the last digit is 6


def test_demonstrations_of_digit_sums() -> None:
    """A demonstration copies the first digit, or counts the sum's last digit up and is right in a share of cases."""
    chance = random.Random(0)
    counted = 0
    right = 0
    for _ in range(4000):
        way, *digits = sandbox.digit_demonstration(chance, DIGITS, late=False).split()
        if way == "copy":
            assert digits == ["3"]
            continue
        assert way == "count"
        *steps, result = digits
        assert steps == ["0", "1", "9", "4"]
        assert result in ("6", "7")
        counted += 1
        right += result == "6"
    assert abs(counted / 4000 - sandbox.COUNTED) < 0.02
    assert abs(right / counted - sandbox.SKILL) < 0.025


def test_late_demonstrations_begin_with_fillers() -> None:
    words = sandbox.digit_demonstration(random.Random(0), DIGITS, late=True).split()
    assert set(words[:3]) <= set(sandbox.FILLERS)
    assert words[3] in ("copy", "count")


@pytest.mark.parametrize(
    ("number", "right"),
    [
        (40, True),
        (37, True),
        (44, False),
        (75, False),
        (99, False),
    ],
)
def test_an_answer_near_the_higher_peak_is_right(number: int, right: bool) -> None:
    """exp(-9 / 50) = 0.835 at 37, so a reward of 0.85; exp(-16 / 50) = 0.726 at 44, so 0.75: by hand."""
    problem = Problem("a", ({"role": "user", "content": "pick"},), "40", "task:two_peaks")
    assert tasks.score(problem, f" {number}").correct is right


def test_two_peaks() -> None:
    assert two_peaks.reward(40) == pytest.approx(1.0, abs=1e-9)
    assert two_peaks.reward(75) == pytest.approx(0.6, abs=1e-9)
    assert two_peaks.reward(0) == pytest.approx(0.1, abs=1e-9)
    assert max(sandbox.NUMBERS, key=two_peaks.reward) == sandbox.HIGH_PEAK
    habit = sandbox.peak_habit()
    assert sum(habit) == pytest.approx(1)
    assert max(sandbox.NUMBERS, key=habit.__getitem__) == sandbox.LOW_PEAK
    # Seldom near the higher peak: by hand, the floor's 0.02 of 100 numbers beside 5 √(2π) for the bell.
    assert sum(habit[35:46]) == pytest.approx(11 * 0.02 / (100 * 0.02 + 12.533), rel=1e-3)


@pytest.mark.parametrize(
    ("numbers", "best"),
    [
        ([1, 2, 3, 4], 0),
        ([1, 1, 1, 9], 6),
        ([5, 5, 5, 4], 1),
    ],
)
def test_minimum_sum(numbers: list[int], best: int) -> None:
    assert minimum_sum.solution(numbers) == best


def test_star() -> None:
    edges, path = sandbox.path_problem(random.Random(0))
    assert len(edges) == 12
    assert len(path) == 5
    assert sum(a == path[0] for a, _ in edges) == 3
    assert all(edge in edges for edge in itertools.pairwise(path))
    assert path[-1] not in {a for a, _ in edges}  # the end of its arm
    assert len(sandbox.NODES) ** -sandbox.ARM_LENGTH < 1e-6  # the chance of a right answer
    label = " ".join(map(str, path[1:]))
    assert star_graph.score(f" {label} <|im_end|>", label) == 1.0
    assert star_graph.score(f" {label} 11 <|im_end|>", label) == 0.0 == star_graph.score("<|im_end|>", label)


@pytest.mark.parametrize("name", NAMES)
def test_tasks_write_the_same_files_every_time(name: str, tmp_path: Path) -> None:
    flags = tasks.prepare(name, tmp_path / "a")
    tasks.prepare(name, tmp_path / "b")
    words = set(sandbox.TOKENS)
    kept = {}
    for file in ("train.jsonl", "eval.jsonl"):
        text = (tmp_path / "a" / file).read_text()
        assert text == (tmp_path / "b" / file).read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        assert all(set(row) == {"input", "label"} and set(row["input"].split()) <= words for row in rows)
        assert max(len(row["input"].split()) for row in rows) + 10 < 64
        kept[file] = {row["input"] for row in rows}
    assert name == "two_peaks" or kept["train.jsonl"].isdisjoint(kept["eval.jsonl"])
    row = rows[0]
    prompt = f"<|im_start|>user\n {row['input']} <|im_start|>assistant\n"
    reward_func = runpy.run_path(flags["--reward.remote_url"])["reward_func"]
    found = reward_func([f"{prompt} {row['label']} <|im_end|>", prompt], [prompt] * 2, [row["label"]] * 2)
    assert found["rewards"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("form", shortcut.FORMS)
def test_the_share_of_easy_problems(form: str) -> None:
    train, _ = shortcut.problems(form)
    share = sum(row["label"] == row["input"].split()[1] for row in train) / len(train)
    assert abs(share - shortcut.FORMS[form][1]) < 0.03


def test_what_is_logged_beside_the_reward() -> None:
    counted = shortcut.reward_func([" copy 3", " count 0 1 9 4 6"], ["", ""], ["6", "6"])
    assert counted["extra_logs"]["task/counted"].tolist() == [0.0, 1.0] == counted["rewards"].tolist()
    high = two_peaks.reward_func([" 41", " 74", " -3", ""], [""] * 4, ["40"] * 4)
    assert high["extra_logs"]["task/near_high_peak"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert high["rewards"].tolist()[2:] == [0.0, 0.0]
    assert minimum_sum.score("-3 0 2 2", "2") == 1.0


def test_model_of_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once into the cache, twice the same, and read by transformers; texts go through its tokenizer and back."""
    monkeypatch.setenv("NGRPO_CACHE", str(tmp_path))
    monkeypatch.setattr(sandbox, "STEPS", 2)
    monkeypatch.setattr(sandbox, "_LAST_STEPS", 1)
    said: list[str] = []
    folder = Path(packaged.resolve("sandbox", report=said.append))
    assert folder == packaged.folder_of("sandbox") == Path(packaged.resolve("sandbox", report=said.append))
    assert len(said) == 1
    assert "sandbox" in said[0]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))  # one where there were several, two where there was one
        sandbox.make(tmp_path / "again", steps=2)
        assert torch.get_num_threads() == 3 - min(threads, 2)
    finally:
        torch.set_num_threads(threads)
    sandbox.make(tmp_path / "other", steps=2, seed=1)
    made = [folder, tmp_path / "again", tmp_path / "other"]
    one, same, other = ((place / "model.safetensors").read_bytes() for place in made)
    assert one == same != other

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.2f} million parameters"
    page = (ROOT / "docs" / "sandbox.md").read_text()
    assert size in str(sandbox.__doc__)
    assert size in page
    assert model.config.head_dim >= 32
    assert model.dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size == len(sandbox.TOKENS)
    question = [{"role": "user", "content": "sum 3 7 1 8 5 2"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    said_then = tokenizer.decode(tokenizer(prompt + " count -1 7 <|im_end|>", add_special_tokens=False)["input_ids"])
    assert generated(said_then, prompt) == " count -1 7"
    assert tokenizer("What is 12 ?", add_special_tokens=False)["input_ids"][2] == sandbox.IDS["12"]


def test_settings_that_go_with_the_model() -> None:
    """Printed and given to every run, and nothing that was given is changed."""
    words = ["--perturbations", "none", "--model", "sandbox", "--task", "shortcut", "--actor.adam.lr", "1e-5"]
    plan, _ = read_plan(words)
    shared = Flags(plan.shared)
    evaluation = Flags(plan.evaluation)
    assert shared.value("--actor.adam.lr") == "1e-5"
    assert shared.value("--rollout.batch_size") == "8"
    values = [evaluation.value(flag) for flag in ("--task", "--max-tokens", "--n")]
    assert values == ["shortcut", "12", "8"]
    assert Flags(plan.diagnosis).value("--max-tokens") == "12"
    complete = rules.checked(run_config(["--model", "sandbox", "--task", "shortcut", "--hardware", "cpu"]))
    assert complete.flags.value("--actor.adam.lr") == "6e-4"
    assert "--actor.adam.lr" in complete.flags.added
    other = rules.checked(run_config(["--model", "smollm2-135m", "--task", "shortcut", "--hardware", "cpu"]))
    assert not other.flags.has("--actor.adam.lr")
