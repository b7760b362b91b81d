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
from perturbations.errors import UsageError
from perturbations.row_blocks import BLOCK, Summary


@dataclass(frozen=True)
class Step:
    """B positions of one rollout step on one device: those that the gate selected, or in a CUDA graph all of them.

    Attributes:
        logits: z̃ = z / temperature, before any top-k, top-p or min-p.
        sampled: the tokens that the request's sampling chose, among ``drawable``.
        temperature: the sampling temperature; 1 for a greedy request.
        seeds: the trajectories' seeds.
        positions: the positions of the sampled tokens in their trajectories, counted from the first prompt token.
        embeddings: the model's embeddings and neighbor indices.
        drawable: the logits, -inf where the request excludes a token; None where it excludes none.
        keys: the keys of random streams at these positions, for the streams whose keys are computed already.
        summary: block maxima and sums of ``logits``, which spare further passes over the vocabulary.
        hidden: the last hidden states, in the model's dtype; None without ``reads_hidden``.
        module: the perturbation's learned parameters; None without ``reads_hidden``.
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

    stream: ClassVar[streams.Stream] = streams.Stream.WEIGHTS  # the random stream that the methods below draw from

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest logits and their tokens, largest first: values (B, k) float32 and ids (B, k) int64.

        ``UsageError`` where k exceeds the vocabulary: `Perturbation.check_model` can refuse such a model at the start.
        """
        vocabulary = self.logits.shape[-1]
        if k > vocabulary:
            raise UsageError(
                f"step.top({k}) of {vocabulary} tokens: k must be at most the vocabulary. Refuse a smaller one in"
                " check_model(self, vocabulary), or take min(k, step.logits.shape[-1])."
            )
        maxima = None if self.summary is None else self.summary.maxima
        return row_blocks.largest(self.logits, k, maxima)

    def log_total(self, scale: Tensor | None = None) -> Tensor:
        """log Σ exp(scale · z̃), (B,) float32; ``scale`` > 0 (B, 1), None for 1."""
        if scale is None or _is_seen_to_be_one(scale):
            if self.summary is None:
                return row_blocks.log_total(self.logits)
            return self.summary.log_total
        scaled_maxima = None if self.summary is None else self.summary.maxima * scale
        return row_blocks.log_total(self.logits * scale, scaled_maxima)

    def entropy(self) -> Tensor:
        """The entropy of softmax(z̃) in nats, (B,) float32."""
        log_total = None if self.summary is None else self.summary.log_total
        return row_blocks.entropy(self.logits, log_total)

    def uniform(self, n: int | Tensor) -> Tensor:
        """(B, n) uniform draws in (0, 1), the same wherever and whenever the position is computed.

        A second call with the same ``n`` returns the same numbers, and :meth:`gumbel` and :meth:`normal` are functions
        of the same bits. Take all draws in one call, or give each call other token ids.

        ``n``: draws per position; or token ids (B, n), so that a draw belongs to its token: rollout and trainer may
        rank near-equal logits differently.
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
        computed_keys = self.keys.get(stream)
        if computed_keys is None:
            return streams.keys(self.seeds, self.positions, stream)
        return computed_keys

    def draws(self, n: int, distinct: bool = False) -> Tensor:
        """(B, n) further tokens, each drawn as ``sampled`` was, among tokens that the request allows.

        ``distinct``: without replacement, also of ``sampled``, which is repeated where no other token is left.
        """
        # A draw chooses a block of 64 tokens by the block's total probability, then a token within that block. One hash
        # for every token of the vocabulary would cost more than the rest of a step.
        logits = self.logits if self.drawable is None else self.drawable
        keys = self.keys_of(self.stream)
        blocks = row_blocks.blocks(logits)  # (B, V / 64, 64)
        if self.drawable is None and self.summary is not None:
            block_totals = self.summary.log_totals  # (B, V / 64)
        else:
            block_totals = blocks.logsumexp(dim=-1)
        block_count = block_totals.shape[1]
        block_numbers = torch.arange(block_count, device=logits.device)
        places = torch.arange(BLOCK, device=logits.device)

        drawn = self.sampled.unsqueeze(-1)  # (B, 1), then a column more with every draw
        for draw in range(n):
            excluded = drawn if distinct else None
            remaining_totals = block_totals
            if distinct:
                # Sum the blocks of the excluded tokens again. Subtracting these tokens would round a small rest away.
                affected_blocks = drawn // BLOCK
                remaining_logits, _ = _tokens_of_blocks(blocks, affected_blocks, places, excluded)
                remaining_totals = block_totals.scatter(1, affected_blocks, remaining_logits.logsumexp(dim=-1))

            # The counters of a draw: one for each block, then one for each token.
            first_block_counter = draw * (block_count + block_count * BLOCK)
            first_token_counter = first_block_counter + block_count
            block = _race(remaining_totals, keys, first_block_counter + block_numbers)  # (B,)
            token_logits, tokens = _tokens_of_blocks(blocks, block.unsqueeze(1), places, excluded)  # (B, 1, 64) each
            place = _race(token_logits[:, 0], keys, first_token_counter + tokens[:, 0])  # (B,), within the block
            token = block * BLOCK + place
            if distinct:
                some_token_is_left = remaining_totals.amax(dim=-1) > -torch.inf
                token = torch.where(some_token_is_left, token, self.sampled)
            drawn = torch.cat([drawn, token.unsqueeze(-1)], dim=-1)
        return drawn[:, 1:]


def _is_seen_to_be_one(scale: Tensor) -> bool:
    """Whether every scale is 1, on a CPU: elsewhere a look would wait for the device, and compiled code cannot look."""
    if scale.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return bool((scale.numpy() == 1.0).all())


def _tokens_of_blocks(blocks: Tensor, chosen: Tensor, places: Tensor, excluded: Tensor | None) -> tuple[Tensor, Tensor]:
    """The logits of the chosen blocks' tokens and the tokens' ids, (B, m, 64) each.

    ``blocks``: logits, (B, V / 64, 64). ``chosen``: numbers of blocks, (B, m). ``places``: 0 to 63, (64,).
    ``excluded``: tokens whose logits become -inf, (B, t).
    """
    tokens = chosen.unsqueeze(-1) * BLOCK + places
    logits = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, BLOCK))
    if excluded is not None:
        is_excluded = (tokens.unsqueeze(-1) == excluded[:, None, None]).any(dim=-1)
        logits = torch.where(is_excluded, -torch.inf, logits)
    return logits, tokens


def _race(logits: Tensor, keys: Tensor, counters: Tensor) -> Tensor:
    """Draws one column from each row's distribution softmax(logits), (B, n) to (B,).

    The smallest of E_i / p_i wins, with E_i exponential draws: the largest of log p_i − log E_i (the Gumbel-max trick).
    """
    log_exponentials = streams.exponential(keys, counters).log()
    return (logits - log_exponentials).argmax(dim=-1)


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
        step_fields = {item.name: getattr(step, item.name) for item in fields(step)}
        return cls(**step_fields, generated=generated, state=state or {})


@dataclass(frozen=True)
class Positions:
    """N positions of any trajectories, on the host, before there are logits: (N,) int64 each.

    Attributes:
        seeds: the seed of each position's trajectory.
        first: the first generated position of that trajectory.
        positions: the positions, each at least ``first``.
    """

    seeds: np.ndarray
    first: np.ndarray
    positions: np.ndarray

    def keys(self, stream: streams.Stream) -> np.ndarray:
        """The keys of a stream at these positions, (N,) int64."""
        return streams.of_stream(self.mixed, stream)

    @cached_property
    def mixed(self) -> np.ndarray:
        """What the keys of all streams are computed from, (N,) int64."""
        return streams.of_positions(self.seeds, self.positions)

    @property
    def generated(self) -> np.ndarray:
        """The number of earlier tokens of the response, (N,) int64."""
        return self.positions - self.first

    def where(self, mask: np.ndarray) -> "Positions":
        """The positions where ``mask`` (N,) is True."""
        return Positions(self.seeds[mask], self.first[mask], self.positions[mask])

    def uniform(self, n: int, at: np.ndarray | None = None) -> np.ndarray:
        """(N, n) uniform draws in (0, 1), float32.

        ``at``: other positions of the same trajectories, (N,) int64, whose draws are used instead.
        """
        positions = self.positions if at is None else at
        keys = streams.keys(self.seeds, positions, streams.Stream.GATE_PLAN)
        return streams.uniform(torch.from_numpy(keys), n).numpy()
