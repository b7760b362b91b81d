# SPDX-License-Identifier: Apache-2.0
"""Finds a text in generated tokens, across token borders: a Knuth–Morris–Pratt automaton over the tokens' bytes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Tokens of a prompt's end that are read, beyond one for each byte of the text: whitespace after it.
_MARGIN = 32


class StopText:
    """The automaton of one text of L bytes.

    State s < L: the bytes so far end with the text's first s bytes. State L: the latest token completed the text.
    """

    def __init__(self, text: str, token_bytes: Sequence[bytes], vocabulary: int, device: torch.device | str) -> None:
        """``token_bytes``: of each token, by id; of V = ``vocabulary`` logits those without bytes change no state."""
        self._text, self._bytes = text.encode(), [*token_bytes[:vocabulary]]
        self._bytes += [b""] * (vocabulary - len(self._bytes))
        self.complete = len(self._text)
        table = _states_after(_automaton(self._text), self._bytes)
        self._table = torch.from_numpy(table).to(device)

    def after(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The states (B,) int64 after ``tokens`` (B,) in ``states`` (B,)."""
        return self._table[tokens, states].long()

    def after_prompt(self, prompt: Sequence[int]) -> int:
        """The state after a prompt: L where its text ends with this one, whitespace aside, as an empty thought does."""
        end = b"".join(self._bytes[token] for token in prompt[-self.complete - _MARGIN :])
        if end.rstrip().endswith(self._text):
            return self.complete
        return next(size for size in range(self.complete - 1, -1, -1) if end.endswith(self._text[:size]))


def _automaton(text: bytes) -> np.ndarray:
    """The state after each byte in each state, (L + 1, 256) int16 (Knuth, Morris and Pratt 1977)."""
    after = np.zeros((len(text) + 1, 256), dtype=np.int16)
    after[0, text[0]] = 1
    border = 0  # the state of the longest proper suffix
    for state in range(1, len(text) + 1):
        after[state] = after[border]
        if state < len(text):
            after[state, text[state]] = state + 1
            border = int(after[border, text[state]])
    return after


def _states_after(automaton: np.ndarray, token_bytes: Sequence[bytes]) -> np.ndarray:
    """The state after each token in each state, (V, L + 1) int16; a text within a token stays complete."""
    complete = len(automaton) - 1
    lengths = np.array([len(each) for each in token_bytes])
    starts = np.cumsum(lengths) - lengths
    symbols = np.frombuffer(b"".join(token_bytes), dtype=np.uint8)
    states = np.tile(np.arange(complete + 1, dtype=np.int16), (len(token_bytes), 1))
    found = np.zeros_like(states, dtype=bool)
    for column in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > column)
        states[rows] = automaton[states[rows], symbols[starts[rows] + column, None]]
        found[rows] |= states[rows] == complete
    states[found] = complete
    return states
