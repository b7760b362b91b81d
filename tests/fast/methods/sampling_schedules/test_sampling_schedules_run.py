# SPDX-License-Identifier: Apache-2.0
"""Sampling schedules in a run: how rollouts, requests and the training get their temperatures."""

import asyncio
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from benchmarks.decoding import Decoding
from ngrpo.methods import sampling_schedules
from ngrpo.methods.sampling_schedules.base import PastStep, Run, SamplingSchedule
from ngrpo.rollout import runners, settings
from ngrpo.rollout.requests import RunningRequests
from ngrpo.rollout.scheduled_temperatures import ScheduledTemperatures
from ngrpo.rollout.settings import KEY
from ngrpo.trainers.openrlhf import samples_generator, trainer
from ngrpo.trainers.openrlhf.rollout_actor import RecordingExecutor, _conversation
from perturbations import create, registry
from perturbations.errors import UsageError
from tests.support.openrlhf_doubles import LOGGED, maker, makers_state
from tests.support.run import run_with

NAMES = sorted(sampling_schedules.available())


# --- the rollout ------------------------------------------------------------------------------------------------


class Rollout:
    """A perturber with requests and a schedule, whose steps are asked for their temperature factors."""

    def __init__(self, **schedule: Any) -> None:
        decoding = Decoding(create("none"), 4)
        self.perturber = decoding.perturber
        store = self.perturber._store
        self.perturber._temperatures = ScheduledTemperatures(
            sampling_schedules.create(**schedule), store, self.perturber._upload
        )
        buffer = registry.buffers.create("memory")
        self.requests = RunningRequests(create("none"), store, self.perturber, buffer)
        for name in decoding.requests:
            store.close(name)

    def add(self, name: str, prompt_length: int, **arguments: Any) -> None:
        request = SimpleNamespace(
            req_id=name,
            sampling_params=SimpleNamespace(seed=None, extra_args={KEY: arguments}),
            prompt_token_ids=[5] * prompt_length,
        )
        self.requests.update(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[request]))

    def finish(self, name: str) -> None:
        self.requests.update(SimpleNamespace(finished_req_ids={name}, scheduled_new_reqs=[]))

    def factors(self, computed: dict[str, tuple[int, int]], greedy: list[int] | None = None) -> list[float] | None:
        """The factors of a step that computes this first position and this number of positions of each request.

        ``greedy``: the token of each greedy request, and −1 for the others.
        """
        firsts = np.array([first for first, _ in computed.values()])
        counts = np.array([count for _, count in computed.values()])
        size = len(computed)
        self.perturber.begin(list(computed), firsts, counts, np.zeros(size, dtype=bool))
        greedy_tokens = None if greedy is None else torch.tensor(greedy)
        factors = self.perturber.temperature_factor(torch.zeros(size, 8), torch.ones(size), greedy_tokens)
        return None if factors is None else factors.tolist()


def test_a_position_has_its_temperature_however_it_is_computed() -> None:
    """A prompt of 7: the token at position 17 is the 10th, in a decode step, a chunk, or a recomputation of it all."""
    rollout = Rollout(name="ead", variant="released")
    rollout.add("a", 7, training_step=100)
    rollout.add("b", 3)
    of_a = 2.2 - math.exp(10 / 10600)
    of_b = 2.2 - math.exp(20 / 600)
    assert rollout.factors({"a": (16, 1), "b": (22, 1)}) == pytest.approx([of_a, of_b])
    assert rollout.factors({"b": (0, 23), "a": (9, 8)}) == pytest.approx([of_b, of_a])
    assert rollout.factors({"a": (0, 17)}) == pytest.approx([of_a])
    assert rollout.factors({"a": (0, 4)}) == [1.0], "a prompt in chunks: what it draws is thrown away"


def test_greedy_requests_and_those_without_a_schedule_keep_their_temperature() -> None:
    rollout = Rollout(name="ead")
    rollout.add("greedy", 5)
    rollout.add("sampled", 5)
    rollout.add("evaluation", 5, scheduled=False)
    of_sampled = 2.2 - math.exp(100 / 500)
    spans = {"greedy": (104, 1), "sampled": (104, 1), "evaluation": (104, 1)}
    assert rollout.factors(spans, greedy=[3, -1, -1]) == pytest.approx([1.0, of_sampled, 1.0])


def test_a_schedule_of_steps_has_no_factor_for_positions() -> None:
    rollout = Rollout(name="e3")
    rollout.add("a", 5)
    assert rollout.factors({"a": (0, 5)}) is None


