# SPDX-License-Identifier: Apache-2.0
"""Replay: a model's forward sees the recorded inputs at perturbed positions, with gradient to its own embedding.

A pre-hook appends the candidates' ids to the embedding module's tokens, and a hook takes their rows off again and mixes
them: one lookup, in which the module's own hooks (ZeRO-3's gathering of parameters, LoRA) and gradient work as ever.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from perturbations import InputEdit, Perturbation, ReplayRecord, UsageError, streams
from perturbations.base import Replayed
from perturbations.edit import Mixer, mix
from perturbations.embeddings import nearest_tokens
from perturbations.parameters import CausalModel, attached


@dataclass(frozen=True)
class FlatRecords:
    """The records of a batch, concatenated: N positions in all, (N,) int64 each."""

    sample: Tensor  # index in the batch
    position: Tensor  # in the trajectory
    edit: InputEdit  # the recorded inputs
    noise_keys: Tensor | None  # of the recorded noise
    seeds: Tensor  # of the trajectories


def flatten(records: Sequence[ReplayRecord | None], device: torch.device) -> FlatRecords:
    """The records of a batch, one per row or None, concatenated on a device."""
    present = [(i, r) for i, r in enumerate(records) if r is not None and len(r)]
    if not present:
        # Learned parameters and densities take part in the graph, with a gradient of zero, on every rank.
        none = torch.zeros(0, dtype=torch.int64, device=device)
        ids, floats = none.view(0, 1), none.float()
        return FlatRecords(none, none, InputEdit(ids, ids.float(), floats, None, floats), none, none)

    def joined(parts: Iterable[np.ndarray], dtype: type = np.float32) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts)).astype(dtype, copy=False)).to(device)

    def optional(name: str) -> Tensor | None:
        """Zeros where a record has none; None where no record has it."""
        shape = next((p.shape[1:] for _, r in present if (p := getattr(r, name)) is not None), None)
        if shape is None:
            return None
        parts = ((r, getattr(r, name)) for _, r in present)
        return joined(np.zeros((len(r), *shape)) if part is None else part for r, part in parts)

    def widened(part: np.ndarray, mode: Literal["edge", "constant"]) -> np.ndarray:
        """Narrower records have weight 0 on their own last candidate, which adds nothing to the sum."""
        missing = width - part.shape[1]
        return np.pad(part, ((0, 0), (0, missing)), mode=mode) if missing else part

    width = max(r.ids.shape[1] for _, r in present)
    ids = joined((widened(r.ids, "edge") for _, r in present), np.int64)
    weights = joined(widened(r.weights, "constant") for _, r in present)
    edit = InputEdit(ids, weights, *(optional(name) for name in ("sigma", "vectors", "normalizer")))
    position = joined((r.positions for _, r in present), np.int64)
    seeds = joined((np.full(len(r), r.seed, dtype=np.int64) for _, r in present), np.int64)
    noise_keys = None if edit.sigma is None else streams.keys(seeds, position, streams.Stream.NOISE)
    return FlatRecords(joined((np.full(len(r), i) for i, r in present), np.int64), position, edit, noise_keys, seeds)


def flat_rows(
    sample: Tensor, position: Tensor, shape: tuple[int, ...], attention_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows of recorded positions in a forward's flattened input, and which exist (a trajectory may be cut): (N,) each.

    ``shape``: (B, T) for a padded batch, (1, total) for a packed one; ``ValueError`` for another. ``attention_mask``:
    (B, T), 1 at real tokens, padded on either side; None for a batch without left padding.
    """
    if attention_mask is None:
        inside = (position < shape[1]) & (sample < shape[0])
        return sample * shape[1] + position, inside
    mask = attention_mask.bool()
    lengths = mask.sum(dim=-1)
    inside = position < lengths[sample]
    if tuple(shape) == tuple(mask.shape):
        first = mask.int().argmax(dim=-1)
        return sample * shape[1] + first[sample] + position, inside
    # One host synchronisation, in the packed layout only; unpadding itself needs the same one.
    if shape[0] == 1 and shape[1] == int(lengths.sum()):
        starts = torch.cumsum(lengths, dim=0) - lengths
        return starts[sample] + position, inside
    given = f"{tuple(shape)} tokens, the attention mask is {tuple(mask.shape)} with {int(lengths.sum())} real tokens"
    needed = "Give padded batches (B, T) or packed ones (1, total), no sequence-parallel slices (ring attention)"
    raise ValueError(f"replay cannot place its records: the model was given {given}. {needed}.")


