"""Sampling schedules: their formulas by hand, and how rollouts, requests and the training get their temperatures."""

from __future__ import annotations

import math
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.decode_step import Decoding, counting
from ngrpo import catalogue, flags, preflight, sampling_schedules, train
from ngrpo.openrlhf_flags import Flags
from ngrpo.rollout import settings
from ngrpo.rollout.requests import RunningRequests
from ngrpo.sampling_schedules.base import NextTokens, PastStep, Run, SamplingSchedule
from ngrpo.trainer import metrics, resume, rollout_requests, sampling_schedule
from ngrpo.trainer.importance import importance_measures
from ngrpo.trainer.run_settings import RunSettings
from ngrpo.trainer.seams import active
from perturbations import create, registry, streams
from perturbations.errors import UsageError
from tests.fast.gradient_problem import policy_loss
from tests.fast.run import run_with

NAMES = sorted(sampling_schedules.available())


def tokens(generated: list[int], step: int = 0, logits: Tensor | None = None, temperature: float = 1.0) -> NextTokens:
    rows = torch.tensor(generated)
    logits = torch.zeros(len(rows), 4) if logits is None else logits
    return NextTokens(logits, torch.full((len(rows),), temperature), rows, torch.full_like(rows, step))


# --- the formulas -----------------------------------------------------------------------------------------------


def test_ead_as_released() -> None:
    """exp(t / 500) at step 0: 2.2 − e^.02 at t = 10, 2.2 − e^.6 at 300, and below τ_min at 400."""
    ead = sampling_schedules.create("ead", variant="released")
    found = ead.factor(tokens([0, 9, 10, 300, 400, 100_000])).tolist()
    assert found == pytest.approx([1.0, 1.0, 1.179799, 0.377881, 0.1, 0.1], abs=1e-6)
    # d_100 = 25 + 500: e^(3000 / 10500).
    assert ead.factor(tokens([3000], step=100)).item() == pytest.approx(2.2 - math.exp(3000 / 10500), abs=1e-6)


def test_ead_as_written() -> None:
    """exp(t / d), d = d_0 + 5 s; at step 0 as released, then cooling sooner than that."""
    paper, released = (sampling_schedules.create("ead", variant=name) for name in ("paper", "released"))
    at = [0, 10, 77, 300, 395]
    assert torch.equal(paper.factor(tokens(at)), released.factor(tokens(at)))
    assert paper.factor(tokens([300], step=100)).item() == pytest.approx(2.2 - math.exp(0.3), abs=1e-6)
    own = sampling_schedules.create("ead", d_0=50, growth=10, tau_max=1.5, tau_min=0.4, c=2)
    found = own.factor(tokens([1, 2, 60], step=5)).tolist()
    assert found == pytest.approx([1.0, 2.5 - math.exp(0.02), 2.5 - math.exp(0.6)], abs=1e-6)
    # d grows no further than 40000.
    assert own.factor(tokens([20_000], step=10**6)).item() == pytest.approx(2.5 - math.exp(0.5), abs=1e-6)
    with pytest.raises(UsageError, match=r"tau_min=2\.0: must be at most tau_max=1\.2"):
        sampling_schedules.create("ead", tau_min=2)


def test_edt_by_hand() -> None:
    """Uniform over four: H = ln 4, so 0.8^(0.1 / 1.386294) = .984032; (.7, .2, .1): H = .801819."""
    z = torch.tensor([[0.0] * 4, [math.log(0.7), math.log(0.2), math.log(0.1), -math.inf], [90.0, 0.0, 0.0, 0.0]])
    edt = sampling_schedules.create("edt")
    expected = [0.8 ** (0.1 / math.log(4)), 0.8 ** (0.1 / 0.801819), 0.1]
    assert expected[:2] == pytest.approx([0.984032, 0.972554], abs=1e-6)
    assert edt.factor(tokens([0, 5, 9], logits=z)).tolist() == pytest.approx(expected, abs=1e-6)
    # The entropy is the model's own, whatever temperature the request asks for.
    assert edt.factor(tokens([0, 5, 9], logits=z / 0.5, temperature=0.5)).tolist() == pytest.approx(expected, abs=1e-6)
    own = sampling_schedules.create("edt", t_0=1.3, base=0.5, theta=0.4, least=0.3)
    expected = [1.3 * 0.5 ** (0.4 / math.log(4)), 1.3 * 0.5 ** (0.4 / 0.801819), 0.3]
    assert own.factor(tokens([0, 5, 9], logits=z)).tolist() == pytest.approx(expected, abs=1e-6)


