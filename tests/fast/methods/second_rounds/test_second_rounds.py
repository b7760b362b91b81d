# SPDX-License-Identifier: Apache-2.0
"""Second rounds: which prompts are asked, which responses are trained, and by which ratio."""

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
from ngrpo.trainers.common.sample_records import TwoRounds
from ngrpo.trainers.openrlhf import samples_generator, second_round
from tests.support.run import run_with

LOPE = second_rounds.create("lope")
IGRPO = second_rounds.create("igrpo")


class Tokenizer:
    """A token for each letter; a chat template with a system message of its own, as Qwen's."""

    chat_template = "a template"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return tokens_of(text)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert not options["tokenize"]
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "Be kind."}, *messages]
        text = ""
        for message in messages:
            text += f"<{message['role']}>{message['content']}</>"
        if options.get("add_generation_prompt"):
            text += "<assistant>"
        return text

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return "".join(map(chr, tokens))


# A tokenizer of which nothing but ``encode`` may be called: it has no chat template.
ENCODER = SimpleNamespace(encode=Tokenizer().encode)


def tokens_of(text: str) -> list[int]:
    return [ord(letter) for letter in text]


# --- LOPE's nonsense -----------------------------------------------------------------------------------------------


def test_the_words_of_nonsense_differ() -> None:
    assert len(WORDS) == 63
    assert len(set(WORDS)) == 63


def test_nonsense_is_of_its_words_and_as_long_as_it_may_be() -> None:
    method = second_rounds.create("lope", least=20, most=40)
    longest_word = max(map(len, WORDS))
    drawn = set()
    for seed in range(60):
        prompt = method.prompt("What?", ENCODER, Random(seed))
        nonsense, line = prompt.split("\n")
        assert line == "What?"
        assert set(nonsense.split(" ")) <= set(WORDS)
        assert 20 - longest_word - 1 < len(nonsense) <= 40
        assert len(prompt) - len("What?") <= method.room
        drawn.add(nonsense)
    assert len(drawn) == 60
    assert min(map(len, drawn)) < 23
    assert max(map(len, drawn)) > 37


def test_nonsense_of_one_length_fills_it() -> None:
    method = second_rounds.create("lope", least=20, most=20)
    prompts = [method.prompt("", ENCODER, Random(seed)) for seed in range(300)]
    assert max(map(len, prompts)) == 20 + len("\n")


def test_nonsense_follows_from_the_seed() -> None:
    method = second_rounds.create("lope", least=20, most=40)
    prompt = method.prompt("What?", Tokenizer(), Random(1))
    assert method.prompt("What?", Tokenizer(), Random(1)) == prompt


def test_repeat_asks_the_prompt_again() -> None:
    assert second_rounds.create("repeat").prompt("What?", Tokenizer(), Random(0)) == "What?"


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        pytest.param(
            "<system>Reason.</><user>What?</><assistant>",
            "<system>",
            id="system message of the data",
        ),
        pytest.param(
            "<system>Be kind.</><user>What?</><assistant>",
            "<system>Be kind.</><user>",
            id="system message of the template",
        ),
        pytest.param("What?", "", id="no template"),
    ],
)
def test_nonsense_stands_before_the_first_message_of_the_data(prompt: str, before: str) -> None:
    assert prompt[: opening(prompt, Tokenizer())] == before
    with_nonsense = second_rounds.create("lope", least=9, most=9).prompt(prompt, Tokenizer(), Random(0))
    assert with_nonsense.startswith(before)
    assert with_nonsense.endswith(prompt[len(before) :])
    nonsense, _, _ = with_nonsense[len(before) :].partition("\n")
    assert nonsense.split(" ")[0] in WORDS


# --- what is kept, and the ratio -----------------------------------------------------------------------------------


def test_a_second_round_is_needed_where_no_response_is_right() -> None:
    assert LOPE.is_needed([0.0, -1.0])
    assert not LOPE.is_needed([0.0, 0.1])
    assert second_rounds.create("lope", wrong=0.2).is_needed([0.1, 0.2])


def test_right_responses_are_kept() -> None:
    assert LOPE.kept([0.0, 1.0, 0.0, 0.5], 4, Random(0)) == [1, 3]
    assert LOPE.kept([0.0, 0.0], 4, Random(0)) == []


