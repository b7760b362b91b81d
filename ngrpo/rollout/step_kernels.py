# SPDX-License-Identifier: Apache-2.0
"""A step's computations from its logits: the tokens, the edits of the gated rows, and the records of both.

On a GPU each part is compiled, so that a step takes a handful of kernels instead of a hundred operations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class Rows:
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
    greedy: Tensor | None
    hidden: Tensor | None = None


class _Tokens(NamedTuple):
    """Slots and prompts of the B rows, their draw and its summary."""

    slots: Tensor
    prompts: Tensor
    tokens: Tensor
    maxima: Tensor
    log_totals: Tensor
    log_total: Tensor


@dataclass(frozen=True)
class Drawn:
    """The next tokens of B rows, (B,) int64; log Σ exp of the logits that log π is normalised over; summary of z̃."""

    tokens: Tensor
    log_total: Tensor
    summary: Summary


def _doubled(part: Tensor | None) -> Any:
    return None if part is None else twice(part)


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
        self._draw = self._part(self._drawn)
        self._edit = self._part(self._edited)
        self._realise = self._part(self._realised)
        self._token_log_probs = self._part(self._token_log_prob)
        self._advance = self._part(self._advanced)
        self.candidates = 0  # of a position, where anything was compiled
        self._free = torch.zeros(0, dtype=torch.int64, device=device)

    def _part(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return Compiled(function, f"the steps of perturbation {self._perturbation.name}") if self.compiled else function

    # --- the parts, each a pure function of tensors but for the gate's state -----------------------------------

    def draw(self, scaled: Tensor, keys: Tensor, drawable: Tensor | None) -> Drawn:
        """Draws the next tokens; arguments as of :func:`~ngrpo.rollout.sample_tokens.sample_by_blocks`."""
        if len(scaled) > 1 or not self.compiled:
            tokens, total, *known = self._draw(scaled, keys, drawable)
        else:
            tokens, total, *known = (part[:1] for part in self._draw(twice(scaled), twice(keys), _doubled(drawable)))
        return Drawn(tokens, total, Summary(*known))

    def _drawn(self, scaled: Tensor, keys: Tensor, drawable: Tensor | None) -> tuple[Tensor, ...]:
        tokens, known = (sample_by_blocks if self.compiled else sample_tokens)(scaled, drawable, keys)
        total = known.log_total if drawable is None or not self._masked else log_total(drawable)
        return tokens, total, known.maxima, known.log_totals, known.log_total

    def edit(self, gated: Gated, rows: Rows, draw: Drawn, logits: Logits) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The tokens of all rows, (B,); the vectors to be fed, (G, D); and the records' parts, (G, …) by name."""
        count, batch = len(gated.rows), len(logits.scaled)
        tokens = _Tokens(rows.slots, rows.prompts, draw.tokens, *vars(draw.summary).values())
        if self.compiled:
            if logits.greedy is None:  # one version for both
                if len(self._free) < batch:
                    self._free = torch.full((max(batch, 2),), -1, dtype=torch.int64, device=logits.scaled.device)
                logits = logits._replace(greedy=self._free[:batch])
            if batch == 1:
                tokens, logits = _Tokens(*map(_doubled, tokens)), Logits(*map(_doubled, logits))
            if count == 1:
                gated = Gated(*map(twice, gated))
        chosen, parts = self._edit(gated, tokens, logits)
        mixture = (parts[name] for name in ("ids", "weights"))
        vectors = self._realise(*mixture, parts.get("sigma"), parts.get("vectors"), gated.noise_keys)
        if len(chosen) > count:
            gated = Gated(*(part[:1] for part in gated))
            chosen, vectors = chosen[:1], vectors[:1]
            parts = {name: part[:1] for name, part in parts.items()}
        placed = chosen if count == batch else draw.tokens.index_copy_(0, gated.rows, chosen)
        return placed, vectors, parts  # the gated rows have the order of the batch

    def _edited(self, gated: Gated, tokens: _Tokens, logits: Logits) -> tuple[Tensor, dict[str, Tensor]]:
        everything = not self.compiled and len(gated.rows) == len(logits.scaled)
        drawable, greedy, hidden = logits.drawable, logits.greedy, logits.hidden

        def picked(part: Tensor) -> Tensor:
            return part if everything else part.index_select(0, gated.rows)

        sampled = picked(tokens.tokens)
        summary = Summary(picked(tokens.maxima), picked(tokens.log_totals), picked(tokens.log_total))
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
        slots, prompts = picked(tokens.slots), picked(tokens.prompts)
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
    def _realised(
        self, ids: Tensor, weights: Tensor, sigma: Tensor | None, vectors: Tensor | None, noise_keys: Tensor
    ) -> Tensor:
        noise = None if sigma is None else noise_keys
        return realise(InputEdit(ids.long(), weights, sigma, vectors), self._lookup, noise, self._module)

    def token_log_probs(self, rows: Rows, tokens: Tensor, counted: Tensor, log_total: Tensor) -> Tensor:
        """log π of all rows' tokens (B,) among the logits ``counted`` (B, V) with this log Σ exp; tells the gate."""
        parts = (rows.slots, rows.positions, rows.sampled, tokens, counted, log_total)
        if self.compiled and len(tokens) == 1:
            return self._token_log_probs(*map(twice, parts))[:1]
        return self._token_log_probs(*parts)

    def _token_log_prob(
        self, slots: Tensor, positions: Tensor, sampled: Tensor, tokens: Tensor, counted: Tensor, log_total: Tensor
    ) -> Tensor:
        if self._gate.tracks_tokens:
            self._gate.observe(slots, positions, tokens, self._gate.matched(slots, positions), sampled > 0)
        return counted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float() - log_total

    def advance_gate(
        self, rows: Rows, seeds: Tensor, tokens: Tensor, summary: Summary, logits: Logits, fed: Tensor
    ) -> None:
        """Moves the further gate's state past the tokens of all rows; ``seeds`` (B,); ``fed``: perturbed, (B,) bool."""
        parts = (rows.slots, rows.prompts, rows.positions, rows.sampled, seeds, tokens, fed, *vars(summary).values())
        parts = (*parts, logits.scaled, logits.temperature, logits.drawable, logits.hidden)
        self._advance(*(map(_doubled, parts) if self.compiled and len(tokens) == 1 else parts))

    def _advanced(
        self,
        slots: Tensor,
        prompts: Tensor,
        positions: Tensor,
        sampled: Tensor,
        seeds: Tensor,
        tokens: Tensor,
        fed: Tensor,
        maxima: Tensor,
        log_totals: Tensor,
        total: Tensor,
        scaled: Tensor,
        temperature: Tensor,
        drawable: Tensor | None,
        hidden: Tensor | None,
    ) -> None:
        known = {}, Summary(maxima, log_totals, total), hidden, None if hidden is None else self._module
        step = Step(scaled.float(), tokens, temperature, seeds, positions, self._embeddings, drawable, *known)
        self._gate.advance(slots, step, prompts, fed, sampled > 0)

    # --- compilation ---------------------------------------------------------------------------------------------

    def compile(self, logits: Tensor) -> Tensor:
        """Compiles every version of every part for logits (B, V), so that no request waits for it; tokens (B,)."""
        # One row for all: an index finds the neighbors of one token only, and its drift is not of noise.
        count = max(len(logits), 2) if self.compiled else len(logits)
        example = logits[:1].repeat(count, 1)
        if len(logits) > 1:  # a vocabulary that vLLM filled up: versions are for the strides; a doubled row has none
            example = logits.new_empty_strided(logits.shape, logits.stride()).copy_(example)
        scaled = example.float()
        tokens = self._rehearsed(scaled, scaled.clone())
        if self.compiled and example.dtype != torch.float32:
            self._rehearsed(example, None)
        self._rehearsed(scaled, None)
        return tokens[: len(logits)]

    def blank_hidden(self, rows: int) -> Tensor | None:
        """Last hidden states of zero for a rehearsal, (rows, D); None where the perturbation reads none."""
        if not self._perturbation.reads_hidden:
            return None
        known = self._lookup(torch.zeros(1, dtype=torch.int64, device=self._free.device))
        return known.new_zeros(rows, known.shape[-1])

    def _rehearsed(self, scaled: Tensor, drawable: Tensor | None) -> Tensor:
        rows = torch.arange(len(scaled), device=scaled.device)
        if not self.compiled:
            return self.draw(scaled, rows, drawable).tokens
        first, none = torch.zeros_like(rows), torch.zeros_like(rows)
        temperature, greedy = torch.ones(len(rows), device=scaled.device), torch.full_like(rows, -1)
        at = Rows(first, first.clone(), first.clone(), none)
        # Batch and gated rows vary by themselves, and so does the number of slots.
        of_rows = scaled, drawable, rows, temperature, greedy, first, at.prompts, at.positions, none
        _mark_dynamic(*of_rows, *self._gate.state)
        draw = self.draw(scaled, rows, drawable)
        hidden = self.blank_hidden(len(rows))
        _mark_dynamic(draw.tokens, draw.log_total, *vars(draw.summary).values(), hidden)
        if self._perturbation.active:
            for count in (max(len(rows) - 1, 2), len(rows)):
                gated = Gated(*(rows[:count].clone() for _ in Gated._fields))
                _mark_dynamic(*gated)
                parts = self.edit(gated, at, draw, Logits(scaled, temperature, drawable, greedy, hidden))[2]
            self.candidates = parts["ids"].shape[-1]
        counted = scaled if drawable is None or not self._masked else drawable
        self.token_log_probs(at, draw.tokens, counted, draw.log_total)
        if self._gate.has_state:
            fed = torch.zeros_like(rows, dtype=torch.bool)
            _mark_dynamic(fed)
            inputs = Logits(scaled, temperature, drawable, greedy, hidden)
            self.advance_gate(at, rows, draw.tokens, draw.summary, inputs, fed)
        return draw.tokens


def _mark_dynamic(*parts: Tensor | None) -> None:
    for part in parts:
        if part is not None:
            torch._dynamo.maybe_mark_dynamic(part, 0)
