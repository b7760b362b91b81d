# SPDX-License-Identifier: Apache-2.0
"""Further gates: those of the tree by hand, one of a third party, and broken ones that each spoil one thing."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from perturbations import create, create_gate, registry, streams
from perturbations.gates import Gate
from perturbations.gates.default import GateOptions
from perturbations.options import option
from perturbations.step import GateStep, Positions, Step
from perturbations.testing import PerturbationError, check_gate
from tests.support.gate_steps import F, T, of_one, step_with


def test_the_gates_of_the_tree() -> None:
    gates = {"top_margin", "bursts", "confidence", "first", "swi"}
    assert gates <= set(registry.gates.available())


@pytest.mark.parametrize("name", registry.gates.available())
def test_every_gate_conforms(name: str) -> None:
    check_gate(name)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("top_margin", {"margin": 0}),
        ("top_margin", {"margin": 1}),
        ("bursts", {"length": 1, "share": 1}),
        ("first", {"length": 3}),
        ("swi", {"window": 0, "max_switches": None}),
        ("swi", {"window": 1, "max_switches": 1}),
        ("swi", {"window": 2, "max_switches": 2}),
    ],
)
def test_gates_conform_with_options_at_their_bounds(name: str, options: dict) -> None:
    check_gate(name, **options)


@pytest.mark.parametrize("method", ["plan", "open"])
def test_a_gate_that_never_opens_is_noted(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = registry.gates.get("first")
    check_gate(gate)
    assert not caplog.records
    closed = {
        "plan": lambda self, positions: np.zeros(len(positions.positions), dtype=bool),
        "open": lambda self, step: torch.zeros_like(step.sampled, dtype=torch.bool),
    }
    monkeypatch.setattr(gate, method, closed[method])
    check_gate(gate)
    assert f"first: {method}() opens none of the positions of this check" in caplog.text


@pytest.mark.parametrize(
    ("margin", "opened"),
    [
        (0.0, [F, T, F, F]),
        (0.21, [F, T, T, F]),
        (0.26, [T, T, T, F]),
        (1.0, [T, T, T, T]),
    ],
)
def test_top_margin_by_hand(margin: float, opened: list[bool]) -> None:
    """Margins: (1/2, 1/4, 1/4) 0.25; four equal 0; (0.6, 0.4) 0.2; certain 1. A shift of the logits changes none."""
    probabilities = torch.tensor(
        [
            [0.5, 0.25, 0.25, 0.0],
            [0.25, 0.25, 0.25, 0.25],
            [0.6, 0.4, 0.0, 0.0],
            [1.0, 0.0, 0.0, 0.0],
        ]
    )
    shift = torch.tensor([[3.0], [-50.0], [0.0], [7.0]])
    step = step_with(probabilities.log() + shift)
    assert create_gate("top_margin", margin=margin).open(step).tolist() == opened


# --- bursts ----------------------------------------------------------------------------------------------

# The generated positions 0 to 3999 of a trajectory with a prompt of ten tokens.
BURST_POSITIONS = np.arange(10, 4010)


def test_bursts_open_whole_stretches() -> None:
    gate = create_gate("bursts", length=4, share=0.3)
    stretches = gate.plan(of_one(7, 10, BURST_POSITIONS)).reshape(-1, 4)
    all_open = stretches.all(axis=1)
    all_closed = ~stretches.any(axis=1)
    assert (all_open | all_closed).all()
    standard_error = math.sqrt(0.3 * 0.7 / 1000)
    assert all_open.mean() == pytest.approx(0.3, abs=4 * standard_error)


def test_a_stretch_s_draw_is_the_one_of_its_first_position() -> None:
    gate = create_gate("bursts", length=4, share=0.3)
    stretches = gate.plan(of_one(7, 10, BURST_POSITIONS)).reshape(-1, 4)
    first_positions = torch.arange(10, 4010, 4)
    keys = streams.keys(torch.tensor(7), first_positions, streams.Stream.GATE_PLAN)
    draws = streams.uniform(keys, 1)[:, 0]
    assert (stretches[:, 0] == (draws < 0.3).numpy()).all()


def test_what_was_selected_inside_a_stretch_does_not_matter() -> None:
    gate = create_gate("bursts", length=4, share=0.3)
    of_all = gate.plan(of_one(7, 10, BURST_POSITIONS))
    every_third = np.arange(11, 4010, 3)
    assert (gate.plan(of_one(7, 10, every_third)) == of_all[every_third - 10]).all()


# --- the default gate and draws --------------------------------------------------------------------------


def test_what_is_selected_is_the_default_gates_choice_where_the_further_gate_agrees() -> None:
    gate = create_gate("bursts", length=3, share=0.4)
    without_gate = create("soft", rate=0.5, every=2)
    with_gate = dataclasses.replace(without_gate, gate=gate)
    positions = of_one(5, 8, np.arange(8, 300))

    by_default = without_gate.selects(positions)
    assert (by_default == GateOptions(rate=0.5, every=2).selects(positions)).all()
    by_both = with_gate.selects(positions)
    assert (by_both == (by_default & gate.plan(positions))).all()
    assert 10 < by_both.sum() < by_default.sum()


def test_a_gate_that_plans_nothing_leaves_nothing_selected() -> None:
    soft = create("soft", gate="bursts", **{"gate.share": 0})
    assert not soft.selects(of_one(5, 8, np.arange(8, 300))).any()


def test_draws_of_a_gate_are_its_own() -> None:
    """A gate's step, a perturbation's step, a gate's plan and the default gate draw four different numbers."""
    gate_step = step_with(torch.zeros(3, 5))
    fields_of_step = {field.name: getattr(gate_step, field.name) for field in dataclasses.fields(Step)}
    step = Step(**fields_of_step)
    positions = of_one(100, 0, np.array([10]))
    keys = streams.keys(torch.tensor(100), torch.tensor(10), streams.Stream.GATE)
    draws = {
        gate_step.uniform(1)[0, 0].item(),
        step.uniform(1)[0, 0].item(),
        positions.uniform(1)[0, 0].item(),
        streams.uniform(keys, 1).item(),
    }
    assert len(draws) == 4
    assert GateStep.of(step, gate_step.generated).uniform(2).equal(gate_step.uniform(2))