def test_the_rollout_takes_a_responses_temperature() -> None:
    """Whatever the batch and its order, and where slots were used before."""
    rollout = Rollout(name="ladder", least=0.5, most=2.0)
    rollout.add("a0", 4, answer=0, answers=3)
    rollout.add("a1", 4, answer=1, answers=3)
    rollout.add("a2", 4, answer=2, answers=3)
    rollout.add("alone", 4)
    assert rollout.factors({"a2": (4, 1), "alone": (0, 4), "a0": (9, 1)}) == pytest.approx([2.0, 1.0, 0.5])
    assert rollout.factors({"a1": (0, 4), "a2": (0, 7)}) == pytest.approx([1.0, 2.0])
    rollout.finish("a2")
    rollout.add("b", 4)
    factors = rollout.factors({"b": (4, 1), "a0": (10, 1)}, greedy=[-1, 7])
    assert factors == pytest.approx([1.0, 1.0]), "greedy ones keep theirs"


def test_an_engine_reads_its_schedule() -> None:
    config = {"sampling_schedule": {"name": "ead", "c": 3}}
    assert settings.read_schedule(config).c == 3
    assert settings.read(config).name == "none", "something must be attached"


def test_an_engine_without_a_schedule() -> None:
    assert settings.read({}) is None
    assert settings.read_schedule({"perturbation": {"name": "soft"}}) is None


def test_a_schedule_without_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match=r"must be a dictionary with a 'name' \(e3, ead, edt, ladder or"):
        settings.read({"sampling_schedule": {"c": 3}})


def test_the_fingerprint_of_an_engine_names_its_schedule() -> None:
    schedules = [None, *map(sampling_schedules.create, NAMES)]
    fingerprints = {settings.fingerprint(create("none"), schedule) for schedule in schedules}
    assert len(fingerprints) == len(schedules)


def test_the_perturber_is_told_the_temperature_that_was_drawn_with() -> None:
    """0.8 asked, factor 2: logits 3.2 / 1.6, and 1.6 for the record."""
    calls: list[tuple[list[float], list[float]]] = []

    def finish(scaled: torch.Tensor, temperature: torch.Tensor, *_: Any) -> None:
        calls.append((scaled[0].tolist(), temperature.tolist()))

    perturber = SimpleNamespace(busy=True, temperature_factor=lambda *_: torch.tensor([2.0]), finish=finish)
    sampler = SimpleNamespace(logprobs_mode="raw_logprobs", sample=None)
    sampling = SimpleNamespace(
        temperature=torch.tensor([0.8]),
        all_random=True,
        all_greedy=False,
        max_num_logprobs=None,
        logitsprocs=SimpleNamespace(argmax_invariant=[]),
        top_k=None,
        top_p=None,
    )
    sample = runners._sample_v1(sampler, SimpleNamespace(perturber=perturber))
    sample(torch.tensor([[3.2, 0.0]]), sampling)
    ((scaled, temperature),) = calls
    assert scaled == pytest.approx([2.0, 0.0])
    assert temperature == pytest.approx([1.6])


def test_v2_tells_the_perturber_the_temperature_that_was_drawn_with() -> None:
    """As above, in the runner that is CUDA's default."""
    pytest.importorskip("vllm")
    calls: list[tuple[list[float], list[float]]] = []

    def finish(scaled: torch.Tensor, temperature: torch.Tensor, *_: Any) -> None:
        calls.append((scaled[0].tolist(), temperature.tolist()))

    def original(logits: Any, expanded_idx_mapping: Any, idx_mapping_np: Any) -> None:
        raise AssertionError("the perturber samples")

    states = SimpleNamespace(
        temperature=SimpleNamespace(gpu=torch.tensor([0.8])),
        any_greedy=lambda slots: False,
        vocab_size=2,
        top_k=SimpleNamespace(np=np.array([2])),
        top_p=SimpleNamespace(np=np.ones(1)),
        min_p=SimpleNamespace(np=np.zeros(1)),
        apply_min_p=None,
    )
    sampler = SimpleNamespace(
        sample=original, sampling_states=states, apply_sampling_params=lambda logits, *_, **__: logits / 0.8
    )
    perturber = SimpleNamespace(
        busy=True, composition=1, temperature_factor=lambda *_: torch.tensor([2.0]), finish=finish
    )
    sample = runners._sample_v2(sampler, SimpleNamespace(perturber=perturber, output_layer=None))
    sample(torch.tensor([[3.2, 0.0]]), torch.tensor([0]), np.array([0]))
    ((scaled, temperature),) = calls
    assert scaled == pytest.approx([2.0, 0.0])
    assert temperature == pytest.approx([1.6])


