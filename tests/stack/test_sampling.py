# SPDX-License-Identifier: Apache-2.0
"""Token draws: the categorical distribution, whatever the batch, compiled or not. (torch.compile needs a compiler.)"""

import torch

from ngrpo.rollout.sample_tokens import exponentials, sample_tokens
from perturbations import streams

DRAWS = 200_000
PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


def many_keys(count: int = DRAWS) -> torch.Tensor:
    """The keys of one trajectory's positions, with which a rollout draws its tokens."""
    return streams.keys(torch.tensor(3), torch.arange(count), streams.Stream.TOKEN)


def test_tokens_follow_the_distribution() -> None:
    logits = PROBABILITIES.log().expand(DRAWS, 5).contiguous()
    tokens, scores = sample_tokens(logits, None, many_keys())
    counts = torch.bincount(tokens, minlength=5).double()
    expected = DRAWS * PROBABILITIES
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 18.5, "with 4 degrees of freedom, 0.1% of fair samples exceed this"
    assert torch.allclose(scores.log_total, torch.zeros(DRAWS), atol=1e-5)


def test_the_hash_is_that_of_unsigned_32_bit_numbers() -> None:
    """The expected draws are of lowbias32 over Python's own integers. Eager and compiled give their very bits."""
    low_bits = (1 << 32) - 1

    def lowbias32(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D & low_bits
        x = (x ^ (x >> 15)) * 0x846CA68B & low_bits
        return x ^ (x >> 16)

    keys = many_keys(50)
    vocabulary = 64
    draws = exponentials(keys, vocabulary)
    compiled = torch.compile(exponentials, dynamic=True)
    assert torch.equal(draws, compiled(keys, vocabulary))
    for key, row in zip(keys.tolist(), draws):
        unsigned = key % (1 << 64)
        low = unsigned & low_bits
        high = unsigned >> 32
        hashes = []
        for token in range(vocabulary):
            first = lowbias32(token ^ low)
            hashes.append(lowbias32((first + high) & low_bits))
        # float32 rounds the integer of 32 bits, and nothing else may round: 1 - u may be within 2^-24 of 0.
        unit = (torch.tensor(hashes).float() + 0.5) * 2.0**-32
        assert torch.equal(row, -torch.log1p(-unit))


def test_rows_do_not_depend_on_the_batch_nor_on_compilation() -> None:
    """Few blocks can hold the token where logits are alike, and nearly all where they spread: both cases are here."""
    generator = torch.Generator().manual_seed(0)
    spreads = torch.linspace(0, 6, 16).unsqueeze(-1)
    logits = spreads * torch.randn(16, 4096, generator=generator)
    keys = many_keys(16)

    together, _ = sample_tokens(logits, None, keys)
    alone = []
    for row_logits, key in zip(logits.split(1), keys.split(1)):
        token, _ = sample_tokens(row_logits, None, key)
        alone.append(token.item())
    eager = (logits - exponentials(keys, 4096).log()).argmax(dim=-1)
    assert together.tolist() == alone
    assert together.tolist() == eager.tolist()
