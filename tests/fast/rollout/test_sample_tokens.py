# SPDX-License-Identifier: Apache-2.0
"""Which tokens a step of a rollout draws, and what the gate hears of them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.decoding import Decoding
from ngrpo.rollout import sample_tokens as module
from ngrpo.rollout.sample_tokens import exponentials, sample_by_blocks, sample_tokens
from perturbations import create, streams

BATCH = 4
PROMPT = 20
FLAT = torch.zeros(BATCH, 1024)


def tokens_of_step(
    decoding: Decoding,
    drawable: Tensor | None = None,
    greedy: list[int] | None = None,
    discard: bool = False,
    position: int = PROMPT,
) -> list[int]:
    """The token of each response at a position, at temperature 1 and with equal logits."""
    ones = np.ones(BATCH, dtype=np.int64)
    decoding.perturber.begin(decoding.requests, (position - 1) * ones, ones, np.full(BATCH, discard))
    greedy_tokens = None if greedy is None else torch.tensor(greedy)
    return decoding.perturber.finish(FLAT, torch.ones(BATCH), drawable, greedy_tokens).tolist()


def test_a_token_is_drawn_from_its_own_stream_at_its_own_position() -> None:
    decoding = Decoding(create("none"), BATCH)
    seeds = 1000 + torch.arange(BATCH)
    for position in (PROMPT, PROMPT + 1):
        keys = streams.keys(seeds, torch.tensor(position), streams.Stream.TOKEN)
        drawn, _ = sample_tokens(FLAT, None, keys)
        assert tokens_of_step(decoding, position=position) == drawn.tolist()


def test_a_greedy_token_may_be_token_0() -> None:
    decoding = Decoding(create("none"), BATCH)
    assert tokens_of_step(decoding, greedy=[0, 7, 0, 0]) == [0, 7, 0, 0]


def test_what_a_filter_cut_is_never_proposed() -> None:
    """A perturbation proposes among all tokens; where the request allows one alone, that one stands."""
    only_token_5 = torch.full_like(FLAT, -torch.inf)
    only_token_5[:, 5] = 0.0
    decoding = Decoding(create("gumbel", burn_in=0), BATCH)
    assert tokens_of_step(decoding, only_token_5) == [5] * BATCH


@pytest.mark.parametrize("name", ["gumbel", "gaussian", "soft"])
def test_a_token_that_a_thinking_budget_forces_is_ordinary(name: str) -> None:
    """Row 1's, of 1e9 divided by a temperature of 2; perturbations that write no other token are ordinary there too."""
    forced = FLAT.clone()
    forced[1, 5] = 1e9 / 2
    ones = np.ones(BATCH, dtype=np.int64)
    decoding = Decoding(create(name, rate=1.0, burn_in=0), BATCH)

    decoding.perturber.begin(decoding.requests, (PROMPT - 1) * ones, ones, np.full(BATCH, False))
    tokens = decoding.perturber.finish(forced, torch.full((BATCH,), 2.0), None, None)
    decoding.perturber.pending.drain(until=1)

    assert tokens[1] == 5
    records = [decoding.perturber._store.record(request)[0] for request in decoding.requests]
    assert [len(record) for record in records] == [1, 0, 1, 1]


@pytest.mark.parametrize("discard", [True, False])
def test_the_gate_hears_nothing_of_a_token_that_is_thrown_away(discard: bool) -> None:
    """Of a prompt in chunks, whose sample is discarded: each token is the a of ab."""
    decoding = Decoding(create("gumbel", until="ab", rate=0.5), BATCH)
    tokens_of_step(decoding, greedy=[1] * BATCH, discard=discard)
    has_heard_the_a = (decoding.perturber._gate.state[1] == 1).any().item()
    assert has_heard_the_a is not discard


# --- the draw itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "draw"), [(-1, 16.635532), (0, 2.0**-33)], ids=["largest", "smallest"])
def test_the_largest_and_the_smallest_draw_are_finite_and_rule_no_token_out(
    monkeypatch: pytest.MonkeyPatch, bits: int, draw: float
) -> None:
    """Of the 2^32 hashes the 128 largest round to a share of 1, taken as 1 - 2^-24: −ln 2^-24 = 16.6."""
    monkeypatch.setattr(module, "_mix32", lambda x: torch.full_like(x, bits))
    key = torch.zeros(1, dtype=torch.int64)
    assert exponentials(key, 8).tolist() == [pytest.approx([draw] * 8, rel=1e-6)]

    only_token_3 = torch.full((1, 155), -torch.inf)
    only_token_3[0, 3] = -4.0
    for sample in (sample_tokens, sample_by_blocks):
        tokens, statistics = sample(only_token_3, None, key)
        assert tokens.tolist() == [3]
        assert statistics.log_total.tolist() == [-4.0]


def test_a_row_is_the_same_in_any_batch() -> None:
    draws = torch.Generator().manual_seed(37)
    logits = torch.randn(37, 155, generator=draws)
    keys = torch.randint(0, 2**62, (37,), generator=draws)

    tokens, statistics = sample_tokens(logits, None, keys)

    for row in range(37):
        token, own_statistics = sample_tokens(logits[row : row + 1], None, keys[row : row + 1])
        assert token.item() == tokens[row].item()
        assert torch.equal(own_statistics.log_total, statistics.log_total[row : row + 1])
    log_totals = logits.double().exp().sum(-1).log().float()
    assert torch.allclose(statistics.log_total, log_totals, atol=1e-6)
