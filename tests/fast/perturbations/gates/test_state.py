# SPDX-License-Identifier: Apache-2.0
"""Gates with a state for each trajectory: its course by hand, and over preemptions, repetitions and further slots."""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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


def test_a_third_partys_gate_with_state_conforms() -> None:
    check_gate(Budget)
    check_gate(Budget, most=1)


# --- by hand -----------------------------------------------------------------------------------------------


class Course(NamedTuple):
    """Where a gate was open along a trajectory, and its last state."""

    opened: list[bool]
    state: Mapping[str, Tensor]


def course_of(gate: Gate, logits: Tensor) -> Course:
    """The course of a gate along the logits (positions, V) of one trajectory; what it opens is fed."""
    state = {name: torch.tensor([float(value)]) for name, value in gate.initial_state().items()}
    opened = []
    for generated, row in enumerate(logits):
        step = dataclasses.replace(step_with(row.unsqueeze(0), generated=[generated]), state=state)
        is_open = gate.open(step)
        opened.append(is_open.item())
        state = {name: value.float() for name, value in gate.advance(step, is_open).items()}
    return Course(opened, state)


def with_entropies(equally_likely: list[int]) -> Tensor:
    """Logits of one trajectory whose entropy at each position is ln n, for n equally likely tokens."""
    logits = torch.full((len(equally_likely), 8), -torch.inf)
    for position, n in enumerate(equally_likely):
        logits[position, :n] = 0.0
    return logits


@pytest.mark.parametrize(
    ("options", "equally_likely", "opened"),
    [
        # H̄ = ln 4. Equal or greater keeps the block open; ln 3 closes it, H̄ = ln 3; ln 4 opens it again, H̄ = ln 4.
        pytest.param(
            dict(window=0),
            [4, 4, 5, 3, 3, 2, 4, 5, 4, 3, 4],
            [T, T, T, F, F, F, T, T, T, F, T],
            id="no window",
        ),
        # A closed block has at least 3 positions: ln 8 opens it at the fourth only.
        pytest.param(
            dict(window=3),
            [4, 3, 8, 8, 8, 8, 7],
            [T, F, F, F, T, T, F],
            id="window of three",
        ),
        pytest.param(
            dict(window=1),
            [4, 3, 8, 7],
            [T, F, T, F],
            id="window of one",
        ),
        # The second open block is the last one.
        pytest.param(
            dict(window=0, max_switches=2),
            [4, 3, 4, 3, 4, 5],
            [T, F, T, F, F, F],
            id="two open blocks",
        ),
        pytest.param(
            dict(window=0, max_switches=1),
            [4, 5, 3, 8],
            [T, T, F, F],
            id="one open block",
        ),
        # The window is 512 by default.
        pytest.param(
            dict(),
            [4, 3, *[8] * 512],
            [T, *[F] * 512, T],
            id="default",
        ),
    ],
)
def test_swi_by_hand(options: dict[str, Any], equally_likely: list[int], opened: list[bool]) -> None:
    course = course_of(create_gate("swi", **options), with_entropies(equally_likely))
    assert course.opened == opened
    closings = [before for before, after in itertools.pairwise(opened) if before and not after]
    assert course.state["switches"].tolist() == [len(closings)]


@pytest.mark.parametrize(
    ("options", "opened"),
    [
        ({}, [F, F, T, T]),
        ({"tau": 0.0}, [T, T, T, T]),
        ({"tau": 0.4}, [T, F, T, T]),
        ({"tau": 0.96}, [F, F, F, T]),
        ({"tau": 1.0}, [F, F, F, T]),
    ],
)
def test_confidence_by_hand(options: dict[str, float], opened: list[bool]) -> None:
    """p(likeliest): 1/2, 1/4, 0.95, 1; a shift of the logits changes none."""
    probabilities = torch.tensor(
        [
            [0.5, 0.25, 0.25, 0.0],
            [0.25, 0.25, 0.25, 0.25],
            [0.02, 0.95, 0.02, 0.01],
            [1.0, 0.0, 0.0, 0.0],
        ]
    )
    shift = torch.tensor([[3.0], [-50.0], [0.0], [7.0]])
    step = step_with(probabilities.log() + shift)
    assert create_gate("confidence", **options).open(step).tolist() == opened