def test_e3_by_hand() -> None:
    """τ = 1, H = .25, H* = .5, V = 151936: 1 + ln 2 / (ln V + ln ln V) = 1.048101."""
    e3, run = sampling_schedules.create("e3", annealing=False), Run(10, 1.0, 151936)
    assert e3.factor_of_step([], run) == 1.0
    assert e3.factor_of_step([PastStep(1.0, 0.5)], run) == 1.0, "the first step's own entropy is the target"
    past = [PastStep(1.0, 0.5), PastStep(1.0, 0.25)]
    assert e3.factor_of_step(past, run) == pytest.approx(1.048101, abs=1e-6)
    # From there on, at τ = 1.048101, an entropy above the target cools: τ (1 + τ ln(.5 / .8) / 14.4100).
    past.append(PastStep(1.048101, 0.8))
    assert e3.factor_of_step(past, run) == pytest.approx(
        1.048101 * (1 + 1.048101 * math.log(0.625) / 14.41016), abs=1e-6
    )
    # τ is the temperature itself, and not its factor: asked for 0.5, it moves half as fast.
    half = e3.factor_of_step(past[:2], Run(10, 0.5, 151936))
    assert half == pytest.approx(1 + 0.5 * 0.048101, abs=1e-6)
    # Where the entropy does not follow, the temperature stays within bounds.
    assert e3.factor_of_step([PastStep(1.0, 1.0), PastStep(1.9, 0.1)], run) == 2.0
    assert e3.factor_of_step([PastStep(1.0, 1e-9), PastStep(2.0, 9.0)], run) == 0.1
    assert e3.factor_of_step([PastStep(1.0, 0.0), PastStep(1.0, 0.0)], run) == 1.0


@pytest.mark.parametrize(("step", "share"), [(5, 1.0), (6, 1.0), (8, 0.95), (10, 0.9)])
def test_e3_lets_its_target_fall_in_the_last_two_fifths(step: int, share: float) -> None:
    """x = ½ at step 8 of 10: ½ (1 + cos π/2) = ½, so 0.1 · ½ + 0.9."""
    past = [PastStep(1.0, 0.5)] * (step - 1) + [PastStep(1.0, 0.5 * share)]
    assert sampling_schedules.create("e3").factor_of_step(past, Run(10, 1.0, 1000)) == pytest.approx(1.0, abs=1e-9)


def test_the_weight_of_a_token_drawn_hotter() -> None:
    """z = (2, 1, 0) drawn at 1.18: token 2 has log π −2.407606 and log π_rollout −2.172464."""
    z = torch.tensor([2.0, 1.0, 0.0])
    own, rollout = torch.log_softmax(z, -1)[[2, 0]], torch.log_softmax(z / 1.18, -1)[[2, 0]]
    assert own[0].item() == pytest.approx(-2.407606, abs=1e-6)
    assert rollout[0].item() == pytest.approx(-2.172464, abs=1e-6)
    default = sampling_schedules.create("ead").flags(Flags())
    args = SimpleNamespace(
        is_correction_gating="ratio",
        **{name.rpartition(".")[2]: value for name, value in default.items()},
    )

    def weight(at: int) -> float:
        experience = SimpleNamespace(
            action_log_probs=own[at].view(1, 1), rollout_log_probs=rollout[at].view(1, 1), action_mask=torch.ones(1, 1)
        )
        return importance_measures([experience], args)["importance/weight"]

    assert (weight(0), weight(1)) == (pytest.approx(0.790459, abs=1e-6), pytest.approx(1.072447, abs=1e-6))


