# SPDX-License-Identifier: Apache-2.0
"""A step's computations from its logits: the tokens, the edits, and what is recorded of both.

On a GPU each of the methods marked with ``_part`` is compiled, so that a step takes a handful of kernels instead of a
hundred operations. `step_graphs.py` captures a step of all of them as one CUDA graph.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ngrpo.rollout.sample_tokens import sample_by_blocks, sample_tokens
from ngrpo.rollout.step_records import pack
from ngrpo.rollout.step_rows import Drawn, Edited, GatedRows, Logits, StepColumns, StepRows
from perturbations import InputEdit, Perturbation, Proposal, Step, streams
from perturbations.compilation import Compiled, on_gpu, twice
from perturbations.edit import realise
from perturbations.embeddings import ModelEmbeddings
from perturbations.gates.default import BoundGate
from perturbations.row_blocks import Summary, log_total

# vLLM gives a logit of 1e9 to a token that a thinking budget forces. A row with a logit of 1e8 or more has a forced
# token, which is not drawn, so its input is not perturbed.
_FORCED = 1e8

F = TypeVar("F", bound=Callable[..., Any])


def _part(function: F) -> F:
    """Compiles a method of :class:`StepKernels` on a GPU.

    The first of the method's tensors has a row for each row of its results. torch.compile specialises on a size of 1,
    so a batch of one such row is doubled, and the second row of each result is dropped.
    """

    @wraps(function)
    def call(self: "StepKernels", *arguments: object) -> Any:
        if not self.compiled:
            return function(self, *arguments)
        if function.__name__ not in self._parts:
            purpose = f"the steps of perturbation {self._perturbation.name}"
            self._parts[function.__name__] = Compiled(MethodType(function, self), purpose)
        compiled = self._parts[function.__name__]
        batch = len(tree_leaves(arguments)[0])
        if batch > 1:
            return compiled(*arguments)
        doubled = tree_map_only(Tensor, _doubled, arguments)
        return tree_map_only(Tensor, _first_row, compiled(*doubled))

    return call  # type: ignore[return-value]


def _doubled(rows: Tensor) -> Tensor:
    """One row twice; a tensor with another number of rows stays as it is."""
    return twice(rows) if len(rows) == 1 else rows


def _first_row(rows: Tensor) -> Tensor:
    return rows[:1]


class StepKernels:
    """The parts of a step, for one perturbation and one model."""

    def __init__(
        self,
        perturbation: Perturbation,
        gate: BoundGate,
        embeddings: ModelEmbeddings,
        lookup: Callable[[Tensor], Tensor],
        device: torch.device,
        module: nn.Module | None = None,
        masked: bool = False,
    ) -> None:
        """
        Args:
            perturbation: what proposes the edits.
            gate: selects and judges the proposals.
            embeddings: of the model, for perturbations.
            lookup: goes from ids of any shape to the rows of the embedding matrix, shape + (D,).
            device: of the logits.
            module: the perturbation's learned module, if it has one.
            masked: whether log π is normalised over the tokens that filters left.
        """
        self._perturbation = perturbation
        self._gate = gate
        self._embeddings = embeddings
        self._lookup = lookup
        self._module = module
        self._masked = masked
        self.compiled = on_gpu(device)
        self._parts: dict[str, Compiled] = {}
        self.candidates = 0  # candidates of a position, known after an edit was rehearsed
        self._no_greedy = torch.zeros(0, dtype=torch.int64, device=device)  # -1 for as many rows as were ever needed

    def step(self, rows: Tensor, gated: Tensor, logits: Logits) -> Edited:
        """Draws the tokens of B rows, proposes at the G that the gate selects, and moves the gate past all.

        ``rows``: :class:`StepRows` as a matrix (B, 6) int64; ``gated``: :class:`GatedRows` as a matrix (G, 4) int64.
        """
        if self.compiled and logits.greedy is None:
            # One compiled version serves batches with and without greedy requests.
            logits = logits._replace(greedy=self._without_greedy(len(rows)))
        draw = self.draw(rows, logits)
        gated_rows = GatedRows.view(gated).rows
        if not len(gated):
            edited = Edited(tokens=draw.tokens, log_probs=draw.log_probs, vectors=None, recorded={})
        else:
            edited = self.edit(gated, rows, draw, logits)
            if len(gated) < len(rows):
                # The rows that are not gated keep what they drew.
                draw.tokens.index_copy_(0, gated_rows, edited.tokens)
                draw.log_probs.index_copy_(0, gated_rows, edited.log_probs)
                edited = edited._replace(tokens=draw.tokens, log_probs=draw.log_probs)
        if self._gate.further_has_state:
            fed = torch.zeros_like(edited.tokens, dtype=torch.bool)
            if len(gated):
                fed.index_copy_(0, gated_rows, edited.recorded["fed"])
            self.advance_gate(rows, draw._replace(tokens=edited.tokens), logits, fed)
        return edited

    def _without_greedy(self, batch: int) -> Tensor:
        """What a batch without greedy requests has as :attr:`Logits.greedy`: -1 for each row, (B,) int64."""
        if len(self._no_greedy) < batch:
            size = max(batch, 2)
            self._no_greedy = torch.full((size,), -1, dtype=torch.int64, device=self._no_greedy.device)
        return self._no_greedy[:batch]

    def edit(self, gated: Tensor, rows: Tensor, draw: Drawn, logits: Logits) -> Edited:
        """Proposes at the G gated rows; of these alone are the tokens and log π of the result, (G,)."""
        tokens, log_probs, recorded = self.proposed(gated, rows, draw, logits)
        vectors = self._vectors(gated, recorded)
        return Edited(tokens=tokens, log_probs=log_probs, vectors=vectors, recorded=recorded)

    def step_in_graph(self, columns: StepColumns, logits: Logits) -> tuple[Edited, Tensor]:
        """As :meth:`step`, with shapes that follow from B alone: proposes at all rows, edits those that are selected.

        Where a row is not selected, the verdict is False: it keeps its token, and what is recorded of it is not read.
        Also returns the record as :func:`~ngrpo.rollout.step_records.pack` has it.
        """
        self._mark_dynamic(columns, logits, self._gate.state)
        rows, gated, selected = self.keyed(columns)
        self._mark_dynamic(rows, gated, selected)
        draw = self.draw(rows, logits)
        self._mark_dynamic(draw)
        tokens, log_probs, recorded = self.proposed_everywhere(gated, rows, selected, draw, logits)
        self._mark_dynamic(tokens, log_probs, recorded)
        self.candidates = recorded["ids"].shape[-1]
        if self._gate.further_has_state:
            self.advance_gate(rows, draw._replace(tokens=tokens), logits, recorded["fed"])
        vectors = self._vectors(gated, recorded)
        edited = Edited(tokens=tokens, log_probs=log_probs, vectors=vectors, recorded=recorded)
        return edited, self.packed(log_probs, recorded)

    # --- the parts, each a pure function of tensors but for the gate's state -----------------------------------

    @_part
    def draw(self, rows: Tensor, logits: Logits) -> Drawn:
        """Draws the next tokens of all rows."""
        step_rows = StepRows.view(rows)
        sample = sample_by_blocks if self.compiled else sample_tokens
        tokens, summary = sample(logits.scaled, logits.drawable, step_rows.token_keys)
        if logits.greedy is not None:
            tokens = torch.where(logits.greedy >= 0, logits.greedy, tokens)
        self._observe(step_rows, tokens)
        if logits.drawable is None or not self._masked:
            log_probs = _log_probs(tokens, logits.scaled, summary.log_total)
            return Drawn(tokens=tokens, log_probs=log_probs, summary=summary, log_total=None)
        total = log_total(logits.drawable)
        log_probs = _log_probs(tokens, logits.drawable, total)
        return Drawn(tokens=tokens, log_probs=log_probs, summary=summary, log_total=total)

    @_part
    def proposed(
        self, gated: Tensor, rows: Tensor, draw: Drawn, logits: Logits
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The gated rows' tokens after the gate's verdict and their log π, (G,), and what is recorded."""
        gated_rows = GatedRows.view(gated)
        if self.compiled or len(gated) < len(rows):

            def picked(tensor: Tensor | None) -> Any:
                return None if tensor is None else tensor.index_select(0, gated_rows.rows)

            rows = picked(rows)
            logits = Logits(*map(picked, logits))
            draw = Drawn(
                tokens=picked(draw.tokens),
                log_probs=picked(draw.log_probs),
                summary=Summary(*map(picked, draw.summary)),
                log_total=picked(draw.log_total),
            )
        return self._proposed(gated_rows, StepRows.view(rows), draw, logits, selected=None)

    @_part
    def proposed_everywhere(
        self, gated: Tensor, rows: Tensor, selected: Tensor, draw: Drawn, logits: Logits
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """All rows' tokens after the gate's verdict and their log π, (B,), and what is recorded where it is True."""
        return self._proposed(GatedRows.view(gated), StepRows.view(rows), draw, logits, selected)

    def _proposed(
        self, gated: GatedRows, rows: StepRows, draw: Drawn, logits: Logits, selected: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        step = self._perturbation_step(rows, draw, logits, gated.keys)
        proposal = self._perturbation.propose(step)
        drawable = logits.scaled if logits.drawable is None else logits.drawable
        proposed_logits = drawable.gather(-1, proposal.tokens.unsqueeze(-1)).squeeze(-1)
        allowed = proposed_logits > -torch.inf
        largest_logits = draw.summary.maxima.amax(dim=-1) * step.temperature
        allowed = allowed & (largest_logits < _FORCED)
        if selected is not None:
            allowed = allowed & selected
        in_text, fed = self._gate.verdict(step, proposal, rows.slots, rows.first, allowed, logits.greedy)
        tokens = torch.where(in_text, proposal.tokens, draw.tokens)
        self._observe(rows, tokens)
        if draw.log_total is None:
            log_probs = _log_probs(tokens, logits.scaled, draw.summary.log_total)
        else:
            log_probs = _log_probs(tokens, drawable, draw.log_total)
        return tokens, log_probs, _recorded(proposal, fed, agreed=tokens == draw.tokens)

    def _perturbation_step(
        self, rows: StepRows, draw: Drawn, logits: Logits, keys: Mapping[streams.Stream, Tensor]
    ) -> Step:
        """What perturbations and gates see of these rows."""
        return Step(
            logits=logits.scaled.float(),
            sampled=draw.tokens,
            temperature=logits.temperature,
            seeds=rows.seeds,
            positions=rows.positions,
            embeddings=self._embeddings,
            drawable=logits.drawable,
            keys=keys,
            summary=draw.summary,
            hidden=logits.hidden,
            module=None if logits.hidden is None else self._module,
        )

    # A part of its own: within a larger one the compiler would round the mixture otherwise than the trainer's.
    @_part
    def realised(
        self, gated: Tensor, ids: Tensor, weights: Tensor, sigma: Tensor | None, vectors: Tensor | None
    ) -> Tensor:
        """The vectors of the gated rows' edits, (G, D)."""
        noise_keys = None if sigma is None else GatedRows.view(gated).noise.contiguous()
        edit = InputEdit(ids=ids.long(), weights=weights, sigma=sigma, vectors=vectors)
        return realise(edit, self._lookup, noise_keys, self._module)

    def _vectors(self, gated: Tensor, recorded: dict[str, Tensor]) -> Tensor:
        """The vectors of the gated rows' edits, (G, D), from what is recorded of them."""
        return self.realised(
            gated,
            recorded["ids"],
            recorded["weights"],
            recorded.get("sigma"),
            recorded.get("vectors"),
        )

    def _observe(self, rows: StepRows, tokens: Tensor) -> None:
        """Shows the gate the tokens (N,) in the text.

        Called for the drawn tokens, and again for the final tokens of the gated rows, which replace these.
        """
        if self._gate.tracks_tokens:
            matched = self._gate.matched(rows.slots, rows.positions)
            self._gate.observe(rows.slots, rows.positions, tokens, matched, rows.keeps_token > 0)

    @_part
    def advance_gate(self, rows: Tensor, draw: Drawn, logits: Logits, fed: Tensor) -> None:
        """Moves the further gate's state past the tokens of all rows; ``fed``: perturbed, (B,) bool."""
        step_rows = StepRows.view(rows)
        step = self._perturbation_step(step_rows, draw, logits, keys={})
        self._gate.advance(step_rows.slots, step, step_rows.first, fed, step_rows.keeps_token > 0)

    # Only a graph computes keys on the device: as single operations they would be a hundred kernels.
    @_part
    def keyed(self, columns: StepColumns) -> tuple[Tensor, Tensor, Tensor]:
        """The matrices of :class:`StepRows`, (B, 6), and of :class:`GatedRows` with every row in it, (B, 4).

        Also which rows are selected, (B,) bool: they are eligible, and rate and schedule select them.
        """
        mixed = streams.of_positions(columns.seeds, columns.positions)
        rows = StepRows(
            slots=columns.slots,
            first=columns.first,
            positions=columns.positions,
            keeps_token=columns.keeps_token,
            seeds=columns.seeds,
            token_keys=streams.of_stream(mixed, streams.Stream.TOKEN),
        )
        gated = GatedRows(
            rows=torch.arange(len(mixed), device=mixed.device),
            weights=streams.of_stream(mixed, streams.Stream.WEIGHTS),
            noise=streams.of_stream(mixed, streams.Stream.NOISE),
            gate_open=streams.of_stream(mixed, streams.Stream.GATE_OPEN),
        )
        gate_keys = streams.of_stream(mixed, streams.Stream.GATE)
        scheduled = self._gate.scheduled(columns.positions - columns.first, gate_keys)
        selected = scheduled & (columns.eligible > 0)
        return torch.stack(rows, dim=1), torch.stack(gated, dim=1), selected

    @_part
    def packed(self, log_probs: Tensor, recorded: dict[str, Tensor]) -> Tensor:
        """All that the host reads of B rows as 32-bit words, (B, W) int32."""
        return pack(log_probs, recorded)

    # --- compilation ---------------------------------------------------------------------------------------------

    def rehearse(self, logits: Tensor, edits: bool = True) -> None:
        """Does a step's work on logits (B, V); on a GPU every version of every part is compiled for later ones.

        edits: whether edits are rehearsed too, for which a perturbation may look for neighbors.
        """
        # Equal rows, so that the warm-up looks up the neighbors of one token and does not disturb the drift metric.
        count = max(len(logits), 2) if self.compiled else len(logits)
        example = logits[:1].repeat(count, 1)
        if len(logits) > 1:
            # Keep the strides of vLLM's padded vocabulary: torch.compile specialises on strides.
            example = logits.new_empty_strided(logits.shape, logits.stride()).copy_(example)
        scaled = example.float()
        # Requests that filter: float32 logits, and others to draw from.
        self._rehearse(scaled, scaled.clone(), edits)
        if self.compiled and example.dtype != torch.float32:
            # No request changes its logits: they come in the model's dtype.
            self._rehearse(example, None, edits)
        if self.compiled:
            # Requests change logits, and none filters.
            self._rehearse(scaled, None, edits)

    def _rehearse(self, scaled: Tensor, drawable: Tensor | None, edits: bool) -> None:
        count = len(scaled)
        device = scaled.device
        rows = torch.zeros(count, len(StepRows._fields), dtype=torch.int64, device=device)
        logits = Logits(
            scaled=scaled,
            temperature=torch.ones(count, device=device),
            drawable=drawable,
            greedy=torch.full((count,), -1, device=device),
            hidden=self.example_hidden(count, device),
        )
        # Batch size, number of gated rows and number of slots are independent dynamic dimensions.
        self._mark_dynamic(rows, logits, self._gate.state)
        draw = self.draw(rows, logits)
        self._mark_dynamic(draw)
        if edits and self._perturbation.active:
            if self.compiled:
                self._rehearse_edit(max(count - 1, 2), rows, draw, logits)
            self._rehearse_edit(count, rows, draw, logits)
        if self._gate.further_has_state:
            fed = torch.zeros(count, dtype=torch.bool, device=device)
            self._mark_dynamic(fed)
            self.advance_gate(rows, draw, logits, fed)

    def _rehearse_edit(self, gated_count: int, rows: Tensor, draw: Drawn, logits: Logits) -> None:
        numbers = torch.arange(gated_count, device=rows.device)
        gated = numbers.repeat(len(GatedRows._fields), 1).T.contiguous()
        self._mark_dynamic(gated)
        edited = self.edit(gated, rows, draw, logits)
        self.candidates = edited.recorded["ids"].shape[-1]

    def example_hidden(self, count: int, device: torch.device) -> Tensor | None:
        """Last hidden states of zeros, (count, D), for a perturbation that reads them; else None."""
        if not self._perturbation.reads_hidden:
            return None
        embedding = self._lookup(torch.zeros(1, dtype=torch.int64, device=device))
        return embedding.new_zeros(count, embedding.shape[-1])

    def _mark_dynamic(self, *tensors: object) -> None:
        """Has torch.compile take the numbers of rows as variables: without the mark, a second size would recompile."""
        if self.compiled:
            for tensor in tree_leaves(tensors):
                if isinstance(tensor, Tensor):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _log_probs(tokens: Tensor, logits: Tensor, total: Tensor) -> Tensor:
    """log π of tokens (N,) by logits (N, V) with the log Σ exp ``total`` (N,): (N,) float32."""
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float() - total


def _recorded(proposal: Proposal, fed: Tensor, agreed: Tensor) -> dict[str, Tensor]:
    """What is recorded of a proposal, by name, as in :class:`~ngrpo.rollout.step_rows.Edited`."""
    edit = proposal.edit
    recorded = {
        "fed": fed,
        "ids": edit.ids.to(torch.int32),
        "weights": edit.weights,
        "agreed": agreed,
        "sigma": edit.sigma,
        "vectors": edit.vectors,
        "normalizer": edit.normalizer,
    }
    return {name: tensor for name, tensor in recorded.items() if tensor is not None}
