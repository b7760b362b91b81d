# SPDX-License-Identifier: Apache-2.0
"""Second rounds: which prompts are asked, which answers are trained, and by which ratio."""

import asyncio
import math
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.config.parse import run_config
from ngrpo.config.rules import resolve_flags
from ngrpo.config.run import RunConfig
from ngrpo.methods import advantages, second_rounds
from ngrpo.methods.second_rounds.base import opening
from ngrpo.methods.second_rounds.lope import WORDS
from ngrpo.trainers.common import sample_records
from ngrpo.trainers.common.policy_loss import TwoRoundsLoss, behavior
from ngrpo.trainers.common.sample_records import TwoRounds
from ngrpo.trainers.openrlhf import experience_maker, samples_generator, second_round, step_advantages
from perturbations.errors import UsageError
from tests.fast.gradient_problem import policy_loss
from tests.fast.run import run_with

LOPE = second_rounds.create("lope")


class Tokenizer:
    """A token for each letter; a chat template with a system message of its own, as Qwen's."""

    chat_template = "a template"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        manner: str = "kind",
    ) -> str:
        assert not tokenize and add_generation_prompt
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": f"Be {manner}."}, *messages]
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>"


def test_nonsense_is_of_its_words_and_as_long_as_it_may_be() -> None:
    method, drawn = second_rounds.create("lope", least=20, most=40), set()
    for seed in range(60):
        asked = method.prompt("What?", SimpleNamespace(encode=Tokenizer().encode), Random(seed))
        nonsense, line = asked.split("\n")
        assert line == "What?" and set(nonsense.split(" ")) <= set(WORDS)
        assert 20 - max(map(len, WORDS)) - 1 < len(nonsense) <= 40
        assert len(asked) - len("What?") <= method.room
        drawn.add(nonsense)
    assert len(drawn) == 60
    assert min(map(len, drawn)) < 23
    assert max(map(len, drawn)) > 37
    assert method.prompt("What?", Tokenizer(), Random(1)) == method.prompt("What?", Tokenizer(), Random(1))
    assert len(set(WORDS)) == len(WORDS) == 63
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