# --- a third party's gates, and how they go wrong --------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Good(Gate):
    """Open where the sampled token is likely enough and its embedding not too long, and half of the time."""

    name = "good"
    least: float = option(0.1, "a probability", low=0.0, high=1.0)

    def plan(self, positions: Positions) -> np.ndarray:
        return positions.uniform(1)[:, 0] < 0.5

    def open(self, step: GateStep) -> Tensor:
        probabilities = torch.softmax(step.logits, -1)
        probability = probabilities.gather(-1, step.sampled.unsqueeze(-1)).squeeze(-1)
        length = step.embeddings.lookup(step.sampled).norm(dim=-1)
        is_short = length < 9.0 * step.temperature
        is_drawn = step.uniform(1)[:, 0] < 0.5
        return (probability >= self.least) & is_short & is_drawn


@dataclass(frozen=True, kw_only=True)
class Counting(Gate):
    """Open until three positions were perturbed."""

    name = "counting"

    def initial_state(self) -> Mapping[str, float]:
        return {"spent": 0}

    def open(self, step: GateStep) -> Tensor:
        return step.state["spent"] < 3

    def advance(self, step: GateStep, fed: Tensor) -> Mapping[str, Tensor]:
        return {"spent": step.state["spent"] + fed}


def test_a_third_partys_gate_conforms_as_instance_class_and_address() -> None:
    check_gate(Good(least=0.3))
    check_gate(Good, least=0.3)
    check_gate(f"{__name__}:Good", least=1)


def test_what_is_no_gate_is_refused() -> None:
    with pytest.raises(PerturbationError, match=r"not a gate.*perturbations\.Gate"):
        check_gate(Step)


def test_options_are_for_a_class() -> None:
    with pytest.raises(ValueError, match="least come too late"):
        check_gate(Good(), least=0.1)
    with pytest.raises(ValueError, match=r"no option 'lest'.*'least'"):
        check_gate(Good, lest=0.1)


def check_broken(
    gate: type[Gate], messages: list[str], monkeypatch: pytest.MonkeyPatch, **methods: Callable[..., object]
) -> None:
    """Asserts that ``check_gate`` refuses a gate with these methods in place of its own, and says all of this."""
    attributes = {
        "__module__": __name__,
        "__qualname__": "Broken",
        "name": "broken",
        **methods,
    }
    broken = dataclass(frozen=True, kw_only=True)(type("Broken", (gate,), attributes))
    monkeypatch.setitem(globals(), "Broken", broken)
    with pytest.raises(PerturbationError) as error:
        check_gate(broken)
    for message in ["broken", *messages]:
        assert message in str(error.value)


def test_a_gate_without_plan_and_open_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = ["neither plan() nor open()", "always open"]
    check_broken(Good, messages, monkeypatch, plan=Gate.plan, open=Gate.open)


def open_of_tokens(self: Gate, step: GateStep) -> Tensor:
    return step.sampled


def open_of_all_logits(self: Gate, step: GateStep) -> Tensor:
    return step.logits > 0


def open_by_a_global_draw(self: Gate, step: GateStep) -> Tensor:
    return torch.rand(len(step.sampled)) < 2


def open_in_place(self: Gate, step: GateStep) -> Tensor:
    return step.logits.sub_(1.0)[:, 0] > 3


