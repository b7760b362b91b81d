# SPDX-License-Identifier: Apache-2.0
"""The default gate and its verdict: which rows of a step are perturbed; where a text ends the perturbation."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from perturbations import Gate, GateStep, Positions, Proposal, Step, UsageError, option, streams
from perturbations.options import Options
from perturbations.registry import gates

_Array = TypeVar("_Array", np.ndarray, Tensor)

_NEVER = torch.iinfo(torch.int64).max
# Tokens of a prompt's end that are read, beyond one for each byte of the text: whitespace after it.
_MARGIN = 32
# State is kept for this many latest positions, so that a position drawn again finds the one before it.
_POSITIONS = 8


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
        gate_keys = positions.keys(streams.Stream.GATE) if self.rate < 1.0 else None
        return self.planned(positions, self.scheduled(positions.generated, gate_keys))

    def planned(self, positions: Positions, among: np.ndarray) -> np.ndarray:
        """Which of the positions ``among``, (N,) bool, the further gate's plan selects, (N,) bool."""
        if not isinstance(self.gate, Gate) or not among.any():
            return among
        selected = among.copy()
        selected[among] = self.gate.plan(positions.where(among))
        return selected

    def scheduled(self, generated: _Array, gate_keys: _Array | None) -> Any:
        """Which positions the draw and the schedule select, (N,) bool: the same bits on the host and on the device.

        ``generated``: earlier tokens of each response, (N,) int64. ``gate_keys``: of `Stream.GATE`, (N,) int64; None at
        rate 1. Both are arrays, or tensors.
        """
        since = generated - self.burn_in
        selected = (since >= 0) & (since % self.every == 0)
        if gate_keys is None or self.rate == 1.0:  # a draw is below 1 in any case
            return selected
        return selected & streams.below(gate_keys, self.rate)