class LastHidden:
    """Keeps the last hidden states, the input of a model's output layer, while it is called as a context."""

    def __init__(self, head: nn.Module | None, reader: str) -> None:
        """``head``: of ``get_output_embeddings()``, from (…, D) to (…, V). ``UsageError`` where the model has none.

        ``reader``: what reads them, for messages, such as ``perturbation tarpo``.
        """
        self._subject = f"the last hidden states, which {reader} reads,"
        if head is None:
            known = "are not known, since get_output_embeddings() is None"
            raise UsageError(f"{self._subject} {known}. Use another model, or leave {reader} out.")
        self._head = head
        self._given: Tensor | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._given = inputs[0]

        hook = self._head.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            hook.remove()
            self._given = None

    def at(self, rows: Int64[Tensor, " positions"], count: int) -> Float[Tensor, "positions hidden"]:
        """The last hidden states of some of a forward's ``count`` rows of logits, with gradient."""
        given = None if self._given is None else self._given.reshape(-1, self._given.shape[-1])
        if given is None or len(given) != count:
            seen = "was not called" if given is None else f"was given {len(given)} rows"
            layer = f"{type(self._head).__name__}, the model's output layer, {seen} in a forward of {count} rows"
            raise RuntimeError(f"{self._subject} are not known: {layer} of logits. A fused or sliced one hides them.")
        return given[rows]


@dataclass
class ReplayStats:
    """Measures of the replayed forwards, on the model's device, a tensor for each forward."""

    # Relative shift of each recorded input, ‖e' − E[x]‖ / ‖E[x]‖, (N,); 0 where a position was cut off.
    shifts: list[Tensor] = field(default_factory=list)
    inside: list[Tensor] = field(default_factory=list)  # which positions the forward had, (N,) bool
    looked_at: list[Tensor] = field(default_factory=list)  # how many were compared with the whole vocabulary
    left_anchor: list[Tensor] = field(default_factory=list)  # how many of these lie nearer to another token

    def shift_sum(self) -> float:
        """Sum of the relative shifts of all replayed positions."""
        return float(sum(shift.sum() for shift in self.shifts))

    def count(self) -> int:
        """Replayed positions."""
        return int(sum(int(inside.sum()) for inside in self.inside))

    def mean_shift(self) -> float:
        """Mean of the relative shifts, 0 without replayed positions."""
        return self.shift_sum() / max(self.count(), 1)


