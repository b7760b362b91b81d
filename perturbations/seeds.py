# SPDX-License-Identifier: Apache-2.0
"""Every seed of a run, and what it is made of: the same parts give the same draws, in every run and on every machine.

The seed of a trajectory is made in three steps: each engine has one of its own (:func:`of_engine`), a request says
which prompt it is of (:func:`of_prompt`) and which answer to it (:class:`AnswerNumbers`; :class:`PromptCounts` where it
says nothing), and the worker hashes the three (:func:`of_trajectory`). What is drawn from it: `streams.py`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np

from perturbations.streams import trajectory_seed

# Answers to one prompt in one round; the next round's numbers follow.
MOST_ANSWERS = 1 << 20
# Prompts of which it is known how often they were asked without a seed; of a server's the oldest are forgotten.
_PROMPTS_KNOWN = 1 << 20


def of_engine(perturbation: int, engine: int) -> int:
    """The perturbation's seed in one of several engines, in [0, 2^31), from OpenRLHF's seed of that engine."""
    return trajectory_seed(perturbation, engine) & 0x7FFFFFFF


def of_prompt(tokens: Sequence[int], pictures: bytes = b"") -> int:
    """What a prompt is known by: its token ids, and the identity of what it shows, empty for nothing."""
    return trajectory_seed(*filter(None, [np.asarray(tokens, dtype=np.int64).tobytes(), pictures]))


def of_trajectory(perturbation: int, prompt: int, sample: int) -> int:
    """The seed of one answer, from which all of its draws follow.

    Args:
        perturbation: the seed of the engine's perturbation.
        prompt: the seed that the request gives, or what its prompt is known by.
        sample: the number of the answer.
    """
    return trajectory_seed(perturbation, prompt, sample)


def of_repeated_turn(trajectory: int, again: int) -> int:
    """The seed of a conversation whose latest prompt was asked ``again`` times before."""
    return trajectory_seed(trajectory, again)


def of_unperturbed_answer(prompt: int, sample: int) -> int:
    """The seed that an engine is given for the unperturbed answer beside answer ``sample``."""
    return trajectory_seed(prompt, sample)


def of_sampler(prompt: int, sample: int) -> int:
    """The seed for vLLM's own sampler, in an engine without a perturbation."""
    return trajectory_seed(prompt, sample)


def of_problem(run: int, prompt: str, repeat: int = 0) -> int:
    """The seed of an evaluation's problem: of its prompt, so that its answers do not depend on the other problems.

    Args:
        run: the seed of the evaluation.
        prompt: what the problem's prompt is known by.
        repeat: how many problems before this one have the same prompt.
    """
    return trajectory_seed(run, prompt, *([repeat] if repeat else []))


def of_listed_prompt(run: int, *place: int | str) -> int:
    """The seed of a prompt that a diagnosis knows by its place in a list."""
    return trajectory_seed(run, *place)


def of_drawn_copy(perturbation: int, run: int, token: int, copy: int) -> int:
    """The seed of one of several inputs that a diagnosis draws in the place of a token."""
    return trajectory_seed(perturbation, run, token, copy)


def of_training_order(run: int, updates: int) -> int:
    """The seed by which samples fall into micro-batches, after so many updates."""
    return trajectory_seed(run, updates)


def of_policy_noise(noise: int, sync: int, parameter: str) -> int:
    """The seed of the noise on one parameter in one weight sync."""
    return trajectory_seed("policy noise", noise, sync, parameter)


def of_dataset_row(step: int | str, row: int | str, evaluation: bool) -> int:
    """The seed of a row of a dataset at a training step, where the trainer numbers rows and not prompts."""
    return trajectory_seed(str(step), str(row), str(evaluation))


def of_row_and_prompt(tokens: Sequence[int], row: int) -> int:
    """The seed of a prompt whose row may have no number of its own: of its token ids and what is known of the row."""
    return trajectory_seed(np.asarray(tokens, dtype=np.int64).tobytes(), row)


class AnswerNumbers:
    """Numbers the answers to each prompt of a training: the same ones in every run, resumed or not."""

    def __init__(self) -> None:
        self._round = 0
        self._asked: Counter[str] = Counter()

    def next(self, prompt: str, round_: int) -> int:
        """The number of the next answer to a prompt in a round."""
        if round_ != self._round:
            self._round, self._asked = round_, Counter()
        number = self._asked[prompt]
        self._asked[prompt] += 1
        return round_ * MOST_ANSWERS + number


class PromptCounts:
    """Numbers the answers to prompts that come without a seed, so that a run repeats and the members of a group differ.

    Data-parallel ranks count each for itself, so each counts in a range of its own.
    """

    def __init__(self, rank: int = 0) -> None:
        self._first = rank << 32
        self._asked: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._asked)

    def next(self, prompt: int) -> int:
        """The number of the next answer to a prompt, by what it is known by."""
        times = self._asked[prompt] = self._asked.pop(prompt, 0) + 1
        if len(self._asked) > _PROMPTS_KNOWN:
            self._asked.popitem(last=False)
        return self._first + times
