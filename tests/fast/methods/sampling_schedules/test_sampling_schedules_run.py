# SPDX-License-Identifier: Apache-2.0
"""Sampling schedules in a run: how rollouts, requests and the training get their temperatures."""

import asyncio
import math
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.decoding import Decoding
from ngrpo.methods import sampling_schedules
from ngrpo.methods.sampling_schedules.base import Run
from ngrpo.rollout import runners, settings
from ngrpo.rollout.requests import RunningRequests
from ngrpo.rollout.settings import KEY
from ngrpo.trainers.openrlhf import samples_generator, trainer
from ngrpo.trainers.openrlhf.rollout_actor import RecordingExecutor, _conversation
from perturbations import create, registry
from perturbations.errors import UsageError
from tests.support.openrlhf_doubles import LOGGED, maker, makers_state
from tests.support.run import run_with

NAMES = sorted(sampling_schedules.available())


# --- the rollout ------------------------------------------------------------------------------------------------


class Step:
    """A perturber with requests, asked at one step of theirs."""

    def __init__(self, **schedule: Any) -> None:
        decoding, buffer = Decoding(create("none"), 4), registry.buffers.create("memory")
        self.perturber, store = decoding.perturber, decoding.perturber._store
        self.perturber._schedule = sampling_schedules.create(**schedule)
        self.requests = RunningRequests(create("none"), store, self.perturber, buffer)
        for name in decoding.requests:
            store.close(name)

    def add(self, name: str, prompt: int, **arguments: Any) -> None:
        params = SimpleNamespace(seed=None, extra_args={KEY: arguments})
        new = SimpleNamespace(req_id=name, sampling_params=params, prompt_token_ids=[5] * prompt)
        self.requests.update(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[new]))

    def factor(self, names: list[str], starts: list[int], counts: list[int], greedy: list[int] | None = None) -> list:
        size = len(names)
        self.perturber.begin(names, np.array(starts), np.array(counts), np.zeros(size, dtype=bool))
        given = None if greedy is None else torch.tensor(greedy)
        return self.perturber.temperature_factor(torch.zeros(size, 8), torch.ones(size), given).tolist()


def test_a_position_has_its_temperature_however_it_is_computed() -> None:
    """A prompt of 7: the token at position 17 is the 10th, in a decode step, a chunk, or a recomputation of it all."""
    step = Step(name="ead", variant="released")
    step.add("a", 7, training_step=100)
    step.add("b", 3)
    hot, first = 2.2 - math.exp(10 / 10600), 2.2 - math.exp(20 / 600)
    assert step.factor(["a", "b"], [16, 22], [1, 1]) == pytest.approx([hot, first])
    assert step.factor(["b", "a"], [0, 9], [23, 8]) == pytest.approx([first, hot])
    assert step.factor(["a"], [0], [17]) == pytest.approx([hot])
    assert step.factor(["a"], [0], [4]) == [1.0], "a prompt in chunks: what it draws is thrown away"


def test_greedy_requests_and_those_without_a_schedule_keep_their_temperature() -> None:
    step = Step(name="ead")
    step.add("greedy", 5)
    step.add("sampled", 5)
    step.add("evaluation", 5, scheduled=False)
    hot = 2.2 - math.exp(100 / 500)
    names = ["greedy", "sampled", "evaluation"]
    assert step.factor(names, [104] * 3, [1] * 3, [3, -1, -1]) == pytest.approx([1.0, hot, 1.0])
    e3 = Step(name="e3")
    e3.add("a", 5)
    e3.perturber.begin(["a"], np.array([0]), np.array([5]), np.zeros(1, dtype=bool))
    assert e3.perturber.temperature_factor(torch.zeros(1, 8), torch.ones(1), None) is None


def test_the_rollout_takes_a_responses_temperature() -> None:
    """Whatever the batch and its order, and where slots were used before."""
    step = Step(name="ladder", least=0.5, most=2.0)
    for i in range(3):
        step.add(f"a{i}", 4, answer=i, answers=3)
    step.add("alone", 4)
    assert step.factor(["a2", "alone", "a0"], [4, 0, 9], [1, 4, 1]) == pytest.approx([2.0, 1.0, 0.5])
    assert step.factor(["a1", "a2"], [0, 0], [4, 7]) == pytest.approx([1.0, 2.0])
    step.requests.update(SimpleNamespace(finished_req_ids={"a2"}, scheduled_new_reqs=[]))
    step.add("b", 4)
    assert step.factor(["b", "a0"], [4, 10], [1, 1], [-1, 7]) == pytest.approx([1.0, 1.0]), "greedy ones keep theirs"


