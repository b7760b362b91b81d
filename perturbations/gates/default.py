# SPDX-License-Identifier: Apache-2.0
"""The default gate and its verdict: which rows of a step are perturbed.

On the host: the request is perturbed and its token kept; the rate's draw, the schedule and the further gate's plan
select the position. On the device: the request's sampling allows the proposed token, thinking goes on, the policy is
uncertain enough, and the further gate is open. Then the proposed token is in the text. Its input is fed unless the
token is protected or ends the thinking, or the perturbation does not act there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from perturbations import streams
from perturbations.errors import UsageError
from perturbations.gates import Gate
from perturbations.options import Options, option
from perturbations.registry import gates
from perturbations.step import GateStep, Positions, Step

if TYPE_CHECKING:
    from perturbations.base import Proposal

_NEVER = torch.iinfo(torch.int64).max
# Tokens kept beyond the length of `until`, so that a position drawn again still finds the ones before it.
_SLACK = 8


@dataclass(frozen=True, kw_only=True)
class GateOptions(Options):
    """The options of the default gate, which every perturbation has; it may redeclare a field for another default."""

    rate: float = option(1.0, "probability that a position is perturbed (the gate)", low=0.0, high=1.0)
    until: str | None = option("</think>", "stop for good once this text has been produced; 'none' for never")
    entropy_min: float | None = option(None, "perturb only where the entropy in nats is at least this", low=0.0)
    every: int = option(1, "perturb only every n-th generated position after the burn-in", low=1)
    burn_in: int = option(0, "leave the first n generated positions alone", low=0)
    protect: str | None = option(None, "never perturb these tokens: 'digits', or ids separated by commas")
    gate: str | Gate | None = option(None, "perturb only where this gate, too, is open: its name", registry=gates)  # noqa: RUF009

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.until is not None and not self.until:
            raise UsageError(f"{self.kind} option until='': must be a text, such as '</think>', or 'none' for never.")
        protected_ids(self.protect)

    def selects(self, positions: Positions) -> np.ndarray:
        """Which positions the draw, the schedule and the further gate's plan select, (N,) bool."""
        since = positions.generated - self.burn_in
        selected = (since >= 0) & (since % self.every == 0)
        if self.rate < 1.0:  # a draw is below 1 in any case
            selected &= streams.below(positions.keys(streams.Stream.GATE), self.rate)
        if isinstance(self.gate, Gate) and selected.any():
            selected[selected] = self.gate.plan(positions.where(selected))
        return selected


