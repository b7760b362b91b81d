# SPDX-License-Identifier: Apache-2.0
"""Draws among few tokens: not compiled, and the same for a row in any batch."""

from __future__ import annotations

import pytest
import torch

from ngrpo.rollout import sample_tokens as module


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The vocabularies whose scores were asked of the compiled function."""
    seen: list[int] = []

    def scored(drawable: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(drawable.shape[-1])
        return module._scores(drawable, *rest)

    monkeypatch.setattr(module, "_scored", scored)
    return seen


def inputs(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, tokens, generator=draw), torch.randint(0, 2**62, (rows,), generator=draw)


@pytest.mark.parametrize("rows", [1, 64])
def test_the_vocabulary_alone_decides(compiled: list[int], rows: int) -> None:
    for tokens in (2, 155, module._COMPILED_FROM - 1, module._COMPILED_FROM):
        logits, keys = inputs(rows, tokens)
        module.sample_tokens(logits, logits, keys)
    assert compiled == [module._COMPILED_FROM]


def test_a_row_is_the_same_in_any_batch() -> None:
    logits, keys = inputs(37, 155)
    tokens, totals = module.sample_tokens(logits, logits, keys)
    for row in range(len(keys)):
        alone = logits[row : row + 1]
        token, total = module.sample_tokens(alone, alone, keys[row : row + 1])
        assert token.item() == tokens[row].item() and torch.equal(total, totals[row : row + 1])
    assert torch.allclose(totals, logits.double().exp().sum(-1).log().float(), atol=1e-6)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(20000, 1)
    drawn, _ = module.sample_tokens(logits, logits, torch.randint(0, 2**62, (20000,), generator=torch.Generator()))
    shares = torch.bincount(drawn, minlength=4) / 20000
    assert torch.allclose(shares, logits[0].exp(), atol=4 * (0.25 / 20000) ** 0.5)