def test_the_state_of_the_entropy_has_the_same_bits_in_any_batch() -> None:
    """So equal logits never turn `swi` after a preemption; at a tie of entropies a slightly different logit does."""
    gate = create_gate("swi", window=0)
    rows = torch.randn(7, 49152, generator=torch.Generator().manual_seed(4))
    tied = entropy(rows, summary(rows).log_total)[3].item()
    state = {
        "closed": 0.0,
        "length": 1.0,
        "reference": tied,
        "switches": 0.0,
    }

    def states_after(logits: Tensor) -> list[list[float]]:
        """The numbers of the state of each row after a position with these logits."""
        step = dataclasses.replace(
            step_with(torch.zeros(len(logits), 1)),
            logits=logits,
            summary=summary(logits),
            state={name: torch.full((len(logits),), value) for name, value in state.items()},
        )
        advanced = gate.advance(step, torch.zeros(len(logits), dtype=torch.bool))
        return torch.stack([values.float() for values in advanced.values()], dim=-1).tolist()

    in_one_batch = states_after(rows)
    closed, length, *_ = in_one_batch[3]
    assert (closed, length) == (0.0, 2.0), "a tie leaves the block open"
    for size in (1, 2, 5):
        for start in range(8 - size):
            batch = slice(start, start + size)
            assert states_after(rows[batch].clone()) == in_one_batch[batch]

    less_uncertain = rows[3:4].clone()
    less_uncertain[0, less_uncertain[0].argmax()] += 0.1
    closed, length, *_ = states_after(less_uncertain)[0]
    assert (closed, length) == (1.0, 1.0)


# --- in a rollout ------------------------------------------------------------------------------------------


class Rollout:
    """A perturber whose logits are a function of request and position."""

    def __init__(self, gate: Gate, slots: int = 2, **options: Any) -> None:
        perturbation = create("soft", **{"rate": 1.0, "until": None, **options}, gate=gate)
        device = torch.device("cpu")
        self.store = TrajectoryStore(slots, 256)
        self.gate = BoundGate(perturbation, lambda: [b""] * V, V, self.store.slots, "cpu")
        self.perturber = RolloutPerturber(
            perturbation,
            self.store,
            self.gate,
            matrix_embeddings(torch.eye(V)),
            InputOverride(nn.Embedding(V, V), 256, slots, V, torch.float32, device),
            device,
        )

    def open(self, *names: str, prompt: int = FIRST, perturbed: bool = True) -> None:
        for name in names:
            seed = 100 + ord(name[0])
            self.store.open(name, seed, prompt, perturbed)
            self.perturber.opened(name)

    def step(self, discard: bool = False, **computed: tuple[int, int]) -> list[int]:
        """Draws the token after each request's first position and number of positions; ``discard``: it is not kept."""
        names = list(computed)
        firsts = np.array([first for first, _ in computed.values()])
        counts = np.array([count for _, count in computed.values()])
        self.perturber.begin(names, firsts, counts, np.full(len(names), discard))
        logits = torch.stack([logits_of(name, at) for name, at in zip(names, firsts + counts)])
        return self.perturber.finish(logits, torch.ones(len(names)), None, None).tolist()

    def decode(self, positions: range, *names: str) -> None:
        """Draws the tokens of these positions; a prompt is computed with the first."""
        for position in positions:
            computed = (0, position) if position == FIRST else (position - 1, 1)
            self.step(**dict.fromkeys(names, computed))

    def state(self, name: str, position: int) -> list[float]:
        """The state before a position."""
        slot = self.store.live[name]
        return self.gate._further_states[slot, (position - 1) % 8].tolist()

    def perturbed(self, name: str) -> list[int]:
        self.perturber.pending.drain(until=self.perturber.pending.added)
        return self.store.record(name)[0].positions.tolist()


def logits_of(name: str, position: int) -> Tensor:
    seed = 1000 * ord(name[0]) + int(position)
    return torch.randn(V, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True)
class EveryThird(Gate):
    """Open at generated positions 0, 3, 6, …"""

    name = "every third"

    def open(self, step: GateStep) -> Tensor:
        return step.generated % 3 == 0


def test_the_rollout_records_only_what_the_gate_left_open() -> None:
    """The gate counts from each response's own start."""
    rollout = Rollout(EveryThird())
    prompts = {"a": FIRST, "b": FIRST + 3}
    for name, prompt in prompts.items():
        rollout.open(name, prompt=prompt)
    rollout.step(a=(0, prompts["a"]), b=(0, prompts["b"]))
    for generated in range(8):
        rollout.step(a=(prompts["a"] + generated, 1), b=(prompts["b"] + generated, 1))
    for name, prompt in prompts.items():
        assert rollout.perturbed(name) == [prompt, prompt + 3, prompt + 6]