# --- the contract -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_keeps_its_contract(name: str) -> None:
    """Rows on their own give what they give in a batch; factors are positive; it travels between processes."""
    schedule = sampling_schedules.create(name)
    assert type(schedule).factor is not SamplingSchedule.factor or schedule.follows_training
    for copy in (pickle.loads(pickle.dumps(schedule)), sampling_schedules.create(**schedule.spec())):
        assert copy == schedule
    drawn = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(64, 512, generator=drawn)
    rows = torch.randint(0, 4000, (64,), generator=drawn)
    steps = torch.randint(0, 300, (64,), generator=drawn)
    given = NextTokens(logits, torch.full((64,), 0.7), rows, steps)
    found = schedule.factor(given)
    if found is not None:
        assert found.shape == (64,) and found.dtype == torch.float32 and (found > 0).all() and found.isfinite().all()
        single = [
            schedule.factor(NextTokens(logits[i : i + 1], torch.tensor([0.7]), rows[i : i + 1], steps[i : i + 1]))
            for i in range(64)
        ]
        torch.testing.assert_close(torch.cat(single), found, rtol=1e-6, atol=0)
    past: list[PastStep] = []
    for step in range(40):
        factor = schedule.factor_of_step(past, Run(40, 0.8, 1000))
        assert 0.0 < factor <= 2.0
        past.append(PastStep(factor, 2.0 / (1 + step)))


@pytest.mark.parametrize("name", NAMES)
def test_a_decode_step_waits_for_nothing(name: str) -> None:
    """One more copy to the device: how many tokens each answer has."""
    decoding = Decoding(create("soft"), 16)
    decoding.perturber._schedule = sampling_schedules.create(name)
    logits, temperature = torch.randn(16, 1024), torch.ones(16)
    decoding.step(), decoding.step()
    with counting(decoding.perturber) as counts:
        finish = decoding.perturber.finish

        def with_factor(*args: Any) -> Tensor:
            decoding.perturber.temperature_factor(logits, temperature, None)
            return finish(*args)

        decoding.perturber.finish = with_factor
        for _ in range(4):
            decoding.step()
    assert counts.steps == 4 and not counts.waits and counts.uploads <= 3 * counts.steps


# --- the rollout ------------------------------------------------------------------------------------------------


class Step:
    """A perturber with requests, asked at one step of theirs."""

    def __init__(self, **schedule: Any) -> None:
        decoding = Decoding(create("none"), 4)
        self.perturber = decoding.perturber
        self.perturber._schedule = sampling_schedules.create(**schedule)
        self.requests = RunningRequests(
            create("none"), self.perturber._store, self.perturber, registry.buffers.create("memory")
        )
        for name in decoding.requests:
            self.perturber._store.close(name)

    def add(self, name: str, prompt: int, **arguments: Any) -> None:
        params = SimpleNamespace(seed=None, extra_args={"perturbation": arguments})
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
    hot, first = 2.2 - math.exp(10 / 10500), 2.2 - math.exp(20 / 500)
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
    assert Step(name="e3").perturber.temperature_factor is not None
    e3 = Step(name="e3")
    e3.add("a", 5)
    e3.perturber.begin(["a"], np.array([0]), np.array([5]), np.zeros(1, dtype=bool))
    assert e3.perturber.temperature_factor(torch.zeros(1, 8), torch.ones(1), None) is None


def test_an_engine_reads_its_schedule() -> None:
    given = {"sampling_schedule": {"name": "ead", "c": 3}}
    assert settings.read_schedule(given).c == 3
    assert settings.read(given).name == "none", "something must be attached"
    assert settings.read({}) is None and settings.read_schedule({"perturbation": {"name": "soft"}}) is None
    prints = {
        settings.fingerprint(create("none"), None if name is None else sampling_schedules.create(name))
        for name in (None, *NAMES)
    }
    assert len(prints) == 1 + len(NAMES)
    for spec in ("ead", {"c": 3}):
        with pytest.raises(UsageError, match=r"must be a dictionary with a 'name' \(e3, ead, edt or"):
            settings.read({"sampling_schedule": spec})
    with pytest.raises(UsageError, match="unknown sampling schedule 'eadd'"):
        settings.read({"sampling_schedule": {"name": "eadd"}})


