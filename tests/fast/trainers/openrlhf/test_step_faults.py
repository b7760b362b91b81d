# SPDX-License-Identifier: Apache-2.0
"""Steps that must not move the policy, or do not, are seen: uniform groups, no update, responses without a token."""

import ast
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
from ngrpo.trainers.openrlhf import rollout_actor, short_steps
from ngrpo.trainers.openrlhf.actor_trainer import actor_trainer
from ngrpo.trainers.openrlhf.model_actors import policy_model_actor
from ngrpo.trainers.openrlhf.samples_generator import samples_generator
from ngrpo.trainers.openrlhf.trainer import trainer
from ngrpo.trainers.verl.overrides import estimator
from perturbations.errors import UsageError
from tests.support.openrlhf_doubles import maker, makers_state
from tests.support.own_process import RESULT, result_of
from tests.support.run import run_of, run_with

ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce")
OF_GROUPS = ("rloo", "group_norm", "dr_grpo")
SIZES = (3, 8, 32)
CONSTANTS = (0.1, 0.3, 1 / 3, 1e-8, 1e6)
ROOM = SimpleNamespace(data=SimpleNamespace(max_len=8), rollout=SimpleNamespace(max_new_tokens=4))


@pytest.fixture(scope="module")
def computed() -> dict[str, list[float]]:
    """The advantages that OpenRLHF's own class computes without and with our patches, by `key`."""
    pytest.importorskip("openrlhf")
    return result_of("tests.fast.trainers.openrlhf.test_step_faults")


def key(side: str, estimator: str, size: int, constant: float, case: str) -> str:
    """The name of a computation.

    Args:
        side: "stock", "ours" or "spo".
        estimator: OpenRLHF's.
        size: number of responses in each of the two groups of a step.
        constant: the reward of all of the first group.
        case: "equal" where the second group has the same rewards, "beside" where its rewards differ.
    """
    return f"{side} {estimator} {size} {constant} {case}"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_of_equal_rewards_moves_nothing(name: str, computed: dict[str, list[float]]) -> None:
    """Under no estimator that a run has by its own flag, a preset or OpenRLHF's default, which is gae."""
    for size, constant in itertools.product(SIZES, CONSTANTS):
        assert set(computed[key("ours", name, size, constant, "equal")]) == {0.0}, (size, constant)


@pytest.mark.parametrize("name", ["group_norm", "reinforce", "gae"])
def test_openrlhf_moves_the_policy_in_a_step_of_equal_rewards(name: str, computed: dict[str, list[float]]) -> None:
    """The rounding of OpenRLHF's means is what the patch is for."""
    stock: list[float] = []
    for size, constant in itertools.product(SIZES, CONSTANTS):
        stock += computed[key("stock", name, size, constant, "equal")]
    assert any(stock)


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_uniform_group_moves_nothing(name: str, computed: dict[str, list[float]]) -> None:
    """Beside one that is not uniform, which keeps OpenRLHF's advantages to the bit."""
    for size, constant in itertools.product(SIZES, CONSTANTS):
        ours = computed[key("ours", name, size, constant, "beside")]
        stock = computed[key("stock", name, size, constant, "beside")]
        half = len(ours) // 2
        uniform_group = ours[:half]
        other_group = ours[half:]
        assert set(uniform_group) == {0.0}
        assert other_group == stock[half:]
        assert any(other_group)


@pytest.mark.parametrize("size", SIZES)
def test_spo_is_normalized_over_the_step_before_the_kl_penalty(size: int, computed: dict[str, list[float]]) -> None:
    """Each response counts once; the penalty is 0.5 for each token that is left, in a step of equal rewards alone."""
    lengths = [1 + place % 5 for place in range(size)] * 2
    penalties = []
    for length in lengths:
        penalties += [-0.5 * (length - token) for token in range(length)]
    rewards = torch.tensor([0.3] * size + [place / size for place in range(size)])
    normalized = (rewards - rewards.mean()) / rewards.std()  # one prompt, so one value
    by_token = normalized.repeat_interleave(torch.tensor(lengths)) + torch.tensor(penalties)

    assert computed[key("spo", "flash_reinforce", size, 0.3, "equal")] == penalties
    beside = computed[key("spo", "flash_reinforce", size, 0.3, "beside")]
    assert beside == pytest.approx(by_token.tolist(), abs=1e-5)


