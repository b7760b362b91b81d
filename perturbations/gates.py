"""Gates: which positions of a trajectory are perturbed.

A position is perturbed where all of these agree: the Bernoulli draw and the schedule (burn-in, every n), the
conditions on the token (thinking not ended, entropy, protected tokens), and the gate of the user's choice, if there
is one. What depends on seed and position alone is planned for a whole trajectory at once on the host; what looks at
logits is batched on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from perturbations import registry, streams
from perturbations.errors import UsageError
from perturbations.options import Options

if TYPE_CHECKING:
    from perturbations.base import GateStep


@dataclass(frozen=True)
class Schedule:
    """The draw and the schedule, which all operators share.

    Attributes:
        rate: probability ρ of the Bernoulli draw at each position, in [0, 1].
        every: only every n-th generated position after the burn-in.
        burn_in: leave the first n generated positions alone.
    """

    rate: float
    every: int = 1
    burn_in: int = 0

    def plan(self, seed: int, first: int, length: int, start: int = 0) -> np.ndarray:
        """Which positions the draw and the schedule select.

        Args:
            seed: the trajectory's seed.
            first: first generated position (the prompt's length).
            length: positions to plan, counted from 0; those below ``first`` are never selected.
            start: plan only from this position on.

        Returns:
            (length - start,) bool.
        """
        selected = np.zeros(max(length - start, 0), dtype=bool)
        eligible = first + self.burn_in
        if start > eligible:
            eligible += -(-(start - eligible) // self.every) * self.every
        if self.rate == 0.0 or eligible >= length:
            return selected
        positions = torch.arange(eligible, length, self.every, dtype=torch.int64)
        keys = streams.keys(torch.tensor(seed, dtype=torch.int64), positions, streams.Stream.GATE)
        drawn = streams.uniform(keys, 1).squeeze(-1) < self.rate
        selected[positions[drawn].numpy() - start] = True
        return selected


@dataclass(frozen=True)
class Places:
    """Positions of one trajectory that draw and schedule selected, on the host.

    Attributes:
        seed: the trajectory's seed.
        first: first generated position (the prompt's length).
        positions: (N,) int64, in ascending order, none below ``first``.
    """

    seed: int
    first: int
    positions: np.ndarray

    @property
    def generated(self) -> np.ndarray:
        """How many tokens the answer has before each position, (N,) int64: 0 for its first one."""
        return self.positions - self.first

    def uniform(self, n: int, at: np.ndarray | None = None) -> np.ndarray:
        """(N, n) uniform draws in (0, 1), float32, the same whenever the position is planned.

        Args:
            n: draws per position.
            at: (N,) the positions whose draws are wanted; positions that name the same one share its draws.
        """
        where = torch.from_numpy(np.ascontiguousarray(self.positions if at is None else at, dtype=np.int64))
        keys = streams.keys(torch.tensor(self.seed, dtype=torch.int64), where, streams.Stream.GATE_PLAN)
        return streams.uniform(keys, n).numpy()


@dataclass(frozen=True, kw_only=True)
class Gate(Options):
    """A further gate, with its options: it can close positions that draw, schedule and conditions left open.

    Subclasses are frozen dataclasses whose fields come from :func:`perturbations.option`, and implement :meth:`plan`,
    :meth:`open` or both. With the operator's ``rate`` at 1 the gate alone decides.
    """

    kind = "gate"
    registry = registry.gates

    def plan(self, places: Places) -> np.ndarray:
        """Which positions of a trajectory the gate leaves open, from seed and position alone; on the host.

        Must judge each position by itself: a long answer is planned in pieces, and the pieces vary.

        Args:
            places: N positions of one trajectory.

        Returns:
            (N,) bool.
        """
        return np.ones(len(places.positions), dtype=bool)

    def open(self, step: GateStep) -> Tensor:
        """Which rows the gate leaves open, from the logits; on the device.

        Must be a function of each row alone, use no randomness but the step's, and not synchronise with the host: no
        ``.item()``, no ``if`` on a tensor.

        Args:
            step: B positions, each of another trajectory.

        Returns:
            (B,) bool. Elsewhere sampling and lookup are ordinary.
        """
        return torch.ones_like(step.sampled, dtype=torch.bool)


class TokenConditions:
    """The conditions of a gate that look at tokens and logits, batched on a device.

    The state of a trajectory is a row: its last tokens, and whether its thinking has ended.
    """

    def __init__(
        self,
        until_ids: Sequence[int],
        protected: Tensor | None,
        entropy_min: float | None,
        rows: int,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            until_ids: the token sequence that ends perturbation, empty for none.
            protected: (V,) bool, True at protected tokens, or None.
            entropy_min: in nats, or None.
            rows: number of trajectories held at once.
            device: where logits and tokens are.
        """
        self._until = torch.tensor(list(until_ids), dtype=torch.int64, device=device) if until_ids else None
        self._protected = None if protected is None else protected.to(device)
        self._entropy_min = entropy_min
        width = max(len(until_ids), 1)
        self._tail = torch.full((rows, width), -1, dtype=torch.int64, device=device)
        self._ended = torch.zeros(rows, dtype=torch.bool, device=device)

    @property
    def trivial(self) -> bool:
        """Whether every position passes, so that nothing needs to be evaluated."""
        return self._until is None and self._protected is None and self._entropy_min is None

    @property
    def tracks_tokens(self) -> bool:
        """Whether :meth:`observe` must see every token."""
        return self._until is not None

    def grow(self, rows: int) -> None:
        """Makes room for more trajectories; the state of the present ones stays."""
        more = rows - self._ended.shape[0]
        self._tail = torch.cat([self._tail, self._tail.new_full((more, self._tail.shape[1]), -1)])
        self._ended = torch.cat([self._ended, self._ended.new_zeros(more)])

    def reset(self, row: int) -> None:
        """Starts a new trajectory in a row."""
        self._ended[row] = False
        self._tail[row] = -1

    def open(self, rows: Tensor, logits: Tensor) -> Tensor:
        """Where the gate is open: thinking has not ended, and the policy is uncertain enough.

        Args:
            rows: (B,) int64, the trajectories.
            logits: (B, V) float32, temperature-scaled.

        Returns:
            (B,) bool. Elsewhere sampling and lookup are ordinary.
        """
        is_open = torch.ones_like(rows, dtype=torch.bool) if self._until is None else ~self._ended[rows]
        if self._entropy_min is not None:
            log_p = torch.log_softmax(logits, dim=-1)
            is_open = is_open & (torch.special.entr(log_p.exp()).sum(dim=-1) >= self._entropy_min)
        return is_open

    def mixes(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Which proposed tokens may be fed perturbed.

        The others, protected ones and the one that completes the end of thinking, stand in the text as proposed but
        are fed as they are: drawing another token in their place would make them rarer than the policy has them.

        Args:
            rows: (B,) int64, the trajectories.
            tokens: (B,) int64, the proposed tokens.

        Returns:
            (B,) bool.
        """
        mixed = torch.ones_like(rows, dtype=torch.bool) if self._until is None else ~self._completes(rows, tokens)
        return mixed if self._protected is None else mixed & ~self._protected[tokens]

    def observe(self, rows: Tensor, tokens: Tensor) -> None:
        """Tells the tokens that were really produced: rows (B,) int64, tokens (B,) int64."""
        if self._until is None:
            return
        recent = self._recent(rows, tokens)
        self._ended[rows] |= (recent == self._until).all(dim=-1)
        self._tail[rows] = recent

    def _completes(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return (self._recent(rows, tokens) == self._until).all(dim=-1)

    def _recent(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([self._tail[rows, 1:], tokens.unsqueeze(-1)], dim=-1)


def protected_tokens(protect: str | None, vocabulary: Callable[[], Sequence[str]], size: int) -> Tensor | None:
    """The tokens that an option ``protect`` names.

    Args:
        protect: ``digits``, token ids separated by commas, or None.
        vocabulary: gives the decoded text of every token, in the order of the ids.
        size: V, the number of logits.

    Returns:
        (V,) bool, or None.

    Raises:
        UsageError: for anything else, or an id outside the vocabulary.
    """
    if protect is None:
        return None
    mask = torch.zeros(size, dtype=torch.bool)
    if protect == "digits":
        texts = vocabulary()[:size]
        mask[[i for i, text in enumerate(texts) if any(c.isdigit() for c in text)]] = True
        return mask
    try:
        ids = [int(part) for part in protect.split(",")]
    except ValueError:
        raise UsageError(
            f"perturbation option protect={protect!r}: must be 'digits' or token ids separated by commas,"
            " for example 13,198."
        ) from None
    bad = [i for i in ids if not 0 <= i < size]
    if bad:
        raise UsageError(f"perturbation option protect={protect!r}: id {bad[0]} is outside [0, {size - 1}].")
    mask[ids] = True
    return mask
