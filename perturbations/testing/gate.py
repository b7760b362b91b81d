# SPDX-License-Identifier: Apache-2.0
"""Checks of what a gate decides: its plan on the host, its conditions on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from perturbations.gates import Gate
from perturbations.step import GateStep, Positions, Step
from perturbations.testing.report import (
    PerturbationError,
    answered,
    check_answers,
    check_tensor,
    global_random_state,
    require,
)

_TRAJECTORIES = ((1, 5), (-9, 0), (2**47, 300))  # seed, prompt's length


def check_decides(gate: Gate) -> None:
    """The gate implements at least one of its two methods."""
    require(
        type(gate).plan is not Gate.plan or type(gate).open is not Gate.open,
        f"{gate.name}: it has neither plan() nor open(), so it is always open.",
        "Write open(self, step) -> (B,) bool to look at logits, plan(self, positions) -> (N,) bool for positions.",
    )


def check_plan(gate: Gate) -> None:
    """Each position is judged by itself, whichever others it is asked for with."""
    steps = np.concatenate([np.arange(90), np.arange(91, 400, 7)])
    seeds, first = (np.repeat(np.array(part), len(steps)) for part in zip(*_TRAJECTORIES))
    every = Positions(seeds, first, first + np.tile(steps, len(_TRAJECTORIES)))
    before, state = every.positions.copy(), global_random_state()
    whole = _plan(gate, every)
    require(
        global_random_state() == state,
        f"{gate.name}: plan() draws from a global random generator (torch's, numpy's or Python's).",
        "Draw with positions.uniform: the same numbers whenever the position is asked for.",
    )
    unchanged = np.array_equal(every.positions, before)
    require(unchanged, f"{gate.name}: plan() changes positions.positions in place.", "Work on a copy.")
    rows = np.arange(len(whole))
    for part in (rows[:1], rows[1:2], rows[2:40], rows[40:41], rows[::-1], rows[7::11]):
        again = _plan(gate, every.where(part))
        if not np.array_equal(whole[part], again):
            at = int(np.flatnonzero(whole[part] != again)[0])
            raise PerturbationError(
                f"{gate.name}: plan() says {whole[part][at]} of position {every.positions[part][at]} among all and"
                f" {again[at]} among others.",
                "Judge each position by itself and keep no state between calls: a step asks for the positions of"
                " whatever trajectories are in it.",
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
    """One answer per row, its own, the same each time, and without asking the device."""
    where = f"{gate.name}, {label}:"
    seen = GateStep.of(step, torch.arange(len(step.logits)))
    check_answers(where, "open()", lambda some: _open(gate, some, where), seen)
    _check_synchronisation(gate, seen, where)


def _open(gate: Gate, step: GateStep, where: str) -> Tensor:
    opened = answered(f"{where} open()", lambda: gate.open(step))
    check_tensor(f"{where} what open() returns", opened, (len(step.logits),), torch.bool, step.logits.device)
    return opened


def _check_synchronisation(gate: Gate, step: GateStep, where: str) -> None:
    """Runs open() on tensors without values: what asks for a value would halt a GPU's pipeline at every step."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = GateStep(
            logits=mode.from_tensor(step.logits),
            sampled=mode.from_tensor(step.sampled),
            temperature=mode.from_tensor(step.temperature),
            seeds=mode.from_tensor(step.seeds),
            positions=mode.from_tensor(step.positions),
            generated=mode.from_tensor(step.generated),
            embeddings=step.embeddings,
        )
        try:
            gate.open(fake)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise PerturbationError(
                f"{where} open() waits for the device ({error.func}): the rollout would stop there at every token.",
                "No .item(), .tolist() or nonzero(), no `if` on a tensor, no indexing with a mask: use torch.where.",
            ) from error
        except Exception:  # an operation without a fake form proves nothing
            return
