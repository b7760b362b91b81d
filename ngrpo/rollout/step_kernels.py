# SPDX-License-Identifier: Apache-2.0
"""What a step computes of its logits: the tokens, the edits of the gated rows, and what is noted of both.

Each of the three parts is compiled where the device is a GPU, so that a step takes a handful of kernels in place of a
hundred operations. On a CPU, where an operation costs little and a compiler's start seconds, they run as they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ngrpo.rollout.sample_tokens import sample_by_blocks, sample_tokens
from perturbations import streams
from perturbations.base import Perturbation
from perturbations.compilation import Compiled, on_gpu, twice
from perturbations.edit import InputEdit, realise
from perturbations.embeddings import ModelEmbeddings
from perturbations.gates.default import BoundGate
from perturbations.row_blocks import Summary, log_total
from perturbations.step import Step

STREAMS = (streams.Stream.WEIGHTS, streams.Stream.NOISE, streams.Stream.GATE_OPEN)
"""Their keys are computed on the host for all gated rows at once: on the device each takes three dozen operations."""


@dataclass(frozen=True)
class Rows:
    """The B rows of a step.

    Attributes:
        slots: where the state of each row's trajectory lies, (B,) int64.
        prompts: first generated position of each, (B,) int64.
        positions: of the next tokens, (B,) int64.
        sampled: 1 where the token is kept; that of a prompt that is not complete is thrown away: 0, (B,) int64.
    """

    slots: Tensor
    prompts: Tensor
    positions: Tensor
    sampled: Tensor


@dataclass(frozen=True)
class Drawn:
    """The next tokens of B rows.

    Attributes:
        tokens: (B,) int64.
        log_total: log Σ exp of the logits that log π is normalised over, (B,) float32.
        summary: of z̃.
    """

    tokens: Tensor
    log_total: Tensor
    summary: Summary


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
            perturbation: what acts.
            gate: its gate, whose state changes with each step.
            embeddings: what the perturbation sees of the model.
            lookup: ids of any shape to their embeddings, shape + (D,).
            device: where logits are.
            module: the perturbation's module, or None.
            masked: whether log π is normalised over the tokens that filters left, and not over all.
        """
        self._perturbation, self._gate, self._embeddings = perturbation, gate, embeddings
        self._lookup, self._module, self._masked = lookup, module, masked
        self.compiled = on_gpu(device)
        self._draw = self._part(self._drawn)
        self._edit = self._part(self._edited)
        self._realise = self._part(self._realised)
        self._settle = self._part(self._settled)
        self.candidates = 0  # of a position, where anything was compiled
        self._free = torch.zeros(0, dtype=torch.int64, device=device)

    def _part(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return Compiled(function, f"the steps of perturbation {self._perturbation.name}") if self.compiled else function

    # --- the parts, each a pure function of tensors but for the gate's state -----------------------------------

    def draw(self, scaled: Tensor, keys: Tensor, drawable: Tensor | None) -> Drawn:
        """Draws the next tokens.

        Args:
            scaled: z̃, (B, V), float32 or the model's dtype.
            keys: (B,) int64 of :data:`perturbations.streams.Stream.TOKEN`.
            drawable: z̃ after the request's filters, (B, V) float32; None where there are none.
        """
        if len(scaled) > 1 or not self.compiled:
            tokens, total, *known = self._draw(scaled, keys, drawable)
            return Drawn(tokens, total, Summary(*known))
        parts = self._draw(twice(scaled), twice(keys), None if drawable is None else twice(drawable))
        tokens, total, *known = (part[:1] for part in parts)
        return Drawn(tokens, total, Summary(*known))

    def _drawn(self, scaled: Tensor, keys: Tensor, drawable: Tensor | None) -> tuple[Tensor, ...]:
        tokens, known = (sample_by_blocks if self.compiled else sample_tokens)(scaled, drawable, keys)
        total = known.log_total if drawable is None or not self._masked else log_total(drawable)
        return tokens, total, known.maxima, known.log_totals, known.log_total

    def edit(
        self,
        gated: Tensor,
        perturbed: Sequence[Tensor],
        rows: Rows,
        draw: Drawn,
        scaled: Tensor,
        temperature: Tensor,
        drawable: Tensor | None,
        greedy: Tensor | None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Proposes edits at the gated rows.

        Args:
            gated: these, (G,) int64.
            perturbed: their positions, their seeds and their keys of :data:`STREAMS`, (G,) int64 each.
            rows: all rows.
            draw: their tokens.
            scaled: as in :meth:`draw`.
            temperature: (B,) float32.
            drawable: as in :meth:`draw`.
            greedy: argmax tokens for greedy rows and -1 elsewhere, (B,) int64, or None where no row is greedy.
            hidden: the last hidden states, (B, D), where the perturbation reads them.

        Returns:
            The tokens of all rows, (B,); the vectors to be fed, (G, D); and what is recorded, (G, …) by its name.
        """
        known = vars(draw.summary).values()
        inputs = [rows.slots, rows.prompts, draw.tokens, scaled, temperature, drawable, greedy, hidden, *known]
        count, batch = len(gated), len(scaled)
        of_gated = [gated, *perturbed]
        if self.compiled:
            if greedy is None:  # one version for both
                if len(self._free) < batch:
                    self._free = torch.full((max(batch, 2),), -1, dtype=torch.int64, device=scaled.device)
                inputs[6] = self._free[:batch]
            if batch == 1:
                inputs = [None if part is None else twice(part) for part in inputs]
            if count == 1:
                of_gated = [twice(part) for part in of_gated]
        chosen, parts = self._edit(*of_gated, *inputs)
        noise_keys = of_gated[3 + STREAMS.index(streams.Stream.NOISE)]
        mixture = (parts[name] for name in ("ids", "weights"))
        vectors = self._realise(*mixture, parts.get("sigma"), parts.get("vectors"), noise_keys)
        if len(chosen) > count:
            chosen, vectors = chosen[:1], vectors[:1]
            parts = {name: part[:1] for name, part in parts.items()}
        placed = chosen if count == batch else draw.tokens.index_copy_(0, gated, chosen)
        return placed, vectors, parts  # the gated rows stand in the order of the batch

    def _edited(
        self,
        gated: Tensor,
        positions: Tensor,
        seeds: Tensor,
        weights_keys: Tensor,
        noise_keys: Tensor,
        gate_keys: Tensor,
        slots: Tensor,
        prompts: Tensor,
        tokens: Tensor,
        scaled: Tensor,
        temperature: Tensor,
        drawable: Tensor | None,
        greedy: Tensor | None,
        hidden: Tensor | None,
        *known: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        everything = not self.compiled and len(gated) == len(scaled)

        def picked(part: Tensor) -> Tensor:
            return part if everything else part.index_select(0, gated)

        sampled = picked(tokens)
        step = Step(
            picked(scaled).float(),
            sampled,
            picked(temperature),
            seeds,
            positions,
            self._embeddings,
            None if drawable is None else picked(drawable),
            dict(zip(STREAMS, (weights_keys, noise_keys, gate_keys), strict=True)),
            Summary(*map(picked, known)),
            None if hidden is None else picked(hidden),
            None if hidden is None else self._module,
        )
        proposal = self._perturbation.propose(step)
        edit = proposal.edit
        allowed = (scaled if drawable is None else drawable)[gated, proposal.tokens] > -torch.inf
        likeliest = None if greedy is None else picked(greedy)
        opened, fed = self._gate.verdict(step, proposal, picked(slots), picked(prompts), allowed, likeliest)
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
        parts = {name: part for name, part in parts.items() if part is not None}
        return chosen, parts

    # A part of its own: within a larger one the compiler would round the mixture otherwise than the trainer's.
    def _realised(
        self, ids: Tensor, weights: Tensor, sigma: Tensor | None, vectors: Tensor | None, noise_keys: Tensor
    ) -> Tensor:
        noise = None if sigma is None else noise_keys
        return realise(InputEdit(ids.long(), weights, sigma, vectors), self._lookup, noise, self._module)

    def settle(self, rows: Rows, tokens: Tensor, counted: Tensor, log_total: Tensor) -> Tensor:
        """Tells the gate which tokens were produced.

        Args:
            rows: all rows.
            tokens: the tokens that stand in the texts, (B,) int64.
            counted: the logits that log π is normalised over, (B, V).
            log_total: their log Σ exp, (B,) float32.

        Returns:
            log π of the tokens, (B,) float32.
        """
        parts = (rows.slots, rows.positions, rows.sampled, tokens, counted, log_total)
        if self.compiled and len(tokens) == 1:
            return self._settle(*map(twice, parts))[:1]
        return self._settle(*parts)

    def _settled(
        self, slots: Tensor, positions: Tensor, sampled: Tensor, tokens: Tensor, counted: Tensor, log_total: Tensor
    ) -> Tensor:
        if self._gate.tracks_tokens:
            self._gate.observe(slots, positions, tokens, self._gate.ending(slots, positions), sampled > 0)
        return counted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float() - log_total

    # --- compilation ---------------------------------------------------------------------------------------------

    def compile(self, logits: Tensor) -> Tensor:
        """Has every version of every part compiled, so that no request waits for it; leaves the gate as it is.

        Args:
            logits: as the model computes them, (B, V), of any values.

        Returns:
            Tokens, (B,) int64.
        """
        # One row for all, so that an index is asked for the neighbors of one token only, and its drift is not of noise.
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
        for part in (*of_rows, *self._gate.state):
            if part is not None:
                torch._dynamo.maybe_mark_dynamic(part, 0)
        draw = self.draw(scaled, rows, drawable)
        for part in (draw.tokens, draw.log_total, *vars(draw.summary).values()):
            torch._dynamo.maybe_mark_dynamic(part, 0)
        hidden = self.blank_hidden(len(rows))
        if hidden is not None:
            torch._dynamo.maybe_mark_dynamic(hidden, 0)
        if self._perturbation.active:
            for count in (max(len(rows) - 1, 2), len(rows)):
                gated = rows[:count].clone()
                perturbed = [gated.clone() for _ in range(2 + len(STREAMS))]
                for part in (gated, *perturbed):
                    torch._dynamo.maybe_mark_dynamic(part, 0)
                parts = self.edit(gated, perturbed, at, draw, scaled, temperature, drawable, greedy, hidden)[2]
            self.candidates = parts["ids"].shape[-1]
        self.settle(at, draw.tokens, scaled if drawable is None or not self._masked else drawable, draw.log_total)
        return draw.tokens
