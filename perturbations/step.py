# SPDX-License-Identifier: Apache-2.0
"""The input of perturbations and gates: the positions of one rollout step, with draws of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from perturbations import row_blocks, streams
from perturbations.embeddings import ModelEmbeddings
from perturbations.row_blocks import BLOCK, Summary


@dataclass(frozen=True)
class Step:
    """The B positions that the gate's draw selected, as one batch on one device.

    Attributes:
        logits: z̃ = z / temperature, before any top-k, top-p or min-p.
        sampled: the tokens that the request's sampling chose, among ``drawable``.
        temperature: the sampling temperature; 1 for a greedy request.
        seeds, positions: of the trajectories, and the tokens' positions in them.
        embeddings: the model's embeddings and neighbor indices.
        drawable: the logits, -inf where the request excludes a token; None where it excludes none.
        keys: the streams' keys at these positions that were computed before.
        summary: of ``logits``, which spares further passes over them.
        hidden, module: the last hidden states, in the model's dtype, and the perturbation's learned parameters; None
            without ``reads_hidden``.
    """

    logits: Float[Tensor, "rows vocabulary"]
    sampled: Int64[Tensor, " rows"]
    temperature: Float[Tensor, " rows"]
    seeds: Int64[Tensor, " rows"]
    positions: Int64[Tensor, " rows"]
    embeddings: ModelEmbeddings
    drawable: Float[Tensor, "rows vocabulary"] | None = None
    keys: Mapping[streams.Stream, Int64[Tensor, " rows"]] = field(default_factory=dict)
    summary: Summary | None = None
    hidden: Float[Tensor, "rows hidden"] | None = None
    module: nn.Module | None = None

    stream: ClassVar[streams.Stream] = streams.Stream.WEIGHTS  # of the draws

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest logits and their tokens, largest first: values (B, k) float32 and ids (B, k) int64."""
        return row_blocks.largest(self.logits, k, None if self.summary is None else self.summary.maxima)

    def log_total(self, scale: Tensor | None = None) -> Tensor:
        """log Σ exp(scale · z̃), (B,) float32; ``scale`` > 0 (B, 1), None for 1."""
        known, looks = self.summary, self.logits.device.type == "cpu" and not torch.compiler.is_compiling()
        if scale is None or (looks and (scale.numpy() == 1.0).all()):
            return row_blocks.log_total(self.logits) if known is None else known.log_total
        return row_blocks.log_total(self.logits * scale, None if known is None else known.maxima * scale)

    def entropy(self) -> Tensor:
        """The entropy of softmax(z̃) in nats, (B,) float32."""
        return row_blocks.entropy(self.logits, None if self.summary is None else self.summary.log_total)

    def uniform(self, n: int | Tensor) -> Tensor:
        """(B, n) uniform draws in (0, 1), the same wherever and whenever the position is computed.

        ``n``: draws per position; or token ids (B, n), since near-equal logits swap ranks.
        """
        return streams.uniform(self.keys_of(self.stream), n)

    def gumbel(self, n: int | Tensor) -> Tensor:
        """(B, n) Gumbel(0, 1) draws; ``n`` as in :meth:`uniform`."""
        return streams.gumbel(self.keys_of(self.stream), n)

    def normal(self, n: int | Tensor) -> Tensor:
        """(B, n) standard normal draws; ``n`` as in :meth:`uniform`."""
        return streams.normal(self.keys_of(self.stream), n)

    def log_gamma(self, ids: Tensor, shape: Tensor) -> Tensor:
        """(B, n) logarithms of Gamma(shape, 1) draws, tied to the tokens ``ids`` (B, n); ``shape`` (B, n)."""
        return streams.log_gamma(self.keys_of(self.stream), ids, shape)

    def keys_of(self, stream: streams.Stream) -> Tensor:
        """The keys of a stream at these positions, (B,) int64."""
        known = self.keys.get(stream)
        return streams.keys(self.seeds, self.positions, stream) if known is None else known

    def draws(self, n: int, distinct: bool = False) -> Tensor:
        """(B, n) further tokens, each drawn as ``sampled`` was, among tokens that the request allows.

        ``distinct``: without replacement, also of ``sampled``, which is repeated where no other token is left.
        """
        # First a block of tokens by its total, then a token within it: a hash for each of the vocabulary would cost
        # more than all the rest of a step.
        logits, keys = self.logits if self.drawable is None else self.drawable, self.keys_of(self.stream)
        blocks = row_blocks.blocks(logits)
        summary = self.summary if self.drawable is None else None
        totals = blocks.logsumexp(dim=-1) if summary is None else summary.log_totals
        count = totals.shape[1]
        each, places = (torch.arange(size, device=logits.device) for size in (count, BLOCK))

        def without(taken: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
            """The logits of some blocks (B, m), without the tokens taken (B, t), and their ids: (B, m, 64) each."""
            tokens = chosen.unsqueeze(-1) * BLOCK + places
            inside = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, BLOCK))
            if distinct:
                gone = (tokens.unsqueeze(-1) == taken[:, None, None]).any(dim=-1)
                inside = torch.where(gone, -torch.inf, inside)
            return inside, tokens

        drawn = self.sampled.unsqueeze(-1)
        for j in range(n):
            first = j * (count + count * BLOCK)  # counters of this draw: one for each block, one for each token
            left = totals
            if distinct:  # sums again and not by difference, which would round a small rest away
                affected = drawn // BLOCK
                left = totals.scatter(1, affected, without(drawn, affected)[0].logsumexp(dim=-1))
            chosen = _race(left, keys, first + each)
            inside, tokens = without(drawn, chosen.unsqueeze(1))
            token = chosen * BLOCK + _race(inside[:, 0], keys, first + count + tokens[:, 0])
            if distinct:
                token = torch.where(left.amax(dim=-1) > -torch.inf, token, self.sampled)
            drawn = torch.cat([drawn, token.unsqueeze(-1)], dim=-1)
        return drawn[:, 1:]


