# SPDX-License-Identifier: Apache-2.0
"""Gates with a state for each trajectory: its course by hand, and over preemptions, repetitions and further slots."""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cuda_without_gpu.simulated import Plan, simulate
from benchmarks.decode_step import Decoding
from perturbations import Gate, GateStep, create, create_gate, option
from perturbations.errors import require
from perturbations.row_blocks import entropy, summary
from perturbations.testing import check_gate
from tests.fast.gate_steps import F, T, step_with


@dataclass(frozen=True, kw_only=True)
class Budget(Gate):
    """Open until `most` positions were perturbed, but not after token 3."""

    name = "budget"
    most: int = option(4, "perturbed positions of a response", low=1)

    def initial_state(self) -> Mapping[str, float]:
        return {"spent": 0, "last": -1}

    def open(self, step: GateStep) -> Tensor:
        return (step.state["spent"] < self.most) & (step.state["last"] != 3)

    def advance(self, step: GateStep, fed: Tensor) -> Mapping[str, Tensor]:
        return {"spent": step.state["spent"] + fed, "last": step.sampled}


def walked(gate: Gate, rows: Tensor) -> tuple[list[list[bool]], list[Mapping[str, Tensor]]]:
    """Where a gate is open along logits (positions, B, V), and its state after each position."""
    state = {name: torch.full((rows.shape[1],), float(value)) for name, value in gate.initial_state().items()}
    opened, states = [], []
    for count, logits in enumerate(rows):
        step = step_with(logits, generated=[count] * len(logits))
        step = dataclasses.replace(step, state=state)
        is_open = gate.open(step)
        state = {name: part.float() for name, part in gate.advance(step, is_open).items()}
        opened.append(is_open.tolist())
        states.append(state)
    return opened, states


def with_entropy(course: list[int]) -> Tensor:
    """Logits of one trajectory whose entropy at each position is ln n, for n equally likely tokens."""
    logits = torch.full((len(course), 1, 8), -torch.inf)
    for position, n in enumerate(course):
        logits[position, 0, :n] = 0.0
    return logits


@pytest.mark.parametrize(
    ("options", "course", "want"),
    [
        # H̄ = ln 4. Equal or greater keeps the block open; ln 3 closes it, H̄ = ln 3; ln 4 opens it again, H̄ = ln 4.
        (dict(window=0), [4, 4, 5, 3, 3, 2, 4, 5, 4, 3, 4], [T, T, T, F, F, F, T, T, T, F, T]),
        # A closed block has at least 3 positions: ln 8 opens it at the fourth only.
        (dict(window=3), [4, 3, 8, 8, 8, 8, 7], [T, F, F, F, T, T, F]),
        (dict(window=1), [4, 3, 8, 7], [T, F, T, F]),
        # The second open block is the last one.
        (dict(window=0, max_switches=2), [4, 3, 4, 3, 4, 5], [T, F, T, F, F, F]),
        (dict(window=0, max_switches=1), [4, 5, 3, 8], [T, T, F, F]),
        (dict(), [4, 3, *[8] * 512], [T, *[F] * 512, T]),
    ],
    ids=str,
)
def test_swi_by_hand(options: dict[str, Any], course: list[int], want: list[bool]) -> None:
    opened, states = walked(create_gate("swi", **options), with_entropy(course))
    assert [row[0] for row in opened] == want
    ends = sum(one and not other for one, other in itertools.pairwise(want))
    assert states[-1]["switches"].tolist() == [ends]


def test_confidence_by_hand() -> None:
    """p(likeliest): 1/2, 1/4, 0.95, 1; a shift of the logits changes none."""
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25] * 4, [0.02, 0.95, 0.02, 0.01], [1.0, 0.0, 0.0, 0.0]])
    step = step_with(p.log() + torch.tensor([[3.0], [-50.0], [0.0], [7.0]]))
    assert create_gate("confidence").open(step).tolist() == [F, F, T, T]
    for tau, want in [(0.0, [T, T, T, T]), (0.4, [T, F, T, T]), (0.96, [F, F, F, T])]:
        assert create_gate("confidence", tau=tau).open(step).tolist() == want


