# SPDX-License-Identifier: Apache-2.0
"""Diversity and validity of groups of responses, which are token ids without EOS; rows of diagnosis.json."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ngrpo.methods.scoring.answers import numbers
from ngrpo.workbench.diagnose.group_sampling import Sample
from ngrpo.workbench.statistics import bounds, mean_of_known, pass_at_k, resamples, with_noise

if TYPE_CHECKING:
    from ngrpo.config.arms import Arm
    from ngrpo.workbench.evaluate import Problem

Tokens = Sequence[int]
Group = Sequence[Sample]

# A response ends in a loop where more than half of the n-grams of its last tokens are repetitions.
LOOP_NGRAM, LOOP_TOKENS, LOOP_SHARE = 4, 128, 0.5
_BLEU_ORDER = 4
# Rows of one batch are rounded differently.
_WEIGHTS_APART = 1e-3

# --- measures of tokens -----------------------------------------------------------------------------


def ngrams(tokens: Tokens, n: int) -> list[tuple[int, ...]]:
    """The max(0, len - n + 1) n-grams in their order."""
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def distinct_share(parts: Iterable[Collection[Any]]) -> float | None:
    """Different elements over all elements of a group's parts, 1/G where all G agree; None where all are empty.

    Of bigrams it is distinct-2 (Li et al., 2016).
    """
    counts = Counter(itertools.chain.from_iterable(parts))
    return len(counts) / counts.total() if counts else None


def bleu(hypothesis: Tokens, references: Sequence[Tokens]) -> float:
    """BLEU-4 of a response against at least one other, in [0, 1].

    The geometric mean of the clipped n-gram precisions for n = 1 to min(4, length), times the brevity penalty with
    the closest reference length (the shorter of two as close). For n above 1, add-one smoothing (Lin and Och, 2004).
    An empty hypothesis has 1 if a reference is empty too, else 0.
    """
    if not hypothesis:
        return float(any(not reference for reference in references))
    logs = []
    for n in range(1, min(_BLEU_ORDER, len(hypothesis)) + 1):
        counts = Counter(ngrams(hypothesis, n))
        allowed = functools.reduce(operator.or_, (Counter(ngrams(reference, n)) for reference in references))
        smooth = int(n > 1)
        matches = (counts & allowed).total() + smooth
        if not matches:
            return 0.0
        logs.append(math.log(matches / (counts.total() + smooth)))
    closest = min((len(r) for r in references), key=lambda length: (abs(length - len(hypothesis)), length))
    brevity = min(0.0, 1.0 - closest / len(hypothesis))
    return math.exp(brevity + sum(logs) / len(logs))


def self_bleu(group: Sequence[Tokens]) -> float:
    """The mean BLEU of each of at least two responses against the others (Zhu et al., 2018): 1 where all are equal."""
    return sum(bleu(each, [*group[:i], *group[i + 1 :]]) for i, each in enumerate(group)) / len(group)


def edit_distance(group: Sequence[Tokens]) -> float:
    """The mean over pairs of the Levenshtein distance over tokens, divided by the longer length; in [0, 1]."""
    lengths = np.array([len(tokens) for tokens in group])
    width = int(lengths.max(initial=0))
    padded = np.full((len(group), width), -1, dtype=np.int64)
    for row, tokens in enumerate(group):
        padded[row, : len(tokens)] = tokens
    left, right = np.array([*itertools.combinations(range(len(group)), 2)]).T
    # All pairs advance together, one row of the distance table at a time. Within a row, insertions are a running
    # minimum: D[j] - j = min over i ≤ j of (candidate[i] - i).
    steps = np.arange(width + 1)
    table = np.tile(steps, (len(left), 1))
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
    """Whether more than half of the 4-grams of the last 128 tokens occur earlier among them."""
    grams = ngrams(tokens[-LOOP_TOKENS:], LOOP_NGRAM)
    return bool(grams) and 1.0 - len(set(grams)) / len(grams) > LOOP_SHARE


def intermediate_results(text: str, question: str, final: str | None) -> set[str]:
    """The numbers of a response that are neither in the question nor in the final answer, in one form each."""
    own, *given = (set(numbers(part, alone=True)) for part in (text, question, final or ""))
    return own.difference(*given)


def fed_the_same(group: Group) -> bool:
    """Whether all responses of a group had the same inputs, position by position, although their texts differ.

    Two are compared up to the last input of the shorter one. Noise of different seeds is different.
    """
    first, *others = group
    texts_differ = False
    for other in others:
        fed = min(len(first.tokens), len(other.tokens)) - 1  # the last token is no input
        texts_differ |= first.tokens[:fed] != other.tokens[:fed]
        one, two = (_inputs(sample)[:fed] for sample in (first, other))
        if one.shape != two.shape or not np.allclose(one, two, rtol=0, atol=_WEIGHTS_APART):
            return False
    return texts_differ


def _inputs(sample: Sample) -> np.ndarray:
    """Each input as a row: its token and zeros; -1, the candidates and their weights; or NaN for noise."""
    record, perturbed = sample.record, sample.perturbed
    if record is None:
        return np.array(sample.tokens, dtype=np.float64)[:, None]
    inputs = np.zeros((len(sample.tokens), 1 + 2 * record.ids.shape[1]))
    inputs[:, 0] = sample.tokens
    mixtures = np.column_stack([record.ids, record.weights])[: len(perturbed)]
    inputs[perturbed, 0] = -1
    inputs[perturbed, 1:] = mixtures if record.sigma is None and record.vectors is None else np.nan
    return inputs


# --- the two axes -----------------------------------------------------------------------------------


class PromptStatistics:
    """Sums and means of each prompt's group, all (P,) float64."""

    def __init__(self, groups: Sequence[Group]) -> None:
        """``groups``: P groups of G samples."""

        def per_group(value: Callable[[Group], Any]) -> np.ndarray:
            return np.array([value(group) for group in groups], dtype=np.float64)

        self.group = len(groups[0])
        self.everyone = np.arange(len(groups))[None]  # all prompts once, as one draw (1, P)
        self.reward = per_group(lambda g: np.mean([s.reward for s in g]))
        self.edit_distance = per_group(lambda g: edit_distance([s.response for s in g]))
        self.distinct = per_group(lambda g: len({s.extracted for s in g} - {None}) / len(g))
        self.parseable = per_group(lambda g: np.mean([s.parsed for s in g]))
        self.repetition = per_group(lambda g: np.mean([loops(s.response) for s in g]))
        self.nll = per_group(lambda g: sum(s.nll for s in g))
        self.tokens = per_group(lambda g: sum(len(s.tokens) for s in g))


