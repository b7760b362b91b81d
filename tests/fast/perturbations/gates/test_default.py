# SPDX-License-Identifier: Apache-2.0
"""The default gate: the draw, the schedule, the conditions on tokens, and its verdict."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from perturbations import InputEdit, Positions, Proposal, create, streams
from perturbations.gates.default import BoundGate, GateOptions, StopText, protected_tokens
from tests.support.gate_steps import F, T, of_one, step_with


def selected_positions(gate: GateOptions, seed: int = 1, first: int = 5, end: int = 15) -> list[int]:
    """The positions from the first generated one to ``end`` that a gate selects."""
    positions = np.arange(first, end)
    is_selected = gate.selects(of_one(seed, first, positions))
    assert is_selected.dtype == bool
    assert is_selected.shape == positions.shape
    return positions[is_selected].tolist()


# --- the draw and the schedule --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]),
        (dict(rate=0.0), []),
        (dict(burn_in=3), [8, 9, 10, 11, 12, 13, 14]),
        (dict(burn_in=2, every=3), [7, 10, 13]),
        (dict(burn_in=9), [14]),
        (dict(burn_in=10), []),
        (dict(every=99), [5]),
    ],
    ids=str,
)
def test_schedule_by_hand(options: dict, expected: list[int]) -> None:
    """Positions 5 to 14 are generated, at a rate of 1 by default."""
    gate = GateOptions(**{"rate": 1.0, **options})
    assert selected_positions(gate) == expected


@pytest.fixture
def drawn_positions() -> list[int]:
    """The positions of 60 at which the gate's stream of a trajectory draws less than 0.4."""
    keys = streams.keys(torch.tensor(-9), torch.arange(60), streams.Stream.GATE)
    is_drawn = streams.uniform(keys, 1).flatten() < 0.4
    positions = is_drawn.nonzero().flatten().tolist()
    assert 10 < len(positions) < 40
    return positions


def test_the_draw_is_the_gate_stream_at_absolute_positions(drawn_positions: list[int]) -> None:
    """Burn-in removes positions and changes no draw."""
    selected = selected_positions(GateOptions(rate=0.4, burn_in=4), seed=-9, first=20, end=60)
    assert selected == [position for position in drawn_positions if position >= 24]


def test_the_stride_changes_no_draw(drawn_positions: list[int]) -> None:
    selected = selected_positions(GateOptions(rate=0.4, every=2), seed=-9, first=20, end=60)
    assert selected == [position for position in drawn_positions if position >= 20 and position % 2 == 0]


# --- until ----------------------------------------------------------------------------------------