# --- in OpenRLHF ------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """What an engine is asked for."""

    temperature: float
    arguments: dict[str, Any]


class Generator:
    """As OpenRLHF's: asks an engine for eight responses at a temperature."""

    def __init__(self, requests: list[Request], **rollout: Any) -> None:
        def remote(sampling_params: Any, **kwargs: Any) -> None:
            requests.append(Request(sampling_params.temperature, sampling_params.extra_args[KEY]))

        self.vllm_engines = [SimpleNamespace(generate_responses=SimpleNamespace(remote=remote))]
        self.args = SimpleNamespace(rollout=SimpleNamespace(batch_size=8, n_samples_per_prompt=8, **rollout))
        self.eval_dataloader = SimpleNamespace(dataset=["a"])

    def _generate_vllm(self, batches: Sequence[list[str]] = (["a"],), **kwargs: Any) -> None:
        for prompts in batches:
            self._dispatch_prompts_to_vllm(prompts, **kwargs)

    def generate_samples(self, **kwargs: Any) -> tuple[list[Any], None, int, bool]:
        self._generate_vllm(**kwargs)
        return [], None, 1, False

    def generate_eval_samples(self, **kwargs: Any) -> None:
        self._generate_vllm(**kwargs)

    def _dispatch_prompts_to_vllm(self, prompts: list[str], **kwargs: Any) -> None:
        params = SimpleNamespace(temperature=kwargs.get("temperature", 1.0), extra_args=None)
        self.vllm_engines[0].generate_responses.remote(sampling_params=params, num_samples=8)


def run_with_ead(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    run_with(monkeypatch, sampling_schedule=sampling_schedules.create("ead", **options).spec())


def test_requests_say_their_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with_ead(monkeypatch)
    requests: list[Request] = []
    generator = samples_generator.samples_generator(Generator)(requests)
    generator.generate_samples(temperature=0.8)
    generator.generate_eval_samples(temperature=0.6)
    generator.rollout_round = 7  # as from a checkpoint
    generator.temperature_factor = 1.5  # as E3 sets it
    generator.generate_samples(temperature=0.8)
    assert requests == [
        (0.8, {"round": 1, "training_step": 0, "answers": 8}),
        (0.6, {"round": 1, "scheduled": False}),
        (pytest.approx(1.2), {"round": 8, "training_step": 7, "answers": 8}),
    ]


def test_an_asynchronous_run_may_draw_the_samples_of_several_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 responses at once are three steps of eight; an evaluation that follows the schedule keeps its temperature."""
    run_with_ead(monkeypatch, evaluation=True)
    requests: list[Request] = []
    generator = samples_generator.samples_generator(Generator)(requests, vllm_generate_batch_size=24)
    generator.generate_samples()
    generator.generate_samples()
    generator.generate_eval_samples(temperature=0.6)
    assert [request.arguments["training_step"] for request in requests] == [0, 3, 3]
    assert requests[2].temperature == 0.6

    generator.args.rollout.vllm_generate_batch_size = 12
    generator.rollout_round = 4
    generator.generate_samples()
    assert requests[3].arguments["training_step"] == 6, "the fifth twelve of eights"


def test_responses_are_numbered_within_their_group() -> None:
    """Three responses to a prompt, the same prompt a second time in the batch, and in the next round."""
    arguments: list[dict[str, Any]] = []

    class Executor:
        async def execute(self, **kwargs: Any) -> dict[str, Any]:
            arguments.append(_conversation.get().arguments)
            return {}

    executor = RecordingExecutor(Executor())
    for round_number in (1, 1, 2):
        of_request = {"round": round_number, "training_step": 0, "answers": 3}
        params = SimpleNamespace(extra_args={KEY: of_request})
        for _ in range(3):
            asyncio.run(executor.execute(prompt="p", sampling_params=params))
    assert [of_response["answer"] for of_response in arguments] == [0, 1, 2] * 3
    assert len({of_response["sample"] for of_response in arguments}) == 9

    of_evaluation = SimpleNamespace(extra_args={KEY: {"round": 2, "scheduled": False}})
    asyncio.run(executor.execute(prompt="p", sampling_params=of_evaluation))
    assert "answer" not in arguments[-1]


def test_a_round_is_a_batch_that_has_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF asks for one more batch where an episode's prompts have ended with one, and for single prompts in the
    place of filtered ones."""
    run_with_ead(monkeypatch)
    requests: list[Request] = []
    generator = samples_generator.samples_generator(Generator)(requests)
    for batches in ([["a"], ["b"]], [["a"]], [], [["a"]]):
        generator.generate_samples(batches=batches)
    assert [request.arguments["round"] for request in requests] == [1, 1, 2, 3]
    assert [request.arguments["training_step"] for request in requests] == [0, 0, 1, 2]


class Trainer:
    """As OpenRLHF's, with three training steps whose rollouts have these entropies."""

    tensorboard_logger = None
    kl_ctl = SimpleNamespace(value=0.01)

    def __init__(self, states: dict[str, Any], entropies: list[float]) -> None:
        self.states = states
        self.entropies = entropies
        self.saved: list[dict[str, Any]] = []
        self.temperatures: list[float] = []
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
    """Ten steps in all; the target begins to fall after the sixth."""
    run_with(monkeypatch, sampling_schedule=sampling_schedules.create("e3").spec())
    monkeypatch.setattr(trainer, "vocabulary", lambda model: 151936)
    entropies = [0.5, 0.25, 0.5]
    uninterrupted = trainer.trainer(Trainer)({"global_step": 0}, entropies)
    uninterrupted.fit()
    assert trainer.run_of(uninterrupted) == Run(10, 0.5, 151936)
    third = 0.5 * (1 + 0.5 * 0.048101)
    assert uninterrupted.temperatures == pytest.approx([0.5, 0.5, third], abs=1e-6)
    assert uninterrupted.samples_generator.temperature_factor == pytest.approx(third / 0.5, abs=1e-6)

    after_two_steps = pickle.loads(pickle.dumps(uninterrupted.saved[1]))
    resumed = trainer.trainer(Trainer)(after_two_steps, entropies)
    resumed.fit()
    assert resumed.temperatures == uninterrupted.temperatures[2:]
    assert resumed.past_steps == uninterrupted.past_steps


@dataclass(frozen=True, kw_only=True)
class Half(SamplingSchedule):
    """Half of the temperature, in every training step."""

    name = "half"

    def factor_of_step(self, past: Sequence[PastStep], run: Run) -> float:
        return 0.5


def test_the_first_evaluation_has_the_temperature_of_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, sampling_schedule=Half().spec(), eval_at_start=True)
    monkeypatch.setattr(trainer, "vocabulary", lambda model: 151936)
    factors = []

    class Evaluating(Trainer):
        eval_dataloader = range(1)
        generate_kwargs: ClassVar[dict[str, Any]] = {}

        def evaluate(self, step: int, **sampling: Any) -> None:
            factors.append(self.samples_generator.temperature_factor)

    evaluating = trainer.trainer(Evaluating)({"global_step": 0}, [])
    evaluating.args.eval = SimpleNamespace(temperature=1.0, n_samples_per_prompt=1)
    evaluating.init_checkpoint_states()
    assert factors == [0.5]