def diversity(stats: PromptStatistics, draws: np.ndarray) -> np.ndarray:
    """The diversity axis of prompts ``draws`` (N, P): (N,) in [0, 1].

    The mean of the normalised edit distance and the distinct final answers, scaled to 0 for a uniform group.
    """
    distinct = np.clip((stats.distinct * stats.group - 1) / (stats.group - 1), 0.0, 1.0)
    return ((stats.edit_distance + distinct) / 2)[draws].mean(axis=1)


def perplexity(stats: PromptStatistics, draws: np.ndarray) -> np.ndarray:
    """exp of the mean -log p over all tokens of prompts ``draws`` (N, P): (N,)."""
    return np.exp(stats.nll[draws].sum(axis=1) / stats.tokens[draws].sum(axis=1))


def validity(stats: PromptStatistics, baseline: PromptStatistics | None, draws: np.ndarray) -> np.ndarray:
    """The validity axis of prompts ``draws`` (N, P): (N,) in [0, 1].

    The mean of three: the fraction of responses with a final answer, the fraction that does not end in a loop, and with
    a ``baseline`` its perplexity over this one's, at most 1.
    """
    parts = [stats.parseable[draws].mean(axis=1), 1.0 - stats.repetition[draws].mean(axis=1)]
    if baseline is not None:
        parts.append(np.minimum(1.0, perplexity(baseline, draws) / perplexity(stats, draws)))
    return np.mean(parts, axis=0)


# --- rows of diagnosis.json -------------------------------------------------------------------------


def groups_of(samples: Group) -> list[list[Sample]]:
    """The samples of one strategy by prompt, members in order."""
    ordered = sorted(samples, key=lambda s: (s.group, s.member))
    return [list(group) for _, group in itertools.groupby(ordered, key=lambda s: s.group)]


