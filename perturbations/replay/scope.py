# SPDX-License-Identifier: Apache-2.0
"""Replay: a model's forward sees the recorded inputs at perturbed positions, with gradient to its own embedding.

A forward pre-hook appends the candidates' ids to the tokens that the embedding module gets. A forward hook cuts the
candidates' embeddings off again, mixes them, and writes the mixtures at the perturbed positions:

    tokens (B, T) ─► pre-hook ─► ids (B · T + N · K,) ─► embedding ─► rows (B · T + N · K, D) ─► hook ─► (B, T, D)

Tokens and candidates pass in one call, so that the gradient and the module's own hooks (ZeRO-3 gathers the parameters,
LoRA adds to them) work as without a replay.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from perturbations import InputEdit, Perturbation, ReplayRecord, UsageError, streams
from perturbations.base import Replayed
from perturbations.edit import Mixer, mix
from perturbations.embeddings import nearest_tokens
from perturbations.parameters import CausalModel, attached
from perturbations.replay.flat_records import FlatRecords, flat_rows, flatten


class LastHidden:
    """Keeps the last hidden states, the input of a model's output layer, within ``with last_hidden():``."""

    def __init__(self, head: nn.Module | None, reader: str) -> None:
        """``head``: of ``get_output_embeddings()``, from (…, D) to (…, V). ``UsageError`` where the model has none.

        ``reader``: what reads them, for messages, such as ``perturbation tarpo``.
        """
        self._subject = f"the last hidden states, which {reader} reads,"
        if head is None:
            raise UsageError(
                f"{self._subject} are not known, since get_output_embeddings() is None."
                f" Use another model, or leave {reader} out."
            )
        self._head = head
        self._states: Tensor | None = None  # the head's latest input

    @contextmanager
    def __call__(self) -> Iterator[None]:
        def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._states = inputs[0]

        hook = self._head.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            hook.remove()
            self._states = None

    def at(self, rows: Int64[Tensor, " positions"], count: int) -> Float[Tensor, "positions hidden"]:
        """The last hidden states of some of a forward's ``count`` rows of logits, with gradient."""
        layer = f"{type(self._head).__name__}, the model's output layer,"
        if self._states is None:
            raise RuntimeError(
                f"{self._subject} are not known: {layer} was not called in a forward of {count} rows of logits."
                " A fused or sliced one hides them."
            )
        states = self._states.reshape(-1, self._states.shape[-1])  # (R, D)
        if len(states) != count:
            raise RuntimeError(
                f"{self._subject} are not known: {layer} was given {len(states)} rows in a forward of {count} rows of"
                " logits. A fused or sliced one hides them."
            )
        return states[rows]