# --- the objective ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ead", "edt"])
def test_the_gradient_on_a_schedule_s_rollouts_is_the_clean_policys(name: str) -> None:
    """By Monte Carlo in a bandit with two contexts: ∇ E_π[R], with the weights and not without.

    Draws are the product's (token streams, factors), the loss and its weights OpenRLHF's.
    """
    count, drawn_as = 400_000, {"ead": {"tau_max": 1.8, "c": 0}, "edt": {"t_0": 1.6, "base": 0.5, "theta": 0.5}}
    schedule = sampling_schedules.create(name, **drawn_as[name])
    z = torch.tensor([[1.4, -0.3, 0.2, 0.9], [0.1, 2.5, -0.6, 0.3]], requires_grad=True)
    reward = torch.tensor([[1.0, -0.5, 0.3, 0.2], [0.4, -1.0, 0.9, -0.2]])
    (true,) = torch.autograd.grad((torch.softmax(z, -1) * reward).sum(-1).mean(), z)
    context = torch.arange(count) % 2
    logits = z.detach()[context]
    at = NextTokens(logits, torch.ones(count), 100 + 100 * context, torch.zeros(count, dtype=torch.int64))
    rollout = torch.log_softmax(logits / schedule.factor(at).unsqueeze(-1), -1)
    keys = streams.keys(torch.tensor(3), torch.arange(count), streams.Stream.TOKEN)
    chosen = (rollout - streams.exponential(keys, torch.arange(4)).log()).argmax(-1)

    default = schedule.flags(Flags())
    bounds = [float(bound) for bound in default["--algo.advantage.is_correction_threshold"]]
    kinds = {
        "weighted": {
            "is_correction_level": default["--algo.advantage.is_correction_level"],
            "is_correction_mode": default["--algo.advantage.is_correction_mode"],
            "is_correction_threshold": bounds,
        },
        "unweighted": {},
    }
    away = {}
    for kind, options in kinds.items():
        loss, batches = type(policy_loss())(token_level_loss=True, **options), []
        for part in torch.arange(count).chunk(40):
            log_p = torch.log_softmax(z[context[part]], -1).gather(-1, chosen[part].unsqueeze(-1))
            behaviour = rollout[part].gather(-1, chosen[part].unsqueeze(-1))
            advantage = reward[context[part], chosen[part]].unsqueeze(-1)
            value = loss(
                log_p, log_p.detach(), advantage, torch.ones_like(log_p), behaviour, batch_num_tokens=float(len(part))
            )[0]
            batches.append(-torch.autograd.grad(value, z)[0])
        found = torch.stack(batches)
        away[kind] = ((found.mean(0) - true) / (found.std(0) / math.sqrt(len(found)) + 1e-6)).abs().max().item()
    print(name, away)
    assert away["weighted"] < 3.5
    assert away["unweighted"] > 20.0, "leaving the weights out must show"


# --- in OpenRLHF ------------------------------------------------------------------------------------------------


class Generator:
    """As OpenRLHF's: asks an engine for samples at a temperature."""

    def __init__(self, asked: list[Any], **rollout: Any) -> None:
        def remote(sampling_params: Any, **kwargs: Any) -> None:
            asked.append((sampling_params.temperature, sampling_params.extra_args["perturbation"]))

        self.vllm_engines = [SimpleNamespace(generate_responses=SimpleNamespace(remote=remote))]
        self.args = SimpleNamespace(rollout=SimpleNamespace(batch_size=8, **rollout))

    def _generate_vllm(self, **kwargs: Any) -> None:
        self._dispatch_prompts_to_vllm(["a"], **kwargs)

    def generate_samples(self, **kwargs: Any) -> None:
        self._generate_vllm(**kwargs)

    def generate_eval_samples(self, **kwargs: Any) -> None:
        self._generate_vllm(**kwargs)

    def _dispatch_prompts_to_vllm(self, prompts: list[str], **kwargs: Any) -> None:
        params = SimpleNamespace(temperature=kwargs.get("temperature", 1.0), extra_args=None)
        self.vllm_engines[0].generate_responses.remote(sampling_params=params)