def test_a_wrong_response_of_the_first_round_stays() -> None:
    """Three of a group of four, any three of five right ones."""
    assert len(LOPE.kept([1.0] * 4, 4, Random(0))) == 3
    choices = {tuple(LOPE.kept([1.0] * 5, 4, Random(seed))) for seed in range(60)}
    for choice in choices:
        assert len(set(choice)) == 3
    assert len(choices) == 10


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # ρ / (ρ + 0.1): ρ = 2 → 2 / 2.1; ρ = 0.1 → 0.5; ρ = e⁻³⁰ → ρ / 0.1.
        pytest.param(
            {},
            [math.log(2 / 2.1), math.log(0.5), -30.0 - math.log(0.1)],
            id="shaped",
        ),
        pytest.param(
            {"shaping": None},
            [math.log(2), math.log(0.1), -30.0],
            id="plain",
        ),
    ],
)
def test_ratio_by_hand(options: dict[str, None], expected: list[float]) -> None:
    """ρ = 0.5 / 0.25, 0.05 / 0.5 and 1 / e³⁰."""
    log_probs = torch.tensor([0.5, 0.05, 1.0]).log()
    behavior_log_probs = torch.tensor([0.25, 0.5, 1.0]).log()
    behavior_log_probs[2] = 30.0
    log_ratio = second_rounds.create("lope", **options).log_ratio(log_probs, behavior_log_probs)
    assert log_ratio.tolist() == pytest.approx(expected, abs=2e-6)


# ---- the rollout ----------------------------------------------------------------------------------------------------


def openrlhf_response(prompt: str, answer: str, reward: float, log_prob: float | None = None) -> dict[str, Any]:
    """What OpenRLHF's executor returns for a response, a token for each letter."""
    tokens = tokens_of(prompt + answer)
    log_probs = None
    if log_prob is not None:
        log_probs = [0.0] * len(prompt) + [log_prob] * len(answer)
    return {
        "prompt": prompt,
        "mm_train_inputs": None,
        "observation_tokens": tokens,
        "action_ranges": [(len(prompt), len(tokens))],
        "rollout_log_probs": log_probs,
        "reward": torch.tensor([reward]),
    }


class Engine:
    """Responds to every prompt with ever longer texts, of which the first is right for the requests numbered here."""

    def __init__(self, *right_requests: int) -> None:
        self.requests: list[dict[str, Any]] = []
        self.second_rounds_asked: Counter[str] = Counter()
        self._right_requests = right_requests

    async def generate_responses(self, **request: Any) -> list[dict[str, Any]]:
        number = len(self.requests)
        self.requests.append(request)
        log_prob = None
        if request["sampling_params"].logprobs is not None:
            log_prob = -0.25 * number
        rewards = [0.0] * request["num_samples"]
        if number in self._right_requests:
            rewards[0] = 1.0
        text = "a" * (number + 1)
        return [openrlhf_response(request["prompt"], text, reward, log_prob) for reward in rewards]


def in_two_rounds(
    engine: Any, monkeypatch: pytest.MonkeyPatch, *, method: Any = None, longest: int = 50, **options: Any
) -> list[dict[str, Any]]:
    """Three responses to a prompt; the run leaves 10 tokens for each. Options are LOPE's."""
    method = method or second_rounds.create("lope", **{"least": 30, "most": 40, **options})
    run_with(monkeypatch, second_round=method.spec())
    of_perturbation = {"round": 7, "training_step": 0, "answers": 3}
    responses = second_round.in_two_rounds(
        engine,
        prompt="What?",
        label="4",
        num_samples=3,
        images=None,
        max_length=longest,
        sampling_params=SimpleNamespace(logprobs=None, max_tokens=10, extra_args={"perturbation": of_perturbation}),
        hf_tokenizer=Tokenizer(),
    )
    return asyncio.run(responses)


def carried_by(group: list[dict[str, Any]]) -> list[TwoRounds]:
    """What the samples of a group carry to the trainer."""
    return sample_records.two_rounds([response["mm_train_inputs"] for response in group], len(group))


