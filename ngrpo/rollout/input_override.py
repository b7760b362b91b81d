# SPDX-License-Identifier: Apache-2.0
"""The input embedding of a vLLM model, with an override that is part of the compiled graph."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.machine.upstream.types import VocabParallelEmbedding
from perturbations.errors import UsageError

PLAIN = -1  # the source of a row that is the model's own


class _OverriddenForward(nn.Module):
    """Calls the forward of ``bare_embedding`` and replaces rows of its result.

    In the method resolution order the module's own class comes before this one, so that a factor by which it multiplies
    embeddings is applied to replaced rows too.

    Attributes:
        bare_embedding: the class whose forward gives rows of the matrix; a base of the module's class.
        override_sources: for each row of the forward the row of the vectors, or :data:`PLAIN`, (max_tokens,) int32.
        override_vectors: what may be fed, (drawn_rows + max_tokens, D).
        override_fed: whether a vector is fed where a source names it, (drawn_rows + max_tokens,) bool.
    """

    bare_embedding: type[nn.Module]
    override_sources: Tensor
    override_vectors: Tensor
    override_fed: Tensor

    def forward(self, input_: Tensor) -> Tensor:
        output = self.bare_embedding.forward(self, input_)
        # vLLM gives ids of shape (N,), its Transformers backend (1, N): rows are counted in reading order.
        rows = output.reshape(-1, output.shape[-1])
        sources = self.override_sources[: rows.shape[0]]
        vector_rows = sources.clamp_min(0)
        replaced = (sources >= 0) & self.override_fed[vector_rows]
        rows = torch.where(replaced.unsqueeze(-1), self.override_vectors[vector_rows], rows)
        return rows.reshape(output.shape)


def _overridden(module_class: type[nn.Module], bare: type[nn.Module]) -> type[nn.Module]:
    """The class of an embedding with an override after the forward of ``bare``, which may be a base of it."""
    override = type("Override", (_OverriddenForward, bare), {"bare_embedding": bare})
    bases = (override,) if module_class is bare else (module_class, override)
    return type(f"Perturbed{module_class.__name__}", bases, {})


class InputOverride:
    """Persistent buffers that replace the embedding's output at chosen rows of the next forward.

    Each row of a forward has a source: none, or a row of the vectors. The first ``drawn_rows`` vectors are the edits of
    the last step, in the order of its batch; the others are edits from the store, one for each row of the forward. So a
    batch that keeps decoding leaves the sources as they are. An edit of the last step is fed where its flag is set,
    which only the device knows.

    The buffers exist before compilation and graph capture, at fixed addresses, so torch.compile and CUDA graphs
    stay on. The module's class is swapped for a subclass of it with :class:`_OverriddenForward`: neither its parameters
    nor its name in the model change. What is replaced are rows of the bare matrix: a factor that the module or the
    model applies comes after that.
    """

    def __init__(
        self,
        module: nn.Module,
        max_tokens: int,
        drawn_rows: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        bare: type[nn.Module] | None = None,
    ) -> None:
        """
        Args:
            module: the model's input embedding.
            max_tokens: rows of the largest forward.
            drawn_rows: rows of the largest step.
            hidden: D.
            dtype: of the embedding.
            device: of the embedding.
            bare: the module's class or a base of it, whose forward returns rows of the matrix unchanged; None for the
                module's class. In vLLM's Transformers backend Gemma's own class scales these rows afterwards.
        """
        module_class: type[nn.Module] = type(module)
        self._bare = module_class if bare is None else bare
        self._module: Any = module  # with the three buffers of `_OverriddenForward`
        self.drawn_rows = drawn_rows
        vector_rows = drawn_rows + max_tokens
        # Plain attributes and not registered buffers: vLLM 0.29's layerwise reload moves registered ones.
        module.override_sources = torch.full((max_tokens,), PLAIN, dtype=torch.int32, device=device)
        module.override_vectors = torch.zeros(vector_rows, hidden, dtype=dtype, device=device)
        module.override_fed = torch.ones(vector_rows, dtype=torch.bool, device=device)
        module.__class__ = _overridden(module_class, self._bare)
        self._laid_out = 0  # rows of the last forward whose source may be set

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a step on the device reads and writes."""
        return self._module.weight, self._module.override_vectors, self._module.override_fed

    @property
    def drawn_vectors(self) -> Tensor:
        """Where the vectors of a step's rows go, (drawn_rows, D)."""
        return self._module.override_vectors[: self.drawn_rows]

    @property
    def drawn_fed(self) -> Tensor:
        """Where it is noted which of a step's rows are perturbed, (drawn_rows,) bool."""
        return self._module.override_fed[: self.drawn_rows]

    def lookup(self, ids: Tensor) -> Tensor:
        """The embedding matrix's rows for ids of any shape: shape + (D,), summed over tensor-parallel ranks."""
        return self._bare.forward(self._module, ids)

    def put_drawn(self, rows: Tensor, vectors: Tensor, fed: Tensor) -> None:
        """Replaces the last step's edits by those of N rows of this step's batch: vectors (N, D), flags (N,) bool."""
        self.clear_drawn()
        self.drawn_fed.index_copy_(0, rows, fed)
        self.drawn_vectors.index_copy_(0, rows, vectors)

    def clear_drawn(self) -> None:
        """Marks every row of the last step as unperturbed."""
        self.drawn_fed.zero_()

    def place_stored(self, rows: Tensor, vectors: Tensor) -> None:
        """Places edits from the store, vectors (N, D), for rows (N,) int64 of the next forward."""
        self._module.override_vectors.index_copy_(0, rows + self.drawn_rows, vectors)

    def sources_of_stored(self, rows: np.ndarray) -> np.ndarray:
        """The sources of rows with edits from the store, (N,) int64."""
        return rows + self.drawn_rows

    def lay_out(self, sources: np.ndarray, upload: Callable[[np.ndarray], Tensor]) -> None:
        """Sets the sources of the next forward's N rows: (N,) int32, a row of the vectors or -1.

        They stay until they are laid out anew.
        """
        replaces = bool((sources != PLAIN).any())
        if not replaces and not self._laid_out:
            return
        rows = len(sources)
        if self._laid_out > rows:
            # The last forward was longer: its further rows must not keep their sources.
            beyond = np.full(self._laid_out - rows, PLAIN, dtype=np.int32)
            sources = np.concatenate([sources, beyond])
        self._module.override_sources[: len(sources)].copy_(upload(sources), non_blocking=True)
        self._laid_out = rows if replaces else 0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """No override acts within: an encoder that runs before the forward may embed a few tokens of its own."""
        if not self._laid_out:
            yield
            return
        sources = self._module.override_sources.clone()
        self._module.override_sources.fill_(PLAIN)
        try:
            yield
        finally:
            self._module.override_sources.copy_(sources)


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
    names = list(tables)
    why = "and nothing in it says which one the text goes through"
    if len(tables) != 1 or hasattr(model, "embed_input_ids"):
        used = _tables_looked_up(model, tables)
        if used:
            names = used
            why = f"and a token's embedding combines {len(used)} of them ({', '.join(used)})"
    if len(names) != 1:
        raise UsageError(
            f"perturbation: {type(model).__name__} has {len(tables)} input embeddings ({', '.join(tables) or 'none'}),"
            f" {why}; exactly one is needed. Use a causal language model with one table for its text."
        )
    name = names[0]
    method = tables[name].quant_method
    if not isinstance(method, layers.UnquantizedEmbeddingMethod):
        raise UsageError(
            f"perturbation: {name} is quantised ({type(method).__name__}), so that the trainer's rows are not the"
            " engine's. Use a checkpoint with an unquantised embedding."
        )
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