def open_by_the_mean(self: Gate, step: GateStep) -> Tensor:
    return step.logits[:, 0] > step.logits[:, 0].mean()


def open_with_a_wait(self: Gate, step: GateStep) -> Tensor:
    bound = 4
    if step.logits.isnan().any().item():
        bound = 3
    return step.sampled > bound


@pytest.mark.parametrize(
    ("method", "messages"),
    [
        (open_of_tokens, ["what open() returns is torch.int64", "torch.bool"]),
        (open_of_all_logits, ["has shape (7, 64)", "(7,)"]),
        (open_by_a_global_draw, ["global random generator", "step.uniform"]),
        (open_in_place, ["changes step.logits in place", "copy"]),
        (open_by_the_mean, ["row", "another result", "that row alone"]),
        (open_with_a_wait, ["open() waits for the device", "item"]),
    ],
)
def test_a_broken_open_is_caught(method: Callable, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_broken(Good, messages, monkeypatch, open=method)


def test_a_gate_that_reads_hidden_states_is_told_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "steady.py").write_text(
        """
from dataclasses import dataclass

from perturbations import Gate


@dataclass(frozen=True, kw_only=True)
class Steady(Gate):
    def open(self, step):
        return step.hidden.norm(dim=-1) > 1.0
"""
    )
    with pytest.raises(PerturbationError, match=r"(?s)line 10 of steady.py.*A gate gets no hidden states: decide by"):
        check_gate(f"{tmp_path}/steady.py")


def plan_as_a_list(self: Gate, positions: Positions) -> list[bool]:
    return [True] * len(positions.positions)


def plan_by_place_in_the_batch(self: Gate, positions: Positions) -> np.ndarray:
    return np.arange(len(positions.positions)) % 2 == 0


def plan_by_a_global_draw(self: Gate, positions: Positions) -> np.ndarray:
    return np.random.rand(len(positions.positions)) < 2


@pytest.mark.parametrize(
    ("method", "messages"),
    [
        (plan_as_a_list, ["plan() returns list", "numpy array of bool"]),
        (plan_by_place_in_the_batch, ["among all", "among others", "alone"]),
        (plan_by_a_global_draw, ["plan() draws from a global", "positions.uniform"]),
    ],
)
def test_a_broken_plan_is_caught(method: Callable, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_broken(Good, messages, monkeypatch, plan=method)


@pytest.mark.parametrize(
    ("state", "messages"),
    [
        pytest.param([0.0], ["initial_state() returns [0.0]", "numbers by name"], id="list"),
        pytest.param({}, ["advance() and no state"], id="empty"),
    ],
)
def test_a_broken_initial_state_is_caught(state: object, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_broken(Counting, messages, monkeypatch, initial_state=lambda self: state)


def test_an_open_that_reads_an_unknown_state_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_of_misspelled(self: Gate, step: GateStep) -> Tensor:
        return step.state["spend"] < 3

    check_broken(Counting, ["open() raises KeyError"], monkeypatch, open=open_of_misspelled)


def advance_misspelled(self: Gate, step: GateStep, fed: Tensor) -> Mapping[str, Tensor]:
    return {"spend": fed}


def advance_to_logits(self: Gate, step: GateStep, fed: Tensor) -> Mapping[str, Tensor]:
    return {"spent": step.logits}


def advance_in_place(self: Gate, step: GateStep, fed: Tensor) -> Mapping[str, Tensor]:
    return {"spent": step.state["spent"].add_(1)}


def advance_by_the_mean(self: Gate, step: GateStep, fed: Tensor) -> Mapping[str, Tensor]:
    return {"spent": step.state["spent"] + fed.float().mean()}


def advance_by_an_entropy_of_nan(self: Gate, step: GateStep, fed: Tensor) -> Mapping[str, Tensor]:
    log_p = torch.log_softmax(step.logits, dim=-1)
    return {"spent": step.state["spent"] - (log_p.exp() * log_p).sum(dim=-1)}


@pytest.mark.parametrize(
    ("method", "messages"),
    [
        pytest.param(Gate.advance, ["never changes", "no advance()"], id="none"),
        (advance_misspelled, ["advance() returns ['spend']", "the names of initial_state"]),
        (advance_to_logits, ["'spent' of what advance() returns has shape (7, 64)"]),
        (advance_in_place, ["changes step.state['spent'] in place", "copy"]),
        (advance_by_an_entropy_of_nan, ["masked tokens", "'spent' of what advance() returns holds nan", "entropy()"]),
        (advance_by_the_mean, ["advance() gives another result", "spent is", "that row alone"]),
    ],
)
def test_a_broken_advance_is_caught(method: Callable, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_broken(Counting, messages, monkeypatch, advance=method)
