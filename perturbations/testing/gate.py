# SPDX-License-Identifier: Apache-2.0
"""Checks of a gate: its plan on the host, its conditions on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import fake_tensor

from perturbations.gates import Gate
from perturbations.step import GateStep, Positions, Step
from perturbations.testing.report import answered, check_answers, check_tensor, global_random_state, require

_TRAJECTORIES = ((1, 5), (-9, 0), (2**47, 300))  # seed, prompt's length


def check_decides(gate: Gate) -> None:
    """The gate implements at least one of its two methods."""
    require(
        type(gate).plan is not Gate.plan or type(gate).open is not Gate.open,
        f"{gate.name}: it has neither plan() nor open(), so it is always open.",
        "Write open(self, step) -> (B,) bool to look at logits, plan(self, positions) -> (N,) bool for positions.",
    )


def check_plan(gate: Gate) -> None:
    """Each position is judged by itself, whichever others are in the same call."""
    steps = np.concatenate([np.arange(90), np.arange(91, 400, 7)])
    seeds, first = (np.repeat(np.array(part), len(steps)) for part in zip(*_TRAJECTORIES))
    every = Positions(seeds, first, first + np.tile(steps, len(_TRAJECTORIES)))
    before, state = every.positions.copy(), global_random_state()
    whole = _plan(gate, every)
    drawn = f"{gate.name}: plan() draws from a global random generator (torch's, numpy's or Python's)."
    require(global_random_state() == state, drawn, "Draw with positions.uniform: the same numbers in each call.")
    unchanged = np.array_equal(every.positions, before)
    require(unchanged, f"{gate.name}: plan() changes positions.positions in place.", "Work on a copy.")
    rows = np.arange(len(whole))
    for part in (rows[:1], rows[1:2], rows[2:40], rows[40:41], rows[::-1], rows[7::11]):
        again = _plan(gate, every.where(part))
        for at in np.flatnonzero(whole[part] != again)[:1]:
            require(
                False,
                f"{gate.name}: plan() says {whole[part][at]} of position {every.positions[part][at]} among all and"
                f" {again[at]} among others.",
                "Judge each position by itself and keep no state between calls: a step has positions of any"
                " trajectories.",
            )


def _plan(gate: Gate, positions: Positions) -> np.ndarray:
    planned = answered(f"{gate.name}: plan()", lambda: gate.plan(positions), "It must answer for any positions.")
    seen, shape = type(planned).__name__, positions.positions.shape
    if isinstance(planned, np.ndarray):
        seen = f"an array of {planned.dtype}, {planned.shape}"
    fix = f"Return a numpy array of bool, {shape}: one a position."
    require(seen == f"an array of bool, {shape}", f"{gate.name}: plan() returns {seen}.", fix)
    return planned


def check_open(gate: Gate, label: str, step: Step) -> None:
    """One answer per row, its own, the same each time, and without waiting for the device."""
    where = f"{gate.name}, {label}:"
    seen = GateStep.of(step, torch.arange(len(step.logits)))

    def opened(some: GateStep) -> Tensor:
        result = answered(f"{where} open()", lambda: gate.open(some))
        check_tensor(f"{where} what open() returns", result, (len(some.logits),), torch.bool, some.logits.device)
        return result

    check_answers(where, "open()", opened, seen)
    # On tensors without values: an operation that needs a value would halt a GPU's pipeline at every step.
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        parts: dict[str, Any] = {
            name: mode.from_tensor(part) if isinstance(part, Tensor) else part for name, part in vars(seen).items()
        }
        waits = None
        try:
            gate.open(GateStep(**parts))
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
            waits = error.func
        except Exception:  # an operation without a fake form proves nothing
            return
    require(
        waits is None,
        f"{where} open() waits for the device ({waits}): the rollout would stop there at every token.",
        "No .item(), .tolist() or nonzero(), no `if` on a tensor, no indexing with a mask: use torch.where.",
    )