def test_a_template_that_knows_no_system_message() -> None:
    class NoSystem(Tokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
            if messages[0]["role"] == "system":
                raise ValueError("System role not supported")
            return f"<bos><user>{messages[0]['content']}</><model>"

    assert opening("<bos><user>What?</><model>", NoSystem()) == len("<bos><user>")
    assert opening("What?", SimpleNamespace(chat_template=None)) == 0


def test_repeat_asks_the_same_prompt_as_often() -> None:
    method = second_rounds.create("repeat")
    assert method.prompt("What?", Tokenizer(), Random(0)) == "What?" and method.room == 0
    assert method.prompts * method.answers == LOPE.prompts * LOPE.answers == 24


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
    log_probs = None if log_prob is None else [0.0] * len(prompt) + [log_prob] * len(answer)
    return {
        "prompt": prompt,
        "label": "4",
        "images": None,
        "mm_train_inputs": None,
        "observation_tokens": tokens,
        "action_ranges": [(len(prompt), len(tokens))],
        "rollout_log_probs": log_probs,
        "truncated": False,
        "reward": torch.tensor([reward]),
        "scores": reward,
        "extra_logs": {},
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
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    logprobs: int | None = None,
    prompt: str = "What?",
    template: str | None = None,
    **options: Any,
) -> Any:
    method = second_rounds.create("lope", **{"least": 30, "most": 40, **options})
    run = RunConfig(specs={"second_round": method.spec()}, chat_template_kwargs=template)
    monkeypatch.setattr(second_round, "current_run", lambda: run)
    asked = {"prompt": prompt, "label": "4", "num_samples": 3, "images": None, "max_length": 50}
    params = SimpleNamespace(logprobs=logprobs, extra_args={"perturbation": {"round": 7}})
    return asyncio.run(second_round.in_two_rounds(engine, **asked, sampling_params=params, hf_tokenizer=Tokenizer()))


def test_the_opening_is_of_the_run_s_own_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the template's arguments, which change what comes before the user's message."""
    engine, before = Engine(), "<system>Be brief.</><user>"
    two_rounds(engine, monkeypatch, prompt=f"{before}What?</><assistant>", template="manner=brief")
    assert len(engine.asked) == 7 and all(asked["prompt"].startswith(before) for asked in engine.asked)
    assert all(asked["prompt"].removeprefix(before).split(" ")[0] in WORDS for asked in engine.asked[1:])


def test_one_right_answer_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(0)
    group = two_rounds(engine, monkeypatch)
    assert len(engine.asked) == 1 and [each["mm_train_inputs"] for each in group] == [None] * 3


def test_right_answers_become_answers_to_the_prompt_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(2, 3)
    group = two_rounds(engine, monkeypatch, prompts=3, answers=2)
    first, *others = engine.asked
    assert (first["prompt"], first["sampling_params"].logprobs, first["max_length"]) == ("What?", None, 50)
    assert len({each["prompt"] for each in others}) == 3
    for each in others:
        assert each["sampling_params"].logprobs == 1
        assert each["num_samples"] == 2
        assert each["label"] == "4"
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


def test_where_rollouts_hand_on_their_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    group = two_rounds(Engine(1), monkeypatch, logprobs=1, prompts=1, answers=1)
    assert group[0]["rollout_log_probs"] == [0.0] * 5 + [-0.25] * 2
    assert group[1]["rollout_log_probs"] == [0.0] * 6


def test_a_second_round_of_wrong_answers_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    group = two_rounds(Engine(), monkeypatch, prompts=2, answers=2)
    assert [each["observation_tokens"][5:] for each in group] == [[ord("a")]] * 3
    assert [each.place for each in sample_records.two_rounds([r["mm_train_inputs"] for r in group], 3)] == [0, 1, 2]


def test_a_prompt_that_was_cut_has_no_second_round(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    original = engine.generate_responses

    async def cut(**asked: Any) -> list[dict[str, Any]]:
        return await original(**{**asked, "prompt": asked["prompt"][2:]})

    monkeypatch.setattr(engine, "generate_responses", cut)
    two_rounds(engine, monkeypatch)
    assert len(engine.asked) == 1


def test_no_reward_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="came without a reward"):
        second_round.reward_of({"reward": None})
    assert second_round.reward_of({"reward": [0.5]}) == 0.5


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


def test_damaged_bytes_are_refused() -> None:
    for kept in (TwoRounds(np.float32([0, 1]), 1, np.float32([-0.5, -1.5])), TwoRounds(np.float32([0]), 0)):
        packed = kept.pack()
        (again,) = sample_records.two_rounds([packed], 1)
        assert again.place == kept.place and (again.rewards == kept.rewards).all()
        assert (again.log_probs is None) == (kept.log_probs is None)
        (key, data) = next(iter(packed.items()))
        with pytest.raises(ValueError, match="two rounds is damaged"):
            sample_records.two_rounds([{key: data[:-1]}], 1)
    assert sample_records.two_rounds(None, 2) == [None, None] == sample_records.two_rounds([None, {}], 2)


# ---- the loss -------------------------------------------------------------------------------------------------------


def test_advantages_of_both_rounds_by_hand() -> None:
    """Of 4 + 4 answers one is right: mean 1/8, deviation √(1/8), so 2.474874 and −0.353553; of the kept 1.5, −0.5."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    advantage = advantages.create("group_norm")
    of_kept = advantage.compute(rewards)
    every = np.float32([0, 0, 0, 0, 0, 0, 1, 0])
    carried = [TwoRounds(every, place) for place in (6, 1, 2, 3)] + [None] * 4
    found = step_advantages.advantages_of_all(advantage, rewards, of_kept, carried)
    assert found[0].tolist() == pytest.approx([2.474874, *[-0.353553] * 3], abs=1e-6)
    assert torch.equal(found[1], of_kept[1])
    penalised = torch.tensor(
        [[0.5, 0.0, 0.0, -0.5]]
    )  # by OpenRLHF, which knows of these four alone: deviation √(0.5/7)
    found = step_advantages.advantages_of_all(advantage, penalised, advantage.compute(penalised), carried[:4])
    assert found[0].tolist() == pytest.approx([1.870829, 0.0, 0.0, -1.870829], abs=1e-6)


def experience(log_probs: list[float] | None, tokens: int = 4) -> SimpleNamespace:
    """Two answers of which the second one may be of the second round; one more column, which is no token's."""
    mask = torch.ones(2, tokens + 1)
    mask[:, -1] = 0
    given = None if log_probs is None else np.float32(log_probs)
    packed = TwoRounds(np.float32([0, 1]), 1, given).pack()
    return SimpleNamespace(action_mask=mask, mm_train_inputs=[None, packed])


def two_rounds_loss(method: Any, loss: Any, batch: Any) -> TwoRoundsLoss:
    carried = sample_records.two_rounds(batch.mm_train_inputs, len(batch.action_mask))
    return TwoRoundsLoss(method, loss, carried, batch.action_mask)


@pytest.mark.parametrize("shaping", [0.1, None])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_loss_is_the_formula_and_its_gradient(shaping: float | None, sign: float) -> None:
    """ρ / (ρ + γ) without clip for either sign; without shaping PPO's ρ, clipped; other answers as ever."""
    old = torch.tensor([[-1.0, -2.0, -0.5, -1.5, 0.0], [-1.0, -0.1, -3.0, -0.7, 0.0]])
    given = [-1.1, -2.5, -0.3, -0.7]
    moved = torch.tensor([0.05, -0.1, 0.4, 0.0, 0.0])
    advantage = torch.tensor([[0.5] * 5, [sign * 1.5] * 5])
    method, batch = second_rounds.create("lope", shaping=shaping), experience(given)
    log_probs = (old + moved).requires_grad_()
    ours = two_rounds_loss(method, policy_loss(), batch)
    loss = ours(log_probs, old, advantage, action_mask=batch.action_mask)[0]
    (gradient,) = torch.autograd.grad(loss, log_probs)

    again = (old + moved).requires_grad_()
    ratio = (again - old).exp()
    rho = (again[1, :4] - torch.tensor(given)).exp()
    first = torch.minimum(ratio[0, :4] * 0.5, ratio[0, :4].clamp(0.8, 1.2) * 0.5)
    if shaping is None:
        second = torch.minimum(rho * sign * 1.5, rho.clamp(0.8, 1.2) * sign * 1.5)
    else:
        second = sign * 1.5 * rho / (rho + shaping)
    expected = -(first.sum() + second.sum()) / 8
    (known,) = torch.autograd.grad(expected, again)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient, known, rtol=1e-5, atol=1e-7) and gradient[1, :4].abs().max() > 1e-3