class ReplayScope:
    """The hooks of one replay on one embedding module. Use :func:`replaying`, or enter it as a context."""

    def __init__(
        self,
        embedding: nn.Module,
        measure: bool = True,
        module: nn.Module | None = None,
        perturbation: Perturbation | None = None,
        look_up: int = 0,
        device: torch.device | None = None,
        hidden: LastHidden | None = None,
    ) -> None:
        """``embedding``: ids of any shape to shape + (D,). ``module``: attached to the model, if any.

        ``perturbation``: of the records, needed where it has a density, as ``hidden`` where that reads hidden states.
        ``look_up``: inputs of each forward with a look-up of the nearest token, if the matrix is whole (no ZeRO-3).
        ``device``: of the forward; None for that of the embedding's parameters, which FSDP may move.
        """
        self._embedding, self._module, self._hidden = embedding, module, hidden
        self.perturbation = perturbation
        self._measure, self._look_up, self._device = measure, look_up, device
        self._shape = torch.Size()  # of a forward's tokens; empty before it
        self._records: Sequence[ReplayRecord | None] = ()
        self._mask: Tensor | None = None
        self._flat: FlatRecords
        self._bypassed, self.stats = False, ReplayStats()

    @contextmanager
    def __call__(self, records: Sequence[ReplayRecord | None], attention_mask: Tensor | None) -> Iterator[ReplayStats]:
        """Replays ``records``, in batch order, in every forward of the context.

        ``ValueError`` for a record of another model, ``RuntimeError`` where no forward went through the embedding.
        """
        # Not the weight's shape, which is empty between forwards under ZeRO-3.
        vocabulary, size = (getattr(self._embedding, name, None) for name in ("num_embeddings", "embedding_dim"))
        for record in records:
            if record is not None and vocabulary is not None and size is not None:
                record.check_model(vocabulary, size, self._module is not None)
        device = next(self._embedding.parameters()).device if self._device is None else self._device
        # A batch without a perturbed position goes the same way: on several ranks all must gather and reduce alike.
        self._flat = flatten(records, device)
        self._records, self._shape, self.stats = records, torch.Size(), ReplayStats()
        self._mask = None if attention_mask is None else attention_mask.to(device)
        before = self._embedding.register_forward_pre_hook(self._append_candidates)
        after = self._embedding.register_forward_hook(self._substitute)
        try:
            with nullcontext() if self._hidden is None else self._hidden():
                yield self.stats
            if not self._shape and any(record is not None for record in records):
                missed = f"no forward went through {type(self._embedding).__name__}, its get_input_embeddings()"
                raise RuntimeError(f"replay of {len(records)} records did not happen: {missed}.")
        finally:
            before.remove()
            after.remove()
            self._mask = None
            del self._flat

    def replayed(
        self, logits: Tensor, log_probs: Tensor, temperature: float, advantages: Tensor | None = None
    ) -> tuple[Replayed, Tensor]:
        """The perturbed positions of the latest forward, for a density; and which exist (N,) bool, the others at row 0.

        ``logits`` z̃ (R, V) need one row per token, or ``RuntimeError``; ``log_probs`` (R,) are of the token after each
        row, ``advantages`` (B, A) of the last A tokens of each row of the batch.
        """
        if not self._shape or self._shape.numel() != len(logits):
            seen = "none" if not self._shape else f"{self._shape.numel()} tokens"
            needed = "one row per token is needed (no sequence-parallel slices, no logits of the response only)"
            raise RuntimeError(f"density: {len(logits)} rows of logits for a replayed forward of {seen}; {needed}.")
        _, edit = self._scaled()
        inside = self._inside & (self._rows > 0)
        rows = torch.where(inside, self._rows - 1, 0)  # the row before a position chose its token and its input
        of_positions = None
        if advantages is not None:
            column, known = self._columns(advantages.shape[1])
            at = torch.where(known, self._flat.sample, 0), torch.where(known, column, 0)
            of_positions = torch.where(known, advantages.to(column.device)[at], 0.0)
        replayed = Replayed(
            logits,
            rows,
            token_log_probs=log_probs[rows],
            temperature=temperature,
            edit=edit,
            noise_keys=self._flat.noise_keys,
            lookup=self.lookup,
            advantages=of_positions,
            draw_keys=streams.keys(self._flat.seeds, self._flat.position, streams.Stream.WEIGHTS),
            hidden=None if self._hidden is None else self._hidden.at(rows, len(logits)),
            module=self._module,
        )
        return replayed, inside

    def to_tokens(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Values of the recorded positions (N,) at their tokens in the last A of each row: ``shape`` (B, A), else 0."""
        column, inside = self._columns(shape[1])
        target = torch.where(inside, self._flat.sample * shape[1] + column, shape[0] * shape[1])
        full = values.new_zeros(shape[0] * shape[1] + 1)
        return full.index_add(0, target, values)[:-1].view(shape)

    def _columns(self, count: int) -> tuple[Tensor, Tensor]:
        """The recorded positions' columns in the last ``count`` tokens of their rows, and which have one, (N,) each."""
        flat, shape = self._flat, tuple(self._shape if self._mask is None else self._mask.shape)
        padded, inside = flat_rows(flat.sample, flat.position, shape, self._mask)
        column = padded - flat.sample * shape[1] - (shape[1] - count)
        return column, inside & (column >= 0)

    def _scaled(self) -> tuple[float, InputEdit]:
        """The factor of the embedding's rows, such as Gemma's, and the recorded edit with σ and vectors times it."""
        embedding, edit = self._embedding, self._flat.edit
        scale = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", None))
        own_forward = isinstance(embedding, nn.Embedding) and type(embedding).forward is not nn.Embedding.forward
        if scale is None and own_forward:
            why = f"replay cannot mix embeddings of {type(embedding).__name__}: its forward changes the matrix's rows"
            raise ValueError(f"{why}. Use a model with a plain or scaled table as input embedding.")
        dtype = next(embedding.parameters()).dtype  # a model rounds the factor to it, and so does vLLM
        scale = 1.0 if scale is None else float(torch.as_tensor(scale).to(dtype))
        sigma, vectors = (None if part is None else part * scale for part in (edit.sigma, edit.vectors))
        return scale, replace(edit, sigma=sigma, vectors=vectors)

    def lookup(self, ids: Tensor) -> Tensor:
        """Embeddings of ids of any shape without a replay, with gradient: shape + (D,)."""
        self._bypassed = True
        try:
            return self._embedding(ids)
        finally:
            self._bypassed = False

    def _append_candidates(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._bypassed:
            return None
        tokens = inputs[0]
        if tokens.dim() != 2:
            raise ValueError(f"replay needs token ids of shape (B, T), not {tuple(tokens.shape)}.")
        batch = tokens.shape[0] if self._mask is None else self._mask.shape[0]
        if len(self._records) != batch:
            needed = "give one per row, in batch order (None for a row without one)"
            raise ValueError(f"replay has {len(self._records)} records for a batch of {batch}: {needed}.")
        self._shape = tokens.shape
        rows, self._inside = flat_rows(self._flat.sample, self._flat.position, tuple(tokens.shape), self._mask)
        # A position that was cut off is pointed at row 0 and masked below: no data-dependent shape, no sync.
        self._rows = torch.where(self._inside, rows, 0)
        return (torch.cat([tokens.reshape(-1), self._flat.edit.ids.reshape(-1)]), *inputs[1:])

    def _substitute(self, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if self._bypassed:
            return None
        count = self._shape.numel()
        scale, edit = self._scaled()
        plain, candidates = output[:count], output[count:].view(*edit.ids.shape, output.shape[-1])
        learned: Mixer | None = self._module
        if self._module is not None and scale != 1.0:
            bare = self._module  # of bare embeddings, applied to multiplied ones

            def learned(token: Tensor, mixture: Tensor) -> Tensor:
                return scale * bare(token / scale, mixture / scale)

        if self.perturbation is not None and self.perturbation.input_gradient == "none":
            candidates = candidates.detach()  # and not the mixture, from which a module learns
        mixed = mix(candidates, edit, self._flat.noise_keys, learned)
        if self.perturbation is not None and self.perturbation.density_of_vector:
            mixed = mixed.detach()  # a fixed action: the density has the whole gradient
        if self._measure:
            with torch.no_grad():
                own = plain[self._rows].float()
                shift = (mixed.float() - own).norm(dim=-1) / own.norm(dim=-1)
                self.stats.shifts.append(shift.nan_to_num(posinf=0.0) * self._inside)  # 0 for a row of zeros
                self.stats.inside.append(self._inside)
                self._compare_with_vocabulary(mixed)
        # Positions that were cut off are written to the first candidate's row, which is dropped with the rest.
        target = torch.where(self._inside, self._rows, count)
        return output.index_copy(0, target, mixed)[:count].view(*self._shape, -1)

    def _compare_with_vocabulary(self, mixed: Tensor) -> None:
        """Of a few inputs, how many lie nearer to another token than to their anchor, the heaviest candidate."""
        edit, matrix = self._flat.edit, getattr(self._embedding, "weight", None)
        count = min(self._look_up, len(edit.ids))
        if not count or matrix is None or matrix.dim() != 2 or matrix.shape[1] != mixed.shape[1]:
            return
        chosen = ((torch.arange(count, device=mixed.device) + 0.5) * len(edit.ids) / count).long()
        anchors = edit.ids.gather(1, edit.weights.argmax(dim=1, keepdim=True)).squeeze(1)[chosen]
        inside = self._inside[chosen]
        self.stats.looked_at.append(inside.sum())
        self.stats.left_anchor.append(((nearest_tokens(mixed[chosen], matrix, anchors) != anchors) & inside).sum())


@contextmanager
def replaying(
    model: CausalModel,
    records: Sequence[ReplayRecord | None],
    attention_mask: Tensor | None = None,
    perturbation: Perturbation | None = None,
) -> Iterator[ReplayStats]:
    """Replays recorded inputs in a Hugging Face causal model's forward; yields statistics that fill as it runs.

    Args:
        model: with ``get_input_embeddings()``, and with a perturbation's module attached if it has one.
        records: one per row of the batch, in batch order (else ``ValueError``); None for an unperturbed row.
        attention_mask: (B, T), 1 at real tokens, needed for left padding and for packed input.
        perturbation: of the records, for its ``input_gradient``; None for "full".
    """
    embedding, module = model.get_input_embeddings(), attached(model)
    with ReplayScope(embedding, module=module, perturbation=perturbation)(records, attention_mask) as stats:
        yield stats
