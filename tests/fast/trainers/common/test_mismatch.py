# SPDX-License-Identifier: Apache-2.0
"""The scale of a run's gaps: what is judged by it, when it is measured, and how its answers travel."""

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.methods import sampling_schedules
from ngrpo.trainers.common import mismatch
from ngrpo.trainers.common.mismatch import GapScale, ReplayGap
from ngrpo.trainers.common.sample_records import unpack
from ngrpo.trainers.openrlhf import experience_maker, rollout_actor, second_round
from ngrpo.trainers.openrlhf.rollout_actor import CONTROLS
from perturbations.replay.trajectory import FinishedTrajectory, UnperturbedAnswer
from tests.support import openrlhf_doubles
from tests.support.replay_examples import a_record
from tests.support.run import run_with

NAMES = ("unperturbed", "perturbed", "plain", "before")


def step(**gaps: float) -> dict[str, float]:
    return {f"perturbation/gap_{name}_mean": gap for name, gap in gaps.items()}


@pytest.mark.parametrize(("wrong", "times"), [("perturbed", 10.0), ("plain", 5.0), ("before", 10.0)])
@pytest.mark.parametrize(("half", "usual"), [(True, 0.02), (False, 2e-5)])
def test_any_gap_beyond_the_limit_rings(half: bool, usual: float, wrong: str, times: float) -> None:
    """Alike large at all positions, as where the engine is wrong: no ratio among them says anything."""
    usual_step = step(**dict.fromkeys(NAMES, usual))
    scale = GapScale(half)
    scale.check(usual_step, 10.0, strict=True)
    says = rf"at most {times * usual:.2g}\) on average; where nothing .* by {usual:.2g}\."
    with pytest.raises(ReplayGap, match=says):
        scale.check({**usual_step, **step(**{wrong: 1.05 * times * usual})}, 10.0, strict=True)
    scale.check({**usual_step, **step(**{wrong: 0.95 * times * usual})}, 10.0, strict=True)
    with pytest.raises(ReplayGap):
        scale.check({**usual_step, **step(**{wrong: 3.1 * usual})}, 3.0, strict=True)


def test_certain_tokens_are_no_scale() -> None:
    """In half precision the first tokens of an answer may agree to any number of digits."""
    scale = GapScale(half_precision=True)
    scale.check(step(unperturbed=1e-7, perturbed=0.07, plain=0.03), 10.0, strict=True)
    with pytest.raises(ReplayGap):
        scale.check(step(perturbed=0.08), 10.0, strict=True)


@pytest.mark.parametrize(("half", "largest"), [(True, 1.0), (False, 0.01)])
def test_two_models_are_not_one(half: bool, largest: float) -> None:
    GapScale(half).check(step(unperturbed=0.99 * largest), 10.0, strict=True)
    with pytest.raises(
        ReplayGap, match=r"(?s)have not the same weights.* of the same run with --perturbation none decides"
    ):
        GapScale(half).check(step(unperturbed=1.01 * largest), 10.0, strict=True)
    GapScale(half, noisy=True).check(step(unperturbed=1.01 * largest), 10.0, strict=True)


