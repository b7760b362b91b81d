# SPDX-License-Identifier: Apache-2.0
"""A step's computations from its logits: the tokens, the edits of the gated rows, and the records of both.

On a GPU each part is compiled, so that a step takes a handful of kernels instead of a hundred operations.
"""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ngrpo.rollout.sample_tokens import sample_by_blocks, sample_tokens
from perturbations import InputEdit, Perturbation, Step, streams
from perturbations.compilation import Compiled, on_gpu, twice
from perturbations.edit import realise
from perturbations.embeddings import ModelEmbeddings
from perturbations.gates.default import BoundGate
from perturbations.row_blocks import Summary, log_total

STREAMS = (streams.Stream.WEIGHTS, streams.Stream.NOISE, streams.Stream.GATE_OPEN)
"""Their keys are computed on the host for all gated rows at once: on the device each takes three dozen operations."""

_FORCED = 1e8  # vLLM gives 1e9 to a token that a thinking budget forces: nothing is drawn, so nothing is perturbed


class Rows(NamedTuple):
    """The B rows of a step, (B,) int64 each: slots, first generated positions, positions of the next tokens.

    ``sampled`` is 0 where a prompt is not complete, so that the token is thrown away.
    """

    slots: Tensor
    prompts: Tensor
    positions: Tensor
    sampled: Tensor


class Gated(NamedTuple):
    """The G of B rows that the gate selects, (G,) int64 each, with the keys of :data:`STREAMS` in its order."""

    rows: Tensor
    positions: Tensor
    seeds: Tensor
    weights_keys: Tensor
    noise_keys: Tensor
    gate_keys: Tensor


class Logits(NamedTuple):
    """The sampler's inputs at the B rows of a step, as of :meth:`~ngrpo.rollout.perturber.RolloutPerturber.finish`.

    ``drawable`` is None where no request filters; ``hidden`` (B, D) is there where the perturbation reads it.
    """

    scaled: Tensor
    temperature: Tensor
    drawable: Tensor | None
    greedy: Tensor | None = None
    hidden: Tensor | None = None


class Drawn(NamedTuple):
    """The next tokens of B rows, (B,) int64; log Σ exp of the logits that log π is normalised over; summary of z̃."""

    tokens: Tensor
    log_total: Tensor
    summary: Summary


F = TypeVar("F", bound=Callable[..., Any])