# --- in a rollout ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EveryThird(Budget):
    """Open at generated positions 0, 3, 6, … until the budget is spent."""

    name = "every third"

    def open(self, step: GateStep) -> Tensor:
        return super().open(step) & (step.generated % 3 == 0)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_budget_is_spent_by_what_is_fed_alone(rate: float) -> None:
    """Generated positions count from the answer's own start; those that the rate leaves out spend nothing."""
    decoding = Decoding(create("soft", rate=rate, until=None, gate=EveryThird(most=6)), 2)
    first, perturber = decoding._position + 1, decoding.perturber
    for step in range(100):
        decoding.step()
        if step < 20:  # further requests, beyond the slots there are
            perturber._store.open(f"further-{step}", step, first, True)
            perturber.opened(f"further-{step}")
    for request in decoding.requests:
        record, _ = perturber._store.record(request)
        generated = record.positions - first
        assert len(generated) == 6 and not (generated % 3).any()
        assert (generated.tolist() == [0, 3, 6, 9, 12, 15]) == (rate == 1.0)


GATES = [Budget(most=6), create_gate("swi", window=1), create_gate("swi", window=0, max_switches=3)]


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_requests_together_on_a_gpu_are_each_alone_on_a_cpu(gate: Gate) -> None:
    simulate(create("soft", until=None, gate=gate), Plan(seed=3, lag=3, preempted=0.2, chunk=3, batch=4), count=6)


@dataclass(frozen=True, kw_only=True)
class Drift(Gate):
    """Open where the last hidden state has another first number than the one before."""

    name = "drift"

    def initial_state(self) -> Mapping[str, float]:
        return {"before": 0.0}

    def open(self, step: GateStep) -> Tensor:
        return require(step.hidden, "hidden")[:, 0] > step.state["before"]

    def advance(self, step: GateStep, fed: Tensor) -> Mapping[str, Tensor]:
        require(step.module, "module")
        return {"before": require(step.hidden, "hidden")[:, 0]}


def test_hidden_states_and_parameters_reach_a_state() -> None:
    simulate(create("tarpo", until=None, gate=Drift()), Plan(seed=3, lag=3, preempted=0.2, batch=4), count=6)


def test_the_state_of_the_entropy_has_the_same_bits_in_any_batch() -> None:
    """So equal logits never turn `swi` after a preemption; at a tie of entropies a slightly different logit does."""
    gate, several = create_gate("swi", window=0), torch.randn(7, 49152, generator=torch.Generator().manual_seed(4))
    known = summary(several)
    state = {"closed": 0.0, "length": 1.0, "reference": entropy(several, known.log_total)[3].item(), "switches": 0.0}

    def after(logits: Tensor) -> list[list[float]]:
        of_rows = {name: torch.full((len(logits),), value) for name, value in state.items()}
        small = step_with(torch.zeros(len(logits), 1))
        step = dataclasses.replace(small, logits=logits, summary=summary(logits), state=of_rows)
        found = gate.advance(step, torch.zeros(len(logits), dtype=torch.bool))
        return torch.stack([part.float() for part in found.values()], dim=-1).tolist()

    whole = after(several)
    assert whole[3][:2] == [0.0, 2.0], "a tie leaves the block open"
    for size in (1, 2, 5):
        for start in range(8 - size):
            assert after(several[start : start + size].clone()) == whole[start : start + size]
    turned = several[3:4].clone()
    turned[0, turned[0].argmax()] += 0.1  # less uncertain
    assert after(turned)[0][:2] == [1.0, 1.0]


def test_a_third_partys_gate_with_state_conforms() -> None:
    check_gate(Budget)
    check_gate(Budget, most=1)