def strategy_rows(
    strategies: Sequence[Arm],
    groups: Mapping[str, Sequence[Group]],
    problems: Sequence[Problem],
    facts: Mapping[str, dict[str, Any]],
    against: str | None,
    seed: int,
) -> list[dict[str, Any]]:
    """``strategies`` of diagnosis.json, in the order given.

    Args:
        strategies: of which ``groups`` has P groups of G samples each.
        facts: by strategy, the numbers of `group_sampling.sample_strategy`; an old folder has no ``relative_shift``.
        against: the strategy that the others are compared with, or None.
        seed: of the bootstrap.
    """
    stats = {strategy.id: PromptStatistics(groups[strategy.id]) for strategy in strategies}
    baseline = None if against is None else stats[against]
    # Each axis and the reward as a function of prompts drawn: for all prompts, and for bootstrap draws.
    curves: dict[str, Callable[[PromptStatistics, np.ndarray], np.ndarray]] = {
        "diversity": diversity,
        "validity": lambda s, prompts: validity(s, baseline, prompts),
        "reward": lambda s, prompts: s.reward[prompts].mean(axis=1),
    }
    questions = [" ".join(message["content"] or "" for message in problem.messages) for problem in problems]
    rows = []
    for strategy in strategies:
        mine, its_groups, told = stats[strategy.id], groups[strategy.id], facts[strategy.id]
        size, right = mine.group, [sum(s.correct for s in group) for group in its_groups]
        ks = sorted({*(1 << i for i in range(size.bit_length())), size})  # the powers of two up to it, and itself
        intervals: dict[str, list[float] | None] = dict.fromkeys(curves)
        difference: dict[str, Any] = {}
        draws = resamples(len(its_groups), seed)
        for name, curve in curves.items() if len(its_groups) > 1 else ():
            intervals[name] = list(bounds(curve(mine, draws)))
            if baseline is not None and baseline is not mine:
                value, resampled = (curve(mine, drawn) - curve(baseline, drawn) for drawn in (mine.everyone, draws))
                low, high = bounds(resampled)
                difference[name] = with_noise({"value": float(value[0]), "low": low, "high": high})
        samples = [sample for group in its_groups for sample in group]
        responses = [[sample.response for sample in group] for group in its_groups]
        intermediate = [
            [intermediate_results(sample.text, question, sample.extracted) for sample in group]
            for group, question in zip(its_groups, questions)
        ]
        generated = sum(len(s.tokens) for s in samples)
        records = [s.record for s in samples if s.record is not None]
        rows.append(
            {
                "name": strategy.id,
                "perturbation": strategy.spec,
                "reward": float(mine.reward.mean()),
                "pass_at_k": {str(k): mean_of_known(pass_at_k(size, c, k) for c in right) for k in ks},
                "diversity": {
                    "distinct_answers": float(mine.distinct.mean()),
                    "distinct_intermediate": mean_of_known(map(distinct_share, intermediate)),
                    "self_bleu": mean_of_known(map(self_bleu, responses)),
                    "distinct_2": mean_of_known(
                        distinct_share(ngrams(tokens, 2) for tokens in group) for group in responses
                    ),
                    "edit_distance": float(mine.edit_distance.mean()),
                    "score": float(diversity(mine, mine.everyone)[0]),
                },
                "validity": {
                    "parseable": float(mine.parseable.mean()),
                    "repetition": float(mine.repetition.mean()),
                    "perplexity": float(perplexity(mine, mine.everyone)[0]),
                    "anchor_nearest": told["anchor_nearest"],
                    "text_nearest": told["text_nearest"],
                    "score": float(validity(mine, baseline, mine.everyone)[0]),
                },
                "learnable_groups": mean_of_known(len({s.reward for s in g}) > 1 for g in its_groups),
                "single_trajectory_groups": mean_of_known(len({tuple(s.tokens) for s in g}) == 1 for g in its_groups),
                "same_input_groups": mean_of_known(map(fed_the_same, its_groups)),
                "truncated": mean_of_known(not s.ended for s in samples),
                "relative_shift": told.get("relative_shift"),
                "rate": sum(len(s.perturbed) for s in samples) / generated,
                "tokens_per_second": told["tokens_per_second"],
                "record_bytes_per_token": sum(len(r.to_bytes()) for r in records) / generated if records else None,
                "intervals": intervals,
                "difference": difference or None,
            }
        )
    return rows
