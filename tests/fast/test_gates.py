"""Gates: the draw, the schedule, and the conditions on tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from perturbations import streams
from perturbations.gates import Gate, TokenConditions, protected_tokens


def positions(gate: Gate, seed: int = 1, first: int = 5, length: int = 15) -> list[int]:
    planned = gate.plan(seed, first, length)
    assert planned.dtype == bool and planned.shape == (length,)
    return np.flatnonzero(planned).tolist()


# --- the draw and the schedule --------------------------------------------------------------------


def test_rate_0_and_1() -> None:
    assert positions(Gate(0.0)) == []
    assert positions(Gate(1.0)) == list(range(5, 15))


@pytest.mark.parametrize(
    ("options", "want"),
    [
        (dict(burn_in=3), [8, 9, 10, 11, 12, 13, 14]),
        (dict(every=3), [5, 8, 11, 14]),
        (dict(burn_in=2, every=3), [7, 10, 13]),
        (dict(burn_in=9), [14]),
        (dict(burn_in=10), []),
        (dict(burn_in=99), []),
        (dict(every=99), [5]),
    ],
)
def test_schedule_by_hand(options: dict, want: list[int]) -> None:
    assert positions(Gate(1.0, **options)) == want


def test_nothing_is_planned_without_generated_positions() -> None:
    assert positions(Gate(1.0), first=15) == []
    assert positions(Gate(1.0), first=20) == []


def test_rate_is_that_of_fair_coins() -> None:
    """2,000 trajectories of 200 positions at ρ = 0.1, by totals, by position and by trajectory."""
    rate, rows, length = 0.1, 2000, 200
    plan = np.stack([Gate(rate).plan(streams.trajectory_seed(7, i), 0, length) for i in range(rows)])
    spread = rate * (1 - rate)
    assert plan.mean() == pytest.approx(rate, abs=4 * math.sqrt(spread / plan.size))
    for axis, n, count in ((0, rows, length), (1, length, rows)):
        chi = (((plan.sum(axis) - n * rate) ** 2) / (n * spread)).sum()  # chi-squared with `count` degrees
        assert abs(chi - count) < 4 * math.sqrt(2 * count)
    together = (plan[:, 1:] & plan[:, :-1]).mean()
    assert together == pytest.approx(rate**2, abs=4 * math.sqrt(rate**2 / plan.size))


def test_the_draw_is_the_gate_stream_at_absolute_positions() -> None:
    keys = streams.keys(torch.tensor(-9), torch.arange(60), streams.Stream.GATE)
    chosen = torch.nonzero(streams.uniform(keys, 1).flatten() < 0.4).flatten().tolist()
    assert 10 < len(chosen) < 40
    assert positions(Gate(0.4), -9, 20, 60) == [p for p in chosen if p >= 20]
    # Burn-in and the stride remove positions and change no draw.
    assert positions(Gate(0.4, burn_in=4), -9, 20, 60) == [p for p in chosen if p >= 24]
    assert positions(Gate(0.4, every=2), -9, 20, 60) == [p for p in chosen if p >= 20 and p % 2 == 0]


def test_a_longer_plan_begins_with_the_shorter_one() -> None:
    assert (Gate(0.5).plan(3, 4, 100)[:40] == Gate(0.5).plan(3, 4, 40)).all()


def test_a_higher_rate_adds_positions_and_seeds_differ() -> None:
    assert set(positions(Gate(0.2), 1, 0, 500)) < set(positions(Gate(0.5), 1, 0, 500))
    assert positions(Gate(0.5), 1, 0, 500) != positions(Gate(0.5), 2, 0, 500)


# --- until ----------------------------------------------------------------------------------------


def conditions(until=(), protected=None, entropy_min=None, rows: int = 1) -> TokenConditions:
    return TokenConditions(until, protected, entropy_min, rows, "cpu")


def passes(state: TokenConditions, rows: torch.Tensor, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Which positions are fed perturbed: the gate is open, and the proposed token may be mixed."""
    return state.open(rows, logits) & state.mixes(rows, tokens)


def admitted(state: TokenConditions, tokens: list[int], row: int = 0) -> list[bool]:
    """Feeds a row its tokens one by one, as generation does: asked first, then told."""
    result = []
    for token in tokens:
        rows, one = torch.tensor([row]), torch.tensor([token])
        result.append(bool(passes(state, rows, one, torch.zeros(1, 10))))
        state.observe(rows, one)
    return result


T, F = True, False


@pytest.mark.parametrize(
    ("until", "tokens", "want"),
    [
        ([4], [1, 4, 1, 2], [T, F, F, F]),
        ([7, 8], [7, 5, 7, 8, 9, 7], [T, T, T, F, F, F]),
        ([7, 8, 9], [7, 8, 7, 8, 9, 1], [T, T, T, T, F, F]),
        ([1, 1, 2], [1, 1, 1, 2, 5, 1], [T, T, T, F, F, F]),  # "aab" in "aaab"
        ([1, 2, 1, 3], [1, 2, 1, 2, 1, 3, 0], [T, T, T, T, T, F, F]),  # "abac" in "ababac"
        ([1, 1], [1, 2, 1, 1, 2], [T, T, T, F, F]),
        ([5], [1, 2, 3], [T, T, T]),
        ([], [1, 2, 3], [T, T, T]),
    ],
)
def test_until_ends_at_the_token_that_completes_it(until: list[int], tokens: list[int], want: list[bool]) -> None:
    assert admitted(conditions(until), tokens) == want