def test_a_second_round_asks_with_nonsense_and_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(2, 3)
    in_two_rounds(engine, monkeypatch, prompts=3, answers=2)
    first, *of_second_round = engine.requests
    assert first["prompt"] == "What?"
    assert first["sampling_params"].logprobs is None
    assert first["sampling_params"].extra_args["perturbation"]["answers"] == 3
    assert first["max_length"] == 50
    assert len({request["prompt"] for request in of_second_round}) == 3
    for request in of_second_round:
        assert request["sampling_params"].logprobs == 1
        assert request["sampling_params"].extra_args["perturbation"]["answers"] == 2, "a ladder is over these"
        assert request["num_samples"] == 2
        assert request["label"] == "4"
        nonsense_length = len(request["prompt"]) - len("What?")
        assert request["max_length"] - 50 == nonsense_length, "responses have the same room"


class CuttingEngine(Engine):
    """An engine that leaves out the first token of a prompt, as OpenRLHF does with one that is too long."""

    async def generate_responses(self, **request: Any) -> list[dict[str, Any]]:
        responses = await super().generate_responses(**request)
        for response in responses:
            ((start, end),) = response["action_ranges"]
            response["observation_tokens"] = response["observation_tokens"][1:]
            response["action_ranges"] = [(start - 1, end - 1)]
        return responses


def test_a_prompt_that_was_cut_has_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CuttingEngine(1)
    group = in_two_rounds(engine, monkeypatch, prompts=2, answers=2)
    assert len(engine.requests) == 1
    assert len(group) == 3


def test_a_prompt_beyond_its_room_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(LOPE), "room", 0)
    with pytest.raises(RuntimeError, match="tokens longer than the given one; its room is 0"):
        in_two_rounds(Engine(), monkeypatch)


