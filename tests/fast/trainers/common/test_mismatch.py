# SPDX-License-Identifier: Apache-2.0
"""The scale of a run's gaps: what is judged by it, when it is measured, and how its answers travel."""

import asyncio
import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.methods import sampling_schedules
from ngrpo.trainers.common import mismatch
from ngrpo.trainers.common.mismatch import GapScale, MismatchTooLarge
from ngrpo.trainers.common.sample_records import unpack
from ngrpo.trainers.openrlhf import experience_maker, rollout_actor, second_round
from ngrpo.trainers.openrlhf.rollout_actor import CONTROLS
from perturbations.replay.trajectory import FinishedTrajectory, UnperturbedResponse
from tests.support import openrlhf_doubles
from tests.support.replay_examples import a_record
from tests.support.run import run_with

NAMES = ("unperturbed", "perturbed", "plain", "before")


def step(**gaps: float) -> dict[str, float]:
    return {f"perturbation/gap_{name}_mean": gap for name, gap in gaps.items()}


@pytest.mark.parametrize(("wrong", "times"), [("perturbed", 10.0), ("plain", 5.0), ("before", 10.0)])
@pytest.mark.parametrize(("half", "usual"), [(True, 0.02), (False, 2e-5)], ids=["half precision", "float32"])
def test_any_mismatch_beyond_the_limit_is_an_error(half: bool, usual: float, wrong: str, times: float) -> None:
    """All positions start alike, as where the engine is wrong: no ratio among them says anything."""
    usual_step = step(**dict.fromkeys(NAMES, usual))
    scale = GapScale(half)
    scale.check(usual_step, 10.0, strict=True)

    def check(mismatch_in_usual: float, limit: float) -> None:
        """Judges a step whose mismatch is the usual one but for ``wrong``, which is so many times larger."""
        larger = step(**{wrong: mismatch_in_usual * usual})
        scale.check({**usual_step, **larger}, limit, strict=True)

    message = rf"at most {times * usual:.2g}\) on average; where nothing .* by {usual:.2g}\."
    with pytest.raises(MismatchTooLarge, match=message):
        check(1.05 * times, limit=10.0)
    check(0.95 * times, limit=10.0)
    with pytest.raises(MismatchTooLarge):
        check(3.1, limit=3.0)


def test_certain_tokens_are_no_scale() -> None:
    """In half precision the first tokens of an answer may agree to any number of digits."""
    scale = GapScale(half_precision=True)
    scale.check(step(unperturbed=1e-7, perturbed=0.07, plain=0.03), 10.0, strict=True)
    with pytest.raises(MismatchTooLarge):
        scale.check(step(perturbed=0.08), 10.0, strict=True)


@pytest.mark.parametrize(("half", "largest"), [(True, 1.0), (False, 0.01)], ids=["half precision", "float32"])
def test_two_models_are_not_one(half: bool, largest: float) -> None:
    below = step(unperturbed=0.99 * largest)
    above = step(unperturbed=1.01 * largest)
    GapScale(half).check(below, 10.0, strict=True)
    message = r"(?s)have not the same weights.*weights are random: in bfloat16 .* trained weights differ by about 0\.02"
    with pytest.raises(MismatchTooLarge, match=message):
        GapScale(half).check(above, 10.0, strict=True)
    GapScale(half, noisy=True).check(above, 10.0, strict=True)


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
    with pytest.raises(MismatchTooLarge, match=r"right after perturbed inputs by 3.4 \(at most 3.3\)"):
        scale.check(step(perturbed=3.4, plain=0.35), 10.0, strict=True)
    scale.check(step(perturbed=3.4, plain=0.35), 10.0, strict=False)
    assert "right after perturbed inputs by 3.4" in capsys.readouterr().out, "the first warning hid this one"


@pytest.mark.parametrize("drifts", [False, True])
def test_the_scale_is_measured_once_unless_weights_drift_by_design(drifts: bool) -> None:
    scale = GapScale(True, drifts=drifts)
    if not drifts:
        scale.check(step(plain=5.0), 10.0, strict=True)  # without an unperturbed response there is no scale
    assert scale.is_needed
    scale.check(step(unperturbed=0.02, plain=0.02), 10.0, strict=True)
    assert scale.is_needed == drifts


def test_a_later_step_is_judged_by_the_start_unless_weights_drift_by_design() -> None:
    start = step(unperturbed=0.02, plain=0.02)
    drifted = step(unperturbed=0.2, plain=0.3, perturbed=0.3)
    fixed = GapScale(True)
    drifting = GapScale(True, drifts=True)
    for scale in (fixed, drifting):
        scale.check(start, 10.0, strict=True)

    drifting.check(drifted, 10.0, strict=True)
    with pytest.raises(MismatchTooLarge):
        fixed.check(drifted, 10.0, strict=True)
    # Its own scale, again 0.02, decides here.
    with pytest.raises(MismatchTooLarge):
        drifting.check(step(unperturbed=0.02, plain=0.3), 10.0, strict=True)


