# SPDX-License-Identifier: Apache-2.0
"""Steps that must not move the policy, or do not, are seen: uniform groups, no update, responses without a token."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo import patches
from ngrpo.config.run import RunConfig, begin
from ngrpo.machine.upstream import patch
from ngrpo.methods import advantages
from ngrpo.trainers.openrlhf import rollout_actor
from ngrpo.trainers.openrlhf.actor_trainer import actor_trainer
from ngrpo.trainers.openrlhf.trainer import trainer
from ngrpo.trainers.verl.overrides import estimator
from perturbations.errors import UsageError
from tests.support.openrlhf_doubles import maker, makers_state
from tests.support.own_process import run_module
from tests.support.run import run_of, run_with

ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce")
OF_GROUPS = ("rloo", "group_norm", "dr_grpo")
SIZES, CONSTANTS = (3, 8, 32), (0.1, 0.3, 1 / 3, 1e-8, 1e6)
ROOM = SimpleNamespace(data=SimpleNamespace(max_len=8), rollout=SimpleNamespace(max_new_tokens=4))


@pytest.fixture(scope="module")
def moved() -> dict[str, list[list[float]]]:
    """What OpenRLHF's own class computed, without and with our patches."""
    pytest.importorskip("openrlhf")
    return json.loads(run_module("tests.fast.trainers.openrlhf.test_step_faults").splitlines()[-1])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_of_equal_rewards_moves_nothing(name: str, moved: dict[str, list[list[float]]]) -> None:
    """Under no estimator that a run has by its own flag, a preset or OpenRLHF's default, which is gae."""
    for case in itertools.product(SIZES, CONSTANTS):
        assert set(moved[f"ours {name} {case} equal"]) == {0.0}, case
    if name in ("group_norm", "reinforce", "gae"):
        assert any(any(moved[f"stock {name} {case} equal"]) for case in itertools.product(SIZES, CONSTANTS))


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_uniform_group_moves_nothing(name: str, moved: dict[str, list[list[float]]]) -> None:
    """Beside one that is not uniform, which keeps OpenRLHF's advantages to the bit."""
    for case in itertools.product(SIZES, CONSTANTS):
        ours, stock = (moved[f"{side} {name} {case} beside"] for side in ("ours", "stock"))
        trained = len(ours) // 2
        assert set(ours[:trained]) == {0.0} and ours[trained:] == stock[trained:] and any(ours[trained:])


def test_spo_is_normalized_over_the_step_before_the_kl_penalty(moved: dict[str, list[list[float]]]) -> None:
    """Of each response once; with a penalty of 0.5 for each token that is left, in a step of equal rewards alone."""
    for size in SIZES:
        lengths = [1 + place % 5 for place in [*range(size)] * 2]
        penalty = [-0.5 * (length - token) for length in lengths for token in range(length)]
        equal, beside = (moved[f"spo flash_reinforce {(size, 0.3)} {case}"] for case in ("equal", "beside"))
        assert equal == penalty
        rewards = torch.tensor([0.3] * size + [place / size for place in range(size)])
        wanted = (rewards - rewards.mean()) / rewards.std()  # one prompt, so one value
        wanted = wanted.repeat_interleave(torch.tensor(lengths)) + torch.tensor(penalty)
        assert beside == pytest.approx(wanted.tolist(), abs=1e-5)


class _ActorPPOTrainer:
    """OpenRLHF's, of which an update has two micro-batches; each of them logs the latest update's gradient norm."""

    actor_loss_fn = None

    def __init__(self) -> None:
        self.actor = SimpleNamespace(model=SimpleNamespace(global_steps=5))
        self.args = SimpleNamespace(
            train=SimpleNamespace(batch_size=32, max_epochs=2), rollout=SimpleNamespace(n_samples_per_prompt=8)
        )
        self._latest, self._norms = 15.0, iter(())

    def ppo_train(self, *norms: float) -> dict[str, float]:
        self._norms = iter(norms)
        for step in range(2 * len(norms)):
            self.training_step(SimpleNamespace(mm_train_inputs=None, attention_mask=None, advantages=None), 0.0, step)
        return {"policy_loss": 0.5}

    def training_step(self, experience: Any, kl_ctl: float, step: int) -> dict[str, Any]:
        if step % 2:
            self._latest = next(self._norms)
            self.actor.model.global_steps += 1
        return {"metrics": {"actor_grad_norm": self._latest}, "weights": {"actor_grad_norm": None}}


def said_of_a_step(*norms: float, capsys: pytest.CaptureFixture[str]) -> str:
    """What a step prints whose updates have these gradient norms."""
    actor = actor_trainer(_ActorPPOTrainer)()

    class PPOTrainer:
        experience_maker = makers_state()

        def train_step(self, samples: list[Any], step: int) -> tuple[dict[str, float], int]:
            return actor.ppo_train(*norms), step + 1

    trainer(PPOTrainer)().train_step([None] * 28, 3)
    return capsys.readouterr().out


