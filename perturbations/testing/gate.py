# SPDX-License-Identifier: Apache-2.0
"""Checks of a gate: its plan, its state, and what it decides on steps of a small synthetic model."""

import dataclasses
import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from perturbations import Gate, GateStep, Positions, Step
from perturbations.testing.proposal import steps
from perturbations.testing.report import (
    PerturbationError,
    answered,
    check_answers,
    check_tensor,
    expect,
    without_global_draws,
)
from perturbations.testing.waits import check_without_values

_log = logging.getLogger(__name__)


def check_decides(gate: Gate) -> None:
    """The gate implements at least one of its two methods."""
    expect(
        type(gate).plan is not Gate.plan or type(gate).open is not Gate.open,
        f"{gate.name}: it has neither plan() nor open(), so it is always open.",
        "Write open(self, step) -> (B,) bool to look at logits, plan(self, positions) -> (N,) bool for positions.",
    )


def check_plan(gate: Gate) -> None:
    """Each position is judged alone, whichever others are in the same call."""
    every_position = _positions_of_three_trajectories()
    positions_before = every_position.positions.copy()
    plan = without_global_draws(
        f"{gate.name}: plan()",
        lambda: _plan(gate, every_position),
        "Draw with positions.uniform: the same numbers in each call.",
    )
    expect(
        np.array_equal(every_position.positions, positions_before),
        f"{gate.name}: plan() changes positions.positions in place.",
        "Work on a copy.",
    )
    rows = np.arange(len(plan))
    single_rows = (rows[:1], rows[1:2], rows[40:41])
    several_rows = (rows[2:40], rows[7::11])
    every_row_in_reverse = rows[::-1]
    for selection in (*single_rows, *several_rows, every_row_in_reverse):
        plan_of_selection = _plan(gate, every_position.where(selection))
        different = np.flatnonzero(plan[selection] != plan_of_selection)
        if len(different):
            first = different[0]
            position = every_position.positions[selection][first]
            raise PerturbationError(
                f"{gate.name}: plan() says {plan[selection][first]} of position {position} among all and"
                f" {plan_of_selection[first]} among others.",
                "Judge each position alone, in steps of any trajectories, and keep no state between calls.",
            )


def _positions_of_three_trajectories() -> Positions:
    """Positions of three trajectories with different seeds and prompts."""
    generated = np.concatenate([np.arange(90), np.arange(91, 400, 7)])
    seeds = np.repeat(np.array([1, -9, 2**47]), len(generated))
    first = np.repeat(np.array([5, 0, 300]), len(generated))
    return Positions(seeds, first, positions=first + np.tile(generated, 3))


def _plan(gate: Gate, positions: Positions) -> np.ndarray:
    """The gate's plan, which must be an array of one bool for each position."""
    plan = answered(f"{gate.name}: plan()", lambda: gate.plan(positions), "It must accept any positions.")
    shape = positions.positions.shape
    kind = f"an array of {plan.dtype}, {plan.shape}" if isinstance(plan, np.ndarray) else type(plan).__name__
    expect(
        kind == f"an array of bool, {shape}",
        f"{gate.name}: plan() returns {kind}.",
        f"Return a numpy array of bool, {shape}: one a position.",
    )
    return plan


def check_state(gate: Gate) -> None:
    """A gate with a state has numbers by name to start with, and moves them on."""
    state = answered(f"{gate.name}: initial_state()", gate.initial_state)
    expect(
        isinstance(state, Mapping) and all(isinstance(value, int | float) for value in state.values()),
        f"{gate.name}: initial_state() returns {state!r}.",
        'Return numbers by name, such as {"spent": 0}.',
    )
    has_advance = type(gate).advance is not Gate.advance
    expect(
        state or not has_advance,
        f"{gate.name}: it has advance() and no state.",
        'Write initial_state(self), such as {"spent": 0}: advance() would never be called.',
    )
    expect(
        has_advance or not state,
        f"{gate.name}: its state never changes, since it has no advance().",
        "Write advance(self, step, fed) -> (B,) by name, the state after each position.",
    )


def check_open(gate: Gate, label: str, step: Step) -> None:
    """One result per row, its own, the same each time, and without waiting for the device; for the state too."""
    where = f"{gate.name}, {label}:"

    def checked_open(gate_step: GateStep) -> Tensor:
        is_open = answered(f"{where} open()", lambda: gate.open(gate_step))
        shape = (len(gate_step.logits),)
        check_tensor(f"{where} what open() returns", is_open, shape, torch.bool, gate_step.logits.device)
        return is_open

    def advance(gate_step: GateStep) -> Mapping[str, Tensor]:
        return gate.advance(gate_step, gate_step.sampled % 2 == 0)

    def checked_advance(gate_step: GateStep) -> Mapping[str, Tensor]:
        state = answered(f"{where} advance()", lambda: advance(gate_step))
        expect(
            isinstance(state, Mapping) and {*state} == {*gate_step.state},
            f"{where} advance() returns {list(state) if isinstance(state, Mapping) else type(state).__name__}.",
            "It must return the names of initial_state(), no more and no fewer.",
        )
        floats = {name: value.float() if isinstance(value, Tensor) else value for name, value in state.items()}
        for name, value in floats.items():
            label = f"{where} {name!r} of what advance() returns"
            check_tensor(label, value, (len(gate_step.logits),), torch.float32, gate_step.logits.device)
            expect(
                not value.isnan().any(),
                f"{label} holds nan.",
                "A masked token's logit is -inf, and 0 · inf is nan: step.entropy() leaves such tokens out.",
            )
        return floats

    rows = len(step.logits)
    state = {name: torch.full((rows,), float(value)) for name, value in gate.initial_state().items()}
    gate_step = GateStep.of(step, generated=torch.arange(rows), state=state)
    if state:
        # Row i is advanced i times, so that the rows have different states.
        for row in range(rows):
            advanced = checked_advance(gate_step)
            state = {
                name: torch.cat([values[: row + 1], advanced[name][row + 1 :]])
                for name, values in gate_step.state.items()
            }
            gate_step = dataclasses.replace(gate_step, state=state)
    check_answers(where, "open()", checked_open, gate_step)
    check_without_values(where, "open()", gate.open, gate_step)
    if state:
        check_answers(where, "advance()", checked_advance, gate_step)
        check_without_values(where, "advance()", advance, gate_step)


def check_is_open(gate: Gate) -> None:
    """Logs a note where the gate is open at no position: that breaks no promise, but a run would be unperturbed."""
    try:
        is_planned = bool(_plan(gate, _positions_of_three_trajectories()).any())
        is_open = any(bool(gate.open(_late_step(gate, step)).any()) for _, step in steps(64))
    except Exception:  # the checks of plan() and open() report it
        return
    if is_planned and is_open:
        return
    method = "open()" if is_planned else "plan()"
    _log.warning(
        "%s: %s opens none of the positions of this check. If it opens none of a model either, the run is unperturbed.",
        gate.name,
        method,
    )


def _late_step(gate: Gate, step: Step) -> GateStep:
    """A step whose rows are at generated positions from 1 to 4096, with the initial state."""
    rows = torch.arange(len(step.logits))
    state = {name: torch.full((len(rows),), float(value)) for name, value in gate.initial_state().items()}
    return GateStep.of(step, generated=4**rows, state=state)
