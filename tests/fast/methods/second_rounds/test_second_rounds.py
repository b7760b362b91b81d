# SPDX-License-Identifier: Apache-2.0
"""Second rounds: which prompts are asked, which answers are trained, and by which ratio."""

import asyncio
import math
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo.methods import second_rounds
from ngrpo.methods.second_rounds.base import closing, opening
from ngrpo.methods.second_rounds.lope import WORDS
from ngrpo.trainers.common import sample_records
from ngrpo.trainers.openrlhf import samples_generator, second_round
from tests.support.run import run_with

LOPE, IGRPO = second_rounds.create("lope"), second_rounds.create("igrpo")


class Tokenizer:
    """A token for each letter; a chat template with a system message of its own, as Qwen's."""

    chat_template = "a template"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def apply_chat_template(self, messages: list[dict[str, str]], **how: Any) -> str:
        assert not how["tokenize"]
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "Be kind."}, *messages]
        generation = "<assistant>" * how.get("add_generation_prompt", False)
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + generation

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return "".join(map(chr, tokens))


def test_nonsense_is_of_its_words_and_as_long_as_it_may_be() -> None:
    method, drawn = second_rounds.create("lope", least=20, most=40), set()
    for seed in range(60):
        asked = method.prompt("What?", SimpleNamespace(encode=Tokenizer().encode), Random(seed))
        nonsense, line = asked.split("\n")
        assert line == "What?" and set(nonsense.split(" ")) <= set(WORDS)
        assert 20 - max(map(len, WORDS)) - 1 < len(nonsense) <= 40
        assert len(asked) - len("What?") <= method.room
        drawn.add(nonsense)
    assert len(drawn) == 60 and min(map(len, drawn)) < 23 and max(map(len, drawn)) > 37
    assert method.prompt("What?", Tokenizer(), Random(1)) == method.prompt("What?", Tokenizer(), Random(1))
    assert len(set(WORDS)) == len(WORDS) == 63
    assert second_rounds.create("repeat").prompt("What?", Tokenizer(), Random(0)) == "What?"
    only = second_rounds.create("lope", least=20, most=20)
    asked = [only.prompt("", SimpleNamespace(encode=Tokenizer().encode), Random(seed)) for seed in range(300)]
    assert max(map(len, asked)) == 20 + len("\n")


@pytest.mark.parametrize(
    "prompt, before",
    [
        ("<system>Reason.</><user>What?</><assistant>", "<system>"),
        ("<system>Be kind.</><user>What?</><assistant>", "<system>Be kind.</><user>"),
        ("What?", ""),
    ],
)
def test_nonsense_stands_before_the_first_message_of_the_data(prompt: str, before: str) -> None:
    assert prompt[: opening(prompt, Tokenizer())] == before
    asked = second_rounds.create("lope", least=9, most=9).prompt(prompt, Tokenizer(), Random(0))
    assert asked.startswith(before) and asked.endswith(prompt[len(before) :])
    assert asked[len(before) :].split("\n")[0].split(" ")[0] in WORDS


def test_right_answers_take_places_and_a_wrong_one_stays() -> None:
    assert LOPE.is_needed([0.0, -1.0]) and not LOPE.is_needed([0.0, 0.1])
    assert second_rounds.create("lope", wrong=0.2).is_needed([0.1, 0.2])
    assert LOPE.kept([0.0, 1.0, 0.0, 0.5], 4, Random(0)) == [1, 3]
    assert LOPE.kept([0.0, 0.0], 4, Random(0)) == []
    assert len(LOPE.kept([1.0] * 4, 4, Random(0))) == 3
    chosen = {tuple(LOPE.kept([1.0] * 5, 4, Random(seed))) for seed in range(60)}
    assert all(len(set(each)) == 3 for each in chosen) and len(chosen) == 10


def test_ratio_by_hand() -> None:
    """ρ = 2 → 2 / 2.1; ρ = 0.1 → 0.5; ρ = e⁻³⁰ → ρ / 0.1."""
    log_probs = torch.tensor([0.5, 0.05, 1.0]).log()
    given = torch.tensor([0.25, 0.5, 1.0]).log() + torch.tensor([0.0, 0.0, 30.0])
    shaped = LOPE.log_ratio(log_probs, given)
    expected = [math.log(2 / 2.1), math.log(0.5), -30.0 - math.log(0.1)]
    assert shaped.tolist() == pytest.approx(expected, abs=2e-6)
    plain = second_rounds.create("lope", shaping=None).log_ratio(log_probs, given)
    assert plain.tolist() == pytest.approx([math.log(2), math.log(0.1), -30.0], abs=2e-6)