def test_a_strict_run_in_half_precision_is_judged_by_its_own_control(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An H200 measured an unperturbed mean of 0.33 with random weights and no fault: a warning, and the run goes on."""
    monkeypatch.setattr(mismatch, "_warned", [])
    scale = GapScale(half_precision=True)
    scale.check(step(unperturbed=0.33, perturbed=0.4, plain=0.35, before=0.3), 10.0, strict=True)
    printed = capsys.readouterr().out
    assert "differ by 0.33 on average where nothing is perturbed" in printed
    assert "In half precision, --perturbation.strict makes this an error above 1." in printed
    with pytest.raises(ReplayGap, match=r"right after perturbed inputs by 3.4 \(at most 3.3\)"):
        scale.check(step(perturbed=3.4, plain=0.35), 10.0, strict=True)


def test_the_scale_is_that_of_the_start_unless_weights_drift_by_design() -> None:
    fixed, drifting = GapScale(True), GapScale(True, drifts=True)
    fixed.check(step(plain=5.0), 10.0, strict=True)  # without an unperturbed response there is no scale
    for scale in (fixed, drifting):
        assert scale.is_needed
        scale.check(step(unperturbed=0.02, plain=0.02), 10.0, strict=True)
    assert not fixed.is_needed and drifting.is_needed
    older = step(unperturbed=0.2, plain=0.3, perturbed=0.3)
    drifting.check(older, 10.0, strict=True)
    with pytest.raises(ReplayGap):
        fixed.check(older, 10.0, strict=True)
    with pytest.raises(ReplayGap):
        drifting.check(step(unperturbed=0.02, plain=0.3), 10.0, strict=True)


def test_the_first_responses_of_each_round_have_a_control(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, perturbation={"name": "neighbor"})
    followed: list[bool] = []

    class Executor:
        async def execute(self, **kwargs: Any) -> None:
            followed.append(rollout_actor._conversation.get().needs_control)
            raise ValueError

    executor = rollout_actor.RecordingExecutor(Executor())
    rounds = [(1, True)] * (CONTROLS + 2) + [(2, False), (2, True), (0, True)]
    for place, (number, enabled) in enumerate(rounds):
        second_round.drafting.set(place == 0)
        params = SimpleNamespace(extra_args={"perturbation": {"round": number, "enabled": enabled}})
        with pytest.raises(RuntimeError, match="ValueError"):
            asyncio.run(executor.execute(prompt="p", sampling_params=params))
    assert followed == [False] + [True] * CONTROLS + [False, False, True, False], "the first one was a draft"


ANSWER = UnperturbedAnswer(np.array([5, 6, 300_000, 8], np.int32), np.array([-0.5, -1.25], np.float32))


def record(answer: UnperturbedAnswer | None) -> FinishedTrajectory:
    return FinishedTrajectory(a_record(0), np.array([np.nan, -1.0], np.float32), unperturbed=answer)


@pytest.mark.parametrize("experts", [None, np.arange(12, dtype=np.uint16).reshape(3, 2, 2)], ids=["plain", "routed"])
def test_an_answer_travels_with_its_sample(experts: np.ndarray | None) -> None:
    answers = [None, dataclasses.replace(ANSWER, experts=experts)]
    none, found = (each.unperturbed for each in unpack([record(answer).pack() for answer in answers]))
    assert none is None
    for field in dataclasses.fields(found):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(answers[1], field.name))


class Group:
    """One actor, whose log-probability of a token is −token / 10."""

    def async_run_method(self, method_name: str, **given: torch.Tensor) -> list[torch.Tensor]:
        assert method_name == "unperturbed_log_probs"
        self.given = given
        return [-given["sequences"][:, -given["action_mask"].shape[1] :] / 10.0]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("ray.get", lambda found: found)
    rollout = SimpleNamespace(batch_size=8, vllm_generate_batch_size=8)
    args = SimpleNamespace(rollout=rollout, train=SimpleNamespace(async_enable=False))
    args.ds = SimpleNamespace(param_dtype="bf16")
    return openrlhf_doubles.maker(actor_model_group=Group(), strategy=SimpleNamespace(args=args))


def test_the_gap_is_over_the_answers_tokens(maker: Any) -> None:
    shorter = UnperturbedAnswer(np.array([1, 2], np.int32), np.array([-0.3], np.float32))
    longer = UnperturbedAnswer(np.array([7, 3, 4, 5], np.int32), np.array([-0.3, -0.4, -0.9], np.float32))
    empty = dataclasses.replace(shorter, log_probs=shorter.log_probs[:0])
    # |−0.2 + 0.3|, and |−0.5 + 0.9| at the last of the other's three tokens.
    found = experience_maker.control_gap(maker, [record(each) for each in (empty, shorter, None, longer)])
    assert found == pytest.approx((0.1 + 0.4) / 4)
    given = maker.actor_model_group.given
    assert given["sequences"].tolist() == [[0, 0, 1, 2], [7, 3, 4, 5]]
    assert given["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert given["action_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert experience_maker.control_gap(maker, [record(empty), None]) is None


@pytest.mark.parametrize(("asynchronous", "batch"), [(False, 8), (True, 8), (False, 16)])
def test_when_weights_drift_by_design(
    maker: Any, asynchronous: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maker's batch has 8 prompts."""
    run_with(monkeypatch)
    maker.strategy.args.train.async_enable = asynchronous
    maker.strategy.args.rollout.vllm_generate_batch_size = batch
    scale = experience_maker.gap_scale(maker)
    assert scale is experience_maker.gap_scale(maker)
    scale.of(0.02)
    assert scale.is_needed == (asynchronous or batch > 8)


@pytest.mark.parametrize("large", [step(perturbed=5.0, plain=0.01), step(perturbed=0.9, plain=0.9, unperturbed=0.02)])
def test_rollouts_at_other_temperatures_are_not_judged(
    maker: Any, large: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule's gap is that between two temperatures, whatever the replay does."""
    run_with(monkeypatch, strict=True)
    with pytest.raises(ReplayGap):
        experience_maker.judge(maker, large)
    run_with(monkeypatch, strict=True, sampling_schedule=sampling_schedules.create("ladder").spec())
    experience_maker.judge(maker, large)