def undisturbed(gate: Gate, end: int, **options: Any) -> Rollout:
    """A rollout of a and b up to a position, without a preemption."""
    rollout = Rollout(gate, **options)
    rollout.open("a", "b")
    rollout.decode(range(FIRST, end), "a", "b")
    return rollout


SWI = create_gate("swi", window=1)
GATES = [
    Budget(most=6),
    SWI,
    create_gate("swi", window=0, max_switches=3),
]
END = 45


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize(
    ("stop", "back"),
    [
        (7, 0),
        (7, 2),
        (20, 1),
        (33, 0),
        (33, 6),
    ],
)
def test_a_preempted_trajectory_reaches_the_state_of_an_undisturbed_one(gate: Gate, stop: int, back: int) -> None:
    """a is preempted at ``stop``; its kept tokens are computed in chunks without draws of theirs, and the last
    ``back`` of them are drawn again."""
    plain = undisturbed(gate, END)
    assert 2 < len(plain.perturbed("a")) < END - FIRST

    rollout = undisturbed(gate, stop)
    rollout.decode(range(stop, stop + 9), "b")
    rollout.step(discard=True, a=(0, 3), b=(stop + 8, 1))
    rollout.decode(range(stop + 9, END), "b")
    rollout.step(a=(3, stop - back - 3))
    rollout.decode(range(stop - back + 1, END), "a")
    for name in ("a", "b"):
        assert rollout.state(name, END) == plain.state(name, END)
        assert rollout.perturbed(name) == plain.perturbed(name)


def test_a_draw_that_is_thrown_away_changes_no_state() -> None:
    plain = undisturbed(SWI, 20)
    rollout = undisturbed(SWI, 12)
    states_before = rollout.gate._further_states.clone()
    rollout.step(discard=True, a=(0, 8), b=(0, 9))
    assert rollout.gate._further_states.equal(states_before)
    rollout.step(a=(8, 4), b=(9, 3))
    rollout.decode(range(13, 20), "a", "b")
    assert rollout.state("a", 20) == plain.state("a", 20)


def test_further_slots_keep_the_states_of_the_first_ones() -> None:
    rollout = undisturbed(Budget(most=3), 15)
    state_before = rollout.state("a", 15)
    spent, _ = state_before
    assert spent == 3
    beyond_the_slots = [f"c{number}" for number in range(20)]
    rollout.open(*beyond_the_slots)
    assert rollout.state("a", 15) == state_before
    assert rollout.state("c9", FIRST) == [0, -1]


def test_a_slot_that_is_used_again_starts_afresh() -> None:
    rollout = undisturbed(Budget(most=3), 15)
    slot = rollout.store.live["a"]
    rollout.store.close("a")
    rollout.open("d")
    assert rollout.store.live["d"] == slot
    assert rollout.state("d", FIRST) == [0, -1]
    rollout.decode(range(FIRST, 15), "d")
    spent, _ = rollout.state("d", 15)
    assert spent == 3


def test_a_state_is_told_what_was_fed_and_every_token() -> None:
    """A budget is spent by what is fed alone, at a rate of 0.3 and with a protected token; b is not perturbed."""
    rollout = Rollout(Budget(most=1000), rate=0.3, protect="2")
    rollout.open("a")
    rollout.open("b", perturbed=False)
    rollout.decode(range(FIRST, 60), "a", "b")

    spent, last = rollout.state("a", 60)
    assert spent == len(rollout.perturbed("a"))
    assert 5 < spent < 30
    assert last >= 0

    spent, last = rollout.state("b", 60)
    assert spent == 0
    assert last >= 0


# --- on a pretended GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_requests_together_on_a_gpu_are_each_alone_on_a_cpu(gate: Gate) -> None:
    plan = Plan(seed=3, lag=3, preempted=0.2, chunk=3, batch=4)
    simulate(create("soft", until=None, gate=gate), plan, count=6)


@dataclass(frozen=True, kw_only=True)
class Drift(Gate):
    """Open where the last hidden state has a larger first number than the one before."""

    name = "drift"

    def initial_state(self) -> Mapping[str, float]:
        return {"before": 0.0}

    def open(self, step: GateStep) -> Tensor:
        return require(step.hidden, "hidden")[:, 0] > step.state["before"]

    def advance(self, step: GateStep, fed: Tensor) -> Mapping[str, Tensor]:
        require(step.module, "module")
        return {"before": require(step.hidden, "hidden")[:, 0]}


def test_hidden_states_and_parameters_reach_a_state() -> None:
    plan = Plan(seed=3, lag=3, preempted=0.2, batch=4)
    simulate(create("tarpo", until=None, gate=Drift()), plan, count=6)