def test_expected_gradient_is_that_of_the_prompt_of_the_data() -> None:
    """Over all answers of one token, drawn from the policy at another prompt: Σ π(o|p′) ρ A ∇log π = Σ A ∇π(o|p)."""
    theta = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64)
    drawn_from = (theta + torch.tensor([0.1, -0.1, 0.05, 0.0])).log_softmax(-1)  # near enough for no clip
    reward = torch.tensor([1.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    method, found = second_rounds.create("lope", shaping=None), torch.zeros(4, dtype=torch.float64)
    for token in range(4):
        logits = theta.clone().requires_grad_()
        log_prob = logits.log_softmax(-1)[token].reshape(1, 1)
        kept = TwoRounds(np.float32([0, 1]), 1, np.float32([drawn_from[token]])).pack()
        batch = SimpleNamespace(action_mask=torch.ones(1, 1), mm_train_inputs=[kept])
        ours = two_rounds_loss(method, policy_loss(), batch)
        loss = ours(log_prob, log_prob.detach(), reward[token].reshape(1, 1), action_mask=batch.action_mask)[0]
        found += drawn_from[token].exp() * torch.autograd.grad(loss, logits)[0]
    logits = theta.clone().requires_grad_()
    (known,) = torch.autograd.grad(-(logits.softmax(-1) * reward).sum(), logits)
    assert torch.allclose(found, known, atol=1e-7) and known.abs().max() > 0.01


def test_weights_of_another_policy_are_not_taken_twice() -> None:
    old = torch.full((2, 5), -1.0)
    rollout = torch.full((2, 5), -1.3)
    batch, method = experience([-1.2] * 4), second_rounds.create("lope")
    plain = type(policy_loss())(is_correction_level="token", is_correction_mode="clip", is_correction_threshold=[0, 10])
    ours = two_rounds_loss(method, plain, batch)
    loss = ours(old, old, torch.ones(2, 5), action_mask=batch.action_mask, rollout_log_probs=rollout)[0]
    rho = math.exp(0.2)
    assert loss.item() == pytest.approx(-(math.exp(0.3) + rho / (rho + 0.1)) / 2, rel=1e-5)


def test_an_answer_that_was_cut_and_one_that_grew() -> None:
    given, there = behavior(torch.ones(1, 3), [TwoRounds(np.float32([0]), 0, np.float32([-1, -2, -3, -4]))])
    assert given.tolist() == [[-1, -2, -3]] and there.all()
    with pytest.raises(RuntimeError, match="3 tokens has 2"):
        behavior(torch.ones(1, 3), [TwoRounds(np.float32([0]), 0, np.float32([-1, -2]))])


def test_measures_by_hand() -> None:
    method, rewards = second_rounds.create("lope", prompts=1, answers=4), np.float32([0, 0, 1, 0, 1, 0])
    batch = SimpleNamespace(action_mask=torch.ones(4, 2), action_log_probs=torch.full((4, 2), -1.0))
    batch.mm_train_inputs = [
        TwoRounds(rewards, 2, np.float32([-1, -2])).pack(),
        TwoRounds(rewards, 1).pack(),
        None,
        None,
    ]
    found = experience_maker.second_round_measures([batch], method)
    expected = {"asked": 0.5, "trained": 0.25, "right": 0.5, "solved": 1.0, "ratio": (1 + math.e) / 2}
    assert found == {f"second_round/{name}": pytest.approx(value) for name, value in expected.items()}
    batch.mm_train_inputs = None
    assert experience_maker.second_round_measures([batch], method) == {
        "second_round/asked": 0.0,
        "second_round/trained": 0.0,
    }


# ---- the command line -----------------------------------------------------------------------------------------------

MODEL = ["--model", "smollm2-135m", "--task", "arithmetic", "--rollout.n_samples_per_prompt", "4"]


@pytest.mark.parametrize(
    "words, told",
    [
        ("", "add --advantage group_norm, or --second_round.group kept"),
        ("--advantage copo", "--advantage copo cannot be used with --second_round lope: it looks at more"),
        ("--advantage group_norm --advantage.overlong exclude", "--advantage group_norm cannot be used with"),
        ("--perturbation neighbor", "--perturbation neighbor cannot be used with --second_round lope"),
        ("--sampling.top_k 5 --sampling.correct_mask", "--sampling.correct_mask cannot"),
        ("--train.agent_func_path agent.py", "--train.agent_func_path agent.py cannot"),
        ("--data.max_images_per_prompt 2", "--data.max_images_per_prompt 2 cannot"),
        ("--actor.policy_loss_type gspo", "gspo cannot"),
        ("--advantage group_norm --credit simko", "--credit simko cannot"),
        ("--rollout.n_samples_per_prompt 1 --advantage group_norm", "n_samples_per_prompt 1 cannot"),
        ("--second_round.least 5 --second_round.most 4", "least=5: must be at most most=4"),
        ("--second_round.shaping 0", "shaping='0': must be greater than 0"),
    ],
)
def test_what_it_cannot_go_with(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=told.replace("(", r"\(")):
        resolve_flags(run_config([*MODEL, "--second_round", "lope", *words.split()]))


def test_there_is_no_kl_term_unless_it_is_asked_for() -> None:
    words = [*MODEL, "--second_round", "lope", "--advantage", "group_norm"]
    assert resolve_flags(run_config(words)).value("--algo.kl.init_coef") == "0"
    assert resolve_flags(run_config([*words, "--algo.kl.init_coef", "0.01"])).value("--algo.kl.init_coef") == "0.01"
    kept = run_config([*MODEL, "--second_round", "repeat", "--second_round.group", "kept"])
    assert resolve_flags(kept) and "second_round" in kept.conditions