def test_requests_say_their_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, sampling_schedule_spec=sampling_schedules.create("ead").spec())
    asked: list[Any] = []
    generator = rollout_requests.numbered_requests(Generator)(asked)
    generator.generate_samples(temperature=0.8)
    generator.generate_eval_samples(temperature=0.6)
    generator.rollout_round, generator.temperature_factor = 7, 1.5  # as from a checkpoint; as E3 sets it
    generator.generate_samples(temperature=0.8)
    assert asked == [
        (0.8, {"round": 1, "training_step": 0}),
        (0.6, {"round": 1, "scheduled": False}),
        (pytest.approx(1.2), {"round": 8, "training_step": 7}),
    ]
    # An asynchronous run may draw the samples of several steps at once.
    run_with(monkeypatch, sampling_schedule_spec=sampling_schedules.create("ead", evaluation=True).spec())
    asked.clear()
    generator = rollout_requests.numbered_requests(Generator)(asked, vllm_generate_batch_size=24)
    generator.generate_samples(), generator.generate_samples(), generator.generate_eval_samples(temperature=0.6)
    assert [arguments["training_step"] for _, arguments in asked] == [0, 3, 3] and asked[2][0] == 0.6


class Trainer:
    """As OpenRLHF's, with three training steps whose entropies are given."""

    def __init__(self, states: dict[str, Any], entropies: list[float]) -> None:
        self.states, self.entropies, self.saved, self.temperatures = states, entropies, [], []
        self.samples_generator = SimpleNamespace(temperature_factor=1.0)
        self.experience_maker = SimpleNamespace()
        self.prompts_dataloader = range(40)
        self.args = SimpleNamespace(
            train=SimpleNamespace(num_episodes=2),
            rollout=SimpleNamespace(batch_size=8, temperature=0.5),
            actor=SimpleNamespace(model_name_or_path="m"),
        )

    def init_checkpoint_states(self) -> dict[str, Any]:
        return self.states

    def fit(self) -> None:
        step = self.init_checkpoint_states()["global_step"]
        while step < 3:
            status, step = self.train_step([], step)
            self.temperatures.append(status["sampling/temperature"])
            states = {"global_step": step}
            self.save_logs_and_checkpoints(step, None, states)
            self.saved.append(states)

    def train_step(self, samples: Any, step: int) -> tuple[dict, int]:
        self.experience_maker.rollout_entropy = self.entropies[step]
        return {}, step + 1

    def save_logs_and_checkpoints(self, global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
        pass


def test_e3_over_a_run_and_a_resumed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sampling_schedules.create("e3").spec()
    run_with(monkeypatch, sampling_schedule_spec=spec)
    monkeypatch.setattr(sampling_schedule, "vocabulary", lambda model: 151936)
    entropies = [0.5, 0.25, 0.5]
    trainer = sampling_schedule.scheduled_trainer(Trainer)({"global_step": 0}, entropies)
    trainer.fit()
    # Ten steps in all; the target begins to fall after the sixth.
    assert trainer.run == Run(10, 0.5, 151936)
    third = 0.5 * (1 + 0.5 * 0.048101)
    assert trainer.temperatures == pytest.approx([0.5, 0.5, third], abs=1e-6)
    assert trainer.samples_generator.temperature_factor == pytest.approx(third / 0.5, abs=1e-6)
    resumed = sampling_schedule.scheduled_trainer(Trainer)(pickle.loads(pickle.dumps(trainer.saved[1])), entropies)
    resumed.fit()
    assert resumed.temperatures == trainer.temperatures[2:] and resumed.past == trainer.past


def test_the_rollout_s_entropy_is_kept_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, sampling_schedule_spec=sampling_schedules.create("e3").spec())
    experience = SimpleNamespace(
        rollout_log_probs=torch.tensor([[-1.0, -3.0], [-2.0, -9.0]]),
        action_log_probs=torch.tensor([[-1.5, -3.0], [-2.0, -9.0]]),
        action_mask=torch.tensor([[1, 1], [1, 0]]),
    )
    advantage = SimpleNamespace(
        is_correction_level="token", is_correction_mode="clip", is_correction_gating="ratio",
        is_correction_threshold=[0.0, 10.0],
    )  # fmt: skip
    maker = SimpleNamespace(strategy=SimpleNamespace(args=SimpleNamespace(algo=SimpleNamespace(advantage=advantage))))
    measured = metrics.measured_rollout_policy(lambda maker, samples: samples)
    measured(maker, [experience])
    assert maker.rollout_entropy == 2.0 and maker.step_measures["sampling/entropy"] == 2.0
    assert maker.step_measures["importance/weight"] == pytest.approx((math.exp(-0.5) + 2) / 3)
    experience.rollout_log_probs, advantage.is_correction_level = None, "off"
    measured(maker, [experience])
    assert maker.rollout_entropy is None


