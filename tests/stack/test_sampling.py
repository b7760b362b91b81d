# SPDX-License-Identifier: Apache-2.0
"""Token draws: the categorical distribution, whatever the batch, compiled or not. (torch.compile needs a compiler.)"""

import torch

from ngrpo.rollout.sample_tokens import exponentials, sample_tokens
from perturbations import streams

N = 200_000
P = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


def many_keys(count: int = N) -> torch.Tensor:
    """The keys of one trajectory's positions: what real draws use."""
    return streams.keys(torch.tensor(3), torch.arange(count), streams.Stream.TOKEN)


def test_tokens_follow_the_distribution() -> None:
    logits = P.log().expand(N, 5).contiguous()
    tokens, known = sample_tokens(logits, None, many_keys())
    seen = torch.bincount(tokens, minlength=5).double()
    chi = ((seen - N * P) ** 2 / (N * P)).sum()
    assert chi < 18.5  # 4 degrees of freedom; exceeded by 0.1% of fair samples
    assert torch.allclose(known.log_total, torch.zeros(N), atol=1e-5)


def test_the_hash_is_that_of_unsigned_32_bit_numbers() -> None:
    """lowbias32 over Python's own integers, and the draw from it in float64; eager and compiled give the same bits."""
    low = (1 << 32) - 1

    def mixed(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D & low
        x = (x ^ (x >> 15)) * 0x846CA68B & low
        return x ^ (x >> 16)

    keys, size = many_keys(50), 64
    draws = exponentials(keys, size)
    assert torch.equal(draws, torch.compile(exponentials, dynamic=True)(keys, size))
    for key, row in zip((key % (1 << 64) for key in keys.tolist()), draws):
        bits = [mixed((mixed(token ^ key & low) + (key >> 32)) & low) for token in range(size)]
        # As float32 rounds an integer of 32 bits, and no further: 1 - u may be within 2^-24 of 0.
        unit = (torch.tensor(bits).float() + 0.5) * 2.0**-32
        assert torch.equal(row, -torch.log1p(-unit))


def test_rows_do_not_depend_on_the_batch_nor_on_compilation() -> None:
    """Nor on how many blocks may hold the token: few where logits are alike, and nearly all where they spread."""
    logits = torch.linspace(0, 6, 16).unsqueeze(-1) * torch.randn(16, 4096, generator=torch.Generator().manual_seed(0))
    keys = many_keys(16)
    together, _ = sample_tokens(logits, None, keys)
    alone = torch.cat([sample_tokens(logits[i : i + 1], None, keys[i : i + 1])[0] for i in range(16)])
    eager = (logits - exponentials(keys, 4096).log()).argmax(dim=-1)
    assert together.tolist() == alone.tolist() == eager.tolist()
