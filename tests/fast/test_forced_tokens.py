# SPDX-License-Identifier: Apache-2.0
"""Draws: the only token that is allowed, whatever its key; and among few tokens, the same in any batch."""

import pytest
import torch

from ngrpo.rollout import sample_tokens as module
from ngrpo.rollout.sample_tokens import exponentials, sample_by_blocks, sample_tokens

_WORD = (1 << 32) - 1


def _inverted(x: int) -> int:
    """The number whose hash, lowbias32, is x: each of its steps undone."""
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 1 << 32) & _WORD
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 1 << 32) & _WORD
    return x ^ x >> 16


def key_of(token: int, hashed: int, first: int = 0) -> int:
    """A key, as int64, under which ``token``'s hash is ``hashed``: mix(mix(token ^ first) + second)."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & _WORD
        x = (x ^ x >> 15) * 0x846CA68B & _WORD
        return x ^ x >> 16

    second = (_inverted(hashed) - mixed(token ^ first)) & _WORD
    assert mixed((mixed(token ^ first) + second) & _WORD) == hashed
    key = second << 32 | first
    return key - (1 << 64) if key >> 63 else key


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


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The vocabularies whose sums were asked of the compiled function."""
    seen: list[int] = []

    def sums(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(logits.shape[-1])
        return module.block_sums(logits)

    monkeypatch.setattr(module, "_fast_sums", sums)
    monkeypatch.setattr(module, "_fast_least", module._least)
    return seen


def inputs(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, tokens, generator=draw), torch.randint(0, 2**62, (rows,), generator=draw)


@pytest.mark.parametrize("rows", [1, 64])
def test_the_vocabulary_alone_decides(compiled: list[int], rows: int) -> None:
    for tokens in (2, 155, module._COMPILED_FROM - 1, module._COMPILED_FROM):
        logits, keys = inputs(rows, tokens)
        module.sample_tokens(logits, None, keys)
    assert compiled == [module._COMPILED_FROM]


def test_a_row_is_the_same_in_any_batch() -> None:
    logits, keys = inputs(37, 155)
    tokens, known = module.sample_tokens(logits, None, keys)
    for row in range(len(keys)):
        alone = logits[row : row + 1]
        token, of_row = module.sample_tokens(alone, None, keys[row : row + 1])
        assert token.item() == tokens[row].item() and torch.equal(of_row.log_total, known.log_total[row : row + 1])
    assert torch.allclose(known.log_total, logits.double().exp().sum(-1).log().float(), atol=1e-6)