def _race(logits: Tensor, keys: Tensor, counters: Tensor) -> Tensor:
    """A draw from each row's distribution, (B,): the smallest of exponential draws over the probabilities."""
    return (logits - streams.exponential(keys, counters).log()).argmax(dim=-1)


@dataclass(frozen=True, kw_only=True)
class GateStep(Step):
    """The input of a gate: a :class:`Step` with draws of its own.

    Attributes:
        generated: the number of earlier tokens of each response.
        state: the trajectories' state before these positions, by the names of :meth:`Gate.initial_state`.
    """

    generated: Int64[Tensor, " rows"]
    state: Mapping[str, Float[Tensor, " rows"]] = field(default_factory=dict)

    stream = streams.Stream.GATE_OPEN

    @classmethod
    def of(cls, step: Step, generated: Tensor, state: Mapping[str, Tensor] | None = None) -> "GateStep":
        """A gate's view of a perturbation's step."""
        return cls(**{f.name: getattr(step, f.name) for f in fields(step)}, generated=generated, state=state or {})


@dataclass(frozen=True)
class Positions:
    """N positions of any trajectories, on the host, before there are logits: (N,) int64 each.

    ``seeds``: of the trajectories. ``first``: their first generated positions. ``positions``: none below ``first``.
    """

    seeds: np.ndarray
    first: np.ndarray
    positions: np.ndarray

    def keys(self, stream: streams.Stream) -> np.ndarray:
        return streams.of_stream(self.mixed, stream)

    @cached_property
    def mixed(self) -> np.ndarray:
        """The origin of all streams' keys, (N,) int64."""
        return streams.of_positions(self.seeds, self.positions)

    @property
    def generated(self) -> np.ndarray:
        """The number of earlier tokens of the response, (N,) int64."""
        return self.positions - self.first

    def where(self, mask: np.ndarray) -> "Positions":
        """The positions where ``mask`` (N,) is True."""
        return Positions(self.seeds[mask], self.first[mask], self.positions[mask])

    def uniform(self, n: int, at: np.ndarray | None = None) -> np.ndarray:
        """(N, n) uniform draws in (0, 1), float32; ``at``: other positions (N,), which give the draws."""
        keys = streams.keys(self.seeds, self.positions if at is None else at, streams.Stream.GATE_PLAN)
        return streams.uniform(torch.from_numpy(keys), n).numpy()
