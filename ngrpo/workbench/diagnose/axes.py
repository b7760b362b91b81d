# SPDX-License-Identifier: Apache-2.0
"""The two axes, diversity and validity, of prompts drawn.

Both are means of parts that lie in [0, 1] and need no tuning:

- diversity: the normalised edit distance, and the distinct final answers, scaled so that a group of one answer is 0;
- validity: the share of answers with a final answer, the share that does not end in a loop, and the perplexity of
  the unperturbed strategy's answers over that of these answers, at most 1 (both under the unperturbed model).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PromptStatistics:
    """Sums and means of each prompt's group, all (P,) float64.

    Attributes:
        reward: mean reward.
        edit_distance: mean normalised edit distance.
        distinct: distinct final answers as a share of the group.
        parseable: share of answers with a final answer.
        repetition: share of answers that end in a loop.
        nll: summed -log p under the unperturbed model.
        tokens: number of tokens.
        group: G.
    """

    reward: np.ndarray
    edit_distance: np.ndarray
    distinct: np.ndarray
    parseable: np.ndarray
    repetition: np.ndarray
    nll: np.ndarray
    tokens: np.ndarray
    group: int

    @property
    def everyone(self) -> np.ndarray:
        """The prompts as they are: one draw (1, P)."""
        return np.arange(len(self.reward))[None]


def diversity(stats: PromptStatistics, draws: np.ndarray) -> np.ndarray:
    """The diversity axis of prompts ``draws`` (N, P): (N,)."""
    distinct = np.clip((stats.distinct * stats.group - 1) / (stats.group - 1), 0.0, 1.0)
    return ((stats.edit_distance + distinct) / 2)[draws].mean(axis=1)


def perplexity(stats: PromptStatistics, draws: np.ndarray) -> np.ndarray:
    """exp of the mean -log p over all tokens of prompts ``draws`` (N, P): (N,)."""
    return np.exp(stats.nll[draws].sum(axis=1) / stats.tokens[draws].sum(axis=1))


def validity(stats: PromptStatistics, baseline: PromptStatistics | None, draws: np.ndarray) -> np.ndarray:
    """The validity axis of prompts ``draws`` (N, P): (N,).

    Args:
        stats: of the strategy.
        baseline: of the unperturbed strategy on the same prompts; without one the perplexity is left out.
        draws: which prompts.
    """
    parts = [stats.parseable[draws].mean(axis=1), 1.0 - stats.repetition[draws].mean(axis=1)]
    if baseline is not None:
        parts.append(np.minimum(1.0, perplexity(baseline, draws) / perplexity(stats, draws)))
    return np.mean(parts, axis=0)
