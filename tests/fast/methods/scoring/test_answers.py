# SPDX-License-Identifier: Apache-2.0
"""Scorers: letters, tasks, reward files, and where the final answer stands."""

from pathlib import Path

import pytest

from ngrpo.methods.scoring import reward_calls
from ngrpo.methods.scoring.answers import (
    check_math,
    chosen_letter,
    generated,
    last_boxed,
    last_boxes,
    last_statement,
    numbers,
    stated,
    visible,
)
from ngrpo.methods.tasks import arithmetic
from ngrpo.workbench.evaluate import Problem, load_task, score
from perturbations.errors import UsageError
from tests.support.scorer_pairs import CHOICE, LETTER_CASES


def problem(answer: str, scorer: str) -> Problem:
    return Problem("p", ({"role": "user", "content": "Which?"},), answer, scorer)


def test_letters() -> None:
    """No wrong response is accepted, and no right one is refused."""
    wrong = [pair for pair in CHOICE if (chosen_letter(pair.response, pair.options) == pair.gold) != pair.right]
    assert wrong == []
    gases = ["Oxygen", "Neon", "Nitrogen", "Chlorine"]
    found = [(case["letter"], chosen_letter(case["response"], case.get("options", gases))) for case in LETTER_CASES]
    assert [pair for pair in found if pair[0] != pair[1]] == []


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("Answer: B", (1.0, True, "B", True)), ("Answer: C", (0.0, False, "C", True)), ("hm", (0.0, False, None, False))],
)
def test_choice_verdict(text: str, verdict: tuple[object, ...]) -> None:
    found = score(problem("B", "choice"), text)
    assert (found.reward, found.correct, found.extracted, found.parsed) == verdict


def test_last_boxed() -> None:
    assert last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert (last_boxed(r"\boxed 3$"), last_boxed(r"\boxed {4}")) == ("3", "4")
    assert last_boxed(r"\boxed{1}, or rather \boxed{\frac{1}{") == ""
    assert last_boxed("none") is None
    assert last_boxed(r"\boxed{x = \boxed{5}}") == "5"
    assert last_boxes(r"\boxed{\boxed{5}, \fbox{6}}") == ["5", "6"]


def test_statements() -> None:
    assert stated("The answer is 3.\nNo: the final answer is: 4") == "4"
    assert stated("Add.\n#### 72") == "72"
    assert stated("no such thing") is None
    assert last_statement("I get 3, then 12.50 in all") == "12.5"
    assert last_statement(r"\boxed{07}") == last_statement("it is 7.0") == "7"
    assert last_statement("It is\n  Paris. ") == "paris"
    assert last_statement(" ") is None
    assert visible("<think>a</think> b") == " b"
    assert visible("<think>only this") == visible("only this</think>") == ""
    assert visible("b<think>a</think>c<think>d") == "bc"
    assert generated("<|im_start|>assistant\n<think>\n12", "<|im_start|>assistant\n<think>\n") == "<think>12"
    assert last_boxes(r"\boxed{1}, so $\boxed{2}$ and $\boxed{3}$") == ["2", "3"]


@pytest.mark.parametrize(
    ("opening", "end"),
    [
        ("<|im_start|>assistant\n", "<|im_end|>"),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<｜Assistant｜><think>\n", "<｜end▁of▁sentence｜>"),
        ("<start_of_turn>model\n", "<end_of_turn>\n<eos>"),
        ("Assistant:", "<end_of_utterance>"),
        ("[/INST]", "</s>"),
    ],
)
def test_training_and_evaluation_read_the_same_response(opening: str, end: str) -> None:
    """A training's query has the end token, and a prompt that was cut at its beginning."""
    prompt = f"The user asks: reply with 42 in \\boxed{{42}}.\n{opening}"
    thinking = "Six times seven.</think>\n\n" if "<think>" in opening else ""
    text = f"{thinking}The answer is 42."
    as_evaluated = generated(prompt + text, prompt)
    assert check_math("42", as_evaluated).correct
    assert generated(prompt + text + end, prompt) == as_evaluated
    assert generated(prompt[10:] + text + end, prompt) == as_evaluated
    assert not check_math("42", generated(prompt[10:] + "I do not know." + end, prompt)).correct


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1,234.50 and 007 and 100", {"1234.5", "7", "100"}),
        (
            "123456789012345678901234567890",
            {"123456789012345678901234567890"},
        ),  # more digits than Python's decimals keep
        ("-7, 8-5, (-2), x-3 and 2(4)-1", {"-7", "8", "5", "-2", "3", "2", "4", "1"}),
        ("x3 2x 3rd v1.2", set()),
        ("12.5. 0.50, -0", {"12.5", "0.5", "0"}),
    ],
)
def test_numbers_in_one_form(text: str, found: set[str]) -> None:
    assert set(numbers(text, alone=True)) == found


def test_a_task_has_its_rewards_verdict() -> None:
    for text in ("12", "7 + 5 = 12", "It is 12.<|im_end|>", "13", "twelve", "12, not 13", "12.0", ""):
        for p in load_task("arithmetic"):
            verdict = score(p, text)
            assert verdict.reward == arithmetic.score(text, p.answer) and verdict.correct == (verdict.reward == 1.0)
    assert score(problem("12", "task:arithmetic"), "12.0").extracted == "12"


FIRST = "return {'rewards': [len(queries[0]) - len(prompts[0])], 'scores': [float(queries[0].endswith(labels[0]))]}"
TENSORS = "import torch; return {'rewards': torch.tensor([0.25]), 'scores': torch.tensor([1.0])}"
NEIGHBOR = "from neighbor_of_the_reward import FULL; return {'rewards': [FULL]}"


@pytest.mark.parametrize(
    ("body", "gold", "reward", "correct"),
    [(FIRST, "7", 7.0, True), (FIRST, "8", 7.0, False), (TENSORS, "7", 0.25, True), (NEIGHBOR, "7", 1.0, True)],
)
def test_reward_file(tmp_path: Path, body: str, gold: str, reward: float, correct: bool) -> None:
    (tmp_path / "neighbor_of_the_reward.py").write_text("FULL = 1.0\n")
    file = tmp_path / "reward.py"
    file.write_text(f"def reward_func(queries, prompts, labels, **kwargs):\n    {body}\n")
    verdict = score(problem(gold, str(file)), "it is 7", prompt="<user>Which?")
    assert (verdict.reward, verdict.correct, verdict.extracted) == (reward, correct, "7")
    file.write_text("def reward_func(queries, prompts, labels):\n    raise KeyError('gold')\n")
    reward_calls.load.cache_clear()
    with pytest.raises(
        UsageError, match=r"reward\.py: reward_func raised KeyError: 'gold', in line 2 .*, for problem 'p'"
    ):
        score(problem("7", str(file)), "7")