# ---- the rollout ----------------------------------------------------------------------------------------------------


def response(prompt: str, answer: str, reward: float, log_prob: float | None = None) -> dict[str, Any]:
    """What OpenRLHF's executor returns for an answer, a token for each letter."""
    tokens = [ord(letter) for letter in prompt + answer]
    return {
        "prompt": prompt,
        "mm_train_inputs": None,
        "observation_tokens": tokens,
        "action_ranges": [(len(prompt), len(tokens))],
        "rollout_log_probs": None if log_prob is None else [0.0] * len(prompt) + [log_prob] * len(answer),
        "reward": torch.tensor([reward]),
    }


class Engine:
    """Answers wrongly to a prompt, and rightly to nonsense before it, ever longer."""

    def __init__(self, *right: int) -> None:
        self.asked: list[dict[str, Any]] = []
        self.second_rounds_asked: Counter[str] = Counter()
        self._right = right

    async def generate_responses(self, **asked: Any) -> list[dict[str, Any]]:
        number = len(self.asked)
        self.asked.append(asked)
        kept = None if asked["sampling_params"].logprobs is None else -0.25 * number
        right = number in self._right
        count = asked["num_samples"]
        return [response(asked["prompt"], "a" * (number + 1), float(right and i == 0), kept) for i in range(count)]


def two_rounds(
    engine: Any, monkeypatch: pytest.MonkeyPatch, *, method: Any = None, longest: int = 50, **options: Any
) -> Any:
    """Responses to a prompt; the run leaves 10 tokens for each."""
    method = method or second_rounds.create("lope", **{"least": 30, "most": 40, **options})
    run_with(monkeypatch, second_round=method.spec())
    asked = {"prompt": "What?", "label": "4", "num_samples": 3, "images": None, "max_length": longest}
    arguments = {"round": 7, "training_step": 0, "answers": 3}
    params = SimpleNamespace(logprobs=None, max_tokens=10, extra_args={"perturbation": arguments})
    return asyncio.run(second_round.in_two_rounds(engine, **asked, sampling_params=params, hf_tokenizer=Tokenizer()))


def test_right_answers_become_answers_to_the_prompt_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(2, 3)
    group = two_rounds(engine, monkeypatch, prompts=3, answers=2)
    first, *others = engine.asked
    assert (first["prompt"], first["sampling_params"].logprobs, first["max_length"]) == ("What?", None, 50)
    assert len({each["prompt"] for each in others}) == 3
    for each in others:
        assert (each["sampling_params"].logprobs, each["num_samples"], each["label"]) == (1, 2, "4")
        assert each["max_length"] - 50 == len(each["prompt"]) - len("What?"), "answers have the same room"
    carried = sample_records.two_rounds([each["mm_train_inputs"] for each in group], 3)
    assert [each.rewards.tolist() for each in carried] == [[0, 0, 0, 0, 0, 1, 0, 1, 0]] * 3
    assert [each.place for each in carried] == [5, 7, 2]
    for each, kept, length in zip(group, carried, (3, 4)):
        assert each["observation_tokens"] == [ord(letter) for letter in "What?" + "a" * length]
        assert each["prompt"] == "What?" and each["action_ranges"] == [(5, 5 + length)]
        assert each["rollout_log_probs"] is None, "as in the other answers"
        assert kept.log_probs.tolist() == [-0.25 * (length - 1)] * length
    assert carried[2].log_probs is None and group[2]["observation_tokens"] == [ord(letter) for letter in "What?a"]


def test_a_second_round_of_wrong_answers_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    group = two_rounds(Engine(), monkeypatch, prompts=2, answers=2)
    assert [each["observation_tokens"][5:] for each in group] == [[ord("a")]] * 3
    assert [each.place for each in sample_records.two_rounds([r["mm_train_inputs"] for r in group], 3)] == [0, 1, 2]


