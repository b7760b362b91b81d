# SPDX-License-Identifier: Apache-2.0
"""The verdict of the gate: each of its conditions alone closes a position."""

from __future__ import annotations

import numpy as np
import torch

from perturbations import InputEdit, Positions, Proposal, Step, create
from perturbations.embeddings import matrix_embeddings
from perturbations.gates.default import BoundGate

V, ROWS, PROMPT = 10, 9, 4
PROPOSED, PROTECTED, LAST_OF_UNTIL = 1, 7, 5
TOKENS = [b"a", b"b", b"c", b"</", b"d", b"think>", b"e", b"f", b"g", b"h"]


def gate_with(until: str | None = "</think>", protect: str | None = str(PROTECTED), rate: float = 0.5) -> BoundGate:
    options = create("gumbel", until=until, protect=protect, rate=rate, burn_in=1)
    return BoundGate(options, lambda: TOKENS, V, ROWS, "cpu")


def test_each_condition_alone_closes_a_position() -> None:
    """Row by row: nothing against it; filtered; greedy for another token; greedy for this one; thinking has ended;
    protected; completes the end of thinking; the perturbation does not act; certain where entropy is asked for.
    """
    options = create("gumbel", until="</think>", protect=str(PROTECTED), entropy_min=1.0)
    gate = BoundGate(options, lambda: TOKENS, V, ROWS, "cpu")
    slots, at = torch.arange(ROWS), torch.full((ROWS,), PROMPT + 2)
    # Row 4 has ended its thinking, row 6 is about to.
    for position, token in ((PROMPT, torch.tensor([0, 0, 0, 0, 3, 0, 0, 0, 0])), (PROMPT + 1, torch.zeros(ROWS))):
        tokens = token.long()
        if position == PROMPT + 1:
            tokens[4], tokens[6] = LAST_OF_UNTIL, 3
        where = torch.full((ROWS,), position)
        gate.observe(slots, where, tokens, gate.matched(slots, where))
    logits = torch.zeros(ROWS, V)
    logits[8, 0] = 50.0
    proposed = torch.full((ROWS,), PROPOSED)
    proposed[5], proposed[6] = PROTECTED, LAST_OF_UNTIL
    acts = torch.ones(ROWS, dtype=torch.bool)
    acts[7] = False
    embeddings = matrix_embeddings(torch.eye(V))
    step = Step(logits, torch.zeros(ROWS).long(), torch.ones(ROWS), slots, at, embeddings)
    edit = InputEdit(proposed.unsqueeze(1), torch.ones(ROWS, 1))
    allowed = torch.ones(ROWS, dtype=torch.bool)
    allowed[1] = False
    greedy = torch.full((ROWS,), -1)
    greedy[2], greedy[3] = PROPOSED + 1, PROPOSED
    found = gate.verdict(step, Proposal(edit, proposed, acts), slots, torch.full((ROWS,), PROMPT), allowed, greedy)
    stands, fed = (part.tolist() for part in found)
    assert [row for row in range(ROWS) if not stands[row]] == [1, 2, 4, 8]
    assert [row for row in range(ROWS) if not fed[row]] == [1, 2, 4, 5, 6, 7, 8]


def test_the_host_selects_what_is_wanted_and_planned() -> None:
    seeds = np.arange(2000)
    gate, first = gate_with(), np.full(2000, PROMPT)
    wanted = seeds % 2 == 0
    rows = gate.selected(Positions(seeds, first, first + 1), wanted)
    assert (rows % 2 == 0).all() and 400 < len(rows) < 600, "half of the wanted half"
    assert not len(gate.selected(Positions(seeds, first, first), wanted)), "the burn-in"