class _ActorPPOTrainer:
    """OpenRLHF's, of which an update has two micro-batches; each of them logs the latest update's gradient norm."""

    actor_loss_fn = None
    buffered = 16  # responses in a rank's buffer

    def __init__(self) -> None:
        self.actor = SimpleNamespace(model=SimpleNamespace(global_steps=5))
        self.args = SimpleNamespace(
            train=SimpleNamespace(batch_size=32, max_epochs=2, micro_batch_size=4, dynamic_batch_enable=False),
            rollout=SimpleNamespace(n_samples_per_prompt=8, batch_size=4, vllm_generate_batch_size=4),
        )
        self.strategy = SimpleNamespace(accumulated_gradient=4)  # two ranks of 16 responses for each update
        self.replay_buffer = SimpleNamespace(items=list(range(self.buffered)))
        self._latest_norm = 15.0
        self._norms = iter(())

    def ppo_train(self, *norms: float) -> dict[str, float]:
        self._norms = iter(norms)
        for step in range(2 * len(norms)):
            experience = SimpleNamespace(mm_train_inputs=None, attention_mask=None, advantages=None)
            self.training_step(experience, 0.0, step)
        return {"policy_loss": 0.5}

    def training_step(self, experience: Any, kl_ctl: float, step: int) -> dict[str, Any]:
        is_second_micro_batch = step % 2 == 1
        if is_second_micro_batch:
            self._latest_norm = next(self._norms)
            self.actor.model.global_steps += 1
        return {"metrics": {"actor_grad_norm": self._latest_norm}, "weights": {"actor_grad_norm": None}}


def output_of_step_4(*norms: float, capsys: pytest.CaptureFixture[str]) -> str:
    """What a step of 28 responses prints whose updates have these gradient norms."""
    actor = actor_trainer(_ActorPPOTrainer)()

    class PPOTrainer:
        experience_maker = makers_state()

        def train_step(self, samples: list[Any], step: int) -> tuple[dict[str, float], int]:
            return actor.ppo_train(*norms), step + 1

    trainer(PPOTrainer)().train_step([None] * 28, 3)
    return capsys.readouterr().out


def test_updates_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, preset="dapo")
    assert actor_trainer(_ActorPPOTrainer)().ppo_train(1.0, 2.0) == {
        "policy_loss": 0.5,
        "optimizer_steps": 2.0,
        "zero_gradients": 0.0,
        "trained_responses": 32.0,
        "trained_groups": 4.0,
        "left_out_responses": 0.0,
    }