def test_prompts_of_an_evaluation_have_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, second_round=LOPE.spec())

    class Plain:
        vllm_engines: list[Any]

        def generate_eval_samples(self) -> str:
            return self._dispatch_prompts_to_vllm([], [])

        def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str]) -> str:
            assert self.vllm_engines[0].name == "engine"
            return self.vllm_engines[0].generate_responses.remote(sampling_params=SimpleNamespace(extra_args=None))

    generator = samples_generator.samples_generator(Plain)()
    rounds = {name: SimpleNamespace(remote=lambda name=name, **_: name) for name in ("one", "two")}
    engine = SimpleNamespace(generate_responses=rounds["one"], generate_in_two_rounds=rounds["two"], name="engine")
    generator.vllm_engines = [engine]
    assert generator.generate_eval_samples() == "one" and generator._dispatch_prompts_to_vllm([], []) == "two"
    assert generator.vllm_engines == [engine]


# ---- refinements of a draft ---------------------------------------------------------------------------------------

SHOWN = "\n\nAn earlier attempt:\n\n{}\n\nThe attempt may be wrong. Solve the problem again, and better where you can."


@pytest.mark.parametrize(
    "prompt, end",
    [
        ("<user>What?</><assistant>", "</><assistant>"),
        ("<user>2 + 2?</><assistant>5</><user>What?</><assistant><think></think>", "</><assistant><think></think>"),
        ("What?", ""),
    ],
)
def test_the_best_draft_ends_the_last_message(prompt: str, end: str) -> None:
    assert prompt[closing(prompt, Tokenizer()) :] == end
    drafts = [("three", 0.0), ("four", 1.0), ("five", 0.5)]
    asked = IGRPO.prompt(prompt, Tokenizer(), Random(0), drafts)
    assert asked == prompt.removesuffix(end) + SHOWN.format("four") + end
    assert closing("What?", SimpleNamespace(chat_template=None)) == len("What?")
    equal = {IGRPO.prompt("", Tokenizer(), Random(seed), [*drafts, ("vier", 1.0)]) for seed in range(20)}
    assert equal == {SHOWN.format("four"), SHOWN.format("vier")}


class Drafting:
    """An engine with rewards 0.5, 1, 0 in the first round, 1, 0, 1 in the second."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.drafting: list[bool] = []
        self.second_rounds_asked = {"What?": 0}

    async def generate_responses(self, **asked: Any) -> list[dict[str, Any]]:
        self.asked.append(asked)
        self.drafting.append(second_round.drafting.get())
        answers = {1: [("two", 0.5), ("four", 1.0), ("six", 0.0)], 2: [("4", 1.0), ("5", 0), ("", 1)]}
        record = {"mm_train_inputs": {"record": bytes([len(self.asked)])}}
        return [{**response(asked["prompt"], *answer), **record} for answer in answers[len(self.asked)]]


def test_refinements_are_trained_with_their_own_prompt_and_records(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Drafting()
    group = two_rounds(engine, monkeypatch, method=IGRPO, longest=200)
    first, second = engine.asked
    assert engine.drafting == [True, False]
    shown = "What?" + SHOWN.format("four")
    assert second == {**first, "prompt": shown, "sampling_params": second["sampling_params"]}
    assert second["sampling_params"] == first["sampling_params"], "no log-probabilities beyond those of the run"
    assert [each["prompt"] for each in group] == [shown] * 3
    texts = [Tokenizer().decode(each["observation_tokens"], True) for each in group]
    assert texts == [f"{shown}4", f"{shown}5", shown]
    assert [each["mm_train_inputs"]["record"] for each in group] == [b"\2"] * 3
    carried = sample_records.two_rounds([each["mm_train_inputs"] for each in group], 3)
    assert [each.rewards.tolist() for each in carried] == [[0.5, 1, 0, 1, 0, 1]] * 3
    assert [each.place for each in carried] == [3, 4, 5] and all(each.log_probs is None for each in carried)


def test_a_draft_without_room_leaves_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = len("What?" + SHOWN.format("four")) + 10
    engine = Drafting()
    group = two_rounds(engine, monkeypatch, method=IGRPO, longest=needed - 1)
    assert len(engine.asked) == 1 and [each["mm_train_inputs"] for each in group] == [{"record": b"\1"}] * 3
    fitting = Drafting()
    two_rounds(fitting, monkeypatch, method=IGRPO, longest=needed)
    assert len(fitting.asked) == 2, "a draft that fills the room is shown"