def test_a_checkpoint_holds_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the training step of the requests follows from."""
    rows = {seam.ours for seam in active(["sampling_schedule"])}
    assert f"{resume.__name__}:resuming_trainer" in rows
    assert {
        "ngrpo.trainer.sampling_schedule:scheduled_trainer",
        "ngrpo.trainer.rollout_requests:numbered_requests",
        "ngrpo.trainer.rollout_actor:perturbed_engine",
        "ngrpo.trainer.metrics:measured_rollout_policy",
        "ngrpo.trainer.metrics:reporting_trainer",
    } < rows


# --- the command line -------------------------------------------------------------------------------------------


def test_the_command_line() -> None:
    words = ["--model", "m", "--sampling.top_k", "5", "--sampling.schedule", "ead", "--sampling.schedule.c", "3"]
    parsed = flags.parse(words).settings
    assert parsed.sampling_schedule_spec["c"] == 3 and parsed.sampling_schedule.name == "ead"
    assert parsed.sampling == {"top_k": 5} and parsed.conditions == ("sampling", "sampling_schedule")
    assert flags.parse(["--sampling.schedule", "none"]).settings.sampling_schedule is None
    for words, message in (
        (["--sampling.schedule", "eaad"], "unknown sampling schedule 'eaad'. Did you mean 'ead'?"),
        (
            ["--sampling.schedule.c", "3"],
            "--sampling.schedule.c is given, but no sampling schedule. Add --sampling.sch",
        ),
        (["--sampling.schedule", "ead", "--sampling.schedule.d", "3"], "has no option 'd'"),
        (["--sampling.schedule"], "--sampling.schedule needs a sampling schedule's name"),
        (["--sampling.shedule", "ead"], "unknown flag '--sampling.shedule'. Did you mean 'schedule'"),
        (["--sampling.schedule", "ead", "--sampling.schedule.tau_min", "0"], "must be greater than 0"),
    ):
        with pytest.raises(UsageError, match=message.replace(".", r"\.").replace("?", r"\?")):
            flags.parse(words)
    assert "exploratory" in sys.modules["ngrpo.sampling_schedules.ead"].__doc__
    assert "sampling schedule" in catalogue.listing() and "--sampling.schedule.tau_max" in catalogue.train_help()
    assert "token 300  0.378" in catalogue.described("ead") and "entropy 4.14" in catalogue.described("edt")


def test_importance_weights_are_on_unless_the_user_says_otherwise() -> None:
    def correction(*words: str) -> str | None:
        command = flags.parse(["--model", "m", "--task", "arithmetic", "--sampling.schedule", "ead", *words])
        given = train.checked_flags(command, __import__("pathlib").Path("runs/never-written"))
        return given.value("--algo.advantage.is_correction_level")

    assert correction() == "token"
    assert correction("--algo.advantage.is_correction_level", "off") == "off"


@pytest.mark.parametrize(
    ("name", "words", "density", "message"),
    [
        ("ead", [], True, "--sampling.schedule ead cannot be used with the density of --perturbation gumbel"),
        ("ead", ["--eval.temperature", "0"], False, "cannot be used with --eval.temperature 0"),
        ("e3", ["--train.async_enable"], False, "--train.async_enable cannot be used with --sampling.schedule e3"),
        ("e3", ["--algo.advantage.is_correction_level", "off"], False, "needs the rollouts' log-probabilities"),
    ],
)
def test_what_it_cannot_go_with(name: str, words: list[str], density: bool, message: str) -> None:
    schedule = sampling_schedules.create(name, evaluation=True)
    spec = create("gumbel", density="gumbel" if density else "token").spec()
    asked = RunSettings(sampling_schedule_spec=schedule.spec(), perturbation_spec=spec)
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        preflight.check_sampling_schedule(Flags(words).with_defaults(schedule.flags(Flags())), asked)
    fine = RunSettings(sampling_schedule_spec=schedule.spec(), perturbation_spec=create("gumbel").spec())
    preflight.check_sampling_schedule(Flags(["--eval.temperature", "0.6"]).with_defaults(schedule.flags(Flags())), fine)
