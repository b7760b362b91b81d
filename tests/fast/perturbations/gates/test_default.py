# SPDX-License-Identifier: Apache-2.0
"""The default gate: the draw, the schedule, the conditions on tokens, and its verdict."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from perturbations import InputEdit, Positions, Proposal, create, streams
from perturbations.gates.default import BoundGate, GateOptions, StopText, protected_tokens
from tests.support.gate_steps import F, T, of_one, step_with


def chosen(gate: GateOptions, seed: int = 1, first: int = 5, length: int = 15) -> list[int]:
    at = np.arange(first, length)
    selected = gate.selects(of_one(seed, first, at))
    assert selected.dtype == bool and selected.shape == at.shape
    return at[selected].tolist()


# --- the draw and the schedule --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "want"),
    [
        (dict(), [*range(5, 15)]),
        (dict(rate=0.0), []),
        (dict(burn_in=3), [8, 9, 10, 11, 12, 13, 14]),
        (dict(burn_in=2, every=3), [7, 10, 13]),
        (dict(burn_in=9), [14]),
        (dict(burn_in=10), []),
        (dict(every=99), [5]),
    ],
    ids=str,
)
def test_schedule_by_hand(options: dict, want: list[int]) -> None:
    assert chosen(GateOptions(**{"rate": 1.0, **options})) == want


def test_the_draw_is_the_gate_stream_at_absolute_positions() -> None:
    keys = streams.keys(torch.tensor(-9), torch.arange(60), streams.Stream.GATE)
    drawn = torch.nonzero(streams.uniform(keys, 1).flatten() < 0.4).flatten().tolist()
    assert 10 < len(drawn) < 40
    # Burn-in and the stride remove positions and change no draw.
    assert chosen(GateOptions(rate=0.4, burn_in=4), -9, 20, 60) == [p for p in drawn if p >= 24]
    assert chosen(GateOptions(rate=0.4, every=2), -9, 20, 60) == [p for p in drawn if p >= 20 and p % 2 == 0]


# --- until ----------------------------------------------------------------------------------------


class Conditions:
    """A bound gate that is asked and told of the next position of each row, as generation does."""

    def __init__(self, until=(), entropy_min=None, rows: int = 1) -> None:
        options = GateOptions(until="".join(map(str, until)) or None, entropy_min=entropy_min)
        self.gate = BoundGate(options, lambda: [str(i).encode() for i in range(10)], 10, rows, "cpu")
        self.next = torch.zeros(8, dtype=torch.int64)

    def opened(self, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        step = dataclasses.replace(step_with(logits), positions=self.next[rows])
        return self.gate.open(rows, step, torch.zeros_like(rows))

    def feeds(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.gate.feeds(tokens, self.gate.matched(rows, self.next[rows]))

    def passes(self, rows: torch.Tensor, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Which positions are fed perturbed: the gate is open, and the proposed token may be."""
        return self.opened(rows, logits) & self.feeds(rows, tokens)

    def observe(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        positions = self.next[rows]
        self.gate.observe(rows, positions, tokens, self.gate.matched(rows, positions))
        self.next[rows] += 1


def admitted(state: Conditions, tokens: list[int], row: int = 0) -> list[bool]:
    """Feeds a row its tokens one by one, as generation does: asked first, then told."""
    result = []
    for token in tokens:
        rows, one = torch.tensor([row]), torch.tensor([token])
        result.append(bool(state.passes(rows, one, torch.zeros(1, 10))))
        state.observe(rows, one)
    return result


@pytest.mark.parametrize(
    ("until", "tokens", "want"),
    [
        ([4], [1, 4, 1, 2], [T, F, F, F]),
        ([7, 8], [7, 5, 7, 8, 9, 7], [T, T, T, F, F, F]),
        ([1, 1, 2], [1, 1, 1, 2, 5, 1], [T, T, T, F, F, F]),  # "aab" in "aaab"
        ([1, 2, 1, 3], [1, 2, 1, 2, 1, 3, 0], [T, T, T, T, T, F, F]),  # "abac" in "ababac"
        ([], [1, 2, 3], [T, T, T]),
    ],
)
def test_until_ends_at_the_token_that_completes_it(until: list[int], tokens: list[int], want: list[bool]) -> None:
    assert admitted(Conditions(until), tokens) == want


def test_reset_starts_afresh() -> None:
    state = Conditions([7, 8], rows=2)
    assert admitted(state, [7, 8, 1]) == [T, F, F]
    state.gate.reset(0)
    assert admitted(state, [8, 7]) == [T, T]  # the old 7 is forgotten, too
    state.gate.reset(0)
    assert admitted(state, [8]) == [T]
    assert admitted(state, [1, 2], row=1) == [T, T]


def test_a_prompt_that_ends_with_the_end_of_thinking_is_not_perturbed() -> None:
    state = Conditions([7, 8])
    state.gate.reset(0, [1, 7, 8])
    assert admitted(state, [1, 2]) == [F, F]
    state.gate.reset(0, [7, 8, 1])  # an earlier turn's
    assert admitted(state, [1, 2]) == [T, T]


def test_white_space_after_the_end_of_thinking_changes_nothing() -> None:
    """As in a template that ends an empty thought with line feeds; each token is one space here."""
    text = StopText("</think>", [b" ", b"</think>", b"x"], 3, "cpu")
    assert text.after_prompt([2, 1, *[0] * 30]) == text.complete
    assert text.after_prompt([1, 2, *[0] * 30]) == 0


@pytest.mark.parametrize("back", [1, 2, 3])
def test_a_token_that_is_drawn_again_is_not_seen_twice(back: int) -> None:
    """After a reset the last positions are drawn again; the end 7 8 7 must not be found in 7 8 | 7 8."""
    plain, again = Conditions([7, 8, 7]), Conditions([7, 8, 7])
    tokens = [1, 7, 8, 8, 7, 8, 7, 2]
    row = torch.tensor([0])
    for count, token in enumerate(tokens):
        plain.observe(row, torch.tensor([token]))
        again.observe(row, torch.tensor([token]))
        if count >= back:
            again.next[0] -= back
            for repeated in tokens[count + 1 - back : count + 1]:
                again.observe(row, torch.tensor([repeated]))
        asked = torch.tensor([7])
        assert again.passes(row, asked, torch.zeros(1, 10)) == plain.passes(row, asked, torch.zeros(1, 10))
    assert not plain.opened(row, torch.zeros(1, 10))


def test_the_position_that_ended_thinking_is_drawn_again() -> None:
    state, row = Conditions([4]), torch.tensor([0])
    state.observe(row, torch.tensor([4]))
    assert not state.opened(row, torch.zeros(1, 10))
    state.next[0] = 0
    assert state.opened(row, torch.zeros(1, 10))
    state.observe(row, torch.tensor([5]))
    assert state.opened(row, torch.zeros(1, 10)), "now with another token"


def test_a_token_that_is_not_kept_is_not_seen() -> None:
    state, row, at = Conditions([7, 8]), torch.tensor([0]), torch.tensor([4])
    for token, kept in ((7, T), (3, F)):
        state.gate.observe(row, at, torch.tensor([token]), state.gate.matched(row, at), torch.tensor([kept]))
    assert state.gate.matched(row, at + 1).tolist() == [1], "7 of 7 8"


# --- entropy and protected tokens -----------------------------------------------------------------


def test_entropy_by_hand() -> None:
    """(1/2, 1/4, 1/4) has 1.5 ln 2 = 1.0397 nats; four equal tokens ln 4 = 1.3863; two of them 0.6931."""
    logits = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25] * 4, [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]).log()
    rows = torch.zeros(4, dtype=torch.int64)
    for least, want in [(0.0, [T, T, T, T]), (0.69, [T, T, T, F]), (0.70, [T, T, F, F])]:
        assert Conditions(entropy_min=least).passes(rows, rows, logits).tolist() == want
    for least, want in [(1.039, [T, T, F, F]), (1.040, [F, T, F, F]), (1.387, [F, F, F, F])]:
        assert Conditions(entropy_min=least).passes(rows, rows, logits).tolist() == want


