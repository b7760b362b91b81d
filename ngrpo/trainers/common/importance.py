# SPDX-License-Identifier: Apache-2.0
"""The policy that rolled out against the trainer's: divergence, entropy, and the importance weights of the loss."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class Weights(NamedTuple):
    """The bounds of token-level importance weights, and what happens beyond them.

    Attributes:
        low: the least weight.
        high: the largest.
        clip: whether a weight beyond them is the bound, otherwise 0.
    """

    low: float
    high: float
    clip: bool


def measures(log_ratio: Tensor, weights: Weights | None) -> dict[str, float]:
    """How far the rollout's policy is from the trainer's.

    Args:
        log_ratio: log π_trainer − log π_rollout of the tokens, (N,).
        weights: those of the loss, None where it has none.

    Returns:
        ``divergence``: the mean of −log_ratio. With weights also ``weight``: their mean, π_trainer / π_rollout within
        the bounds; and ``cut``: the share of tokens beyond them.
    """
    result = {"divergence": -log_ratio.mean().item()}
    if weights is not None:
        weight = log_ratio.clamp(-20.0, 20.0).exp()
        beyond = (weight < weights.low) | (weight > weights.high)
        bounded = weight.clamp(weights.low, weights.high) if weights.clip else weight.masked_fill(beyond, 0.0)
        result |= {"weight": bounded.mean().item(), "cut": beyond.float().mean().item()}
    return {f"importance/{name}": value for name, value in result.items()}


def with_strength(
    trainer: Float[Tensor, "batch actions"],
    rollout: Float[Tensor, "batch actions"],
    strength: float,
    bounds: tuple[float, float],
) -> Float[Tensor, "batch actions"]:
    """Log-probabilities of the rollout from which the weight 1 + α (w − 1) follows, w = π_trainer / π_rollout.

    A loss forms w from two log-probabilities, so ``--sampling.correction_warmup`` replaces the rollout's.

    Args:
        trainer: log π of the trainer, (B, A), in nats.
        rollout: log π of the rollout, (B, A).
        strength: α, in [0, 1). At 1 the rollout's own are right.
        bounds: the least and the largest w, at most and at least 1.

    Returns:
        (B, A), as ``rollout``.
    """
    weight = (trainer - rollout).clamp(-20.0, 20.0).exp().clamp(*bounds)
    return trainer - (strength * (weight - 1.0)).log1p()