def test_the_gate_stays_open_until_the_end_was_produced() -> None:
    """The token that completes the end stands in the text but is fed as it is; only then does the gate close."""
    state = conditions([4])
    rows, end = torch.tensor([0]), torch.tensor([4])
    assert state.open(rows, torch.zeros(1, 10))
    assert not state.mixes(rows, end)
    state.observe(rows, torch.tensor([3]))  # proposed, but not produced
    assert state.open(rows, torch.zeros(1, 10))
    state.observe(rows, end)
    assert not state.open(rows, torch.zeros(1, 10))
    state.reset(0)
    assert passes(state, rows, torch.tensor([1]), torch.zeros(1, 10))


def test_rows_are_independent_whatever_their_order() -> None:
    state = conditions([7, 8], rows=3)
    state.observe(torch.tensor([2, 0, 1]), torch.tensor([7, 5, 7]))
    state.observe(torch.tensor([0, 1]), torch.tensor([8, 3]))
    passed = passes(state, torch.tensor([1, 2, 0, 2]), torch.tensor([8, 8, 8, 7]), torch.zeros(4, 10))
    assert passed.tolist() == [T, F, T, T]
    state.observe(torch.tensor([2]), torch.tensor([8]))
    assert passes(state, torch.tensor([0, 1, 2]), torch.tensor([1, 1, 1]), torch.zeros(3, 10)).tolist() == [
        T,
        T,
        F,
    ]


def test_reset_starts_afresh() -> None:
    state = conditions([7, 8], rows=2)
    assert admitted(state, [7, 8, 1]) == [T, F, F]
    state.reset(0)
    assert admitted(state, [8, 7]) == [T, T]  # the old 7 is forgotten, too
    state.reset(0)
    assert admitted(state, [8]) == [T]
    assert admitted(state, [1, 2], row=1) == [T, T]


def test_grow_keeps_the_state() -> None:
    state = conditions([7, 8], rows=2)
    state.observe(torch.tensor([0, 1]), torch.tensor([7, 7]))
    state.observe(torch.tensor([1]), torch.tensor([8]))
    state.grow(4)
    rows = torch.tensor([0, 1, 2, 3])
    assert passes(state, rows, torch.tensor([8, 1, 8, 8]), torch.zeros(4, 10)).tolist() == [F, F, T, T]


def test_trivial_and_tracks_tokens() -> None:
    assert conditions().trivial and not conditions().tracks_tokens
    assert not conditions([1]).trivial and conditions([1]).tracks_tokens
    for state in (conditions(entropy_min=0.0), conditions(protected=torch.zeros(3, dtype=torch.bool))):
        assert not state.trivial and not state.tracks_tokens


# --- entropy and protected tokens -----------------------------------------------------------------


def test_entropy_by_hand() -> None:
    """(1/2, 1/4, 1/4) has 1.5 ln 2 = 1.0397 nats; four equal tokens ln 4 = 1.3863; two of them 0.6931."""
    logits = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25] * 4, [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]).log()
    rows = torch.zeros(4, dtype=torch.int64)
    for least, want in [(0.0, [T, T, T, T]), (0.69, [T, T, T, F]), (0.70, [T, T, F, F])]:
        assert passes(conditions(entropy_min=least), rows, rows, logits).tolist() == want
    for least, want in [(1.039, [T, T, F, F]), (1.040, [F, T, F, F]), (1.387, [F, F, F, F])]:
        assert passes(conditions(entropy_min=least), rows, rows, logits).tolist() == want


def test_conditions_must_all_agree() -> None:
    state = conditions([4], torch.tensor([F, T, F, F, F]), entropy_min=1.0)
    flat, peaked = torch.zeros(5), torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0])
    logits = torch.stack([flat, flat, flat, peaked])
    assert passes(state, torch.zeros(4, dtype=torch.int64), torch.tensor([2, 1, 4, 2]), logits).tolist() == [
        T,
        F,
        F,
        F,
    ]


def test_protect_ids_and_digits() -> None:
    def words() -> list[str]:
        return ["a", "7", " x2", "", "²", "b", "beyond the logits 3"]

    assert protected_tokens(None, words, 6) is None
    assert protected_tokens("1,4", words, 6).tolist() == [F, T, F, F, T, F]
    assert protected_tokens(" 0, 5", words, 6).tolist() == [T, F, F, F, F, T]
    assert protected_tokens("digits", words, 6).tolist() == [F, T, T, F, T, F]
    padded = protected_tokens("digits", words, 9)  # logits are often padded beyond the tokenizer
    assert padded.tolist() == [F, T, T, F, T, F, T, F, F]


@pytest.mark.parametrize(
    ("protect", "words"),
    [
        ("digit", ["protect='digit'", "'digits'", "separated by commas"]),
        ("1;2", ["protect='1;2'", "separated by commas"]),
        ("", ["protect=''"]),
        ("1,6", ["id 6", "[0, 5]"]),
        ("-1", ["id -1", "[0, 5]"]),
    ],
)
def test_protect_errors(protect: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        protected_tokens(protect, list, 6)
    for word in words:
        assert word in str(error.value)
