# SPDX-License-Identifier: Apache-2.0
"""The verdict of the gate: which rows of a step are perturbed. Every condition is here, in the order of asking.

On the host: the request is perturbed and its token kept; the rate's draw, the schedule and the further gate's plan
select the position. On the device: the request's sampling allows the proposed token, thinking goes on, the policy is
uncertain enough, and the further gate is open. Then the proposed token is in the text. Its input is fed unless the
token is protected or ends the thinking, or the perturbation does not act there.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from perturbations.base import Proposal
from perturbations.gates.default import BoundGate
from perturbations.step import Positions, Step


def selected(gate: BoundGate, at: Positions, eligible: np.ndarray) -> np.ndarray:
    """The rows that may be perturbed, as far as the host can tell: (G,) int64, ascending.

    Args:
        gate: the perturbation's.
        at: of the next tokens of N rows.
        eligible: whether a row's request is to be perturbed and its token will be kept, (N,) bool.
    """
    return (gate.selects(at) & eligible).nonzero()[0]


def verdict(
    gate: BoundGate,
    step: Step,
    proposal: Proposal,
    slots: Tensor,
    prompts: Tensor,
    allowed: Tensor,
    greedy: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Whether the proposed token is in the text, and whether its input is fed, at G positions: (G,) bool each.

    Args:
        gate: the perturbation's.
        step: the positions.
        proposal: the perturbation's answer.
        slots: the gate's row of each trajectory, (G,) int64.
        prompts: first generated position of each, (G,) int64.
        allowed: whether the request's filters (top-k, top-p, min-p, a grammar) leave the proposed token, (G,) bool.
        greedy: argmax tokens for greedy rows and -1 elsewhere, (G,) int64, or None where no row is greedy.
    """
    # What the request's own sampling excludes (at temperature 0 all but the likeliest token) is never in its text: such
    # a position stays unperturbed.
    opened = allowed
    if greedy is not None:
        opened = opened & ((greedy < 0) | (greedy == proposal.tokens))
    fed = opened
    if not gate.always_open:
        opened = opened & gate.open(slots, step, prompts)
        fed = opened & gate.feeds(proposal.tokens, gate.ending(slots, step.positions))
    return opened, fed if proposal.acts is None else fed & proposal.acts
