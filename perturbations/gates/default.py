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

_NEVER = torch.iinfo(torch.int64).max  # the position where thinking ends, as long as it has not ended
# `after_prompt` looks for the text among the prompt's last tokens: one for each byte of the text, and this many more,
# since white space may follow it.
_MARGIN = 32
# The states after this many latest positions are kept, since the engine may draw a position again.
_POSITIONS = 8


@dataclass(frozen=True, kw_only=True)
class GateOptions(Options):
    """The options of the default gate, which every perturbation has; it may redeclare a field for another default."""

    rate: float = option(1.0, "probability that a position is perturbed (the gate)", low=0.0, high=1.0)
    until: str | None = option("</think>", "stop perturbing once the response has this text; 'none': never stop")
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
        scheduled = self.scheduled(positions.generated, gate_keys)
        return self.planned(positions, scheduled)

    def planned(self, positions: Positions, among: np.ndarray) -> np.ndarray:
        """Which of the positions where ``among`` is True the further gate's plan selects; (N,) bool each."""
        if not isinstance(self.gate, Gate) or not among.any():
            return among
        selected = among.copy()
        selected[among] = self.gate.plan(positions.where(among))
        return selected

    def scheduled(self, generated: _Array, gate_keys: _Array | None) -> Any:
        """Which positions the draw and the schedule select, (N,) bool: the same bits on the host and on the device.

        Args:
            generated: the number of earlier tokens of each response, (N,) int64, an array or a tensor.
            gate_keys: the keys of `Stream.GATE`, (N,) int64, of the same type; None at rate 1.
        """
        since_burn_in = generated - self.burn_in
        selected = (since_burn_in >= 0) & (since_burn_in % self.every == 0)
        if gate_keys is None or self.rate == 1.0:  # every uniform draw is below 1
            return selected
        return selected & streams.below(gate_keys, self.rate)