def test_right_responses_become_responses_to_the_prompt_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests 2 and 3, of three and four letters, have a right response each: numbers 5 and 7 of 3 + 3 · 2."""
    group = in_two_rounds(Engine(2, 3), monkeypatch, prompts=3, answers=2)
    carried = carried_by(group)
    for rounds in carried:
        assert rounds.rewards.tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 0]
    assert [rounds.place for rounds in carried] == [5, 7, 2]

    for response, rounds, length in zip(group, carried, (3, 4)):
        assert response["observation_tokens"] == tokens_of("What?" + "a" * length)
        assert response["prompt"] == "What?"
        assert response["action_ranges"] == [(5, 5 + length)]
        assert response["rollout_log_probs"] is None, "as in the other responses"
        assert rounds.log_probs.tolist() == [-0.25 * (length - 1)] * length
    assert group[2]["observation_tokens"] == tokens_of("What?a")
    assert carried[2].log_probs is None


def test_a_second_round_of_wrong_responses_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    group = in_two_rounds(Engine(), monkeypatch, prompts=2, answers=2)
    for response in group:
        assert response["observation_tokens"] == tokens_of("What?a")
    assert [rounds.place for rounds in carried_by(group)] == [0, 1, 2]


def test_prompts_of_an_evaluation_have_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, second_round=LOPE.spec())

    class PlainSamplesGenerator:
        vllm_engines: list[Any]

        def generate_eval_samples(self) -> str:
            return self._dispatch_prompts_to_vllm([], [])

        def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str]) -> str:
            assert self.vllm_engines[0].name == "engine"
            return self.vllm_engines[0].generate_responses.remote(sampling_params=SimpleNamespace(extra_args=None))

    engine = SimpleNamespace(
        name="engine",
        generate_responses=SimpleNamespace(remote=lambda **_: "one round"),
        generate_in_two_rounds=SimpleNamespace(remote=lambda **_: "two rounds"),
    )
    generator = samples_generator.samples_generator(PlainSamplesGenerator)()
    generator.vllm_engines = [engine]
    assert generator.generate_eval_samples() == "one round"
    assert generator._dispatch_prompts_to_vllm([], []) == "two rounds"
    assert generator.vllm_engines == [engine]


# ---- refinements of a draft ---------------------------------------------------------------------------------------

SHOWN = "\n\nAn earlier attempt:\n\n{}\n\nThe attempt may be wrong. Solve the problem again, and better where you can."
DRAFTS = [("three", 0.0), ("four", 1.0), ("five", 0.5)]


@pytest.mark.parametrize(
    ("prompt", "end"),
    [
        pytest.param(
            "<user>What?</><assistant>",
            "</><assistant>",
            id="one turn",
        ),
        pytest.param(
            "<user>2 + 2?</><assistant>5</><user>What?</><assistant><think></think>",
            "</><assistant><think></think>",
            id="several turns",
        ),
        pytest.param("What?", "", id="no template"),
    ],
)
def test_the_best_draft_ends_the_last_message(prompt: str, end: str) -> None:
    assert prompt[closing(prompt, Tokenizer()) :] == end
    with_draft = IGRPO.prompt(prompt, Tokenizer(), Random(0), DRAFTS)
    assert with_draft == prompt.removesuffix(end) + SHOWN.format("four") + end


def test_a_prompt_without_a_chat_template_ends_the_last_message() -> None:
    assert closing("What?", SimpleNamespace(chat_template=None)) == len("What?")


def test_of_equally_good_drafts_any_may_be_shown() -> None:
    drafts = [*DRAFTS, ("vier", 1.0)]
    prompts = {IGRPO.prompt("", Tokenizer(), Random(seed), drafts) for seed in range(20)}
    assert prompts == {SHOWN.format("four"), SHOWN.format("vier")}


class DraftingEngine:
    """An engine with rewards 0.5, 1, 0 in the first round, 1, 0, 1 in the second."""

    ANSWERS = (
        [("two", 0.5), ("four", 1.0), ("six", 0.0)],
        [("4", 1.0), ("5", 0), ("", 1)],
    )

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.drafting: list[bool] = []
        self.second_rounds_asked = {"What?": 0}

    async def generate_responses(self, **request: Any) -> list[dict[str, Any]]:
        answers = self.ANSWERS[len(self.requests)]
        self.requests.append(request)
        self.drafting.append(second_round.drafting.get())
        record = {"record": bytes([len(self.requests)])}
        responses = []
        for answer, reward in answers:
            response = openrlhf_response(request["prompt"], answer, reward)
            responses.append({**response, "mm_train_inputs": dict(record)})
        return responses


def test_refinements_are_asked_like_drafts_with_the_best_draft_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DraftingEngine()
    in_two_rounds(engine, monkeypatch, method=IGRPO, longest=200)
    first, second = engine.requests
    assert engine.drafting == [True, False]
    with_draft = "What?" + SHOWN.format("four")
    assert second == {**first, "prompt": with_draft, "sampling_params": second["sampling_params"]}
    assert second["sampling_params"] == first["sampling_params"], "no log-probabilities beyond those of the run"


def test_refinements_are_trained_with_their_own_prompt_and_records(monkeypatch: pytest.MonkeyPatch) -> None:
    group = in_two_rounds(DraftingEngine(), monkeypatch, method=IGRPO, longest=200)
    with_draft = "What?" + SHOWN.format("four")
    assert [response["prompt"] for response in group] == [with_draft] * 3
    texts = [Tokenizer().decode(response["observation_tokens"], True) for response in group]
    assert texts == [f"{with_draft}4", f"{with_draft}5", with_draft]
    for response in group:
        assert response["mm_train_inputs"]["record"] == b"\2"

    carried = carried_by(group)
    assert [rounds.place for rounds in carried] == [3, 4, 5]
    for rounds in carried:
        assert rounds.rewards.tolist() == [0.5, 1, 0, 1, 0, 1]
        assert rounds.log_probs is None


NEEDED = len("What?" + SHOWN.format("four")) + 10


def test_a_draft_without_room_leaves_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DraftingEngine()
    group = in_two_rounds(engine, monkeypatch, method=IGRPO, longest=NEEDED - 1)
    assert len(engine.requests) == 1
    assert [response["mm_train_inputs"] for response in group] == [{"record": b"\1"}] * 3


def test_a_draft_that_fills_the_room_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DraftingEngine()
    in_two_rounds(engine, monkeypatch, method=IGRPO, longest=NEEDED)
    assert len(engine.requests) == 2