class Conditions:
    """A bound gate that is asked and told of the next position of each row, as generation does.

    The ten tokens are the digits; ``until`` is a text of digits, as tokens.
    """

    def __init__(self, until: list[int] | None = None, entropy_min: float | None = None, rows: int = 1) -> None:
        text = "".join(map(str, until or [])) or None
        options = GateOptions(until=text, entropy_min=entropy_min)
        digits = [str(digit).encode() for digit in range(10)]
        self.gate = BoundGate(options, lambda: digits, 10, rows, "cpu")
        self.next = torch.zeros(8, dtype=torch.int64)

    def opened(self, rows: Tensor, logits: Tensor) -> Tensor:
        step = dataclasses.replace(step_with(logits), positions=self.next[rows])
        return self.gate.open(rows, step, torch.zeros_like(rows))

    def feeds(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return self.gate.feeds(tokens, self.gate.matched(rows, self.next[rows]))

    def passes(self, rows: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        """Which positions are fed perturbed: the gate is open, and the proposed token may be."""
        return self.opened(rows, logits) & self.feeds(rows, tokens)

    def observe(self, rows: Tensor, tokens: Tensor) -> None:
        positions = self.next[rows]
        self.gate.observe(rows, positions, tokens, self.gate.matched(rows, positions))
        self.next[rows] += 1


ROW = torch.tensor([0])
EQUAL_LOGITS = torch.zeros(1, 10)


def admitted(state: Conditions, tokens: list[int], row: int = 0) -> list[bool]:
    """Feeds a row its tokens one by one, as generation does: asked first, then told."""
    passed = []
    for token in tokens:
        passes = state.passes(torch.tensor([row]), torch.tensor([token]), EQUAL_LOGITS)
        passed.append(bool(passes))
        state.observe(torch.tensor([row]), torch.tensor([token]))
    return passed


@pytest.mark.parametrize(
    ("until", "tokens", "expected"),
    [
        pytest.param(
            [4],
            [1, 4, 1, 2],
            [T, F, F, F],
            id="one token",
        ),
        pytest.param(
            [7, 8],
            [7, 5, 7, 8, 9, 7],
            [T, T, T, F, F, F],
            id="two tokens",
        ),
        pytest.param(
            [1, 1, 2],
            [1, 1, 1, 2, 5, 1],
            [T, T, T, F, F, F],
            id="aab in aaab",
        ),
        pytest.param(
            [1, 2, 1, 3],
            [1, 2, 1, 2, 1, 3, 0],
            [T, T, T, T, T, F, F],
            id="abac in ababac",
        ),
        pytest.param(
            [],
            [1, 2, 3],
            [T, T, T],
            id="never",
        ),
    ],
)
def test_until_ends_at_the_token_that_completes_it(until: list[int], tokens: list[int], expected: list[bool]) -> None:
    assert admitted(Conditions(until), tokens) == expected


def test_reset_starts_afresh() -> None:
    state = Conditions([7, 8], rows=2)
    assert admitted(state, [7, 8, 1]) == [T, F, F]
    state.gate.reset(0)
    assert admitted(state, [8, 7]) == [T, T]
    state.gate.reset(0)
    assert admitted(state, [8]) == [T], "the old 7 is forgotten, too"
    assert admitted(state, [1, 2], row=1) == [T, T]


def test_a_prompt_that_ends_with_the_end_of_thinking_is_not_perturbed() -> None:
    state = Conditions([7, 8])
    state.gate.reset(0, [1, 7, 8])
    assert admitted(state, [1, 2]) == [F, F]


def test_the_end_of_thinking_of_an_earlier_turn_does_not_matter() -> None:
    state = Conditions([7, 8])
    state.gate.reset(0, [7, 8, 1])
    assert admitted(state, [1, 2]) == [T, T]


def test_white_space_after_the_end_of_thinking_changes_nothing() -> None:
    """As in a template that ends an empty thought with line feeds; each token is one space here."""
    stop = StopText("</think>", [b" ", b"</think>", b"x"], 3, "cpu")
    spaces = [0] * 30
    assert stop.after_prompt([2, 1, *spaces]) == stop.complete
    assert stop.after_prompt([1, 2, *spaces]) == 0


@pytest.mark.parametrize("back", [1, 2, 3])
def test_a_token_that_is_drawn_again_is_not_seen_twice(back: int) -> None:
    """After a reset the last positions are drawn again; the end 7 8 7 must not be found in 7 8 | 7 8."""
    undisturbed = Conditions([7, 8, 7])
    repeating = Conditions([7, 8, 7])
    tokens = [1, 7, 8, 8, 7, 8, 7, 2]
    next_token = torch.tensor([7])
    for count, token in enumerate(tokens, start=1):
        undisturbed.observe(ROW, torch.tensor([token]))
        repeating.observe(ROW, torch.tensor([token]))
        if count > back:
            repeating.next[0] -= back
            for repeated in tokens[count - back : count]:
                repeating.observe(ROW, torch.tensor([repeated]))
        expected = undisturbed.passes(ROW, next_token, EQUAL_LOGITS)
        assert repeating.passes(ROW, next_token, EQUAL_LOGITS) == expected
    assert not undisturbed.opened(ROW, EQUAL_LOGITS)


def test_the_position_that_ended_thinking_is_drawn_again() -> None:
    state = Conditions([4])
    state.observe(ROW, torch.tensor([4]))
    assert not state.opened(ROW, EQUAL_LOGITS)
    state.next[0] = 0
    assert state.opened(ROW, EQUAL_LOGITS)
    state.observe(ROW, torch.tensor([5]))
    assert state.opened(ROW, EQUAL_LOGITS), "now with another token"


def test_a_token_that_is_not_kept_is_not_seen() -> None:
    """Of 7, which is kept, and 3, which is not, at the same position: one token of 7 8 is matched."""
    gate = Conditions([7, 8]).gate
    position = torch.tensor([4])
    gate.observe(ROW, position, torch.tensor([7]), gate.matched(ROW, position), torch.tensor([True]))
    gate.observe(ROW, position, torch.tensor([3]), gate.matched(ROW, position), torch.tensor([False]))
    assert gate.matched(ROW, position + 1).tolist() == [1]


# --- entropy and protected tokens -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("entropy_min", "expected"),
    [
        (0.0, [T, T, T, T]),
        (0.69, [T, T, T, F]),
        (0.70, [T, T, F, F]),
        (1.039, [T, T, F, F]),
        (1.040, [F, T, F, F]),
        (1.387, [F, F, F, F]),
    ],
)
def test_entropy_by_hand(entropy_min: float, expected: list[bool]) -> None:
    """(1/2, 1/4, 1/4) has 1.5 ln 2 = 1.0397 nats; four equal tokens ln 4 = 1.3863; two of them 0.6931."""
    probabilities = torch.tensor(
        [
            [0.5, 0.25, 0.25, 0.0],
            [0.25, 0.25, 0.25, 0.25],
            [0.5, 0.5, 0.0, 0.0],
            [1.0, 0.0, 0.0, 0.0],
        ]
    )
    rows = torch.zeros(4, dtype=torch.int64)
    tokens = torch.zeros(4, dtype=torch.int64)
    state = Conditions(entropy_min=entropy_min)
    assert state.passes(rows, tokens, probabilities.log()).tolist() == expected


def words() -> list[bytes]:
    """Seven tokens, of which the last is beyond the logits of a vocabulary of six."""
    texts = ("a", "7", " x2", "", "²", "b", "beyond the logits 3")
    return [text.encode() for text in texts]


def test_nothing_is_protected_by_default() -> None:
    assert protected_tokens(None, words, 6) is None


@pytest.mark.parametrize(
    ("protect", "vocabulary", "expected"),
    [
        ("1,4", 6, [F, T, F, F, T, F]),
        (" 0, 5", 6, [T, F, F, F, F, T]),
        ("digits", 6, [F, T, T, F, T, F]),
        # Logits are often padded beyond the tokenizer.
        ("digits", 9, [F, T, T, F, T, F, T, F, F]),
    ],
)
def test_protect_ids_and_digits(protect: str, vocabulary: int, expected: list[bool]) -> None:
    assert protected_tokens(protect, words, vocabulary).tolist() == expected


@pytest.mark.parametrize(
    ("protect", "message"),
    [
        ("digit", "protect='digit'.*'digits'.*separated by commas"),
        ("1,6", r"id 6.*\[0, 5\]"),
        ("-1", "'-1' is no token id"),
    ],
)
def test_protect_errors(protect: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        protected_tokens(protect, list, 6)


# --- the verdict: each condition alone closes a position -------------------------------------------------

V = 10
PROMPT = 4
TOKENS = [b"a", b"b", b"c", b"</", b"d", b"think>", b"e", b"f", b"g", b"h"]
PROPOSED = 1
PROTECTED = 7
THINKING_ENDS = (3, 5)

# The rows of the batch, by what is against feeding them perturbed.
NOTHING = 0
FILTERED = 1
GREEDY_FOR_ANOTHER_TOKEN = 2
GREEDY_FOR_THIS_TOKEN = 3  # which is nothing against it
THINKING_HAS_ENDED = 4
PROTECTED_TOKEN = 5
COMPLETES_THE_END_OF_THINKING = 6
PERTURBATION_DOES_NOT_ACT = 7
CERTAIN = 8
ROWS = 9


def bound(**options: Any) -> BoundGate:
    perturbation = create("gumbel", until="</think>", protect=str(PROTECTED), **options)
    return BoundGate(perturbation, lambda: TOKENS, V, ROWS, "cpu")


def test_each_condition_alone_closes_a_position() -> None:
    slots = torch.arange(ROWS)
    gate = bound(entropy_min=1.0)
    gate.reset(THINKING_HAS_ENDED, THINKING_ENDS)
    gate.reset(COMPLETES_THE_END_OF_THINKING, THINKING_ENDS[:1])
    logits = torch.zeros(ROWS, V)
    logits[CERTAIN, 0] = 50.0
    proposed = torch.full((ROWS,), PROPOSED)
    proposed[PROTECTED_TOKEN] = PROTECTED
    proposed[COMPLETES_THE_END_OF_THINKING] = THINKING_ENDS[1]
    greedy = torch.full((ROWS,), -1)
    greedy[GREEDY_FOR_ANOTHER_TOKEN] = PROPOSED + 1
    greedy[GREEDY_FOR_THIS_TOKEN] = PROPOSED
    proposal = Proposal(
        edit=InputEdit(proposed.unsqueeze(1), torch.ones(ROWS, 1)),
        tokens=proposed,
        acts=slots != PERTURBATION_DOES_NOT_ACT,
    )
    first_generated = torch.full((ROWS,), PROMPT)
    is_allowed = slots != FILTERED

    stands_in_text, is_fed = gate.verdict(step_with(logits), proposal, slots, first_generated, is_allowed, greedy)
    closed_in_text = (~stands_in_text).nonzero().flatten().tolist()
    assert closed_in_text == [FILTERED, GREEDY_FOR_ANOTHER_TOKEN, THINKING_HAS_ENDED, CERTAIN]
    assert (~is_fed).nonzero().flatten().tolist() == [
        FILTERED,
        GREEDY_FOR_ANOTHER_TOKEN,
        THINKING_HAS_ENDED,
        PROTECTED_TOKEN,
        COMPLETES_THE_END_OF_THINKING,
        PERTURBATION_DOES_NOT_ACT,
        CERTAIN,
    ]


def test_the_host_selects_what_is_wanted_and_planned() -> None:
    """2,000 trajectories, of which those with an even seed are wanted; half of these are drawn."""
    seeds = np.arange(2000)
    first_generated = np.full(2000, PROMPT)
    is_wanted = seeds % 2 == 0
    gate = bound(rate=0.5, burn_in=1)
    rows = gate.selected(Positions(seeds, first_generated, first_generated + 1), is_wanted)
    assert (rows % 2 == 0).all()
    assert 400 < len(rows) < 600

    within_burn_in = Positions(seeds, first_generated, first_generated)
    assert not len(gate.selected(within_burn_in, is_wanted))
