# SPDX-License-Identifier: Apache-2.0
"""The input embedding of a vLLM model, with an override that is part of the compiled graph."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.machine.upstream.types import VocabParallelEmbedding
from perturbations.errors import UsageError

_NONE = np.zeros(0, dtype=np.int64)


class InputOverride:
    """Persistent buffers that replace the embedding's output at chosen rows of the next forward.

    They exist before compilation and graph capture, at fixed addresses, so torch.compile and CUDA graphs
    stay on. The module's class is swapped for a subclass: neither its parameters nor its name in the model change.
    What is replaced are rows of the bare matrix: a factor that the module or the model applies comes after that.
    """

    def __init__(
        self,
        module: nn.Module,
        max_tokens: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        bare: type[nn.Module] | None = None,
    ) -> None:
        """module: the model's input embedding; max_tokens: rows of the largest forward.

        bare: the class among the module's bases with a forward to rows of the matrix, which Gemma's then scales in
        vLLM's Transformers backend; the module's own by default.
        """
        base: type[nn.Module] = type(module)
        self._bare = bare = base if bare is None else bare

        class Override(bare):
            """The override right after the forward of ``bare``, inside the work of the module's other classes."""

            override: Tensor
            overridden: Tensor

            def forward(self, input_: Tensor) -> Tensor:
                output = bare.forward(self, input_)
                # vLLM gives ids of shape (N,), its Transformers backend (1, N): rows are counted in reading order.
                flat = output.reshape(-1, output.shape[-1])
                rows = flat.shape[0]
                return torch.where(self.overridden[:rows], self.override[:rows], flat).reshape(output.shape)

        self._module: Any = module  # with the two buffers below
        # Plain attributes and not registered buffers: vLLM 0.29's layerwise reload moves registered ones.
        module.override = torch.zeros(max_tokens, hidden, dtype=dtype, device=device)
        module.overridden = torch.zeros(max_tokens, 1, dtype=torch.bool, device=device)
        bases = (Override,) if base is bare else (base, Override)
        module.__class__ = type(f"Perturbed{base.__name__}", bases, {})
        # Rows with flags that may be set: these, none of them (empty), or any (None).
        self._flagged: np.ndarray | None = _NONE

    def lookup(self, ids: Tensor) -> Tensor:
        """The embedding matrix's rows for ids of any shape: shape + (D,), summed over tensor-parallel ranks."""
        return self._bare.forward(self._module, ids)

    def clear(self, rewritten: np.ndarray | None = None) -> None:
        """No row of the next forward is replaced, but for ``rewritten`` (N,) int64, which :meth:`put` is given next.

        Where these are the rows of the last forward, as in a batch that keeps decoding, there is nothing to clear.
        """
        if self._flagged is None or (len(self._flagged) and not _equal(self._flagged, rewritten)):
            self._module.overridden.zero_()
            self._flagged = _NONE

    def put(self, rows: Tensor, vectors: Tensor, mask: Tensor | None = None, on_host: np.ndarray | None = None) -> None:
        """Replaces rows of the next forward: rows (N,) int64, vectors (N, D), mask (N,) bool or None for all.

        ``on_host``: the same rows, where they are known there.
        """
        self._module.override.index_copy_(0, rows, vectors)
        flags = torch.ones_like(rows, dtype=torch.bool) if mask is None else mask
        self._module.overridden.index_copy_(0, rows, flags.unsqueeze(-1))
        known = self._flagged is not None and (not len(self._flagged) or _equal(self._flagged, on_host))
        self._flagged = on_host if known else None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Look-ups within are not those of the forward: an encoder may embed a few tokens of its own."""
        if self._flagged is not None and not len(self._flagged):
            yield
            return
        overridden = self._module.overridden.clone()
        self._module.overridden.zero_()
        try:
            yield
        finally:
            self._module.overridden.copy_(overridden)


def _equal(rows: np.ndarray, others: np.ndarray | None) -> bool:
    return others is not None and np.array_equal(rows, others)


def find_input_embedding(model: nn.Module) -> VocabParallelEmbedding:
    """The table of a vLLM model that its text goes through, found by embedding tokens as the model does.

    A model may have others, per layer or in another modality's tower. ``UsageError`` for no table, several, or a
    quantised one.
    """
    from vllm.model_executor.layers import vocab_parallel_embedding as layers

    tables = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, layers.VocabParallelEmbedding) and not isinstance(module, layers.ParallelLMHead)
    }
    names, why = list(tables), "and nothing in it says which one the text goes through"
    if len(tables) != 1 or hasattr(model, "embed_input_ids"):
        names, why = _looked_up(model, tables) or (names, why)
    if len(names) != 1:
        found = f"{len(tables)} input embeddings ({', '.join(tables) or 'none'}), {why}; exactly one is needed"
        fix = "Use a causal language model with one table for its text"
        raise UsageError(f"perturbation: {type(model).__name__} has {found}. {fix}.")
    name = names[0]
    method = tables[name].quant_method
    if not isinstance(method, layers.UnquantizedEmbeddingMethod):
        why = f"{name} is quantised ({type(method).__name__}), so that the trainer's rows are not the engine's"
        raise UsageError(f"perturbation: {why}. Use a checkpoint with an unquantised embedding.")
    return tables[name]


def language_model(model: nn.Module) -> nn.Module:
    """The part of a multimodal vLLM model that reads text; the model itself where it reads nothing else."""
    get = getattr(model, "get_language_model", None)
    try:
        return model if get is None else get()
    except NotImplementedError:  # vLLM's Transformers backend: its parts are not vLLM models
        return model


def tables_of_text(model: nn.Module) -> list[nn.Module]:
    """The modules of the part that reads text which may be tables of tokens: all but its output head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return [module for module in language_model(model).modules() if not isinstance(module, ParallelLMHead)]


def _looked_up(model: nn.Module, tables: Mapping[str, nn.Module]) -> tuple[list[str], str] | None:
    """Which tables the model's own way of embedding two tokens uses, and what that means; None where it has no way."""
    ways = [getattr(owner, "embed_input_ids", None) for owner in dict.fromkeys((language_model(model), model))]
    for owner in (model, getattr(model, "model", None)):
        table = getattr(owner, "get_input_embeddings", None)
        ways.append(table and (lambda ids, table=table: table()(ids)))
    used: dict[str, None] = {}
    note = used.setdefault
    hooks = [table.register_forward_hook(lambda *_, name=name: note(name)) for name, table in tables.items()]
    try:
        for embed in filter(None, ways):
            with suppress(AttributeError, NotImplementedError, TypeError), torch.inference_mode():
                embed(torch.zeros(2, dtype=torch.int32, device=next(model.parameters()).device))
                if used:
                    return [*used], f"and a token's embedding combines {len(used)} of them ({', '.join(used)})"
            used.clear()
    finally:
        for hook in hooks:
            hook.remove()
    return None