def test_a_step_without_an_update_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(monkeypatch, preset="dapo")
    trained = {"optimizer_steps": 2.0, "zero_gradients": 0.0, "trained_responses": 32.0, "trained_groups": 4.0}
    assert actor_trainer(_ActorPPOTrainer)().ppo_train(1.0, 2.0) == {"policy_loss": 0.5, **trained}
    message = "step 4 made no optimizer step: 28 responses do not fill --train.batch_size"
    assert message in said_of_a_step(capsys=capsys)


def test_a_gradient_of_zero_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is exactly zero in all of a step's updates; the step before had another one."""
    run_with(monkeypatch, preset="dapo")
    message = "warning: step 4 trained nothing: the gradient was exactly 0 in each of its updates (2)."
    assert message in said_of_a_step(0.0, 0.0, capsys=capsys)
    assert "updates (1)" in said_of_a_step(0.0, capsys=capsys)
    assert said_of_a_step(1e-12, 0.0, capsys=capsys) == ""
    actor = actor_trainer(_ActorPPOTrainer)()
    found = [actor.ppo_train(*norms)["zero_gradients"] for norms in ((1e-12, 0.0), (1.0, 2.0), (0.0, 0.0))]
    assert found == [1.0, 0.0, 2.0], "the last update of the rollout before does not count"


def test_a_response_without_a_trained_token_is_named() -> None:
    sample = SimpleNamespace(action_mask=torch.tensor([[0, 0, 0]]), prompts=["What is 2 + 2?"])
    with pytest.raises(UsageError, match=r"no token to train on.*\n  prompt: 'What is 2"):
        maker().make_experience_batch([sample])


def test_it_is_no_part_of_its_group_in_verl() -> None:
    """As verl's rejection sampling masks it; neither verl's padding nor the one response of b has k = 2."""
    rewards = torch.tensor([[1.0, 0.0], [9.0, 0.0], [0.0, 0.0], [0.5, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    mask = torch.ones(7, 2)
    mask[[1, 4, 6]] = 0.0
    group, kept = np.array(["a"] * 4 + ["padding"] + ["b"] * 2, dtype=object), [0, 2, 3]
    for name, options in {"group_norm": {}, "rs_grpo": {}, "pkpo": {"k": 2}}.items():
        estimate = estimator(advantages.create(name, **options))
        found, alone = estimate(rewards, mask, group)[0], estimate(rewards[kept], mask[kept], group[kept])[0]
        assert torch.equal(found[kept], alone) and not found[[1, 4, 6]].any()
        assert name == "rs_grpo" or not found[5].any(), "one response says nothing of its group"


def test_cut_prompts_are_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of prompts of 5, 4 and 2 tokens with room for 4 the first; its responses are two."""
    run_with(monkeypatch, preset="dapo")
    sizes = {"a b c d e": 4, "a b c d": 4, "a b": 2}
    masks = ([[int(t >= size - 1) for t in range(7)]] for size in sizes.values())
    samples = [
        SimpleNamespace(prompts=[text], action_mask=torch.tensor(mask), rewards=torch.ones(1))
        for text, mask in zip(sizes, masks)
        for _ in range(2)
    ]
    made = maker(args=ROOM)
    words = lambda text, add_special_tokens: {"input_ids": text.split()}  # noqa: E731
    made.tokenizer = SimpleNamespace(tokenizer=words)  # a multimodal model's processor
    made.make_experience_batch(samples)
    assert made.step_measures == {"cut_prompts": 1.0}
    assert "step 1: 1 prompts have more than 4 tokens" in capsys.readouterr().out


def test_turns_without_room_are_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 8 tokens: an agent's message up to the last one, a response up to it, and a message that leaves room."""
    run_with(monkeypatch)
    masks = [[0, 0, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0]]
    samples = [SimpleNamespace(prompts=["p"], action_mask=torch.tensor([mask])) for mask in masks]
    made = maker(args=ROOM)
    made.make_experience_batch(samples)
    assert made.step_measures == {"cut_turns": 1.0}
    assert "step 1: 1 conversations ended" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "said"), [(None, "a call of generate"), (KeyError("tool"), "KeyError: 'tool'")])
def test_an_agent_that_generates_nothing_is_named(
    error: Exception | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(monkeypatch, perturbation={"name": "neighbor"})

    class Agent:
        async def execute(self, **kwargs: Any) -> dict[str, Any]:
            if error is not None:
                raise error
            return {"observation_tokens": [1, 2]}

    with pytest.raises(RuntimeError, match=f"Agent, for the prompt 'the question': .*{said}"):
        asyncio.run(rollout_actor.RecordingExecutor(Agent()).execute(prompt="the question"))


@pytest.mark.parametrize(
    ("requested", "said"),
    [
        ({"temperature": 0.2}, r"requested temperature=0\.2 where the run samples with temperature=0\.7, so"),
        ({"repetition_penalty": 1.3}, r"requested repetition_penalty=1\.3 where .* repetition_penalty=1\.0, so"),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.5}, r"presence_penalty=0\.5, frequency_penalty=0\.5 where"),
        ({"logit_bias": {7: 5.0}}, r"requested logit_bias=\{7: 5\.0\} where the run samples with logit_bias=None"),
        ({"bad_words": ["no"]}, r"bad_words=\['no'\] where"),
        ({"allowed_token_ids": [1, 2]}, r"allowed_token_ids=\[1, 2\] where"),
        ({"min_tokens": 4}, "min_tokens=4 where the run samples with min_tokens=1"),
        ({"structured_outputs": "a digit"}, "structured_outputs=.*regex.* where"),
        ({"min_tokens": 0, "max_tokens": 5, "stop": ["."], "logprobs": 2}, None),
    ],
)
def test_an_agent_draws_tokens_as_the_run_does(
    requested: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    run_with(monkeypatch, perturbation={"name": "neighbor"})
    if "structured_outputs" in requested:
        requested = {"structured_outputs": StructuredOutputsParams(regex="[0-9]")}

    class Agent:
        async def execute(self, sampling_params: SamplingParams, **kwargs: Any) -> Any:
            params = SamplingParams(**{"temperature": 0.7, "min_tokens": 1, "max_tokens": 8, **requested})
            await rollout_actor.generate(SimpleNamespace(), [1, 2], params)

    of_the_run = SamplingParams(temperature=0.7, min_tokens=1, max_tokens=8)
    call = rollout_actor.RecordingExecutor(Agent()).execute(prompt="p", sampling_params=of_the_run)
    # An agent that is let through reaches the engine, which this test does not have.
    with pytest.raises(RuntimeError, match=said or "AttributeError: .*no attribute 'llm'"):
        asyncio.run(call)


def test_a_control_is_drawn_with_the_models_probabilities() -> None:
    """Otherwise penalties that both the responses and their controls have would hide in the scale of the mismatch.

    OpenRLHF's own min_tokens stays: all responses have it, so the scale without it would ring for each of them.
    """
    pytest.importorskip("vllm")
    from vllm import SamplingParams

    received: list[SamplingParams] = []

    class Engine:
        async def generate(self, request: Any, params: SamplingParams, request_id: str) -> Any:
            received.append(params)
            raise ConnectionError
            yield

    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 4}
    lists = {"logit_bias": {7: 5.0}, "bad_words": ["no"], "allowed_token_ids": [1, 2]}
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=100, **penalties, **lists)
    with pytest.raises(ConnectionError):
        asyncio.run(rollout_actor.unperturbed_response(SimpleNamespace(llm=Engine()), [1, 2], params, seed=3))
    (control,) = received
    extra = {"perturbation": {"enabled": False, "scheduled": False, "seed": 3}}
    assert control == SamplingParams(temperature=0.7, max_tokens=16, min_tokens=4, extra_args=extra)
    assert params.repetition_penalty == 1.3, "the response's own parameters stay"


