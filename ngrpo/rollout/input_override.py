# SPDX-License-Identifier: Apache-2.0
"""The input embedding of a vLLM model, with an override that is part of the compiled graph."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from perturbations.errors import UsageError

_NONE = np.zeros(0, dtype=np.int64)


class InputOverride:
    """Persistent buffers that replace the embedding's output at chosen rows of the next forward.

    They are in place before compilation and graph capture, at fixed addresses, so torch.compile and CUDA graphs
    stay on. The module's class is swapped for a subclass: neither its parameters nor its name in the model change.
    """

    def __init__(
        self, module: nn.Module, max_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """
        Args:
            module: the model's input embedding.
            max_tokens: rows of the largest forward.
            hidden: D.
            dtype: of the embedding's output.
            device: of the model.
        """
        self._plain_forward = type(module).forward
        self._module = module
        # Plain attributes and not registered buffers: vLLM 0.29's layerwise reload moves registered ones.
        module.override = torch.zeros(max_tokens, hidden, dtype=dtype, device=device)
        module.overridden = torch.zeros(max_tokens, 1, dtype=torch.bool, device=device)
        module.__class__ = _subclass(type(module))
        # Rows whose flags may be set: these, none of them (empty), or any (None).
        self._flagged: np.ndarray | None = _NONE

    def lookup(self, ids: Tensor) -> Tensor:
        """The embedding's own output for ids (N,): (N, D), summed over tensor-parallel ranks."""
        return self._plain_forward(self._module, ids)

    def clear(self, rewritten: np.ndarray | None = None) -> None:
        """No row of the next forward is replaced, but for those that are put at once.

        Args:
            rewritten: the rows that :meth:`put` is told next, (N,) int64, or None. Where they are those of the last
                forward, as in a batch that goes on decoding, there is nothing to clear.
        """
        if self._flagged is None or (len(self._flagged) and not _equal(self._flagged, rewritten)):
            self._module.overridden.zero_()
            self._flagged = _NONE

    def put(self, rows: Tensor, vectors: Tensor, mask: Tensor | None = None, on_host: np.ndarray | None = None) -> None:
        """Replaces rows of the next forward.

        Args:
            rows: (N,) int64.
            vectors: (N, D).
            mask: the rows that are replaced; the others are not, (N,) bool; None for all.
            on_host: the same rows, where they are known there.
        """
        self._module.override.index_copy_(0, rows, vectors)
        flags = torch.ones_like(rows, dtype=torch.bool) if mask is None else mask
        self._module.overridden.index_copy_(0, rows, flags.unsqueeze(-1))
        known = self._flagged is not None and (not len(self._flagged) or _equal(self._flagged, on_host))
        self._flagged = on_host if known else None


def _equal(rows: np.ndarray, others: np.ndarray | None) -> bool:
    return others is not None and np.array_equal(rows, others)


def _subclass(base: type[nn.Module]) -> type[nn.Module]:
    plain_forward = base.forward

    def forward(self: nn.Module, input_: Tensor) -> Tensor:
        output = plain_forward(self, input_)
        rows = output.shape[0]
        return torch.where(self.overridden[:rows], self.override[:rows], output)

    return type(f"Perturbed{base.__name__}", (base,), {"forward": forward})


def find_input_embedding(model: nn.Module) -> nn.Module:
    """The one input embedding of a vLLM model.

    Raises:
        UsageError: where there is none, or several, as in models with per-layer embeddings, or where it is quantised.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    if len(found) != 1:
        raise UsageError(
            f"perturbation: {type(model).__name__} has {len(found)} input embeddings"
            f" ({', '.join(found) or 'none'}), and exactly one is needed. Use a text-only causal language model."
        )
    ((name, module),) = found.items()
    if not isinstance(module.quant_method, UnquantizedEmbeddingMethod):
        raise UsageError(
            f"perturbation: {name} is quantised ({type(module.quant_method).__name__}), so that the trainer's rows are"
            " not the engine's. Use a checkpoint whose embedding is not quantised."
        )
    return module
