# SPDX-License-Identifier: Apache-2.0
"""Gates with a state for each trajectory: its course by hand, and over preemptions, repetitions and further slots."""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.cuda_without_gpu.simulated import simulate
from benchmarks.cuda_without_gpu.simulated_engine import Plan
from ngrpo.rollout.input_override import InputOverride
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import Gate, GateStep, create, create_gate, option
from perturbations.embeddings import matrix_embeddings
from perturbations.errors import require
from perturbations.gates.default import BoundGate
from perturbations.row_blocks import entropy, summary
from perturbations.testing import check_gate
from tests.support.gate_steps import F, T, step_with

V = 16
FIRST = 5


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
    for tau, want in [(0.0, [T, T, T, T]), (0.4, [T, F, T, T]), (0.96, [F, F, F, T]), (1.0, [F, F, F, T])]:
        assert create_gate("confidence", tau=tau).open(step).tolist() == want


# --- in a rollout ------------------------------------------------------------------------------------------


class Rollout:
    """A perturber whose logits are a function of request and position."""

    def __init__(self, gate: Gate, slots: int = 2, **options: Any) -> None:
        perturbation = create("soft", **{"rate": 1.0, "until": None, **options}, gate=gate)
        self.store, embeddings = TrajectoryStore(slots, 256), matrix_embeddings(torch.eye(V))
        self.gate = BoundGate(perturbation, lambda: [b""] * V, V, self.store.slots, "cpu")
        device = torch.device("cpu")
        override = InputOverride(nn.Embedding(V, V), 256, slots, V, torch.float32, device)
        self.perturber = RolloutPerturber(perturbation, self.store, self.gate, embeddings, override, device)

    def open(self, *names: str, prompt: int = FIRST, perturbed: bool = True) -> None:
        for name in names:
            self.store.open(name, 100 + ord(name[0]), prompt, perturbed)
            self.perturber.opened(name)

    def step(self, discard: bool = False, **computed: tuple[int, int]) -> list[int]:
        """Draws the token after each request's first position and number of positions; ``discard``: it is not kept."""
        names, spans = list(computed), np.array([*computed.values()])
        self.perturber.begin(names, spans[:, 0], spans[:, 1], np.full(len(names), discard))
        seeds = (1000 * ord(name[0]) + int(at) for name, at in zip(names, spans.sum(axis=1)))
        logits = torch.stack([torch.randn(V, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        return self.perturber.finish(logits, torch.ones(len(names)), logits, None).tolist()

    def decode(self, positions: range, *names: str) -> None:
        """Draws the tokens of these positions; a prompt is computed with the first."""
        for at in positions:
            self.step(**{name: (0, at) if at == FIRST else (at - 1, 1) for name in names})

    def state(self, name: str, at: int) -> list[float]:
        """The state before a position."""
        return self.gate._own_states[self.store.live[name], (at - 1) % 8].tolist()

    def perturbed(self, name: str) -> list[int]:
        self.perturber.notes.drain(until=self.perturber.notes.taken)
        return self.store.record(name)[0].positions.tolist()


@dataclass(frozen=True, kw_only=True)
class EveryThird(Gate):
    """Open at generated positions 0, 3, 6, …"""

    name = "every third"

    def open(self, step: GateStep) -> torch.Tensor:
        return step.generated % 3 == 0


def test_the_rollout_records_only_what_the_gate_left_open() -> None:
    """The gate counts from each answer's own start."""
    rollout = Rollout(EveryThird())
    prompts = {"a": FIRST, "b": FIRST + 3}
    for name, prompt in prompts.items():
        rollout.open(name, prompt=prompt)
    rollout.step(**{name: (0, prompt) for name, prompt in prompts.items()})
    for generated in range(8):
        rollout.step(**{name: (prompt + generated, 1) for name, prompt in prompts.items()})
    for name, prompt in prompts.items():
        assert [position - prompt for position in rollout.perturbed(name)] == [0, 3, 6]


def undisturbed(gate: Gate, upto: int, **options: Any) -> Rollout:
    rollout = Rollout(gate, **options)
    rollout.open("a", "b")
    rollout.decode(range(FIRST, upto), "a", "b")
    return rollout


GATES = [Budget(most=6), create_gate("swi", window=1), create_gate("swi", window=0, max_switches=3)]
END = 45


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_a_preempted_trajectory_reaches_the_state_of_an_undisturbed_one(gate: Gate) -> None:
    """Kept tokens are computed in chunks without draws of theirs; the last ones may have to be drawn again."""
    plain = undisturbed(gate, END)
    assert 2 < len(plain.perturbed("a")) < END - FIRST
    for stop, back in ((7, 0), (7, 2), (20, 1), (33, 0), (33, 6)):
        rollout = undisturbed(gate, stop)
        rollout.decode(range(stop, stop + 9), "b")  # a was preempted
        rollout.step(discard=True, a=(0, 3), b=(stop + 8, 1))
        rollout.decode(range(stop + 9, END), "b")
        rollout.step(a=(3, stop - back - 3))
        rollout.decode(range(stop - back + 1, END), "a")
        for name in "ab":
            assert rollout.state(name, END) == plain.state(name, END), (stop, back)
            assert rollout.perturbed(name) == plain.perturbed(name), (stop, back)


def test_a_draw_that_is_thrown_away_changes_no_state() -> None:
    plain, rollout = undisturbed(GATES[1], 20), undisturbed(GATES[1], 12)
    before = rollout.gate._own_states.clone()
    rollout.step(discard=True, a=(0, 8), b=(0, 9))
    assert rollout.gate._own_states.equal(before)
    rollout.step(a=(8, 4), b=(9, 3))
    rollout.decode(range(13, 20), "a", "b")
    assert rollout.state("a", 20) == plain.state("a", 20)


def test_further_slots_and_a_slot_that_is_used_again() -> None:
    gate = Budget(most=3)
    rollout = undisturbed(gate, 15)
    before = rollout.state("a", 15)
    names = [f"c{i}" for i in range(20)]  # beyond the store's slots
    rollout.open(*names)
    assert rollout.state("a", 15) == before and before[0] == 3
    assert rollout.state("c9", FIRST) == [0, -1]
    rollout.store.close("a")
    rollout.open("d")
    assert rollout.state("d", FIRST) == [0, -1]
    rollout.decode(range(FIRST, 15), "d")
    assert rollout.state("d", 15)[0] == 3


def test_what_was_fed_is_told_and_every_position_counts() -> None:
    """A budget is spent by what is fed alone, at a rate of 0.3 and with a protected token."""
    rollout = Rollout(Budget(most=1000), rate=0.3, protect="2")
    rollout.open("a")
    rollout.open("b", perturbed=False)
    rollout.decode(range(FIRST, 60), "a", "b")
    spent, last = rollout.state("a", 60)
    assert spent == len(rollout.perturbed("a")) and 5 < spent < 30
    assert rollout.state("b", 60)[0] == 0 and rollout.state("b", 60)[1] >= 0
    assert last >= 0


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
