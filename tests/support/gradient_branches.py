# SPDX-License-Identifier: Apache-2.0
"""What the true gradients of test_policy_gradient.py are made of: the branches of a method's step.

A step of a method at logits z̃ (R, V) has branches: weights with their dependence on the policy, (R, n), the text's
tokens (R, n) and the fed vectors (R, n, D). E is the policy's embedding; detached parts are the environment's.
"""

import torch
from torch import Tensor

from tests.support.gradient_problem import D, V

Branches = tuple[Tensor, Tensor, Tensor]
SAMPLES = 20_000
"""Branches of a method that is sampled and not enumerated."""


def every_token(z: Tensor, vectors: Tensor) -> Branches:
    """Each token with its probability; vectors (R, V or 1, D) by token."""
    rows = len(z)
    tokens = torch.arange(V).expand(rows, V)
    return torch.softmax(z, dim=-1), tokens, vectors.expand(rows, V, D)


def one_with_gradient(log_weight: Tensor) -> Tensor:
    """1 with the gradient of a log-probability or log-density: the ratio to the one of the rollout."""
    return (log_weight - log_weight.detach()).exp()


def ratio(z: Tensor, tokens: Tensor) -> Tensor:
    """π(x)/π_old(x) of tokens (R, n): 1, with a gradient."""
    return one_with_gradient(torch.log_softmax(z, dim=-1).gather(-1, tokens))


def mixture(weights: Tensor, ids: Tensor, E: Tensor) -> Tensor:
    """Σ w E[id] of candidates (R, k): (R, 1, D)."""
    return (weights.unsqueeze(-1) * E[ids]).sum(1, keepdim=True)


def gumbel_noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel(0, 1) noise of the shape and dtype of a tensor."""
    return -torch.log(torch.empty_like(like).exponential_(generator=generator))


def standard_gumbel(dtype: torch.dtype) -> torch.distributions.Gumbel:
    return torch.distributions.Gumbel(torch.zeros((), dtype=dtype), 1.0, validate_args=False)
