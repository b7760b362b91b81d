# SPDX-License-Identifier: Apache-2.0
"""A position at which one token is allowed: it is drawn, whatever its key."""

from __future__ import annotations

import pytest
import torch

from ngrpo.rollout import sample_tokens as module
from ngrpo.rollout.sample_tokens import exponentials, sample_by_blocks, sample_tokens
from tests.fast.forced_key import _WORD, key_of


@pytest.mark.parametrize("hashed", [_WORD, _WORD - 127, _WORD - 128, _WORD - 300, 1 << 31, 1, 0])
@pytest.mark.parametrize("token", [0, 3, 41_000])
def test_the_only_allowed_token_is_drawn_with_the_very_key(
    monkeypatch: pytest.MonkeyPatch, token: int, hashed: int
) -> None:
    """Of the 2^32 hashes the 128 largest round to a share of 1, whose exponential would be infinite."""
    keys = torch.tensor([key_of(token, hashed), key_of(token, hashed, first=77), 12345])
    draws = exponentials(keys, 49_152)
    assert draws.isfinite().all() and (draws > 0.0).all()
    expected = min(hashed + 0.5, (1 << 32) - 256) * 2.0**-32
    assert draws[:2, token].tolist() == pytest.approx([-torch.tensor(-expected).double().log1p().item()] * 2, rel=1e-4)
    drawable = torch.full((3, 49_152), -torch.inf)
    drawable[:, token] = -4.0
    monkeypatch.setattr(module, "_COMPILED_FROM", 1 << 20)
    for sample in (sample_tokens, sample_by_blocks):
        tokens, known = sample(drawable, None, keys)
        assert tokens.tolist() == [token] * 3 and known.log_total.tolist() == [-4.0] * 3


def test_the_largest_draw_is_the_least_likely_one_and_no_more() -> None:
    """−ln 2^-24 = 16.6: such a token loses against one that is as likely, and is not ruled out."""
    token, rival = 3, 4
    key = torch.tensor([key_of(token, _WORD)])
    draws = exponentials(key, 8)[0]
    assert draws[token].item() == pytest.approx(16.635532, abs=1e-5) and draws.argmax() == token
    drawable = torch.full((1, 8), -torch.inf)
    drawable[0, token], drawable[0, rival] = 40.0, 0.0
    assert sample_tokens(drawable, None, key)[0] == token
