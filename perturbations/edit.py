# SPDX-License-Identifier: Apache-2.0
"""The universal form of an input perturbation: e' = Σ_k w_k · E[c_k] + σ · ε.

A dense perturbation adds vectors v, and one with learned parameters (`perturbations.parameters`) has a module:
e' = module(E[c_1], Σ_k w_k · E[c_k] + σ · ε) + v.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from perturbations import streams
from perturbations.compilation import Compiled, on_gpu, twice
from perturbations.errors import require

# A perturbation's module: maps the first candidates' embeddings and the mixtures, (N, D) float32 each, to the inputs.
Mixer = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class InputEdit:
    """The inputs at B positions, which replace the tokens' own embeddings.

    Attributes:
        ids: candidates c. A candidate that is not used repeats another with weight 0.
        weights: w. Each row sums to 1, except with a ``mixture`` that is "free", with vectors, or with a module.
        sigma: noise scale σ, or None for no noise.
        vectors: v, or None: 4·D bytes of record per position. Replay feeds them as constants.
        normalizer: n = τ log Σ_k exp(y_k / τ) of weights w = softmax(y / τ), so that a density gets the raw scores
            y = τ log w + n again; None where no density needs them.
    """

    ids: Int64[Tensor, "rows candidates"]
    weights: Float[Tensor, "rows candidates"]
    sigma: Float[Tensor, " rows"] | None = None
    vectors: Float[Tensor, "rows hidden"] | None = None
    normalizer: Float[Tensor, " rows"] | None = None


@dataclass(frozen=True)
class Proposal:
    """What a perturbation feeds and writes at B positions.

    Attributes:
        edit: the inputs.
        tokens: the tokens in the text: reward and PPO ratio read these.
        acts: where the perturbation acts; None: everywhere. Elsewhere the edit is the token alone, and not recorded.
    """

    edit: InputEdit
    tokens: Int64[Tensor, " rows"]
    acts: Bool[Tensor, " rows"] | None = None


def mix(candidates: Tensor, edit: InputEdit, noise_keys: Tensor | None, module: Mixer | None = None) -> Tensor:
    """Σ_k w_k · e_k + σ · ε + v in float32, (N, D) in the candidates' dtype, with gradient to them and to the module.

    Rollout and replay both call this function, compiled on a GPU and uncompiled on a CPU, so that they round alike.
    ``candidates``: e, (N, K, D); the edit's ids are not used. ``noise_keys``: (N,) int64 of ``Stream.NOISE``, with σ.
    """
    arguments = (edit.weights, edit.sigma, edit.vectors, noise_keys, module)
    if torch.compiler.is_compiling() or not on_gpu(candidates.device) or not len(candidates):
        return _mixed(candidates, *arguments)
    with torch.no_grad():
        compiled_value = _compiled_mix(candidates, *arguments)
    has_gradient = module is not None or candidates.requires_grad or edit.weights.requires_grad
    if torch.is_grad_enabled() and has_gradient:
        return _Rounded.apply(_mixed(candidates, *arguments), compiled_value)
    return compiled_value


def _mixed(
    candidates: Tensor,
    weights: Tensor,
    sigma: Tensor | None,
    vectors: Tensor | None,
    noise_keys: Tensor | None,
    module: Mixer | None,
) -> Tensor:
    """As :func:`mix`, with the edit's fields as arguments: `torch.compile` takes tensors."""
    mixed = (candidates.float() * weights.unsqueeze(-1)).sum(dim=-2)  # (N, K, D) to (N, D)
    if sigma is not None:
        noise = streams.normal(require(noise_keys, "noise_keys"), candidates.shape[-1])  # (N, D)
        mixed = mixed + sigma.unsqueeze(-1) * noise
    if module is not None:
        mixed = module(candidates[:, 0].float(), mixed)
    if vectors is not None:
        mixed = mixed + vectors
    return mixed.to(candidates.dtype)


class _Rounded(torch.autograd.Function):
    """The compiled mixture's value with the uncompiled mixture's gradient; the two values differ by rounding."""

    @staticmethod
    def forward(ctx: object, mixture: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _compiled_mix(candidates: Tensor, *arguments: Tensor | Mixer | None) -> Tensor:
    """:func:`_mixed`, compiled; ``arguments`` are its further ones."""
    if len(candidates) == 1:
        doubled = [twice(argument) if isinstance(argument, Tensor) else argument for argument in arguments]
        return _compiled_mix(twice(candidates), *doubled)[:1]
    table = candidates.detach().reshape(-1, candidates.shape[-1])  # (N · K, D)
    places = torch.arange(len(table), device=table.device).view(candidates.shape[:2])  # (N, K)
    for argument in (table, places, *arguments):
        if isinstance(argument, Tensor):
            torch._dynamo.maybe_mark_dynamic(argument, 0)
    return _mixed_rows(table, places, *arguments)


# The engine's compiled step looks its tokens up in a table of embeddings. The lookup is repeated here, from a table of
# the candidates: without it the compiler adds the candidates in another order, and the two sums round differently.
_mixed_rows = Compiled(
    lambda table, places, *arguments: _mixed(torch.nn.functional.embedding(places, table), *arguments),
    "the mixing of embeddings",
)


def realise(
    edit: InputEdit, lookup: Callable[[Tensor], Tensor], noise_keys: Tensor | None, module: Mixer | None = None
) -> Tensor:
    """The vectors of an edit, (B, D) in the embedding's dtype; further arguments as in :func:`mix`."""
    rows = lookup(edit.ids.reshape(-1))  # (B · K, D)
    candidates = rows.view(*edit.ids.shape, rows.shape[-1])  # (B, K, D)
    return mix(candidates, edit, noise_keys, module)


def one_hot(tokens: Tensor) -> InputEdit:
    """The edit that changes nothing: each token with weight 1. ``tokens``: (B,)."""
    ids = tokens.unsqueeze(-1)
    return InputEdit(ids, torch.ones_like(ids, dtype=torch.float32))


def dense_edit(tokens: Tensor, vectors: Tensor) -> InputEdit:
    """The edit that feeds vectors (B, D) float32 alone, without gradient; ``tokens``, (B,) int64, have weight 0.

    Its record takes 4·D bytes per perturbed position (2.3 KB at D = 576).
    """
    ids = tokens.unsqueeze(-1)
    return InputEdit(ids, weights=torch.zeros_like(ids, dtype=torch.float32), vectors=vectors)
