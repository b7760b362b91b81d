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


class Logits(NamedTuple):
    """The sampler's inputs at the B rows of a step, as of :meth:`~ngrpo.rollout.perturber.RolloutPerturber.finish`.

    ``drawable`` is None where no request filters; ``hidden`` (B, D) is there where the perturbation reads it.
    """

    scaled: Tensor
    temperature: Tensor
    drawable: Tensor | None
    greedy: Tensor | None
    hidden: Tensor | None


class Drawn(NamedTuple):
    """The next tokens of B rows, (B,) int64, and log π; summary of z̃.

    ``log_total``: log Σ exp of what filters left, where log π is normalised over that; else None.
    """

    tokens: Tensor
    log_probs: Tensor
    summary: Summary
    log_total: Tensor | None


class Edited(NamedTuple):
    """Tokens and log π of rows, (N,); of the G gated ones what is fed, (G, D), and what is recorded, by name."""

    tokens: Tensor
    log_probs: Tensor
    vectors: Tensor | None
    recorded: dict[str, Tensor]


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
        if len(parts[0]) > 1:
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

    def step(self, rows: Tensor, gated: Tensor, logits: Logits) -> Edited:
        """Draws the tokens of B rows, proposes what the gate's verdict is on, and moves the gate past them.

        ``rows`` (B, 6) int64: slots, first generated positions, positions of the next tokens, 0 where a prompt is not
        complete, seeds, keys of the draw. ``gated`` (G, 4) int64: which rows, and their keys of :data:`STREAMS`.
        """
        batch = len(rows)
        if self.compiled and logits.greedy is None:  # one version for both
            if len(self._free) < batch:
                self._free = torch.full((max(batch, 2),), -1, dtype=torch.int64, device=rows.device)
            logits = logits._replace(greedy=self._free[:batch])
        draw = self.draw(rows, logits)
        tokens, log_probs, vectors, recorded = draw.tokens, draw.log_probs, None, {}
        if len(gated):
            chosen, their_log_probs, vectors, recorded = self.edit(gated, rows, draw, logits)
            if len(gated) < batch:
                tokens.index_copy_(0, gated[:, 0], chosen)
                log_probs.index_copy_(0, gated[:, 0], their_log_probs)
            else:  # the gated rows have the order of the batch
                tokens, log_probs = chosen, their_log_probs
        if self._gate.has_state:
            fed = torch.zeros_like(tokens, dtype=torch.bool)
            if len(gated):
                fed.index_copy_(0, gated[:, 0], recorded["fed"])
            self.advance_gate(rows, draw._replace(tokens=tokens), logits, fed)
        return Edited(tokens, log_probs, vectors, recorded)

    def edit(self, gated: Tensor, rows: Tensor, draw: Drawn, logits: Logits) -> Edited:
        """What becomes of the gated rows alone."""
        chosen, log_probs, recorded = self.proposed(gated, rows, draw, logits)
        mixed = recorded["ids"], recorded["weights"], recorded.get("sigma"), recorded.get("vectors")
        return Edited(chosen, log_probs, self.realised(gated, *mixed), recorded)

    # --- the parts, each a pure function of tensors but for the gate's state -----------------------------------

    @_part
    def draw(self, rows: Tensor, logits: Logits) -> Drawn:
        """Draws the next tokens of all rows."""
        scaled, drawable, greedy = logits.scaled, logits.drawable, logits.greedy
        sample = sample_by_blocks if self.compiled else sample_tokens
        tokens, known = sample(scaled, drawable, rows[:, 5])
        if greedy is not None:
            tokens = torch.where(greedy >= 0, greedy, tokens)
        if drawable is None or not self._masked:
            return Drawn(tokens, self._noted(rows, tokens, scaled, known.log_total), known, None)
        total = log_total(drawable)
        return Drawn(tokens, self._noted(rows, tokens, drawable, total), known, total)

    @_part
    def proposed(
        self, gated: Tensor, rows: Tensor, draw: Drawn, logits: Logits
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The gated rows' tokens after the gate's verdict and their log π, (G,), and what is recorded."""
        which, *keys = gated.unbind(1)
        everything = not self.compiled and len(gated) == len(rows)

        def picked(part: Tensor) -> Tensor:
            return part if everything else part.index_select(0, which)

        rows, sampled, summary = picked(rows), picked(draw.tokens), Summary(*map(picked, draw.summary))
        slots, first, positions, _, seeds, _ = rows.unbind(1)
        scaled, hidden = picked(logits.scaled), logits.hidden
        drawable, greedy = (None if part is None else picked(part) for part in (logits.drawable, logits.greedy))
        step = Step(
            scaled.float(),
            sampled,
            picked(logits.temperature),
            seeds,
            positions,
            self._embeddings,
            drawable,
            dict(zip(STREAMS, keys, strict=True)),
            summary,
            None if hidden is None else picked(hidden),
            None if hidden is None else self._module,
        )
        proposal = self._perturbation.propose(step)
        edit, left = proposal.edit, scaled if drawable is None else drawable
        allowed = left.gather(-1, proposal.tokens.unsqueeze(-1)).squeeze(-1) > -torch.inf
        allowed = allowed & (summary.maxima.amax(dim=-1) * step.temperature < _FORCED)
        opened, fed = self._gate.verdict(step, proposal, slots, first, allowed, greedy)
        chosen = torch.where(opened, proposal.tokens, sampled)
        total = summary.log_total if draw.log_total is None else picked(draw.log_total)
        log_probs = self._noted(rows, chosen, scaled if draw.log_total is None else left, total)
        parts = {
            "fed": fed,
            "ids": edit.ids.to(torch.int32),
            "weights": edit.weights,
            "agreed": chosen == sampled,
            "sigma": edit.sigma,
            "vectors": edit.vectors,
            "normalizer": edit.normalizer,
        }
        return chosen, log_probs, {name: part for name, part in parts.items() if part is not None}

    # A part of its own: within a larger one the compiler would round the mixture otherwise than the trainer's.
    @_part
    def realised(
        self, gated: Tensor, ids: Tensor, weights: Tensor, sigma: Tensor | None, vectors: Tensor | None
    ) -> Tensor:
        """The vectors to be fed, (G, D)."""
        noise = None if sigma is None else gated[:, 1 + STREAMS.index(streams.Stream.NOISE)].contiguous()
        return realise(InputEdit(ids.long(), weights, sigma, vectors), self._lookup, noise, self._module)

    def _noted(self, rows: Tensor, tokens: Tensor, counted: Tensor, log_total: Tensor) -> Tensor:
        """log π of tokens (N,) among the logits ``counted`` (N, V) with this log Σ exp; tells the gate of them."""
        slots, _, positions, sampled, _, _ = rows.unbind(1)
        if self._gate.tracks_tokens:
            self._gate.observe(slots, positions, tokens, self._gate.matched(slots, positions), sampled > 0)
        return counted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float() - log_total

    @_part
    def advance_gate(self, rows: Tensor, draw: Drawn, logits: Logits, fed: Tensor) -> None:
        """Moves the further gate's state past the tokens of all rows; ``fed``: perturbed, (B,) bool."""
        slots, first, positions, sampled, seeds, _ = rows.unbind(1)
        scaled, hidden = logits.scaled.float(), logits.hidden
        at = draw.tokens, logits.temperature, seeds, positions
        known = {}, draw.summary, hidden, None if hidden is None else self._module
        step = Step(scaled, *at, self._embeddings, logits.drawable, *known)
        self._gate.advance(slots, step, first, fed, sampled > 0)

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
        count, device = len(scaled), scaled.device
        rows = torch.zeros(count, 6, dtype=torch.int64, device=device)
        temperature, greedy = torch.ones(count, device=device), torch.full((count,), -1, device=device)
        hidden = None
        if self._perturbation.reads_hidden:
            known = self._lookup(torch.zeros_like(greedy[:1]))
            hidden = known.new_zeros(count, known.shape[-1])
        logits = Logits(scaled, temperature, drawable, greedy, hidden)
        # Batch and gated rows vary by themselves, and so does the number of slots.
        _mark_dynamic(rows, *logits, *self._gate.state)
        draw = self.draw(rows, logits)
        _mark_dynamic(draw.tokens, draw.log_probs, *draw.summary, draw.log_total)
        if edits and self._perturbation.active:
            for some in (max(count - 1, 2), count) if self.compiled else (count,):
                gated = torch.arange(some, device=device).repeat(4, 1).T.contiguous()
                _mark_dynamic(gated)
                self.candidates = self.edit(gated, rows, draw, logits).recorded["ids"].shape[-1]
        if self._gate.has_state:
            fed = torch.zeros_like(greedy, dtype=torch.bool)
            _mark_dynamic(fed)
            self.advance_gate(rows, draw, logits, fed)


def _mark_dynamic(*parts: Tensor | None) -> None:
    for part in parts:
        if part is not None:
            torch._dynamo.maybe_mark_dynamic(part, 0)