def experience_with_rollout() -> SimpleNamespace:
    """Three trained tokens, of log-probabilities −1, −3 and −2 in the rollout."""
    return SimpleNamespace(
        rollout_log_probs=torch.tensor([[-1.0, -3.0], [-2.0, -9.0]]),
        action_log_probs=torch.tensor([[-1.5, -3.0], [-2.0, -9.0]]),
        mm_train_inputs=None,
        action_mask=torch.tensor([[1, 1], [1, 0]]),
        info={},
    )


def experience_maker(level: str) -> Any:
    """An experience maker of a run with this level of importance weights."""
    correction = SimpleNamespace(
        is_correction_level=level,
        is_correction_mode="clip",
        is_correction_gating="ratio",
        is_correction_threshold=[0.0, 10.0],
    )
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=correction),
        actor=SimpleNamespace(policy_loss_type="ppo"),
    )
    return maker(strategy=SimpleNamespace(args=args))


def test_the_rollout_s_entropy_is_kept_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, sampling_schedule=sampling_schedules.create("e3").spec())
    made = experience_maker(level="token")
    made.make_experience_batch([experience_with_rollout()])
    assert made.rollout_entropy == 2.0
    assert made.step_measures["sampling/entropy"] == 2.0
    assert made.step_measures["importance/weight"] == pytest.approx((math.exp(-0.5) + 2) / 3)


def test_a_step_without_log_probabilities_of_the_rollout_forgets_the_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, sampling_schedule=sampling_schedules.create("e3").spec())
    made = experience_maker(level="off")
    made.rollout_entropy = 2.0
    experience = experience_with_rollout()
    experience.rollout_log_probs = None
    made.make_experience_batch([experience])
    assert made.rollout_entropy is None