def _tables_looked_up(model: nn.Module, tables: Mapping[str, nn.Module]) -> list[str]:
    """The names of the tables that the model's own way of embedding tokens looks up; empty where it has no way."""
    used: dict[str, None] = {}
    hooks = [table.register_forward_hook(partial(_note_use, used, name)) for name, table in tables.items()]
    try:
        for embed in _ways_of_embedding(model):
            with suppress(AttributeError, NotImplementedError, TypeError), torch.inference_mode():
                embed(torch.zeros(2, dtype=torch.int32, device=next(model.parameters()).device))
                if used:
                    return list(used)
            used.clear()  # a way that failed half-way says nothing
    finally:
        for hook in hooks:
            hook.remove()
    return []


def _note_use(used: dict[str, None], name: str, *_: object) -> None:
    """A forward hook that notes the name of a table, once."""
    used.setdefault(name)


def _ways_of_embedding(model: nn.Module) -> Iterator[Callable[[Tensor], object]]:
    """Functions by which a model may embed token ids, vLLM's own method first."""
    for owner in dict.fromkeys([language_model(model), model]):
        embed = getattr(owner, "embed_input_ids", None)
        if embed:
            yield embed
    for owner in (model, getattr(model, "model", None)):
        get_table = getattr(owner, "get_input_embeddings", None)
        if get_table:
            yield lambda ids, get_table=get_table: get_table()(ids)
