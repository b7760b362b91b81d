# SPDX-License-Identifier: Apache-2.0
"""The verdict of the gate: which rows of a step are perturbed. Every condition stands here, in the order of asking.

On the host, of what needs no logits: the request is perturbed and its token kept (``wanted``); the rate's draw, the
schedule and the further gate's plan select the position. On the device, of the rows that are left: the request's own
sampling allows the proposed token; thinking has not ended, the policy is uncertain enough, and the further gate is
open. Then the proposed token stands in the text. Its input is fed in place of the token's embedding unless the token is
protected or ends the thinking, or the perturbation itself says that it does not act there.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from perturbations.base import Proposal
from perturbations.gates.default import BoundGate
from perturbations.step import Positions, Step


def selected(gate: BoundGate, at: Positions, eligible: np.ndarray) -> np.ndarray:
    """The rows that may be perturbed, as far as the host knows.

    Args:
        gate: the perturbation's.
        at: of the next tokens of N rows.
        eligible: whether a row's request is to be perturbed and its token will be kept, (N,) bool.

    Returns:
        (G,) int64, ascending.
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
    """What becomes of the proposals at G selected positions.

    Args:
        gate: the perturbation's.
        step: the positions.
        proposal: the perturbation's answer.
        slots: where the gate keeps the state of each trajectory, (G,) int64.
        prompts: first generated position of each, (G,) int64.
        allowed: whether the request's filters (top-k, top-p, min-p, a grammar) leave the proposed token, (G,) bool.
        greedy: argmax tokens for greedy rows and -1 elsewhere, (G,) int64, or None where no row is greedy.

    Returns:
        Whether the proposed token stands in the text, and whether its input is fed, (G,) bool each.
    """
    # What the request's own sampling excludes (at temperature 0 all but the likeliest token) never stands in its text:
    # such a position stays an ordinary one.
    opened = allowed
    if greedy is not None:
        opened = opened & ((greedy < 0) | (greedy == proposal.tokens))
    fed = opened
    if not gate.always_open:
        opened = opened & gate.open(slots, step, prompts)
        fed = opened & gate.feeds(proposal.tokens, gate.ending(slots, step.positions))
    return opened, fed if proposal.acts is None else fed & proposal.acts