@dataclass
class ReplayStats:
    """Measures of the replayed forwards. Each list has a tensor for each forward, on the model's device.

    Attributes:
        shifts: the relative shift of each recorded input, ‖e' − E[x]‖ / ‖E[x]‖, (N,); 0 where a position was cut off.
        inside: which recorded positions the forward had, (N,) bool.
        looked_at: how many inputs were compared with the whole vocabulary.
        left_anchor: how many of these lie nearer to another token than to their heaviest candidate.
    """

    shifts: list[Tensor] = field(default_factory=list)
    inside: list[Tensor] = field(default_factory=list)
    looked_at: list[Tensor] = field(default_factory=list)
    left_anchor: list[Tensor] = field(default_factory=list)

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
    """The hooks of one replay on one embedding module, within ``with scope(records, attention_mask):``."""

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
        """Takes the modules; nothing is hooked before the scope is called.

        Args:
            embedding: maps ids of any shape to shape + (D,).
            measure: whether :class:`ReplayStats` are measured.
            module: the perturbation's module that is attached to the model, if any.
            perturbation: the one that made the records; needed where it has a density or detaches inputs.
            look_up: how many inputs of each forward are compared with the whole vocabulary, where the matrix is whole
                (it is not with ZeRO-3).
            device: of the forward; None for the device of the embedding's parameters, which FSDP may move.
            hidden: the last hidden states; needed where the density reads them.
        """
        self._embedding = embedding
        self._module = module
        self._hidden = hidden
        self.perturbation = perturbation
        self._measure = measure
        self._look_up = look_up
        self._device = device
        # Of the batch that is replayed.
        self._records: Sequence[ReplayRecord | None] = ()
        self._mask: Tensor | None = None  # the attention mask
        self._flat: FlatRecords
        # Of the latest forward.
        self._shape = torch.Size()  # of its tokens; empty before the first forward
        self._rows: Tensor  # the row of each recorded position, 0 where it was cut off, (N,) int64
        self._inside: Tensor  # whether the forward has each recorded position, (N,) bool
        self._bypassed = False  # whether lookup() calls the embedding module
        self.stats = ReplayStats()

    @contextmanager
    def __call__(self, records: Sequence[ReplayRecord | None], attention_mask: Tensor | None) -> Iterator[ReplayStats]:
        """Replays ``records``, in batch order, in every forward of the context.

        ``ValueError`` for a record of another model, ``RuntimeError`` where no forward went through the embedding.
        """
        self._check_model(records)
        device = _matrix(self._embedding).device if self._device is None else self._device
        # The hooks also run for a batch without perturbed positions: on several ranks all must gather and reduce alike.
        self._flat = flatten(records, device)
        self._records = records
        self._mask = None if attention_mask is None else attention_mask.to(device)
        self._shape = torch.Size()
        self.stats = ReplayStats()
        pre_hook = self._embedding.register_forward_pre_hook(self._append_candidates)
        hook = self._embedding.register_forward_hook(self._substitute)
        try:
            with nullcontext() if self._hidden is None else self._hidden():
                yield self.stats
            if not self._shape and any(record is not None for record in records):
                raise RuntimeError(
                    f"replay of {len(records)} records did not happen: no forward went through"
                    f" {type(self._embedding).__name__}, its get_input_embeddings()."
                )
        finally:
            pre_hook.remove()
            hook.remove()
            self._mask = None
            del self._flat

    def _check_model(self, records: Sequence[ReplayRecord | None]) -> None:
        """Raises ``ValueError`` for a record of another model, where the embedding states its size."""
        # By these attributes, since the weight's shape is empty between forwards under ZeRO-3.
        vocabulary = getattr(self._embedding, "num_embeddings", None)
        hidden_size = getattr(self._embedding, "embedding_dim", None)
        if vocabulary is None or hidden_size is None:
            return
        for record in records:
            if record is not None:
                record.check_model(vocabulary, hidden_size, self._module is not None)

    def replayed(
        self, logits: Tensor, log_probs: Tensor, temperature: float, advantages: Tensor | None = None
    ) -> tuple[Replayed, Tensor]:
        """The perturbed positions of the latest forward, for a density; and which of them exist, (N,) bool.

        A position that was cut off does not exist; it stands at row 0.

        Args:
            logits: z̃ of the forward, (R, V). ``RuntimeError`` unless there is one row per token.
            log_probs: log π of the token after each row, (R,).
            temperature: the sampling temperature.
            advantages: of the last A tokens of each row of the batch, (B, A); None where there is no loss.
        """
        if not self._shape or self._shape.numel() != len(logits):
            size = f"{self._shape.numel()} tokens" if self._shape else "none"
            raise RuntimeError(
                f"density: {len(logits)} rows of logits for a replayed forward of {size}; one row per token is needed"
                " (no sequence-parallel slices, no logits of the response only)."
            )
        _, edit = self._scaled()
        inside = self._inside & (self._rows > 0)
        rows = torch.where(inside, self._rows - 1, 0)  # the row before a position chose its token and its input
        position_advantages = None
        if advantages is not None:
            column, has_column = self._columns(advantages.shape[1])
            sample = torch.where(has_column, self._flat.sample, 0)
            column = torch.where(has_column, column, 0)
            position_advantages = torch.where(has_column, advantages.to(column.device)[sample, column], 0.0)
        replayed = Replayed(
            logits,
            rows,
            token_log_probs=log_probs[rows],
            temperature=temperature,
            edit=edit,
            noise_keys=self._flat.noise_keys,
            lookup=self.lookup,
            advantages=position_advantages,
            draw_keys=streams.keys(self._flat.seeds, self._flat.position, streams.Stream.WEIGHTS),
            hidden=None if self._hidden is None else self._hidden.at(rows, len(logits)),
            module=self._module,
        )
        return replayed, inside

    def to_tokens(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Spreads values of the recorded positions, (N,), to the last A tokens of each row of the batch.

        Returns ``shape`` (B, A), with 0 at tokens that are no recorded position.
        """
        batch, count = shape
        column, has_column = self._columns(count)
        # Values of positions without a column are added to a last place, which is dropped.
        target = torch.where(has_column, self._flat.sample * count + column, batch * count)
        spread = values.new_zeros(batch * count + 1).index_add(0, target, values)
        return spread[:-1].view(shape)

    def _columns(self, count: int) -> tuple[Tensor, Tensor]:
        """The recorded positions' columns in the last ``count`` tokens of their rows, and which have one, (N,) each."""
        flat = self._flat
        shape = tuple(self._shape if self._mask is None else self._mask.shape)  # padded, also where rows are packed
        padded_row, inside = flat_rows(flat.sample, flat.position, shape, self._mask)
        column = padded_row - flat.sample * shape[1] - (shape[1] - count)
        return column, inside & (column >= 0)

    def _scaled(self) -> tuple[float, InputEdit]:
        """The factor of the embedding's rows, such as Gemma's, and the recorded edit with σ and vectors times it."""
        embedding = self._embedding
        edit = self._flat.edit
        factor = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", None))
        has_own_forward = isinstance(embedding, nn.Embedding) and type(embedding).forward is not nn.Embedding.forward
        if factor is None and has_own_forward:
            raise ValueError(
                f"replay cannot mix embeddings of {type(embedding).__name__}: its forward changes the matrix's rows."
                " Use a model with a plain or scaled table as input embedding."
            )
        scale = 1.0
        if factor is not None:
            dtype = _matrix(embedding).dtype  # transformers and vLLM round the factor to it
            scale = float(torch.as_tensor(factor).to(dtype))
        scaled_edit = replace(
            edit,
            sigma=None if edit.sigma is None else edit.sigma * scale,
            vectors=None if edit.vectors is None else edit.vectors * scale,
        )
        return scale, scaled_edit

    def lookup(self, ids: Tensor) -> Tensor:
        """Embeddings of ids of any shape without a replay, with gradient: shape + (D,)."""
        self._bypassed = True
        try:
            return self._embedding(ids)
        finally:
            self._bypassed = False

    def _append_candidates(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The pre-hook of the embedding module: appends the candidates' ids to the tokens."""
        if self._bypassed:
            return None
        tokens = inputs[0]
        if tokens.dim() != 2:
            raise ValueError(f"replay needs token ids of shape (B, T), not {tuple(tokens.shape)}.")
        batch = tokens.shape[0] if self._mask is None else self._mask.shape[0]
        if len(self._records) != batch:
            raise ValueError(
                f"replay has {len(self._records)} records for a batch of {batch}: give one per row, in batch order"
                " (None for a row without one)."
            )
        self._shape = tokens.shape
        rows, self._inside = flat_rows(self._flat.sample, self._flat.position, tuple(tokens.shape), self._mask)
        # A position that was cut off is put at row 0 and masked later. To leave it out would need a shape that depends
        # on the data, which waits for the device.
        self._rows = torch.where(self._inside, rows, 0)
        tokens_and_candidates = torch.cat([tokens.reshape(-1), self._flat.edit.ids.reshape(-1)])
        return (tokens_and_candidates, *inputs[1:])

    def _substitute(self, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """The hook of the embedding module: cuts the candidates' embeddings off and writes their mixtures."""
        if self._bypassed:
            return None
        count = self._shape.numel()
        scale, edit = self._scaled()
        plain = output[:count]  # (B · T, D)
        candidates = output[count:].view(*edit.ids.shape, output.shape[-1])  # (N, K, D)
        if self.perturbation is not None and self.perturbation.input_gradient == "none":
            candidates = candidates.detach()  # not the mixture, which has the gradient to a module
        mixed = mix(candidates, edit, self._flat.noise_keys, self._module_at(scale))  # (N, D)
        if self.perturbation is not None and self.perturbation.density_of_vector:
            mixed = mixed.detach()  # the input is the action: its density alone has a gradient
        if self._measure:
            with torch.no_grad():
                own = plain[self._rows].float()
                shift = (mixed.float() - own).norm(dim=-1) / own.norm(dim=-1)
                shift = shift.nan_to_num(posinf=0.0)  # 0 for a token with an embedding of zeros
                self.stats.shifts.append(shift * self._inside)
                self.stats.inside.append(self._inside)
                self._compare_with_vocabulary(mixed)
        # Positions that were cut off are written to the first candidate's row, which is dropped with the candidates.
        target = torch.where(self._inside, self._rows, count)
        # The other candidates are left out here, since the model's backward keeps the memory of what it is fed.
        return output[: count + 1].index_copy(0, target, mixed)[:count].view(*self._shape, -1)

    def _module_at(self, scale: float) -> Mixer | None:
        """The perturbation's module for embeddings that the model multiplies by ``scale``."""
        module = self._module
        if module is None or scale == 1.0:
            return module

        def on_scaled_embeddings(token: Tensor, mixture: Tensor) -> Tensor:
            return scale * module(token / scale, mixture / scale)  # the module is of embeddings as the matrix has them

        return on_scaled_embeddings

    def _compare_with_vocabulary(self, mixed: Tensor) -> None:
        """Counts, of a few inputs, those that lie nearer to another token than to their heaviest candidate."""
        edit = self._flat.edit
        matrix = getattr(self._embedding, "weight", None)
        count = min(self._look_up, len(edit.ids))
        if not count or matrix is None or matrix.dim() != 2 or matrix.shape[1] != mixed.shape[1]:
            return
        evenly_spaced = (torch.arange(count, device=mixed.device) + 0.5) * len(edit.ids) / count
        chosen = evenly_spaced.long()  # (count,)
        heaviest = edit.weights.argmax(dim=1, keepdim=True)
        anchors = edit.ids.gather(1, heaviest).squeeze(1)[chosen]
        inside = self._inside[chosen]
        left_anchor = nearest_tokens(mixed[chosen], matrix, anchors) != anchors
        self.stats.looked_at.append(inside.sum())
        self.stats.left_anchor.append((left_anchor & inside).sum())


def _matrix(embedding: nn.Module) -> Tensor:
    """The matrix of an embedding module, or another of its parameters where it has none of that name.

    Within a forward of FSDP1 the matrix is a plain tensor, and the module has no parameters.
    """
    weight = getattr(embedding, "weight", None)
    return weight if isinstance(weight, Tensor) else next(embedding.parameters())


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
        perturbation: of the records; its ``input_gradient`` and ``density_of_vector`` say what is fed without
            gradient. None: every mixture has its gradient.
    """
    scope = ReplayScope(model.get_input_embeddings(), module=attached(model), perturbation=perturbation)
    with scope(records, attention_mask) as stats:
        yield stats