def _part(function: F) -> F:
    """A function of batches of rows, compiled on a GPU; its results have as many rows as its first argument.

    There a batch of one runs as a batch of two, or it would be a version of its own.
    """

    @wraps(function)
    def call(self: "StepKernels", *parts: Any) -> Any:
        if not self.compiled:
            return function(self, *parts)
        if function.__name__ not in self._parts:
            purpose = f"the steps of perturbation {self._perturbation.name}"
            self._parts[function.__name__] = Compiled(MethodType(function, self), purpose)
        compiled = self._parts[function.__name__]
        if len(parts[0] if isinstance(parts[0], Tensor) else parts[0][0]) > 1:
            return compiled(*parts)
        doubled = tree_map_only(Tensor, lambda part: twice(part) if len(part) == 1 else part, parts)
        return tree_map_only(Tensor, lambda part: part[:1], compiled(*doubled))

    return call  # type: ignore[return-value]


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
        """lookup: ids of any shape to shape + (D,); masked: log π is normalised over the tokens that filters left."""
        self._perturbation, self._gate, self._embeddings = perturbation, gate, embeddings
        self._lookup, self._module, self._masked = lookup, module, masked
        self.compiled = on_gpu(device)
        self._parts: dict[str, Compiled] = {}
        self.candidates = 0  # of a position, where an edit was rehearsed
        self._free = torch.zeros(0, dtype=torch.int64, device=device)

    # --- the parts, each a pure function of tensors but for the gate's state -----------------------------------

    @_part
    def draw(self, scaled: Tensor, keys: Tensor, drawable: Tensor | None) -> Drawn:
        """Draws the next tokens; arguments as of :func:`~ngrpo.rollout.sample_tokens.sample_by_blocks`."""
        tokens, known = (sample_by_blocks if self.compiled else sample_tokens)(scaled, drawable, keys)
        total = known.log_total if drawable is None or not self._masked else log_total(drawable)
        return Drawn(tokens, total, known)

    def edit(self, gated: Gated, rows: Rows, draw: Drawn, logits: Logits) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The tokens of all rows, (B,); the vectors to be fed, (G, D); and the records' parts, (G, …) by name."""
        batch = len(logits.scaled)
        if self.compiled and logits.greedy is None:  # one version for both
            if len(self._free) < batch:
                self._free = torch.full((max(batch, 2),), -1, dtype=torch.int64, device=logits.scaled.device)
            logits = logits._replace(greedy=self._free[:batch])
        chosen, parts = self.proposed(gated, rows, draw, logits)
        mixed = parts.get("sigma"), parts.get("vectors")
        vectors = self.realised(parts["ids"], parts["weights"], *mixed, gated.noise_keys)
        placed = chosen if len(chosen) == batch else draw.tokens.index_copy_(0, gated.rows, chosen)
        return placed, vectors, parts  # the gated rows have the order of the batch

    @_part
    def proposed(self, gated: Gated, rows: Rows, draw: Drawn, logits: Logits) -> tuple[Tensor, dict[str, Tensor]]:
        """The gated rows' tokens after the gate's verdict, (G,), and the records' parts."""
        everything = not self.compiled and len(gated.rows) == len(logits.scaled)
        drawable, greedy, hidden = logits.drawable, logits.greedy, logits.hidden

        def picked(part: Tensor) -> Tensor:
            return part if everything else part.index_select(0, gated.rows)

        sampled, summary = picked(draw.tokens), Summary(*map(picked, draw.summary))
        step = Step(
            picked(logits.scaled).float(),
            sampled,
            picked(logits.temperature),
            gated.seeds,
            gated.positions,
            self._embeddings,
            None if drawable is None else picked(drawable),
            dict(zip(STREAMS, (gated.weights_keys, gated.noise_keys, gated.gate_keys), strict=True)),
            summary,
            None if hidden is None else picked(hidden),
            None if hidden is None else self._module,
        )
        proposal = self._perturbation.propose(step)
        edit = proposal.edit
        allowed = (logits.scaled if drawable is None else drawable)[gated.rows, proposal.tokens] > -torch.inf
        allowed = allowed & (summary.maxima.amax(dim=-1) * step.temperature < _FORCED)
        likeliest = None if greedy is None else picked(greedy)
        slots, prompts = picked(rows.slots), picked(rows.prompts)
        opened, fed = self._gate.verdict(step, proposal, slots, prompts, allowed, likeliest)
        chosen = torch.where(opened, proposal.tokens, sampled)
        parts = {
            "fed": fed,
            "ids": edit.ids.to(torch.int32),
            "weights": edit.weights,
            "agreed": chosen == sampled,
            "sigma": edit.sigma,
            "vectors": edit.vectors,
            "normalizer": edit.normalizer,
        }
        return chosen, {name: part for name, part in parts.items() if part is not None}

    # A part of its own: within a larger one the compiler would round the mixture otherwise than the trainer's.
    @_part
    def realised(
        self, ids: Tensor, weights: Tensor, sigma: Tensor | None, vectors: Tensor | None, noise_keys: Tensor
    ) -> Tensor:
        """The vectors to be fed, (G, D)."""
        noise = None if sigma is None else noise_keys
        return realise(InputEdit(ids.long(), weights, sigma, vectors), self._lookup, noise, self._module)

    @_part
    def token_log_probs(self, rows: Rows, tokens: Tensor, counted: Tensor, log_total: Tensor) -> Tensor:
        """log π of all rows' tokens (B,) among the logits ``counted`` (B, V) with this log Σ exp; tells the gate."""
        slots, _, positions, sampled = rows
        if self._gate.tracks_tokens:
            self._gate.observe(slots, positions, tokens, self._gate.matched(slots, positions), sampled > 0)
        return counted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float() - log_total

    @_part
    def advance_gate(self, rows: Rows, seeds: Tensor, draw: Drawn, logits: Logits, fed: Tensor) -> None:
        """Moves the further gate's state past the tokens of all rows; ``seeds`` (B,); ``fed``: perturbed, (B,) bool."""
        scaled, hidden = logits.scaled.float(), logits.hidden
        at = draw.tokens, logits.temperature, seeds, rows.positions
        known = {}, draw.summary, hidden, None if hidden is None else self._module
        step = Step(scaled, *at, self._embeddings, logits.drawable, *known)
        self._gate.advance(rows.slots, step, rows.prompts, fed, rows.sampled > 0)

    # --- compilation ---------------------------------------------------------------------------------------------

    def rehearse(self, logits: Tensor, edits: bool = True) -> None:
        """Does a step's work on logits (B, V); on a GPU every version of every part is compiled for later ones.

        edits: with those of the perturbation, which may look for neighbors.
        """
        # One row for all: an index finds the neighbors of one token only, and its drift is not of noise.
        count = max(len(logits), 2) if self.compiled else len(logits)
        example = logits[:1].repeat(count, 1)
        if len(logits) > 1:  # a vocabulary that vLLM filled up: versions are for the strides; a doubled row has none
            example = logits.new_empty_strided(logits.shape, logits.stride()).copy_(example)
        scaled = example.float()
        self._rehearse(scaled, scaled.clone(), edits)
        if self.compiled and example.dtype != torch.float32:
            self._rehearse(example, None, edits)
        if self.compiled:
            self._rehearse(scaled, None, edits)

    def _rehearse(self, scaled: Tensor, drawable: Tensor | None, edits: bool) -> None:
        rows = torch.arange(len(scaled), device=scaled.device)
        first, none = torch.zeros_like(rows), torch.zeros_like(rows)
        temperature, greedy = torch.ones(len(rows), device=scaled.device), torch.full_like(rows, -1)
        at = Rows(first, first.clone(), first.clone(), none)
        # Batch and gated rows vary by themselves, and so does the number of slots.
        of_rows = scaled, drawable, rows, temperature, greedy, first, at.prompts, at.positions, none
        _mark_dynamic(*of_rows, *self._gate.state)
        draw, hidden = self.draw(scaled, rows, drawable), None
        if self._perturbation.reads_hidden:
            known = self._lookup(first[:1])
            hidden = known.new_zeros(len(rows), known.shape[-1])
        _mark_dynamic(draw.tokens, draw.log_total, *draw.summary, hidden)
        if edits and self._perturbation.active:
            for count in (max(len(rows) - 1, 2), len(rows)) if self.compiled else (len(rows),):
                gated = Gated(*(rows[:count].clone() for _ in Gated._fields))
                _mark_dynamic(*gated)
                parts = self.edit(gated, at, draw, Logits(scaled, temperature, drawable, greedy, hidden))[2]
                self.candidates = parts["ids"].shape[-1]
        counted = scaled if drawable is None or not self._masked else drawable
        self.token_log_probs(at, draw.tokens, counted, draw.log_total)
        if self._gate.has_state:
            fed = torch.zeros_like(rows, dtype=torch.bool)
            _mark_dynamic(fed)
            self.advance_gate(at, rows, draw, Logits(scaled, temperature, drawable, hidden=hidden), fed)


def _mark_dynamic(*parts: Tensor | None) -> None:
    for part in parts:
        if part is not None:
            torch._dynamo.maybe_mark_dynamic(part, 0)
