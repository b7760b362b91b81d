# SPDX-License-Identifier: Apache-2.0
"""The perturber on a pretended GPU, whose copies arrive late, driven by a made-up scheduler; no GPU is needed."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.command_line import in_tree
from benchmarks.cuda_without_gpu.simulated import Disagreement, simulate
from benchmarks.cuda_without_gpu.simulated_engine import Plan
from ngrpo.rollout.async_scheduling import PendingSteps
from ngrpo.rollout.input_override import InputOverride
from ngrpo.rollout.perturber import RolloutPerturber
from perturbations import create, registry
from perturbations.methods.soft import Soft

pytestmark = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs PyTorch's build for CPUs")

NAMES = sorted(in_tree())
PLANS = (
    Plan(seed=2, lag=3, preempted=0.1, chunk=5, batch=5, sampling="filtered"),
    Plan(seed=3, lag=6, preempted=0.2, chunk=3, batch=6, masked=True, sampling="filtered"),
    Plan(seed=4, lag=2, preempted=0.05, chunk=100, batch=3, sampling="greedy"),
    Plan(seed=5),
)


def cases() -> Iterator[Any]:
    """Each perturbation with one of the plans in turn. Each is compiled first, so most are `make test-more`."""
    for number, name in enumerate(NAMES):
        marks = [] if name in ("neighbor", "gumbel") else [pytest.mark.more]
        yield pytest.param(name, PLANS[number % len(PLANS)], marks=marks)


# Recomputation needs what is on its way, a request that has ended its last copies; a gate is made before any step.
MAY_WAIT = ("/rollout/async_scheduling.py", "/gates/default.py")


def made(name: str, **options: Any) -> Any:
    """A perturbation at rate 0.7, unless ``options`` has another."""
    usual: dict[str, Any] = {"rate": 0.7}
    if name == "neighbor":
        usual["realization"] = "sampled"
    return create(name, **{**usual, **options})


def run(perturbation: Any, plan: Plan) -> None:
    """Simulates a plan; nothing but what may wait for the device has done so."""
    device = simulate(perturbation, plan, count=5)
    if perturbation.name == "neighbor":
        return  # its table is made at once, outside of steps
    forbidden = [line for _, line in device.waits if not line.split(":")[0].endswith(MAY_WAIT)]
    assert forbidden == []


@pytest.mark.parametrize(("name", "plan"), cases())
def test_requests_together_on_a_gpu_are_each_alone_on_a_cpu(name: str, plan: Plan) -> None:
    run(made(name), plan)


@pytest.mark.parametrize("gate", sorted(registry.gates.available()))
def test_gates(gate: str) -> None:
    run(made("soft", gate=gate), PLANS[0])


def test_entropy_protected_tokens_and_masks() -> None:
    run(made("gumbel", entropy_min=1.0, protect="digits"), PLANS[1])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
@pytest.mark.parametrize("options", [{"rate": 1.0}, {"rate": 0.3}, {"gate": "bursts"}, {"entropy_min": 1.0}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_configuration(name: str, options: dict[str, Any], plan: Plan) -> None:
    run(made(name, **options), plan)


# --- planted faults -----------------------------------------------------------------------------------------

PLAN = Plan(seed=3, lag=3, preempted=0.2, chunk=3, batch=4, sampling="filtered")
MASKED = dataclasses.replace(PLAN, masked=True)
PROPOSE = Soft.propose
DRAIN = PendingSteps.drain
DRAIN_EDITS = PendingSteps._drain_edits
LAY_OUT = InputOverride.lay_out


def test_without_a_fault_nothing_is_seen() -> None:
    run(made("soft"), PLAN)


def test_a_tensor_of_the_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(self: Soft, step: Any) -> Any:
        return PROPOSE(self, dataclasses.replace(step, logits=step.logits + torch.zeros(len(step.logits), 1)))

    monkeypatch.setattr(Soft, "propose", propose)
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        run(made("soft"), PLAN)


def test_a_value_asked_of_the_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(self: Soft, step: Any) -> Any:
        step.logits.max().item()
        return PROPOSE(self, step)

    monkeypatch.setattr(Soft, "propose", propose)
    assert any(kind == "item" for kind, _ in simulate(made("soft"), PLAN, count=5).waits)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of a method that is left out."""


def only_what_is_replaced(self: InputOverride, sources: Any, upload: Any) -> None:
    if (sources >= 0).any():
        LAY_OUT(self, sources, upload)


def too_early(self: PendingSteps, until: int = 0) -> None:
    DRAIN(self)
    self.written = self.added


def masks_too_early(self: PendingSteps, until: int) -> None:
    DRAIN_EDITS(self, until)
    for i, step in enumerate(self._masked):  # what was asked for only now
        self._masked[i] = dataclasses.replace(step, ready=None)


FAULTS = {
    "steps-are-read-early": (RolloutPerturber, "_event", nothing, PLAN, None),
    "masks-are-read-early": (PendingSteps, "_drain_edits", masks_too_early, MASKED, None),
    "a-record-is-taken-early": (PendingSteps, "drain", too_early, PLAN, None),
    "a-record-with-masks-is-taken-early": (PendingSteps, "drain", too_early, MASKED, None),
    "recomputation-does-not-wait": (PendingSteps, "drain_slot", nothing, PLAN, "replaced False, on a CPU True"),
    "a-source-is-left-standing": (InputOverride, "lay_out", only_what_is_replaced, PLAN, None),
}


@pytest.mark.parametrize(("owner", "method", "fault", "plan", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_timing_is_seen(
    monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, fault: Any, plan: Plan, message: str | None
) -> None:
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises((Disagreement, ValueError, IndexError), match=message):
        run(made("soft"), plan)


def test_an_edit_of_a_slot_that_is_used_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request begins where the last one in its slot would have gone on."""
    monkeypatch.setattr(RolloutPerturber, "closed", lambda self, slot: None)
    with pytest.raises(Disagreement):
        for seed in range(12):
            run(made("soft", rate=1.0), Plan(seed=seed, batch=2, chunk=100))