def test_an_engine_reads_its_schedule() -> None:
    given = {"sampling_schedule": {"name": "ead", "c": 3}}
    assert settings.read_schedule(given).c == 3
    assert settings.read(given).name == "none", "something must be attached"
    assert settings.read({}) is None and settings.read_schedule({"perturbation": {"name": "soft"}}) is None
    schedules = [None, *map(sampling_schedules.create, NAMES)]
    assert len({settings.fingerprint(create("none"), each) for each in schedules}) == len(schedules)
    with pytest.raises(UsageError, match=r"must be a dictionary with a 'name' \(e3, ead, edt, ladder or"):
        settings.read({"sampling_schedule": {"c": 3}})


def test_the_perturber_is_told_the_temperature_that_was_drawn_with() -> None:
    """0.8 asked, factor 2: logits 3.2 / 1.6, and 1.6 for the record."""
    told: list[list[float]] = []

    def finish(scaled: torch.Tensor, temperature: torch.Tensor, *_: Any) -> None:
        told.append([*scaled[0].tolist(), *temperature.tolist()])

    perturber = SimpleNamespace(busy=True, temperature_factor=lambda *_: torch.tensor([2.0]), finish=finish)
    sampler = SimpleNamespace(logprobs_mode="raw_logprobs", sample=None)
    sample = runners._sample_v1(sampler, SimpleNamespace(perturber=perturber))
    given = {"temperature": torch.tensor([0.8]), "all_random": True, "all_greedy": False, "max_num_logprobs": None}
    no_filters = {"logitsprocs": SimpleNamespace(argmax_invariant=[]), "top_k": None, "top_p": None}
    sample(torch.tensor([[3.2, 0.0]]), SimpleNamespace(**given, **no_filters))
    assert told == [pytest.approx([2.0, 0.0, 1.6])]


# --- in OpenRLHF ------------------------------------------------------------------------------------------------


class Generator:
    """As OpenRLHF's: asks an engine for eight answers at a temperature."""

    def __init__(self, asked: list[Any], **rollout: Any) -> None:
        def remote(sampling_params: Any, **kwargs: Any) -> None:
            asked.append((sampling_params.temperature, sampling_params.extra_args[KEY]))

        self.vllm_engines = [SimpleNamespace(generate_responses=SimpleNamespace(remote=remote))]
        self.args = SimpleNamespace(rollout=SimpleNamespace(batch_size=8, **rollout))
        self.eval_dataloader = SimpleNamespace(dataset=["a"])

    def _generate_vllm(self, batches: Sequence[list[str]] = (["a"],), **kwargs: Any) -> None:
        for prompts in batches:
            self._dispatch_prompts_to_vllm(prompts, **kwargs)

    def generate_samples(self, **kwargs: Any) -> None:
        self._generate_vllm(**kwargs)

    def generate_eval_samples(self, **kwargs: Any) -> None:
        self._generate_vllm(**kwargs)

    def _dispatch_prompts_to_vllm(self, prompts: list[str], **kwargs: Any) -> None:
        params = SimpleNamespace(temperature=kwargs.get("temperature", 1.0), extra_args=None)
        self.vllm_engines[0].generate_responses.remote(sampling_params=params, num_samples=8)


def test_requests_say_their_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, sampling_schedule=sampling_schedules.create("ead").spec())
    asked: list[Any] = []
    generator = samples_generator.samples_generator(Generator)(asked)
    generator.generate_samples(temperature=0.8)
    generator.generate_eval_samples(temperature=0.6)
    generator.rollout_round, generator.temperature_factor = 7, 1.5  # as from a checkpoint; as E3 sets it
    generator.generate_samples(temperature=0.8)
    assert asked == [
        (0.8, {"round": 1, "training_step": 0, "answers": 8}),
        (0.6, {"round": 1, "scheduled": False}),
        (pytest.approx(1.2), {"round": 8, "training_step": 7, "answers": 8}),
    ]
    # An asynchronous run may draw the samples of several steps at once.
    run_with(monkeypatch, sampling_schedule=sampling_schedules.create("ead", evaluation=True).spec())
    asked.clear()
    generator = samples_generator.samples_generator(Generator)(asked, vllm_generate_batch_size=24)
    generator.generate_samples(), generator.generate_samples(), generator.generate_eval_samples(temperature=0.6)
    assert [arguments["training_step"] for _, arguments in asked] == [0, 3, 3] and asked[2][0] == 0.6
    generator.args.rollout.vllm_generate_batch_size, generator.rollout_round = 12, 4
    generator.generate_samples()
    assert asked[3][1]["training_step"] == 6, "the fifth twelve of eights"


