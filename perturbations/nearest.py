# SPDX-License-Identifier: Apache-2.0
"""The token that a perturbed input lies nearest to: does the model still read the anchor?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_VOCABULARY_BLOCK = 1 << 14
# Two tokens whose cosines differ by less are equally near; embeddings of never-trained tokens nearly coincide.
_TIE = 1e-6


def nearest_tokens(vectors: Tensor, matrix: Tensor, own: Tensor) -> Tensor:
    """The token of largest cosine to each vector, without waiting for the device.

    Args:
        vectors: (N, D), any float dtype.
        matrix: E, (V, D).
        own: (N,) int64, the token that wins a tie.

    Returns:
        (N,) int64.
    """
    normal = nn.functional.normalize(vectors.float(), dim=-1)
    best = torch.full((len(vectors),), -torch.inf, device=vectors.device)
    tokens = torch.zeros_like(own)
    for start in range(0, len(matrix), _VOCABULARY_BLOCK):
        block = nn.functional.normalize(matrix[start : start + _VOCABULARY_BLOCK].float(), dim=-1)
        score, best_of_block = (normal @ block.T).max(dim=-1)
        tokens = torch.where(score > best, best_of_block + start, tokens)
        best = torch.maximum(score, best)
    of_own = (normal * nn.functional.normalize(matrix[own].float(), dim=-1)).sum(dim=-1)
    return torch.where(of_own >= best - _TIE, own, tokens)