class BoundGate:
    """A perturbation's gate in a rollout, for the trajectories of one worker.

    Each has a row of state: its latest tokens by position, and where its thinking ended. A position may be drawn again.
    """

    def __init__(
        self,
        options: GateOptions,
        encode: Callable[[str], Sequence[int]],
        texts: Callable[[], Sequence[str]],
        vocabulary: int,
        rows: int,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            options: of the perturbation.
            encode: token ids of a text, without special tokens around it.
            texts: gives the decoded text of every token, in the order of the ids.
            vocabulary: V, the number of logits.
            rows: trajectories held at once.
            device: of logits and tokens.
        """
        self._options = options
        # Where nothing is ever perturbed, no token needs to be seen.
        until = list(encode(options.until)) if options.until is not None and options.rate > 0.0 else []
        protected = protected_tokens(options.protect, texts, vocabulary)
        self._protected = None if protected is None else protected.to(device)
        ends = torch.tensor(until, dtype=torch.int64, device=device)
        self._until = (ends[:-1], ends[-1]) if until else None
        self._back = torch.arange(1 - max(len(until), 1), 0, device=device)
        self._recent = torch.full((rows, len(until) + _SLACK), -1, dtype=torch.int64, device=device)
        self._ended = torch.full((rows,), _NEVER, dtype=torch.int64, device=device)

    @property
    def tracks_tokens(self) -> bool:
        """Whether :meth:`observe` must see every token."""
        return self._until is not None

    @property
    def always_open(self) -> bool:
        """Whether every selected position passes, so that nothing needs to be evaluated on the device."""
        options = self._options
        return all(part is None for part in (self._until, self._protected, options.entropy_min, options.gate))

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The tensors that :meth:`observe` changes, each with a row for every trajectory."""
        return self._ended, self._recent

    def grow(self, rows: int) -> None:
        """Makes room for more trajectories; the state of the present ones stays."""
        more = rows - len(self._ended)
        self._recent = torch.cat([self._recent, self._recent.new_full((more, self._recent.shape[1]), -1)])
        self._ended = torch.cat([self._ended, self._ended.new_full((more,), _NEVER)])

    def reset(self, row: int) -> None:
        """Starts a new trajectory in a row."""
        self._ended[row] = _NEVER
        self._recent[row] = -1

    def selected(self, at: Positions, eligible: np.ndarray) -> np.ndarray:
        """Which rows the host lets through, (G,) int64; ``eligible``: of requests to perturb, with tokens to keep."""
        return (self._options.selects(at) & eligible).nonzero()[0]

    def verdict(
        self, step: Step, proposal: Proposal, rows: Tensor, first: Tensor, allowed: Tensor, greedy: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Whether the proposed token is in the text, and whether its input is fed, at G positions: (G,) bool each.

        Args:
            step: the positions.
            proposal: the perturbation's answer.
            rows: of the trajectories, (G,) int64.
            first: first generated position of each, (G,) int64.
            allowed: whether the request's filters leave the proposed token, (G,) bool.
            greedy: argmax tokens of greedy rows, else -1, (G,) int64; None where no row is greedy.
        """
        # What the request's own sampling excludes (at temperature 0 all but the likeliest token) is never in its text:
        # such a position stays unperturbed.
        opened = allowed
        if greedy is not None:
            opened = opened & ((greedy < 0) | (greedy == proposal.tokens))
        fed = opened
        if not self.always_open:
            opened = opened & self.open(rows, step, first)
            fed = opened & self.feeds(proposal.tokens, self.ending(rows, step.positions))
        return opened, fed if proposal.acts is None else fed & proposal.acts

    def open(self, rows: Tensor, step: Step, first: Tensor) -> Tensor:
        """Whether thinking goes on, the policy is uncertain enough and the further gate is open: (B,) bool."""
        is_open = step.positions <= self._ended[rows]
        if self._options.entropy_min is not None:
            is_open = is_open & (step.entropy() >= self._options.entropy_min)
        if isinstance(self._options.gate, Gate):
            is_open = is_open & self._options.gate.open(GateStep.of(step, step.positions - first))
        return is_open

    def ending(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The token that would complete the end of thinking at each position, (B,) int64, else -1."""
        if self._until is None:
            return torch.full_like(rows, -1)
        before = (positions.unsqueeze(-1) + self._back) % self._recent.shape[1]
        beginning, last = self._until
        matched = (self._recent[rows.unsqueeze(-1), before] == beginning).all(dim=-1)
        return torch.where(matched, last, -1)

    def feeds(self, tokens: Tensor, ending: Tensor) -> Tensor:
        """Which proposed tokens (B,) may be fed perturbed, (B,) bool, with ``ending`` of :meth:`ending`."""
        # The others are in the text, fed as they are: another token would make them rarer than under the policy.
        fed = tokens != ending
        return fed if self._protected is None else fed & ~self._protected[tokens]

    def observe(
        self, rows: Tensor, positions: Tensor, tokens: Tensor, ending: Tensor, kept: Tensor | None = None
    ) -> None:
        """Takes the tokens (B,) that were produced, or those ``kept`` (B,), with ``ending`` of :meth:`ending`."""
        if self._until is None:
            return
        before = self._ended[rows]
        # A position that is drawn again forgets its own end of thinking and any later one.
        now = torch.where(tokens == ending, positions, _NEVER)
        now, at = torch.where(before < positions, before, now), positions % self._recent.shape[1]
        if kept is not None:
            now, tokens = torch.where(kept, now, before), torch.where(kept, tokens, self._recent[rows, at])
        self._ended[rows] = now
        self._recent[rows, at] = tokens


def protected_tokens(protect: str | None, vocabulary: Callable[[], Sequence[str]], size: int) -> Tensor | None:
    """The tokens that an option ``protect`` names among V = ``size``, by their texts: (V,) bool; None for None."""
    if protect is None:
        return None
    ids = protected_ids(protect, size)
    if protect == "digits":
        ids = [i for i, text in enumerate(vocabulary()[:size]) if any(c.isdigit() for c in text)]
    mask = torch.zeros(size, dtype=torch.bool)
    mask[ids] = True
    return mask


def protected_ids(protect: str | None, size: int | None = None) -> list[int]:
    """The ids that an option ``protect`` lists, below V = ``size`` if given; none for ``digits``, which needs texts."""
    if protect is None or protect == "digits":
        return []
    parts = [part.strip() for part in protect.split(",")]
    wrong = next((part for part in parts if not (part.isascii() and part.isdecimal()) or len(part) > 18), None)
    if wrong is not None:
        allowed = "must be 'digits', or ids separated by commas, such as 13,198"
        raise UsageError(f"perturbation option protect={protect!r}: {wrong!r} is no token id; {allowed}.")
    ids = [int(part) for part in parts]
    if size is not None and max(ids) >= size:
        raise UsageError(
            f"perturbation option protect={protect!r}: id {max(ids)} is not in the model's [0, {size - 1}]."
        )
    return ids