def test_answers_are_numbered_within_their_group() -> None:
    """Three answers to a prompt, the same prompt a second time in the batch, and in the next round."""
    seen: list[dict[str, Any]] = []

    class Executor:
        async def execute(self, **kwargs: Any) -> dict[str, Any]:
            seen.append(_conversation.get().arguments)
            return {}

    executor = RecordingExecutor(Executor())
    for round_ in (1, 1, 2):
        params = SimpleNamespace(extra_args={KEY: {"round": round_, "training_step": 0, "answers": 3}})
        for _ in range(3):
            asyncio.run(executor.execute(prompt="p", sampling_params=params))
    assert [given["answer"] for given in seen] == [0, 1, 2] * 3
    assert len({given["sample"] for given in seen}) == 9
    plain = SimpleNamespace(extra_args={KEY: {"round": 2, "scheduled": False}})
    asyncio.run(executor.execute(prompt="p", sampling_params=plain))
    assert "answer" not in seen[-1]


def test_a_round_is_a_batch_that_has_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF asks for one more batch where an episode's prompts have ended with one, and for single prompts in the
    place of filtered ones."""
    run_with(monkeypatch, sampling_schedule=sampling_schedules.create("ead").spec())

    asked: list[Any] = []
    generator = samples_generator.samples_generator(Generator)(asked)
    for batches in ([["a"], ["b"]], [["a"]], [], [["a"]]):
        generator.generate_samples(batches=batches)
    assert [(sent["round"], sent["training_step"]) for _, sent in asked] == [(1, 0), (1, 0), (2, 1), (3, 2)]


class Trainer:
    """As OpenRLHF's, with three training steps whose entropies are given."""

    tensorboard_logger = None

    def __init__(self, states: dict[str, Any], entropies: list[float]) -> None:
        self.states, self.entropies, self.saved, self.temperatures = states, entropies, [], []
        self.samples_generator = SimpleNamespace(temperature_factor=1.0)
        self.experience_maker = makers_state()
        self.prompts_dataloader = range(40)
        self.args = SimpleNamespace(
            train=SimpleNamespace(num_episodes=2),
            rollout=SimpleNamespace(batch_size=8, temperature=0.5),
            actor=SimpleNamespace(model_name_or_path="m"),
            ds=SimpleNamespace(load_in_4bit=False),
        )

    def init_checkpoint_states(self) -> dict[str, Any]:
        return self.states

    def fit(self) -> None:
        step = self.init_checkpoint_states()["global_step"]
        while step < 3:
            status, step = self.train_step([], step)
            self.temperatures.append(status["sampling/temperature"])
            states = {"global_step": step, "data_loader_state_dict": {}}
            self.save_logs_and_checkpoints(step, LOGGED, states)
            self.saved.append(states)

    def train_step(self, samples: Any, step: int) -> tuple[dict, int]:
        self.experience_maker.rollout_entropy = self.entropies[step]
        return {}, step + 1

    def save_logs_and_checkpoints(self, global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
        pass


def test_e3_over_a_run_and_a_resumed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sampling_schedules.create("e3").spec()
    run_with(monkeypatch, sampling_schedule=spec)
    monkeypatch.setattr(trainer, "vocabulary", lambda model: 151936)
    entropies = [0.5, 0.25, 0.5]
    trained = trainer.trainer(Trainer)({"global_step": 0}, entropies)
    trained.fit()
    # Ten steps in all; the target begins to fall after the sixth.
    assert trainer.run_of(trained) == Run(10, 0.5, 151936)
    third = 0.5 * (1 + 0.5 * 0.048101)
    assert trained.temperatures == pytest.approx([0.5, 0.5, third], abs=1e-6)
    assert trained.samples_generator.temperature_factor == pytest.approx(third / 0.5, abs=1e-6)
    resumed = trainer.trainer(Trainer)(pickle.loads(pickle.dumps(trained.saved[1])), entropies)
    resumed.fit()
    assert resumed.temperatures == trained.temperatures[2:] and resumed.past_steps == trained.past_steps


def test_the_rollout_s_entropy_is_kept_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, sampling_schedule=sampling_schedules.create("e3").spec())
    experience = SimpleNamespace(
        rollout_log_probs=torch.tensor([[-1.0, -3.0], [-2.0, -9.0]]),
        action_log_probs=torch.tensor([[-1.5, -3.0], [-2.0, -9.0]]),
        action_mask=torch.tensor([[1, 1], [1, 0]]),
    )
    correction = {"level": "token", "mode": "clip", "gating": "ratio", "threshold": [0.0, 10.0]}
    advantage = SimpleNamespace(**{f"is_correction_{name}": value for name, value in correction.items()})
    args = SimpleNamespace(algo=SimpleNamespace(advantage=advantage), actor=SimpleNamespace(policy_loss_type="ppo"))
    made = maker(strategy=SimpleNamespace(args=args))
    made.make_experience_batch([experience])
    assert made.rollout_entropy == 2.0 and made.step_measures["sampling/entropy"] == 2.0
    assert made.step_measures["importance/weight"] == pytest.approx((math.exp(-0.5) + 2) / 3)
    experience.rollout_log_probs, advantage.is_correction_level = None, "off"
    made.make_experience_batch([experience])
    assert made.rollout_entropy is None
