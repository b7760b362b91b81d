# SPDX-License-Identifier: Apache-2.0
"""Further gates: those of the tree by hand, one of a third party, and broken ones that each spoil one thing."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from perturbations import create, create_gate, registry, streams
from perturbations.embeddings import matrix_embeddings
from perturbations.gates import Gate
from perturbations.gates.default import BoundGate
from perturbations.options import option
from perturbations.step import GateStep, Positions, Step
from perturbations.testing import PerturbationError, check_gate
from tests.fast.gate_steps import F, T, of_one, schedule, step_with


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
    assert (plain == schedule(0.5, every=2).selects(every)).all()
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
    """Open where the sampled token is likely enough, and half of the time."""

    name = "good"
    least: float = option(0.1, "a probability", low=0.0, high=1.0)

    def plan(self, places: Positions) -> np.ndarray:
        return places.uniform(1)[:, 0] < 0.5

    def open(self, step: GateStep) -> torch.Tensor:
        p = torch.softmax(step.logits, -1).gather(-1, step.sampled.unsqueeze(-1)).squeeze(-1)
        return (p >= self.least) & (step.uniform(1)[:, 0] < 0.5)


CALLS: list[int] = []


def counted(step: GateStep) -> torch.Tensor:
    CALLS.append(1)
    return torch.full((len(step.sampled),), len(CALLS) % 2 == 0)


def whole(places: Positions) -> np.ndarray:
    return np.arange(len(places.positions)) % 2 == 0


def shifted(step: GateStep) -> torch.Tensor:
    step.logits.sub_(1.0)
    return step.sampled > 3


BROKEN = [
    (dict(plan=None, open=None), ["neither plan() nor open()", "always open"]),
    (dict(open=lambda s: s.sampled), ["what open() returns is torch.int64", "torch.bool"]),
    (dict(open=lambda s: s.logits > 0), ["has shape (7, 64)", "(7,)"]),
    (dict(open=lambda s: [True] * len(s.sampled)), ["is a list", "a tensor of shape (7,)"]),
    (dict(open=lambda s: s.nothing), ["open() raises AttributeError", "any logits"]),
    (dict(open=lambda s: torch.rand(len(s.sampled)) < 2), ["global random generator", "step.uniform"]),
    (dict(open=shifted), ["changes step.logits in place", "copy"]),
    (dict(open=counted), ["two results for the same step", "no state"]),
    (dict(open=lambda s: s.logits[:, 0] > s.logits[:, 0].mean()), ["row", "another result", "that row alone"]),
    (
        dict(open=lambda s: s.sampled > (3 if s.logits.isnan().any().item() else 4)),
        ["open() waits for the device", "item"],
    ),
    (
        dict(open=lambda s: s.sampled > 3 + 0 * len(s.sampled[s.sampled > 5])),
        ["open() waits for the device", "indexing with a mask"],
    ),
    (dict(plan=lambda p: p.positions), ["plan() returns an array of int64", "bool"]),
    (dict(plan=lambda p: [True] * len(p.positions)), ["plan() returns list", "numpy array of bool"]),
    (dict(plan=lambda p: np.ones(3, bool)), ["plan() returns an array of bool, (3,)"]),
    (dict(plan=whole), ["among all", "among others", "alone"]),
    (dict(plan=lambda p: np.random.rand(len(p.positions)) < 2), ["plan() draws from a global", "positions.uniform"]),
    (dict(plan=lambda p: p.nothing), ["plan() raises AttributeError", "any positions"]),
]


@pytest.mark.parametrize(("parts", "words"), BROKEN, ids=[words[0] for _, words in BROKEN])
def test_broken_gates_are_caught(parts: dict, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def method(name: str) -> Callable:
        return getattr(Gate, name) if parts[name] is None else lambda self, seen: parts[name](seen)

    methods = {name: method(name) for name in parts}
    made = type("Broken", (Good,), {**methods, "__module__": __name__, "__qualname__": "Broken", "name": "broken"})
    made = dataclass(frozen=True, kw_only=True)(made)
    monkeypatch.setitem(globals(), "Broken", made)
    with pytest.raises(PerturbationError) as error:
        check_gate(made)
    for word in ["broken", *words]:
        assert word in str(error.value), error.value


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


@dataclass(frozen=True, kw_only=True)
class EveryThird(Gate):
    """Open at generated positions 0, 3, 6, …"""

    name = "every third"

    def open(self, step: GateStep) -> torch.Tensor:
        return step.generated % 3 == 0


class NoModel:
    """Stands for the embedding layer of an engine."""

    def __init__(self) -> None:
        self.lookup = matrix_embeddings(torch.eye(16)).lookup

    def clear(self, rewritten: object = None) -> None:
        pass

    def put(self, *_: torch.Tensor) -> None:
        pass


def test_the_rollout_records_only_what_the_gate_left_open() -> None:
    """Prompts of 5 and 8 tokens, 9 generated tokens each; the gate counts from each answer's own start."""
    from ngrpo.rollout.perturber import RolloutPerturber
    from ngrpo.rollout.trajectories import TrajectoryStore

    perturbation = create("neighbor", rate=1.0, gate=EveryThird())
    store = TrajectoryStore(2, 64)
    gate = BoundGate(perturbation, lambda: [b""] * 16, 16, store.slots, "cpu")
    perturber = RolloutPerturber(
        perturbation, store, gate, matrix_embeddings(torch.eye(16)), NoModel(), torch.device("cpu")
    )
    prompts = {"a": 5, "b": 8}
    for name, prompt in prompts.items():
        store.open(name, 100 + prompt, prompt, True)
        perturber.opened(name)
    starts, counts = np.array([0, 0]), np.array([5, 8])
    draws = torch.Generator().manual_seed(0)
    for generated in range(9):
        perturber.begin(["a", "b"], starts, counts, np.zeros(2, dtype=bool))
        logits = torch.randn(2, 16, generator=draws)
        tokens = perturber.finish(logits, torch.ones(2), logits, None)
        if generated % 3 == 0:  # neighbor's text is the likeliest token, where it acts
            assert tokens.tolist() == logits.argmax(-1).tolist()
        starts, counts = starts + counts, np.array([1, 1])
    perturber.notes.drain(until=perturber.notes.taken)
    for name, prompt in prompts.items():
        assert (store.record(name)[0].positions - prompt).tolist() == [0, 3, 6]