def test_the_first_responses_of_each_round_have_a_control(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, perturbation={"name": "neighbor"})
    has_control: list[bool] = []

    class Executor:
        async def execute(self, **kwargs: Any) -> None:
            has_control.append(rollout_actor._conversation.get().needs_control)
            raise ValueError

    executor = rollout_actor.RecordingExecutor(Executor())

    def respond(round_number: int, perturbed: bool = True) -> None:
        params = SimpleNamespace(extra_args={"perturbation": {"round": round_number, "enabled": perturbed}})
        with pytest.raises(RuntimeError, match="ValueError"):
            asyncio.run(executor.execute(prompt="p", sampling_params=params))

    second_round.drafting.set(True)
    respond(1)
    assert has_control == [False], "a draft has none"
    second_round.drafting.set(False)
    has_control.clear()

    for _ in range(CONTROLS + 1):
        respond(1)
    assert has_control == [True] * CONTROLS + [False]
    has_control.clear()

    respond(2, perturbed=False)
    respond(2)
    respond(0)  # an evaluation
    assert has_control == [False, True, False]


UNPERTURBED = UnperturbedResponse(
    np.array([5, 6, 300_000, 8], np.int32),
    np.array([-0.5, -1.25], np.float32),
)


def trajectory_with(unperturbed: UnperturbedResponse | None) -> FinishedTrajectory:
    """A trajectory with an unperturbed response to its prompt."""
    return FinishedTrajectory(a_record(0), np.array([np.nan, -1.0], np.float32), unperturbed=unperturbed)


@pytest.mark.parametrize("experts", [None, np.arange(12, dtype=np.uint16).reshape(3, 2, 2)], ids=["plain", "routed"])
def test_an_unperturbed_response_travels_with_its_sample(experts: np.ndarray | None) -> None:
    sent = dataclasses.replace(UNPERTURBED, experts=experts)
    without, with_response = unpack([trajectory_with(None).pack(), trajectory_with(sent).pack()])
    assert without.unperturbed is None
    for field in dataclasses.fields(sent):
        received = getattr(with_response.unperturbed, field.name)
        np.testing.assert_array_equal(received, getattr(sent, field.name))


class Group:
    """One actor, whose log-probability of a token is −token / 10; ``tensors`` are those of its last call."""

    def async_run_method(self, method_name: str, **tensors: torch.Tensor) -> list[torch.Tensor]:
        assert method_name == "unperturbed_log_probs"
        self.tensors = tensors
        response_tokens = tensors["action_mask"].shape[1]
        return [-tensors["sequences"][:, -response_tokens:] / 10.0]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("ray.get", lambda results: results)
    args = SimpleNamespace(
        rollout=SimpleNamespace(batch_size=8, vllm_generate_batch_size=8),
        train=SimpleNamespace(async_enable=False),
        ds=SimpleNamespace(param_dtype="bf16"),
    )
    return openrlhf_doubles.maker(actor_model_group=Group(), strategy=SimpleNamespace(args=args))


def test_the_mismatch_is_over_the_tokens_of_unperturbed_responses(maker: Any) -> None:
    shorter = UnperturbedResponse(np.array([1, 2], np.int32), np.array([-0.3], np.float32))
    longer = UnperturbedResponse(np.array([7, 3, 4, 5], np.int32), np.array([-0.3, -0.4, -0.9], np.float32))
    empty = dataclasses.replace(shorter, log_probs=shorter.log_probs[:0])

    trajectories = [trajectory_with(unperturbed) for unperturbed in (empty, shorter, None, longer)]
    mean = experience_maker.control_gap(maker, trajectories)

    # |−0.2 + 0.3|, and |−0.5 + 0.9| at the last of the other's three tokens.
    assert mean == pytest.approx((0.1 + 0.4) / 4)
    tensors = maker.actor_model_group.tensors
    assert tensors["sequences"].tolist() == [[0, 0, 1, 2], [7, 3, 4, 5]]
    assert tensors["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert tensors["action_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert experience_maker.control_gap(maker, [trajectory_with(empty), trajectory_with(None)]) is None


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
    scale.update(0.02)
    assert scale.is_needed == (asynchronous or batch > 8)


@pytest.mark.parametrize(
    "large",
    [
        pytest.param(step(perturbed=5.0, plain=0.01), id="beside plain positions"),
        pytest.param(step(perturbed=0.9, plain=0.9, unperturbed=0.02), id="beside unperturbed responses"),
    ],
)
def test_rollouts_at_other_temperatures_are_not_judged(
    maker: Any, large: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule's mismatch is that between two temperatures, whatever the replay does."""
    run_with(monkeypatch, strict=True)
    with pytest.raises(MismatchTooLarge):
        experience_maker.judge(maker, large)
    run_with(monkeypatch, strict=True, sampling_schedule=sampling_schedules.create("ladder").spec())
    experience_maker.judge(maker, large)


def test_the_scale_is_of_the_runs_precision(maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """1e-3 is rounding in bfloat16 and a fault in float32."""
    run_with(monkeypatch, strict=True)
    for dtype, is_fault in (("bf16", False), ("fp32", True)):
        maker.gap_scale = None
        maker.strategy.args.ds.param_dtype = dtype
        experience_maker.judge(maker, step(unperturbed=2e-6, plain=2e-6))
        with pytest.raises(MismatchTooLarge) if is_fault else nullcontext():
            experience_maker.judge(maker, step(plain=1e-3))


def test_noisy_weights_are_not_taken_for_another_model(maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, strict=True, policy_noise={"name": "psn"})
    experience_maker.judge(maker, step(unperturbed=2.0, plain=2.0))
    assert maker.gap_scale.is_needed
