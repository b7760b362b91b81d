# SPDX-License-Identifier: Apache-2.0
"""Every seed of a run is `trajectory_seed` of its engine's seed, its prompt (or the request's seed) and the number of
the response. The draws made from it: `streams.py`.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np

SEED_BYTES = 6
# Responses to one prompt in one round; the next round's numbers follow.
MOST_ANSWERS = 1 << 20
# A server counts this many prompts without a seed; it forgets the oldest.
_PROMPTS_KNOWN = 1 << 20


def trajectory_seed(*parts: int | str | bytes) -> int:
    """Hashes identifying parts to one seed in [0, 2^48); their order and boundaries matter."""
    digest = hashlib.blake2b(digest_size=SEED_BYTES)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def of_engine(perturbation: int, engine: int) -> int:
    """The perturbation's seed in one of several engines, in [0, 2^31), from that engine's seed."""
    return trajectory_seed(perturbation, engine) & 0x7FFFFFFF


def of_prompt(tokens: Sequence[int], pictures: bytes = b"") -> int:
    """The identity of a prompt, from its token ids and its pictures' identity, empty for none."""
    return trajectory_seed(*filter(None, [np.asarray(tokens, dtype=np.int64).tobytes(), pictures]))


def of_row_and_prompt(tokens: Sequence[int], row: int) -> int:
    """The seed of a dataset's row that may lack a number of its own."""
    return trajectory_seed(np.asarray(tokens, dtype=np.int64).tobytes(), row)


class AnswerNumbers:
    """Numbers the responses to each prompt of a training: the same in every run, resumed or not."""

    def __init__(self) -> None:
        self._round = 0
        self._asked: Counter[str] = Counter()

    def next(self, prompt: str, round_: int) -> int:
        if round_ != self._round:
            self._round, self._asked = round_, Counter()
        number = self._asked[prompt]
        self._asked[prompt] += 1
        return round_ * MOST_ANSWERS + number


class PromptCounts:
    """Numbers the responses to prompts without a seed; each data-parallel rank counts in a range of its own."""

    def __init__(self, rank: int = 0) -> None:
        self._first = rank << 32
        self._asked: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._asked)

    def next(self, prompt: int) -> int:
        times = self._asked[prompt] = self._asked.pop(prompt, 0) + 1
        if len(self._asked) > _PROMPTS_KNOWN:
            self._asked.popitem(last=False)
        return self._first + times