def main() -> None:
    """Advantages of trained tokens, group by group: all of one reward, or one such group beside another."""
    patches.install(["cpu", "without_flash_attn"])
    from openrlhf.trainer.ppo_utils import experience_maker
    from openrlhf.trainer.ppo_utils.experience import Experience

    found = {}

    def compute(side: str, names: Sequence[str], constants: Sequence[float], penalty: float = 0.0) -> None:
        for name, size, constant in itertools.product(names, SIZES, constants):
            mask = (torch.arange(5) < 1 + torch.arange(size).unsqueeze(-1) % 5).float()  # of responses of 1 to 5 tokens
            equal = torch.full((size,), constant)
            for case, second in {"equal": equal, "beside": torch.arange(size) / size}.items():
                algo = SimpleNamespace(estimator=name, gamma=1.0, lambd=1.0, no_std_norm=False)
                args = SimpleNamespace(
                    rollout=SimpleNamespace(n_samples_per_prompt=size, max_new_tokens=5),
                    algo=SimpleNamespace(advantage=algo),
                    reward=SimpleNamespace(clip_range=(-10, 10)),
                )
                made = object.__new__(experience_maker.RemoteExperienceMaker)
                made.args, made.strategy, made.kl_ctl = args, SimpleNamespace(args=args), SimpleNamespace(value=penalty)
                made.advantage_estimator, made.tokenizer = name, None
                zeros, kl = torch.zeros_like(mask), torch.ones_like(mask)
                step = [
                    Experience(action_mask=mask, rewards=r, index=places, prompts=["p"] * size, values=zeros, kl=kl)
                    for r, places in ((equal, [*range(size)]), (second, [*range(size, 2 * size)]))
                ]
                done = made.compute_advantages_and_returns(step)
                trained = torch.cat([each.advantages[each.action_mask.bool()] for each in done])
                found[f"{side} {name} {(size, constant)} {case}"] = trained.tolist()

    compute("stock", ESTIMATORS, CONSTANTS)
    patch.place(row for row in patches.active([patches.TRAINING]) if row.module.endswith("experience_maker"))
    begin(RunConfig())
    compute("ours", ESTIMATORS, CONSTANTS)
    begin(run_of(advantage={"name": "spo"}))
    compute("spo", ["flash_reinforce"], [0.3], penalty=0.5)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