@pytest.mark.parametrize(
    ("responses", "epochs", "prompts", "kept"),
    [
        (16, 1, 4, 16),
        (12, 1, 4, 0),
        (40, 1, 12, 32),
        (40, 4, 12, 32),
        (12, 2, 4, 0),  # each epoch has its own batches
        (12, 1, 6, 12),  # a whole step leaves responses over, too
    ],
)
def test_a_short_step_ends_with_an_update(
    responses: int, epochs: int, prompts: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's buffer keeps as many responses as fill whole batches; DeepSpeed would carry the others' gradient on."""
    run_with(monkeypatch, preset="dapo")
    actor = actor_trainer(_ActorPPOTrainer)()
    actor.args.train.max_epochs = epochs
    actor.args.rollout.batch_size = prompts
    actor.args.rollout.vllm_generate_batch_size = prompts
    actor.replay_buffer.items = list(range(responses))
    status = actor.ppo_train()
    assert actor.replay_buffer.items == list(range(kept))
    assert status["left_out_responses"] == 2 * (responses - kept)
    assert ("policy_loss" in status) == (kept > 0)


@pytest.mark.parametrize(("responses", "kept"), [(16, 16), (12, 0), (40, 32)])
def test_the_critic_leaves_out_the_same(responses: int, kept: int) -> None:
    """Its gradient of a rest would come into the first update of the next step."""

    class CriticPPOTrainer(_ActorPPOTrainer):
        critic = SimpleNamespace(global_steps=0)

        def ppo_train(self) -> dict[str, float]:
            return {"critic_loss": float(len(self.replay_buffer.items))}

    critic = short_steps.critic_trainer(CriticPPOTrainer)()
    critic.replay_buffer.items = list(range(responses))
    assert critic.ppo_train() == ({"critic_loss": float(kept)} if kept else {})


def test_a_resumed_critic_continues_with_the_orders_of_a_run_that_never_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenRLHF shuffles with torch's own generator, which a new process begins anew and a checkpoint lacks."""

    class CriticPPOTrainer(_ActorPPOTrainer):
        def __init__(self, updates: int) -> None:
            super().__init__()
            self.args.train.seed = 7
            self.critic = SimpleNamespace(global_steps=updates)

        def ppo_train(self) -> list[int]:
            self.critic.global_steps += 4
            return torch.randperm(16).tolist()

    run_with(monkeypatch, reproducible=True)
    made = short_steps.critic_trainer(CriticPPOTrainer)
    never_stopped = made(0)
    orders = [never_stopped.ppo_train() for _ in range(3)]
    torch.manual_seed(1)
    assert made(4).ppo_train() == orders[1]
    assert orders[1] != orders[0] != orders[2]


@pytest.mark.parametrize(("prompts", "kept"), [(16, 16), (11, 10), (10, 10), (1, 0), (0, 0)])
def test_a_short_rollout_leaves_out_the_groups_that_ranks_would_wait_for(
    prompts: int, kept: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On eight ranks: 44 responses are 7 × 6 + 2, and 40 are 8 × 5; 4 leave ranks without any."""
    words = "--actor.model_name_or_path m --data.prompt_dataset d --reward.remote_url http://r --algo.kl.init_coef 0"
    words += " --algo.advantage.estimator group_norm --actor.num_gpus_per_node 8 --train.batch_size 64"
    words += " --rollout.batch_size 16 --rollout.n_samples_per_prompt 4"
    words += " --rollout.micro_batch_size 1 --train.micro_batch_size 1"
    run_with(monkeypatch, openrlhf=tuple(words.split()))

    class SamplesGenerator:
        args = SimpleNamespace(rollout=SimpleNamespace(batch_size=16, n_samples_per_prompt=4))

        def generate_samples(self, **_: object) -> tuple[list[int], None, int, bool]:
            return list(range(4 * prompts)), None, prompts, True

    made = samples_generator(SamplesGenerator)()
    assert made.generate_samples() == (list(range(4 * kept)), None, prompts, True)
    warning = f"{prompts - kept} of the {prompts} prompts of a short step are not trained"
    assert (warning in capsys.readouterr().out) == (kept < prompts)


def test_dynamic_batches_leave_out_what_fills_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF's two ranks of 12 responses train one batch of 16 in each of two epochs."""
    run_with(monkeypatch, preset="dapo")
    actor = actor_trainer(_ActorPPOTrainer)()
    actor.args.train.dynamic_batch_enable = True
    actor.args.train.batch_size = 16
    actor.args.ds = SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1)
    actor.strategy.all_reduce = lambda value, op: {"sum": 2 * value}[op]
    actor.replay_buffer.items = list(range(12))
    status = actor.ppo_train(1.0, 2.0)
    assert status["trained_responses"] == 16.0
    assert status["left_out_responses"] == 8.0


class _PolicyModelActor:
    """OpenRLHF's, whose training of its buffer is noted."""

    def __init__(self) -> None:
        self.trainer = SimpleNamespace(replay_buffer=[])
        self.trained: list[list[str]] = []

    def append(self, experience: str) -> None:
        self.trainer.replay_buffer.append(experience)

    def fit(self, kl_ctl: float) -> dict[str, float]:
        self.trained.append([*self.trainer.replay_buffer])
        self.trainer.replay_buffer.clear()
        return {"optimizer_steps": 1.0}


def test_the_policy_is_not_trained_on_rollouts_of_frozen_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF's own ``ppo_train`` leaves them in the policy's buffer, whose first step would take all of them."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "get", lambda results: results)
    source = patch.source_of("openrlhf.trainer.ppo_trainer")
    if source is None:
        pytest.skip("needs OpenRLHF")
    method = patch.definition(ast.parse(source), "BasePPOTrainer.ppo_train")
    assert method is not None
    scope: dict[str, Any] = {"ray": ray, "Dict": dict}
    exec(compile(ast.Module([method], []), "ppo_trainer.py", "exec"), scope)
    actor = policy_model_actor(_PolicyModelActor)()

    class PPOTrainer:
        args = SimpleNamespace(
            critic=SimpleNamespace(freezing_steps=1),
            ds=SimpleNamespace(enable_sleep=False),
        )
        kl_ctl = SimpleNamespace(value=0.0)
        critic_model_group = None
        actor_model_group = SimpleNamespace(
            async_run_method=lambda method_name, **kwargs: [getattr(actor, method_name)(**kwargs)]
        )
        ppo_train = scope["ppo_train"]

    made = trainer(PPOTrainer)()
    statuses = []
    for step in range(4):
        actor.append(f"rollout {step}")
        statuses.append(made.ppo_train(step))
    assert actor.trained == [["rollout 2"], ["rollout 3"]]
    assert statuses == [{}, {}, {"optimizer_steps": 1.0}, {"optimizer_steps": 1.0}]


def test_a_step_without_an_update_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(monkeypatch, preset="dapo")
    message = "step 4 made no optimizer step: 28 responses do not fill --train.batch_size"
    assert message in output_of_step_4(capsys=capsys)


def test_responses_that_a_short_step_leaves_out_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(monkeypatch, preset="dapo")
    monkeypatch.setattr(_ActorPPOTrainer, "buffered", 20)
    assert "step 4 left out 8 of its 28 responses" in output_of_step_4(1.0, capsys=capsys)


def test_a_step_whose_gradients_are_all_exactly_0_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(monkeypatch, preset="dapo")
    message = "warning: step 4 trained nothing: the gradient was exactly 0 in each of its updates (2)."
    assert message in output_of_step_4(0.0, 0.0, capsys=capsys)
    assert "updates (1)" in output_of_step_4(0.0, capsys=capsys)
    assert output_of_step_4(1e-12, 0.0, capsys=capsys) == ""


def test_gradients_of_exactly_0_are_counted_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last update of the step before does not count, although the first micro-batch logs its norm."""
    run_with(monkeypatch, preset="dapo")
    actor = actor_trainer(_ActorPPOTrainer)()
    assert actor.ppo_train(1e-12, 0.0)["zero_gradients"] == 1.0
    assert actor.ppo_train(1.0, 2.0)["zero_gradients"] == 0.0
    assert actor.ppo_train(0.0, 0.0)["zero_gradients"] == 2.0


def test_a_response_without_a_trained_token_is_named() -> None:
    sample = SimpleNamespace(action_mask=torch.tensor([[0, 0, 0]]), prompts=["What is 2 + 2?"])
    with pytest.raises(UsageError, match=r"no token to train on.*\n  prompt: 'What is 2"):
        maker().make_experience_batch([sample])


@pytest.mark.parametrize(("name", "options"), [("group_norm", {}), ("rs_grpo", {}), ("pkpo", {"k": 2})])
def test_a_response_without_a_trained_token_is_no_part_of_its_group_in_verl(name: str, options: dict[str, Any]) -> None:
    """As verl's rejection sampling masks it; neither verl's padding nor the one response of b has k = 2."""
    first_token_rewards = torch.tensor([1.0, 9.0, 0.0, 0.5, 0.0, 1.0, 1.0])
    rewards = torch.stack([first_token_rewards, torch.zeros(7)], dim=1)
    groups = np.array(["a", "a", "a", "a", "padding", "b", "b"], dtype=object)
    masked = [1, 4, 6]
    mask = torch.ones(7, 2)
    mask[masked] = 0.0
    trained_of_a = [0, 2, 3]
    trained_of_b = 5
    estimate = estimator(advantages.create(name, **options))

    computed, _ = estimate(rewards, mask, groups)
    alone, _ = estimate(rewards[trained_of_a], mask[trained_of_a], groups[trained_of_a])

    assert torch.equal(computed[trained_of_a], alone)
    assert not computed[masked].any()
    if name != "rs_grpo":
        assert not computed[trained_of_b].any(), "one response says nothing of its group"


def test_cut_prompts_are_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of prompts of 5, 4 and 2 tokens with room for 4 the first; its responses are two."""
    run_with(monkeypatch, preset="dapo")
    samples = []
    for prompt, kept_tokens in (("a b c d e", 4), ("a b c d", 4), ("a b", 2)):
        # Entry t of an action mask is of token t + 1.
        action_mask = torch.tensor([[int(entry >= kept_tokens - 1) for entry in range(7)]])
        sample = SimpleNamespace(prompts=[prompt], action_mask=action_mask, rewards=torch.ones(1), info={})
        samples += [sample, sample]
    experience_maker = maker(args=ROOM)

    def tokenize(text: str, add_special_tokens: bool) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    experience_maker.tokenizer = SimpleNamespace(tokenizer=tokenize)  # a multimodal model's processor
    experience_maker.make_experience_batch(samples)

    assert experience_maker.step_measures == {"cut_prompts": 1.0, "generated_tokens": 28.0}
    assert "step 1: 1 prompts have more than 4 tokens" in capsys.readouterr().out


def test_turns_without_room_are_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(monkeypatch)
    action_masks = {
        "a message up to the last of 8 tokens": [0, 0, 1, 1, 0, 0, 0],
        "a response up to the last token": [0, 0, 1, 0, 0, 1, 1],
        "a message that leaves room": [0, 0, 1, 1, 0, 0],
    }
    samples = [
        SimpleNamespace(prompts=["p"], action_mask=torch.tensor([mask]), info={}) for mask in action_masks.values()
    ]
    experience_maker = maker(args=ROOM)

    experience_maker.make_experience_batch(samples)

    assert experience_maker.step_measures == {"cut_turns": 1.0, "generated_tokens": 7.0}
    assert "step 1: 1 conversations ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "message"), [(None, "a call of generate"), (KeyError("tool"), "KeyError: 'tool'")], ids=["ends", "raises"]
)
def test_an_agent_that_generates_nothing_is_named(
    error: Exception | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(monkeypatch, perturbation={"name": "neighbor"})

    class Agent:
        async def execute(self, **kwargs: Any) -> dict[str, Any]:
            if error is not None:
                raise error
            return {"observation_tokens": [1, 2]}

    executor = rollout_actor.RecordingExecutor(Agent())
    with pytest.raises(RuntimeError, match=f"Agent, for the prompt 'the question': .*{message}"):
        asyncio.run(executor.execute(prompt="the question"))


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

    requests: list[tuple[dict[str, Any], SamplingParams]] = []

    class Engine:
        async def generate(self, request: dict[str, Any], params: SamplingParams, request_id: str) -> Any:
            requests.append((request, params))
            raise ConnectionError
            yield

    of_the_response = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        max_tokens=100,
        min_tokens=4,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={7: 5.0},
        bad_words=["no"],
        allowed_token_ids=[1, 2],
    )
    with pytest.raises(ConnectionError):
        long_prompt = list(range(600))
        actor = SimpleNamespace(llm=Engine())
        asyncio.run(rollout_actor.unperturbed_response(actor, long_prompt, of_the_response, seed=3))

    ((request, of_the_control),) = requests
    assert request == {"prompt_token_ids": long_prompt[:512]}, "a long prompt has a control too"
    assert of_the_control == SamplingParams(
        temperature=0.7,
        max_tokens=16,
        min_tokens=4,
        extra_args={"perturbation": {"enabled": False, "scheduled": False, "seed": 3}},
    )
    assert of_the_response.repetition_penalty == 1.3, "the response's own parameters stay"