def test_protect_ids_and_digits() -> None:
    def words() -> list[bytes]:
        return [text.encode() for text in ("a", "7", " x2", "", "²", "b", "beyond the logits 3")]

    assert protected_tokens(None, words, 6) is None
    assert protected_tokens("1,4", words, 6).tolist() == [F, T, F, F, T, F]
    assert protected_tokens(" 0, 5", words, 6).tolist() == [T, F, F, F, F, T]
    assert protected_tokens("digits", words, 6).tolist() == [F, T, T, F, T, F]
    padded = protected_tokens("digits", words, 9)  # logits are often padded beyond the tokenizer
    assert padded.tolist() == [F, T, T, F, T, F, T, F, F]


@pytest.mark.parametrize(
    ("protect", "says"),
    [
        ("digit", "protect='digit'.*'digits'.*separated by commas"),
        ("1,6", r"id 6.*\[0, 5\]"),
        ("-1", "'-1' is no token id"),
    ],
)
def test_protect_errors(protect: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        protected_tokens(protect, list, 6)


# --- the verdict: each condition alone closes a position -------------------------------------------------

V, ROWS, PROMPT = 10, 9, 4
PROPOSED, PROTECTED, THINKING_ENDS = 1, 7, (3, 5)
TOKENS = [b"a", b"b", b"c", b"</", b"d", b"think>", b"e", b"f", b"g", b"h"]


def bound(**options: Any) -> BoundGate:
    perturbation = create("gumbel", until="</think>", protect=str(PROTECTED), **options)
    return BoundGate(perturbation, lambda: TOKENS, V, ROWS, "cpu")


def test_each_condition_alone_closes_a_position() -> None:
    """Row by row: nothing against it; filtered; greedy for another token; greedy for this one; thinking has ended;
    protected; completes the end of thinking; the perturbation does not act; certain where entropy is asked for.
    """
    gate, slots = bound(entropy_min=1.0), torch.arange(ROWS)
    gate.reset(4, THINKING_ENDS)
    gate.reset(6, THINKING_ENDS[:1])
    logits = torch.zeros(ROWS, V)
    logits[8, 0] = 50.0
    proposed = torch.full((ROWS,), PROPOSED)
    proposed[5], proposed[6] = PROTECTED, THINKING_ENDS[1]
    acts, allowed = slots != 7, slots != 1
    greedy = torch.full((ROWS,), -1)
    greedy[2], greedy[3] = PROPOSED + 1, PROPOSED
    proposal = Proposal(InputEdit(proposed.unsqueeze(1), torch.ones(ROWS, 1)), proposed, acts)
    stands, fed = gate.verdict(step_with(logits), proposal, slots, torch.full((ROWS,), PROMPT), allowed, greedy)
    assert (~stands).nonzero().flatten().tolist() == [1, 2, 4, 8]
    assert (~fed).nonzero().flatten().tolist() == [1, 2, 4, 5, 6, 7, 8]


def test_the_host_selects_what_is_wanted_and_planned() -> None:
    seeds = np.arange(2000)
    gate, first = bound(rate=0.5, burn_in=1), np.full(2000, PROMPT)
    wanted = seeds % 2 == 0
    rows = gate.selected(Positions(seeds, first, first + 1), wanted)
    assert (rows % 2 == 0).all() and 400 < len(rows) < 600, "half of the wanted half"
    assert not len(gate.selected(Positions(seeds, first, first), wanted)), "the burn-in"