class StopText:
    """Finds a text of L bytes in a sequence of tokens, also where it begins and ends within tokens.

    A finite automaton with L + 1 states (Knuth, Morris and Pratt). In state s < L the bytes read so far end with the
    text's first s bytes. In state L the latest token completed the text. For ``</think>``, L = 8:

        tokens   "so"  "."  "</"  "thi"  "nk>"
        states      0    0     2      5      8
    """

    def __init__(self, text: str, token_bytes: Sequence[bytes], vocabulary: int, device: torch.device | str) -> None:
        """``token_bytes``: of each token, by id. Tokens below V = ``vocabulary`` without bytes change no state."""
        self._text = text.encode()
        self._bytes = list(token_bytes[:vocabulary])
        self._bytes += [b""] * (vocabulary - len(self._bytes))
        self.complete = len(self._text)

        after_byte = np.zeros((self.complete + 1, 256), dtype=np.int16)  # the state after a byte in a state
        for state, byte in itertools.product(range(self.complete + 1), set(self._text)):
            bytes_read = self._text[:state] + bytes([byte])
            after_byte[state, byte] = self._matched_size(bytes_read, self.complete)

        # All tokens at once, byte by byte: column j moves every token that has a byte j, from every state.
        lengths = np.array([len(token) for token in self._bytes])  # (V,)
        starts = np.cumsum(lengths) - lengths  # where each token's bytes begin in all_bytes
        all_bytes = np.frombuffer(b"".join(self._bytes), dtype=np.uint8)
        states = np.tile(np.arange(self.complete + 1, dtype=np.int16), (vocabulary, 1))  # (V, L + 1)
        was_complete = np.zeros_like(states, dtype=bool)
        for column in range(int(lengths.max(initial=0))):
            rows = np.flatnonzero(lengths > column)
            bytes_of_rows = all_bytes[starts[rows] + column]
            states[rows] = after_byte[states[rows], bytes_of_rows[:, None]]
            was_complete[rows] |= states[rows] == self.complete
        states[was_complete] = self.complete  # also where the token goes on after the text
        self.table = torch.from_numpy(states).to(device)  # the state after each token in each state, (V, L + 1) int16

    def _matched_size(self, bytes_read: bytes, most: int) -> int:
        """How many of the text's first bytes, at most ``most``, the bytes end with."""
        size = most
        while not bytes_read.endswith(self._text[:size]):
            size -= 1
        return size

    def after(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The states (B,) int64 after ``tokens`` (B,) in ``states`` (B,)."""
        return self.table[tokens, states].long()

    def after_prompt(self, prompt: Sequence[int]) -> int:
        """The state after a prompt: L where the prompt ends with the text and white space, as an empty thought does."""
        latest_tokens = prompt[-self.complete - _MARGIN :]
        # The placeholder of a picture or a sound may be a token beyond the vocabulary.
        end = b"".join(self._bytes[token] for token in latest_tokens if token < len(self._bytes))
        text = self._text.rstrip() or self._text  # a text of white space alone is searched as it is
        if end.rstrip().endswith(text):
            return self.complete
        return self._matched_size(end, self.complete - 1)


class BoundGate:
    """A perturbation's gate in a rollout, for the trajectories of one worker: decides where a proposal is fed.

    The proposed token is in the text where all of these hold:

    1. on the host: the request is perturbed, its token is kept, and the further gate's plan selects the position;
    2. on the device within a CUDA graph, else on the host: the rate's draw and the schedule select the position;
    3. on the device: the request's sampling allows the proposed token (top-k, top-p and min-p; at temperature 0 only
       the likeliest), and no token is forced;
    4. on the device: thinking continues, the policy is uncertain enough, and the further gate is open.

    Then the proposed input is fed too, unless the token is protected, or the token ends the thinking, or the
    perturbation does not act at the position.
    """

    # Each trajectory has a row in the tensors below. Position p's state is in column p % _POSITIONS, so that a position
    # that the engine draws again finds the state of the position before it.

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
        # At rate 0 nothing is ever perturbed, so it does not matter where thinking ends.
        self._until: StopText | None = None
        if options.until is not None and options.rate > 0.0:
            self._until = StopText(options.until, token_bytes(), vocabulary, device)
        protected = protected_tokens(options.protect, token_bytes, vocabulary)
        self._protected = None if protected is None else protected.to(device)  # (V,) bool
        # The states of StopText after the latest positions, (rows, _POSITIONS).
        self._states = torch.zeros((rows, _POSITIONS), dtype=torch.int64, device=device)
        # The position whose token ended the thinking, (rows,).
        self._ended = torch.full((rows,), _NEVER, dtype=torch.int64, device=device)
        self._further = options.gate if isinstance(options.gate, Gate) else None
        initial_state = {} if self._further is None else self._further.initial_state()
        self._names = tuple(initial_state)
        self._start = torch.tensor([*initial_state.values()], dtype=torch.float32, device=device)  # (names,)
        # The states of the further gate after the latest positions, (rows, _POSITIONS, names).
        self._further_states = self._start.repeat(rows, _POSITIONS, 1)

    @property
    def tracks_tokens(self) -> bool:
        """Whether :meth:`observe` must see every token."""
        return self._until is not None

    @property
    def further_has_state(self) -> bool:
        """Whether the further gate has a state, so that :meth:`advance` must see every token."""
        return bool(self._names)

    @property
    def always_open(self) -> bool:
        """Whether :meth:`open` and :meth:`feeds` hold everywhere, so that :meth:`verdict` need not evaluate them."""
        conditions = (self._until, self._protected, self._options.entropy_min, self._options.gate)
        return all(condition is None for condition in conditions)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the gate reads on the device: its state, and tables that never change."""
        tensors = [*self.state, self._start]
        if self._until is not None:
            tensors.append(self._until.table)
        if self._protected is not None:
            tensors.append(self._protected)
        return tuple(tensors)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The tensors that :meth:`observe` and :meth:`advance` change, each with a row for every trajectory."""
        return self._ended, self._states, self._further_states

    def grow(self, rows: int) -> None:
        """Makes room for ``rows`` trajectories; the state of the present ones stays."""
        added = rows - len(self._ended)
        # vLLM calls this in its inference mode, and torch.compile would compile anew for another kind of tensor.
        with torch.inference_mode(self._ended.is_inference()):
            self._states = torch.cat([self._states, self._states.new_zeros((added, _POSITIONS))])
            self._ended = torch.cat([self._ended, self._ended.new_full((added,), _NEVER)])
            self._further_states = torch.cat([self._further_states, self._start.repeat(added, _POSITIONS, 1)])

    def reset(self, row: int, prompt: Sequence[int] = ()) -> None:
        """Starts a new trajectory in a row. Its thinking has ended if the prompt ends with the text of ``until``."""
        state = 0
        ended = _NEVER
        if self._until is not None:
            state = self._until.after_prompt(prompt)
            if state == self._until.complete:
                ended = -1  # before every position
        self._states[row] = state
        self._ended[row] = ended
        if self.further_has_state:
            self._further_states[row] = self._start

    @property
    def plans(self) -> bool:
        """Whether the further gate has a plan, which only the host can ask for."""
        return self._further is not None and type(self._further).plan is not Gate.plan

    def scheduled(self, generated: Tensor, gate_keys: Tensor) -> Tensor:
        """The part of :meth:`selected` that the device can compute, rate and schedule; see `GateOptions.scheduled`."""
        return self._options.scheduled(generated, gate_keys)

    def planned(self, at: Positions, eligible: np.ndarray) -> np.ndarray:
        """Which of the eligible rows the further gate's plan leaves open, (B,) bool, whatever rate and schedule say."""
        return self._options.planned(at, eligible)

    def selected(self, at: Positions, eligible: np.ndarray) -> np.ndarray:
        """The rows that the host selects, (G,) int64.

        ``eligible``: rows of requests to perturb whose tokens are kept, (B,) bool.
        """
        return (self._options.selects(at) & eligible).nonzero()[0]

    def verdict(
        self, step: Step, proposal: Proposal, rows: Tensor, first: Tensor, allowed: Tensor, greedy: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Whether the proposed token is in the text, and whether its input is fed, at G positions: (G,) bool each.

        Args:
            step: G positions: those that the host selected, or within a CUDA graph all rows.
            proposal: what the perturbation proposes there.
            rows: the trajectories' rows in this gate, (G,) int64.
            first: the trajectories' first generated positions, (G,) int64.
            allowed: whether top-k, top-p and min-p leave the proposed token and no token is forced, and within a CUDA
                graph also whether the row is selected, (G,) bool.
            greedy: the likeliest token of a request at temperature 0, -1 for another request, (G,) int64; None where no
                request is at temperature 0.
        """
        # A token that the request's own sampling excludes (at temperature 0 all but the likeliest) is never in its
        # text. A position with such a proposal stays unperturbed.
        in_text = allowed
        if greedy is not None:
            in_text = in_text & ((greedy < 0) | (greedy == proposal.tokens))
        fed = in_text
        if not self.always_open:
            in_text = in_text & self.open(rows, step, first)
            matched = self.matched(rows, step.positions)
            fed = in_text & self.feeds(proposal.tokens, matched)
        if proposal.acts is not None:
            fed = fed & proposal.acts
        return in_text, fed

    def open(self, rows: Tensor, step: Step, first: Tensor) -> Tensor:
        """Whether thinking continues, the policy is uncertain enough and the further gate is open: (B,) bool."""
        is_open = step.positions <= self._ended[rows]
        if self._options.entropy_min is not None:
            is_open = is_open & (step.entropy() >= self._options.entropy_min)
        if self._further is not None:
            is_open = is_open & self._further.open(self._gate_step(rows, step, first))
        return is_open

    def _gate_step(self, rows: Tensor, step: Step, first: Tensor) -> GateStep:
        """What the further gate sees at each position."""
        generated = step.positions - first
        if not self.further_has_state:
            return GateStep.of(step, generated)
        previous_column = (step.positions - 1) % _POSITIONS
        state_values = self._further_states[rows, previous_column]  # (B, names)
        state = dict(zip(self._names, state_values.unbind(-1)))
        return GateStep.of(step, generated, state)

    def advance(self, rows: Tensor, step: Step, first: Tensor, fed: Tensor, kept: Tensor) -> None:
        """Moves the further gate's state past B positions with ``kept`` tokens; ``fed``: perturbed, (B,) bool."""
        if self._further is None or not self.further_has_state:
            return
        state_by_name = self._further.advance(self._gate_step(rows, step, first), fed)
        state = torch.stack([state_by_name[name].float() for name in self._names], dim=-1)  # (B, names)
        column = step.positions % _POSITIONS
        self._further_states[rows, column] = torch.where(kept.unsqueeze(-1), state, self._further_states[rows, column])

    def matched(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The states of `StopText` before each position, (B,) int64."""
        return self._states[rows, (positions - 1) % _POSITIONS]

    def feeds(self, tokens: Tensor, matched: Tensor) -> Tensor:
        """Which proposed tokens (B,) may be fed perturbed, (B,) bool, with the states of :meth:`matched`.

        A protected token, and one that ends the thinking, stays in the text and is fed unperturbed: replacing it by
        another token would make it rarer than under the policy.
        """
        fed = torch.ones_like(tokens, dtype=torch.bool)
        if self._until is not None:
            fed = self._until.after(matched, tokens) != self._until.complete
        if self._protected is not None:
            fed = fed & ~self._protected[tokens]
        return fed

    def observe(
        self, rows: Tensor, positions: Tensor, tokens: Tensor, matched: Tensor, kept: Tensor | None = None
    ) -> None:
        """Moves the states of ``until`` past the tokens (B,) in the text at ``positions`` (B,).

        ``matched``: the states of :meth:`matched`. ``kept``: the rows whose tokens count, (B,) bool; None for all.
        """
        if self._until is None:
            return
        column = positions % _POSITIONS
        state = self._until.after(matched, tokens)
        # An end before this position stays. An end at or after it is of an earlier draw of the position: forget it.
        ended_before = self._ended[rows]
        ended = torch.where(state == self._until.complete, positions, _NEVER)
        ended = torch.where(ended_before < positions, ended_before, ended)
        if kept is not None:
            ended = torch.where(kept, ended, ended_before)
            state = torch.where(kept, state, self._states[rows, column])
        self._ended[rows] = ended
        self._states[rows, column] = state


def protected_tokens(protect: str | None, token_bytes: Callable[[], Sequence[bytes]], size: int) -> Tensor | None:
    """The tokens that an option ``protect`` names among V = ``size``: (V,) bool, or None where it is None."""
    if protect is None:
        return None
    ids = protected_ids(protect, size)
    if protect == "digits":
        texts = [token.decode(errors="ignore") for token in token_bytes()[:size]]
        ids = [token_id for token_id, text in enumerate(texts) if any(letter.isdigit() for letter in text)]
    mask = torch.zeros(size, dtype=torch.bool)
    mask[ids] = True
    return mask


def protected_ids(protect: str | None, size: int | None = None) -> list[int]:
    """The ids that an option ``protect`` lists, below V = ``size`` if given; none for ``digits``, which needs texts."""
    if protect is None or protect == "digits":
        return []
    ids = []
    for text in protect.split(","):
        digits = text.strip()
        if not (digits.isascii() and digits.isdecimal()) or len(digits) > 18:  # 18 digits fit into int64
            raise UsageError(
                f"perturbation option protect={protect!r}: {digits!r} is no token id;"
                " must be 'digits', or ids separated by commas, such as 13,198."
            )
        ids.append(int(digits))
    if size is not None and max(ids) >= size:
        raise UsageError(
            f"perturbation option protect={protect!r}: id {max(ids)} is not in the model's [0, {size - 1}]."
        )
    return ids