def compute_advantages(estimator: str, groups: Sequence[torch.Tensor], penalty: float) -> list[float]:
    """The advantages of a step's trained tokens, by OpenRLHF's class as it is patched now.

    Args:
        estimator: OpenRLHF's.
        groups: of each of the step's prompts the rewards of its responses, which have 1 to 5 tokens.
        penalty: the coefficient of a KL estimate that is 1 at every token.
    """
    from openrlhf.trainer.ppo_utils import experience_maker
    from openrlhf.trainer.ppo_utils.experience import Experience

    size = len(groups[0])
    lengths = 1 + torch.arange(size) % 5
    mask = (torch.arange(5) < lengths.unsqueeze(-1)).float()
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=size, max_new_tokens=5),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)),
        reward=SimpleNamespace(clip_range=(-10, 10)),
    )
    maker_of_openrlhf = object.__new__(experience_maker.RemoteExperienceMaker)
    maker_of_openrlhf.args = args
    maker_of_openrlhf.strategy = SimpleNamespace(args=args)
    maker_of_openrlhf.kl_ctl = SimpleNamespace(value=penalty)
    maker_of_openrlhf.advantage_estimator = estimator
    maker_of_openrlhf.tokenizer = None
    step = []
    for number, rewards in enumerate(groups):
        experience = Experience(
            action_mask=mask,
            rewards=rewards,
            index=list(range(number * size, (number + 1) * size)),
            prompts=["p"] * size,
            values=torch.zeros_like(mask),
            kl=torch.ones_like(mask),
        )
        step.append(experience)
    experiences = maker_of_openrlhf.compute_advantages_and_returns(step)
    return torch.cat([experience.advantages[experience.action_mask.bool()] for experience in experiences]).tolist()


def main() -> None:
    """Prints the advantages of all computations as JSON; a process of its own, since it patches OpenRLHF."""
    patches.install(["cpu", "without_flash_attn"])
    results = {}

    def compute(side: str, estimators: Sequence[str], constants: Sequence[float], penalty: float = 0.0) -> None:
        for name, size, constant in itertools.product(estimators, SIZES, constants):
            equal = torch.full((size,), constant)
            for case, second_group in (("equal", equal), ("beside", torch.arange(size) / size)):
                advantages_of_step = compute_advantages(name, (equal, second_group), penalty)
                results[key(side, name, size, constant, case)] = advantages_of_step

    compute("stock", ESTIMATORS, CONSTANTS)
    patch.place(row for row in patches.active([patches.TRAINING]) if row.module.endswith("experience_maker"))
    begin(RunConfig())
    compute("ours", ESTIMATORS, CONSTANTS)
    begin(run_of(advantage={"name": "spo"}))
    compute("spo", ["flash_reinforce"], [0.3], penalty=0.5)
    print(RESULT + json.dumps(results))


if __name__ == "__main__":
    main()