class StopText:
    """Finds a text of L bytes in tokens, across their borders, with a table of states.

    State s < L: the bytes read end with the text's first s bytes. State L: the latest token completed the text.
    """

    def __init__(self, text: str, token_bytes: Sequence[bytes], vocabulary: int, device: torch.device | str) -> None:
        """``token_bytes``: of each token, by id; of V = ``vocabulary`` logits those without bytes change no state."""
        self._text, self._bytes = text.encode(), [*token_bytes[:vocabulary]]
        self._bytes += [b""] * (vocabulary - len(self._bytes))
        self.complete = len(self._text)
        after_byte = np.zeros((self.complete + 1, 256), dtype=np.int16)
        for state, byte in itertools.product(range(self.complete + 1), set(self._text)):
            after_byte[state, byte] = self._begun(self._text[:state] + bytes([byte]), self.complete)
        lengths = np.array([len(each) for each in self._bytes])
        starts = np.cumsum(lengths) - lengths
        symbols = np.frombuffer(b"".join(self._bytes), dtype=np.uint8)
        states = np.tile(np.arange(self.complete + 1, dtype=np.int16), (vocabulary, 1))
        found = np.zeros_like(states, dtype=bool)
        for column in range(int(lengths.max(initial=0))):
            rows = np.flatnonzero(lengths > column)
            states[rows] = after_byte[states[rows], symbols[starts[rows] + column, None]]
            found[rows] |= states[rows] == self.complete
        states[found] = self.complete  # a text within a token stays complete
        self.table = torch.from_numpy(states).to(device)  # the state after each token in each state

    def _begun(self, read: bytes, most: int) -> int:
        """The size of the text's longest beginning, of at most ``most`` bytes, with which some bytes end."""
        return next(size for size in range(most, -1, -1) if read.endswith(self._text[:size]))

    def after(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The states (B,) int64 after ``tokens`` (B,) in ``states`` (B,)."""
        return self.table[tokens, states].long()

    def after_prompt(self, prompt: Sequence[int]) -> int:
        """The state after a prompt: L where its text ends with this one, whitespace aside, as an empty thought does."""
        # A picture's or a sound's placeholder may be beyond the vocabulary.
        end = b"".join(self._bytes[token] for token in prompt[-self.complete - _MARGIN :] if token < len(self._bytes))
        text = self._text.rstrip() or self._text  # one of white space alone is met in the response
        return self.complete if end.rstrip().endswith(text) else self._begun(end, self.complete - 1)


class BoundGate:
    """A perturbation's gate in a rollout, for the trajectories of one worker: where is what is proposed fed?

    On the host: the request is perturbed and its token kept; the rate's draw, the schedule and the further gate's plan
    select the position. On the device: the request's sampling allows the proposed token, thinking continues, the
    policy is uncertain enough, and the further gate is open. Then the proposed token is in the text. Its input is fed
    unless the token is protected or ends the thinking, or the perturbation does not act there.
    """

    # Each trajectory has a row: the states of `StopText` and of the further gate after its latest positions, and where
    # its thinking ended. A position may be observed and drawn again.

    def __init__(
        self,
        options: GateOptions,
        token_bytes: Callable[[], Sequence[bytes]],
        vocabulary: int,
        rows: int,
        device: torch.device | str,
    ) -> None:
        """``token_bytes`` gives the bytes of every token, by id; V = ``vocabulary``; ``rows``: trajectories at once."""
        self._options = options
        # Where nothing is ever perturbed, no token needs to be seen.
        until = options.until if options.rate > 0.0 else None
        self._until = None if until is None else StopText(until, token_bytes(), vocabulary, device)
        protected = protected_tokens(options.protect, token_bytes, vocabulary)
        self._protected = None if protected is None else protected.to(device)
        self._states = torch.zeros((rows, _POSITIONS), dtype=torch.int64, device=device)
        self._ended = torch.full((rows,), _NEVER, dtype=torch.int64, device=device)
        self._further = options.gate if isinstance(options.gate, Gate) else None
        start = {} if self._further is None else self._further.initial_state()
        self._names = tuple(start)
        self._start = torch.tensor([*start.values()], dtype=torch.float32, device=device)
        self._own_states = self._start.repeat(rows, _POSITIONS, 1)

    @property
    def tracks_tokens(self) -> bool:
        """Whether :meth:`observe` must see every token."""
        return self._until is not None

    @property
    def has_state(self) -> bool:
        """Whether the further gate has a state, so that :meth:`advance` must see every token."""
        return bool(self._names)

    @property
    def always_open(self) -> bool:
        """Whether every selected position passes, so that nothing needs to be evaluated on the device."""
        options = self._options
        return all(part is None for part in (self._until, self._protected, options.entropy_min, options.gate))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the gate reads on the device: its state, and tables that never change."""
        tables = (None if self._until is None else self._until.table, self._protected, self._start)
        return *self.state, *(table for table in tables if table is not None)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The tensors that :meth:`observe` and :meth:`advance` change, each with a row for every trajectory."""
        return self._ended, self._states, self._own_states

    def grow(self, rows: int) -> None:
        """Makes room for more trajectories; the state of the present ones stays."""
        more = rows - len(self._ended)
        self._states = torch.cat([self._states, self._states.new_zeros((more, _POSITIONS))])
        self._ended = torch.cat([self._ended, self._ended.new_full((more,), _NEVER)])
        self._own_states = torch.cat([self._own_states, self._start.repeat(more, _POSITIONS, 1)])

    def reset(self, row: int, prompt: Sequence[int] = ()) -> None:
        """Starts a new trajectory in a row. It has ended already where its prompt ends with the text of ``until``."""
        state = 0 if self._until is None else self._until.after_prompt(prompt)
        self._states[row] = state
        self._ended[row] = -1 if self._until is not None and state == self._until.complete else _NEVER
        if self.has_state:
            self._own_states[row] = self._start

    @property
    def plans(self) -> bool:
        """Whether the further gate has a plan, which only the host can ask for."""
        return self._further is not None and type(self._further).plan is not Gate.plan

    def scheduled(self, generated: Tensor, gate_keys: Tensor) -> Tensor:
        """On the device, what :meth:`selected` asks of rate and schedule: (N,) bool, as `GateOptions.scheduled`."""
        return self._options.scheduled(generated, gate_keys)

    def planned(self, at: Positions, eligible: np.ndarray) -> np.ndarray:
        """Which of the eligible rows the further gate's plan leaves open, (B,) bool; rate and schedule aside."""
        return self._options.planned(at, eligible)

    def selected(self, at: Positions, eligible: np.ndarray) -> np.ndarray:
        """Which rows the host lets through, (G,) int64; ``eligible``: of requests to perturb, with tokens to keep."""
        return (self._options.selects(at) & eligible).nonzero()[0]

    def verdict(
        self, step: Step, proposal: Proposal, rows: Tensor, first: Tensor, allowed: Tensor, greedy: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Whether the proposed token is in the text, and whether its input is fed, at G positions: (G,) bool each.

        ``rows``, ``first``: of the trajectories, and their first generated positions, (G,) int64. ``allowed``: whether
        the request's filters leave the proposed token, (G,) bool. ``greedy``: argmax tokens of greedy rows, else -1.
        """
        # What the request's own sampling excludes (at temperature 0 all but the likeliest token) is never in its text:
        # such a position stays unperturbed.
        opened = allowed
        if greedy is not None:
            opened = opened & ((greedy < 0) | (greedy == proposal.tokens))
        fed = opened
        if not self.always_open:
            opened = opened & self.open(rows, step, first)
            fed = opened & self.feeds(proposal.tokens, self.matched(rows, step.positions))
        return opened, fed if proposal.acts is None else fed & proposal.acts

    def open(self, rows: Tensor, step: Step, first: Tensor) -> Tensor:
        """Whether thinking continues, the policy is uncertain enough and the further gate is open: (B,) bool."""
        is_open = step.positions <= self._ended[rows]
        if self._options.entropy_min is not None:
            is_open = is_open & (step.entropy() >= self._options.entropy_min)
        if self._further is not None:
            is_open = is_open & self._further.open(self._seen(rows, step, first))
        return is_open

    def _seen(self, rows: Tensor, step: Step, first: Tensor) -> GateStep:
        """What the further gate sees at each position."""
        if not self.has_state:
            return GateStep.of(step, step.positions - first)
        state = dict(zip(self._names, self._own_states[rows, (step.positions - 1) % _POSITIONS].unbind(-1)))
        return GateStep.of(step, step.positions - first, state)

    def advance(self, rows: Tensor, step: Step, first: Tensor, fed: Tensor, kept: Tensor) -> None:
        """Moves the further gate's state past B positions with ``kept`` tokens; ``fed``: perturbed, (B,) bool."""
        if self._further is None:
            return
        after, at = self._further.advance(self._seen(rows, step, first), fed), step.positions % _POSITIONS
        state = torch.stack([after[name].float() for name in self._names], dim=-1)
        self._own_states[rows, at] = torch.where(kept.unsqueeze(-1), state, self._own_states[rows, at])

    def matched(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The states of `StopText` before each position, (B,) int64."""
        return self._states[rows, (positions - 1) % _POSITIONS]

    def feeds(self, tokens: Tensor, matched: Tensor) -> Tensor:
        """Which proposed tokens (B,) may be fed perturbed, (B,) bool, with the states of :meth:`matched`.

        The others are fed as they are: another token in the text would make them rarer than under the policy.
        """
        fed = torch.ones_like(tokens, dtype=torch.bool)
        if self._until is not None:
            fed = self._until.after(matched, tokens) != self._until.complete
        return fed if self._protected is None else fed & ~self._protected[tokens]

    def observe(
        self, rows: Tensor, positions: Tensor, tokens: Tensor, matched: Tensor, kept: Tensor | None = None
    ) -> None:
        """Takes the tokens (B,) that were produced, or those ``kept`` (B,), with the states of :meth:`matched`."""
        if self._until is None:
            return
        before, state = self._ended[rows], self._until.after(matched, tokens)
        # A position that is drawn again forgets its own end of thinking and any later one.
        now = torch.where(state == self._until.complete, positions, _NEVER)
        now, at = torch.where(before < positions, before, now), positions % _POSITIONS
        if kept is not None:
            now, state = torch.where(kept, now, before), torch.where(kept, state, self._states[rows, at])
        self._ended[rows] = now
        self._states[rows, at] = state


def protected_tokens(protect: str | None, token_bytes: Callable[[], Sequence[bytes]], size: int) -> Tensor | None:
    """The tokens that an option ``protect`` names among V = ``size``: (V,) bool, or None where it is None."""
    if protect is None:
        return None
    ids = protected_ids(protect, size)
    if protect == "digits":
        texts = (each.decode(errors="ignore") for each in token_bytes()[:size])
        ids = [i for i, text in enumerate(texts) if any(c.isdigit() for c in text)]
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
        wrong = f"id {max(ids)} is not in the model's [0, {size - 1}]"
        raise UsageError(f"perturbation option protect={protect!r}: {wrong}.")
    return ids
