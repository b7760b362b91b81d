# SPDX-License-Identifier: Apache-2.0
"""Perturbations with learned parameters: the contract of their module, and its place in a model.

`Perturbation.module(hidden_size)` maps the first candidate's embedding e and the mixture r = Σ_k w_k E[c_k] + σ ε, both
(N, D) float32, to the input e', (N, D) float32. It must start the same in every process, treat each of the N ≥ 0 rows
alone, compute in float32 whatever the dtype of its parameters, and have no buffers that matter.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from perturbations.base import Perturbation

NAME = "perturbation"  # of the module as a submodule of the policy
PREFIX = NAME + "."


class CausalModel(Protocol):
    """A model, as Hugging Face's causal ones."""

    def get_input_embeddings(self) -> nn.Module: ...

    def get_output_embeddings(self) -> nn.Module | None: ...

    def add_module(self, name: str, module: nn.Module | None) -> None: ...


def attach(model: CausalModel, perturbation: Perturbation) -> nn.Module | None:
    """Makes the perturbation's module, if any, a submodule of a model, on its device and in its dtype."""
    if type(perturbation).module is Perturbation.module:
        return None
    embedding = model.get_input_embeddings()
    hidden_size: int = getattr(embedding, "embedding_dim")  # noqa: B009 - an nn.Module's attributes have no types
    module = perturbation.module(hidden_size)
    if module is None:
        return None
    if hasattr(model, NAME):
        raise ValueError(f"{type(model).__name__} already has a submodule {NAME!r}. Attach one perturbation, once.")
    weight = next(embedding.parameters())
    module.to(device=weight.device, dtype=weight.dtype)
    model.add_module(NAME, module)
    return module


def freeze(model: CausalModel, perturbation: Perturbation) -> None:
    """Takes the embedding, the head or both out of training, by the perturbation's ``freeze``.

    A matrix that both share is frozen in either case. ``ValueError`` where the model names no head to freeze.
    """
    if perturbation.freeze in ("embedding", "both"):
        model.get_input_embeddings().requires_grad_(False)
    if perturbation.freeze in ("head", "both"):
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(
                f"perturbation option freeze={perturbation.freeze!r}: {type(model).__name__} names no output embedding"
                " (get_output_embeddings() is None). Take freeze='embedding' or 'none'."
            )
        head.requires_grad_(False)


def attached(model: object) -> nn.Module | None:
    """The module that :func:`attach` added to a model, or None."""
    return getattr(model, NAME, None)


def split(tensors: Iterable[tuple[str, Tensor]], own: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Yields the model's tensors, and puts those of the module into ``own``, by their names in the module."""
    for name, tensor in tensors:
        if name.startswith(PREFIX):
            own[name[len(PREFIX) :]] = tensor
        else:
            yield name, tensor


@torch.no_grad()
def load(module: nn.Module, tensors: Mapping[str, Tensor], *, whole: bool = True) -> None:
    """Copies values by name, of any dtype and device; ``ValueError`` where a name or shape is not the module's.

    ``whole``: every parameter must be there; a weight sync may bring them one at a time.
    """
    parameters = dict(module.named_parameters())
    unknown = sorted(set(tensors) - set(parameters))
    missing = sorted(set(parameters) - set(tensors)) if whole else []
    if unknown or missing:
        raise ValueError(
            f"these are not the parameters of {type(module).__name__}: unknown {unknown or 'none'}, missing"
            f" {missing or 'none'}. Load them with the perturbation that saved them."
        )
    for name, tensor in tensors.items():
        parameter = parameters[name]
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"parameter {name!r} of {type(module).__name__} has shape {tuple(parameter.shape)}, the saved one"
                f" {tuple(tensor.shape)}: they belong to a model of another hidden size."
            )
        parameter.copy_(tensor)
