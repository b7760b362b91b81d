# SPDX-License-Identifier: Apache-2.0
"""Draws among few tokens: not compiled, and the same for a row in any batch."""

from __future__ import annotations

import pytest
import torch

from ngrpo.rollout import sample_tokens as module


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


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(20000, 1)
    drawn, _ = module.sample_tokens(logits, None, torch.randint(0, 2**62, (20000,), generator=torch.Generator()))
    shares = torch.bincount(drawn, minlength=4) / 20000
    assert torch.allclose(shares, logits[0].exp(), atol=4 * (0.25 / 20000) ** 0.5)
