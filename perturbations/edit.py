"""The universal form of an input perturbation: e' = Σ_k w_k · E[c_k] + σ · ε."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import streams


@dataclass(frozen=True)
class InputEdit:
    """What is fed to the model at B positions, in place of the tokens' own embeddings.

    Attributes:
        ids: candidates c, (B, K) int64. A candidate that is not used repeats another with weight 0.
        weights: w, (B, K) float32; each row sums to 1.
        sigma: noise scale σ, (B,) float32, or None for no noise.
    """

    ids: Tensor
    weights: Tensor
    sigma: Tensor | None = None


def mix(vectors: Tensor, weights: Tensor, sigma: Tensor | None, noise_keys: Tensor | None) -> Tensor:
    """Σ_k w_k · v_k + σ · ε, computed in float32 whatever the dtype of the vectors.

    Rollout and replay both call this function, so that they round alike.

    Args:
        vectors: candidate embeddings, (N, K, D), any float dtype.
        weights: (N, K) float32.
        sigma: (N,) float32, or None.
        noise_keys: (N,) int64 keys of :data:`perturbations.streams.Stream.NOISE`; needed with ``sigma``.

    Returns:
        (N, D) in the dtype of ``vectors``, with gradient to ``vectors``.
    """
    mixed = (vectors.float() * weights.unsqueeze(-1)).sum(dim=-2)
    if sigma is not None:
        mixed = mixed + sigma.unsqueeze(-1) * streams.normal(noise_keys, vectors.shape[-1])
    return mixed.to(vectors.dtype)


def realise(edit: InputEdit, lookup: Callable[[Tensor], Tensor], noise_keys: Tensor | None) -> Tensor:
    """The vectors of an edit, looked up through an embedding.

    Args:
        edit: B positions.
        lookup: ids of any shape to their embeddings, shape + (D,).
        noise_keys: (B,) int64, needed where ``edit.sigma`` is set.

    Returns:
        (B, D) in the embedding's dtype.
    """
    rows, width = edit.ids.shape
    vectors = lookup(edit.ids.reshape(-1))
    return mix(vectors.view(rows, width, -1), edit.weights, edit.sigma, noise_keys)


def one_hot(tokens: Tensor) -> InputEdit:
    """The edit that changes nothing: each token with weight 1. ``tokens``: (B,)."""
    ids = tokens.unsqueeze(-1)
    return InputEdit(ids, torch.ones_like(ids, dtype=torch.float32))
