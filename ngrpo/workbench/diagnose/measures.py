# SPDX-License-Identifier: Apache-2.0
"""How different the answers of one group are, and how far one answer repeats itself. Plain functions of tokens.

An answer is a sequence of token ids, without the token that ended it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ngrpo.workbench.scoring.answers import numbers

Tokens = Sequence[int]

# An answer is degenerate where more than half of the n-grams of its last tokens have stood there before.
LOOP_NGRAM, LOOP_TOKENS, LOOP_SHARE = 4, 128, 0.5
_BLEU_ORDER = 4


def ngrams(tokens: Tokens, n: int) -> list[tuple[int, ...]]:
    """The n-grams in their order, max(0, len - n + 1) of them."""
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def distinct_n(group: Sequence[Tokens], n: int) -> float | None:
    """Different n-grams over all n-grams of a group (Li et al., 2016); None where there are none."""
    counts = Counter(itertools.chain.from_iterable(ngrams(tokens, n) for tokens in group))
    return len(counts) / counts.total() if counts else None


def bleu(hypothesis: Tokens, references: Sequence[Tokens]) -> float:
    """BLEU-4 with add-one smoothing.

    The geometric mean of the clipped n-gram precisions for n = 1 to min(4, length), times the brevity penalty with
    the closest reference length (the shorter of two as close). As in Lin and Och (2004), for n above 1 one is added
    to the matches and to the n-grams, so that an answer without a common 4-gram is not simply 0.

    Args:
        hypothesis: one answer.
        references: at least one other.

    Returns:
        In [0, 1]. An empty hypothesis has 1 where a reference is empty too, else 0.
    """
    if not hypothesis:
        return float(any(not reference for reference in references))
    logs = []
    for n in range(1, min(_BLEU_ORDER, len(hypothesis)) + 1):
        counts = Counter(ngrams(hypothesis, n))
        allowed: Counter[tuple[int, ...]] = Counter()
        for reference in references:
            allowed |= Counter(ngrams(reference, n))
        matches, total = sum((counts & allowed).values()), counts.total()
        smooth = int(n > 1)
        if not matches + smooth:
            return 0.0
        logs.append(math.log((matches + smooth) / (total + smooth)))
    closest = min((len(r) for r in references), key=lambda length: (abs(length - len(hypothesis)), length))
    brevity = min(0.0, 1.0 - closest / len(hypothesis))
    return math.exp(brevity + sum(logs) / len(logs))


def self_bleu(group: Sequence[Tokens]) -> float:
    """The mean BLEU of each answer against the others (Zhu et al., 2018): 1 where all are the same.

    Args:
        group: at least two answers.
    """
    return sum(bleu(a, [*group[:i], *group[i + 1 :]]) for i, a in enumerate(group)) / len(group)


def edit_distance(group: Sequence[Tokens]) -> float:
    """The mean over pairs of the Levenshtein distance over tokens, divided by the longer length.

    All pairs advance together, one row of the distance table at a time. Within a row, insertions are a running
    minimum: D[j] - j = min over i ≤ j of (candidate[i] - i).

    Args:
        group: at least two answers.

    Returns:
        In [0, 1]; two empty answers are 0 apart.
    """
    pairs = list(itertools.combinations(range(len(group)), 2))
    lengths = np.array([len(tokens) for tokens in group])
    width = int(lengths.max(initial=0))
    padded = np.full((len(group), width), -1, dtype=np.int64)
    for row, tokens in enumerate(group):
        padded[row, : len(tokens)] = tokens
    left, right = np.array(pairs).T
    steps = np.arange(width + 1)
    table = np.tile(steps, (len(pairs), 1))
    distances = np.where(lengths[left] == 0, lengths[right], 0)
    for i in range(int(lengths[left].max(initial=0))):
        candidate = table + 1
        substituted = table[:, :-1] + (padded[right] != padded[left, i : i + 1])
        np.minimum(candidate[:, 1:], substituted, out=candidate[:, 1:])
        table = np.minimum.accumulate(candidate - steps, axis=1) + steps
        ends = lengths[left] == i + 1
        distances[ends] = table[ends, lengths[right][ends]]
    longest = np.maximum(np.maximum(lengths[left], lengths[right]), 1)
    return float((distances / longest).mean())


def loops(tokens: Tokens) -> bool:
    """Whether an answer is degenerate: it repeats itself at its end.

    True where, among the 4-grams of the last 128 tokens, more than half have occurred before among them.
    """
    grams = ngrams(list(tokens)[-LOOP_TOKENS:], LOOP_NGRAM)
    return bool(grams) and 1.0 - len(set(grams)) / len(grams) > LOOP_SHARE


def intermediate_results(text: str, question: str, final: str | None) -> set[str]:
    """The numbers that an answer passes through: those in it that are neither in the question nor its final answer.

    Args:
        text: the answer.
        question: what was asked.
        final: the extracted final answer, or None.

    Returns:
        Numbers in one form each: ``1,200.50`` is ``1200.5``.
    """
    mine, in_question, said = (set(numbers(part, alone=True)) for part in (text, question, final or ""))
    return mine - in_question - said


def distinct_share(sets: Sequence[set[str]]) -> float | None:
    """Different elements over all elements of a group's sets: 1/G where all agree; None where all are empty."""
    total = sum(map(len, sets))
    return len(set().union(*sets)) / total if total else None
