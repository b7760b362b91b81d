# SPDX-License-Identifier: Apache-2.0
"""The seed of a trajectory: `trajectory_seed` of the engine's seed, of the prompt or the request's seed, and of the
response's number. `streams.py` makes all draws of the trajectory from it.

An engine chooses the seed of a new trajectory in `RunningRequests._seed` (`ngrpo/rollout/requests.py`), from what the
request says. In OpenRLHF's training `ngrpo/trainers/openrlhf/rollout_actor.py` says it: `_begin` the response's number,
and `generate` the prompt's seed. In verl's training `generate` of `ngrpo/trainers/verl/rollout_server.py` says it.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np

SEED_BYTES = 6
# The most responses to one prompt in one round. The numbers of round r begin at r times this.
MOST_RESPONSES = 1 << 20
# A server counts the responses to this many prompts without a seed. Beyond that it forgets the oldest prompt.
_PROMPTS_COUNTED = 1 << 20


def trajectory_seed(*parts: int | str | bytes) -> int:
    """Hashes what identifies a trajectory to one seed in [0, 2^48); the parts' order and boundaries matter."""
    digest = hashlib.blake2b(digest_size=SEED_BYTES)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def of_engine(perturbation_seed: int, engine_seed: int) -> int:
    """The seed of the perturbation in one of several engines, in [0, 2^31)."""
    return trajectory_seed(perturbation_seed, engine_seed) & 0x7FFFFFFF


def of_prompt(tokens: Sequence[int], pictures: bytes = b"") -> int:
    """The identity of a prompt, from its token ids and its pictures' identity, which is empty without pictures."""
    token_bytes = np.asarray(tokens, dtype=np.int64).tobytes()
    identifying_parts = [data for data in (token_bytes, pictures) if data]
    return trajectory_seed(*identifying_parts)


def of_prompt_and_number(tokens: Sequence[int], number: int) -> int:
    """The seed of a prompt with a number: the round of rollouts in a training by OpenRLHF, a row's seed in verl."""
    return trajectory_seed(np.asarray(tokens, dtype=np.int64).tobytes(), number)


class RoundCounts:
    """Counts how often each key has come in a round, such as equal rows of a training step."""

    def __init__(self) -> None:
        self._round = 0
        self._counts: Counter[str] = Counter()  # in this round

    def next(self, key: str, round_: int) -> int:
        """The number of the key among its equals in a round, from 0."""
        if round_ != self._round:
            self._round = round_
            self._counts = Counter()
        number = self._counts[key]
        self._counts[key] += 1
        return number


class ResponseNumbers:
    """Numbers the responses to each prompt of a training: the same in every run, resumed or not."""

    def __init__(self) -> None:
        self._counts = RoundCounts()

    def next(self, prompt: str, round_: int) -> int:
        """The number of the next response to a prompt in a round."""
        return round_ * MOST_RESPONSES + self._counts.next(prompt, round_)


class PromptCounts:
    """Numbers the responses to prompts without a seed; each data-parallel rank counts in a range of its own."""

    def __init__(self, rank: int = 0) -> None:
        self._first = rank << 32
        self._responses: OrderedDict[int, int] = OrderedDict()  # by prompt; the one asked last is at the end

    def __len__(self) -> int:
        return len(self._responses)

    def next(self, prompt: int) -> int:
        """The number of the next response to a prompt, from 1 on within the rank's range."""
        count = self._responses.pop(prompt, 0) + 1
        self._responses[prompt] = count
        if len(self._responses) > _PROMPTS_COUNTED:
            self._responses.popitem(last=False)
        return self._first + count
