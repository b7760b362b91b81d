# SPDX-License-Identifier: Apache-2.0
"""Further gates: those of the tree by hand, one of a third party, and broken ones that each spoil one thing."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from perturbations import create, create_gate, registry, streams
from perturbations.gates import Gate
from perturbations.gates.default import GateOptions
from perturbations.options import option
from perturbations.step import GateStep, Positions, Step
from perturbations.testing import PerturbationError, check_gate
from tests.support.gate_steps import F, T, of_one, step_with


def test_every_gate_conforms() -> None:
    assert {"top_margin", "bursts", "confidence", "first", "swi"} <= set(registry.gates.available())
    for name in registry.gates.available():
        check_gate(name)
    for margin in (0, 1):
        check_gate("top_margin", margin=margin)
    check_gate("bursts", length=1, share=1)
    check_gate("first", length=3)
    for window, most in ((0, None), (1, 1), (2, 2)):
        check_gate("swi", window=window, max_switches=most)


def test_top_margin_by_hand() -> None:
    """Margins: (1/2, 1/4, 1/4) 0.25; four equal 0; (0.6, 0.4) 0.2; certain 1. A shift of the logits changes none."""
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25] * 4, [0.6, 0.4, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    step = step_with(p.log() + torch.tensor([[3.0], [-50.0], [0.0], [7.0]]))
    for margin, want in [(0.0, [F, T, F, F]), (0.21, [F, T, T, F]), (0.26, [T, T, T, F]), (1.0, [T, T, T, T])]:
        assert create_gate("top_margin", margin=margin).open(step).tolist() == want


def test_bursts_open_whole_stretches() -> None:
    gate = create_gate("bursts", length=4, share=0.3)
    every = of_one(7, 10, np.arange(10, 10 + 4000))
    opened = gate.plan(every).reshape(-1, 4)
    assert (opened.all(axis=1) | ~opened.any(axis=1)).all()
    assert opened[:, 0].mean() == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / 1000))
    # A stretch's draw is the one of its first position; what was selected inside a stretch does not matter.
    keys = streams.keys(torch.tensor(7), torch.arange(10, 4010, 4), streams.Stream.GATE_PLAN)
    assert (opened[:, 0] == (streams.uniform(keys, 1)[:, 0] < 0.3).numpy()).all()
    some = np.arange(11, 4010, 3)
    assert (gate.plan(of_one(7, 10, some)) == gate.plan(every)[some - 10]).all()


def test_what_is_selected_is_the_default_gates_choice_where_the_further_gate_agrees() -> None:
    shared, gate = create("soft", rate=0.5, every=2), create_gate("bursts", length=3, share=0.4)
    both = dataclasses.replace(shared, gate=gate)
    every = of_one(5, 8, np.arange(8, 300))
    plain, gated = shared.selects(every), both.selects(every)
    assert (plain == GateOptions(rate=0.5, every=2).selects(every)).all()
    assert (gated == (plain & gate.plan(every))).all()
    assert 10 < gated.sum() < plain.sum()
    assert not create("soft", gate="bursts", **{"gate.share": 0}).selects(every).any()


def test_draws_of_a_gate_are_its_own() -> None:
    step = step_with(torch.zeros(3, 5))
    plain = Step(*(getattr(step, f.name) for f in dataclasses.fields(Step)))
    places = of_one(100, 0, np.array([10]))
    drawn = [step.uniform(1)[0, 0].item(), plain.uniform(1)[0, 0].item(), places.uniform(1)[0, 0].item()]
    keys = streams.keys(torch.tensor(100), torch.tensor(10), streams.Stream.GATE)
    assert len({*drawn, streams.uniform(keys, 1).item()}) == 4
    assert GateStep.of(plain, step.generated).uniform(2).equal(step.uniform(2))


@dataclass(frozen=True, kw_only=True)
class Good(Gate):
    """Open where the sampled token is likely enough and its embedding not too long, and half of the time."""

    name = "good"
    least: float = option(0.1, "a probability", low=0.0, high=1.0)

    def plan(self, places: Positions) -> np.ndarray:
        return places.uniform(1)[:, 0] < 0.5

    def open(self, step: GateStep) -> torch.Tensor:
        p = torch.softmax(step.logits, -1).gather(-1, step.sampled.unsqueeze(-1)).squeeze(-1)
        short = step.embeddings.lookup(step.sampled).norm(dim=-1) < 9.0 * step.temperature
        return (p >= self.least) & short & (step.uniform(1)[:, 0] < 0.5)


@dataclass(frozen=True, kw_only=True)
class Counting(Gate):
    """Open until three positions were perturbed."""

    name = "counting"

    def initial_state(self) -> Mapping[str, float]:
        return {"spent": 0}

    def open(self, step: GateStep) -> torch.Tensor:
        return step.state["spent"] < 3

    def advance(self, step: GateStep, fed: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"spent": step.state["spent"] + fed}


def by_the_mean(self: Gate, step: GateStep) -> torch.Tensor:
    return step.logits[:, 0] > step.logits[:, 0].mean()


def waiting(self: Gate, step: GateStep) -> torch.Tensor:
    return step.sampled > (3 if step.logits.isnan().any().item() else 4)


# How such a gate goes wrong, and what its error says.
OPEN = [
    (lambda self, step: step.sampled, ["what open() returns is torch.int64", "torch.bool"]),
    (lambda self, step: step.logits > 0, ["has shape (7, 64)", "(7,)"]),
    (lambda self, step: torch.rand(len(step.sampled)) < 2, ["global random generator", "step.uniform"]),
    (lambda self, step: step.logits.sub_(1.0)[:, 0] > 3, ["changes step.logits in place", "copy"]),
    (by_the_mean, ["row", "another result", "that row alone"]),
    (waiting, ["open() waits for the device", "item"]),
]
PLAN = [
    (lambda self, places: [True] * len(places.positions), ["plan() returns list", "numpy array of bool"]),
    (lambda self, places: np.arange(len(places.positions)) % 2 == 0, ["among all", "among others", "alone"]),
    (
        lambda self, places: np.random.rand(len(places.positions)) < 2,
        ["plan() draws from a global", "positions.uniform"],
    ),
]
START = [
    (lambda self: [0.0], ["initial_state() returns [0.0]", "numbers by name"]),
    (lambda self: {}, ["advance() and no state"]),
]
ADVANCE = [
    (Gate.advance, ["never changes", "no advance()"]),
    (lambda self, step, fed: {"spend": fed}, ["advance() returns ['spend']", "the names of initial_state"]),
    (lambda self, step, fed: {"spent": step.logits}, ["'spent' of what advance() returns has shape (7, 64)"]),
    (lambda self, step, fed: {"spent": step.state["spent"].add_(1)}, ["changes step.state['spent'] in place", "copy"]),
    (
        lambda self, step, fed: {"spent": step.state["spent"] + fed.float().mean()},
        ["advance() gives another result", "spent is", "that row alone"],
    ),
]
BROKEN = [
    (Good, dict(plan=Gate.plan, open=Gate.open), ["neither plan() nor open()", "always open"]),
    *((Good, dict(open=part), words) for part, words in OPEN),
    *((Good, dict(plan=part), words) for part, words in PLAN),
    *((Counting, dict(initial_state=part), words) for part, words in START),
    *((Counting, dict(advance=part), words) for part, words in ADVANCE),
    (Counting, dict(open=lambda self, step: step.state["spend"] < 3), ["open() raises KeyError"]),
]


@pytest.mark.parametrize(("of", "parts", "words"), BROKEN, ids=[words[0] for *_, words in BROKEN])
def test_broken_gates_are_caught(
    of: type[Gate], parts: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"__module__": __name__, "__qualname__": "Broken", "name": "broken"}
    made = dataclass(frozen=True, kw_only=True)(type("Broken", (of,), {**parts, **named}))
    monkeypatch.setitem(globals(), "Broken", made)
    with pytest.raises(PerturbationError) as error:
        check_gate(made)
    for word in ["broken", *words]:
        assert word in str(error.value)


def test_a_third_partys_gate_conforms_as_instance_class_and_address() -> None:
    check_gate(Good(least=0.3))
    check_gate(Good, least=0.3)
    check_gate(f"{__name__}:Good", least=1)
    with pytest.raises(PerturbationError, match=r"not a gate.*perturbations\.Gate"):
        check_gate(Step)
    with pytest.raises(ValueError, match="least come too late"):
        check_gate(Good(), least=0.1)
    with pytest.raises(ValueError, match=r"no option 'lest'.*'least'"):
        check_gate(Good, lest=0.1)
