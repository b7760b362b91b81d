# SPDX-License-Identifier: Apache-2.0
"""Diversity and validity of groups of responses, which are token ids without EOS; rows of diagnosis.json."""

from __future__ import annotations

import itertools
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

# A response ends in a loop where more than half of the 4-grams of its last 128 tokens are repetitions.
LOOP_NGRAM = 4
LOOP_TOKENS = 128
LOOP_SHARE = 0.5
_BLEU_ORDER = 4
_SAME_WEIGHT = 1e-3  # A mixture's weights depend a little on its row in the batch: kernels round rows differently.

# --- measures of tokens -----------------------------------------------------------------------------


def ngrams(tokens: Tokens, n: int) -> list[tuple[int, ...]]:
    """The max(0, len - n + 1) n-grams in their order."""
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def distinct_share(elements_by_response: Iterable[Collection[Any]]) -> float | None:
    """The number of different elements in a group's responses, divided by the number of all elements.

    It is 1/G where all G responses have the same single element, and None where no response has any. Of bigrams it is
    distinct-2 (Li et al., 2016).
    """
    counts = Counter(itertools.chain.from_iterable(elements_by_response))
    return len(counts) / counts.total() if counts else None


def bleu(hypothesis: Tokens, references: Sequence[Tokens]) -> float:
    """BLEU-4 of a response against at least one other, in [0, 1].

    The geometric mean of the clipped n-gram precisions for n = 1 to min(4, length), times the brevity penalty with
    the closest reference length (the shorter of two as close). For n above 1, add-one smoothing (Lin and Och, 2004).
    An empty hypothesis has 1 if a reference is empty too, else 0.
    """
    if not hypothesis:
        return float(any(not reference for reference in references))
    from sacrebleu.metrics import BLEU

    metric = BLEU(
        tokenize="none",
        smooth_method="add-k",
        smooth_value=1,
        max_ngram_order=min(_BLEU_ORDER, len(hypothesis)),
        effective_order=True,
    )
    percent = metric.sentence_score(_as_words(hypothesis), [_as_words(reference) for reference in references]).score
    return percent / 100


def _as_words(tokens: Tokens) -> str:
    """Token ids as a text, each id a word: sacrebleu reads text alone."""
    return " ".join(map(str, tokens))


def self_bleu(group: Sequence[Tokens]) -> float:
    """The mean BLEU of each of at least two responses against the others (Zhu et al., 2018): 1 where all are equal."""
    scores = []
    for number, response in enumerate(group):
        other_responses = [*group[:number], *group[number + 1 :]]
        scores.append(bleu(response, other_responses))
    return sum(scores) / len(scores)


def edit_distance(group: Sequence[Tokens]) -> float:
    """The mean over pairs of the Levenshtein distance over tokens, divided by the longer length; in [0, 1]."""
    from rapidfuzz.distance import Levenshtein

    pairs = itertools.combinations(group, 2)
    return float(np.mean([Levenshtein.normalized_distance(one, other) for one, other in pairs]))


def loops(tokens: Tokens) -> bool:
    """Whether more than half of the 4-grams of the last 128 tokens occur earlier among them."""
    grams = ngrams(tokens[-LOOP_TOKENS:], LOOP_NGRAM)
    return bool(grams) and 1.0 - len(set(grams)) / len(grams) > LOOP_SHARE


def intermediate_results(text: str, question: str, final: str | None) -> set[str]:
    """The numbers of a response that are neither in the question nor in the final answer, in one form each."""
    in_question = numbers(question, alone=True)
    in_final_answer = numbers(final or "", alone=True)
    return set(numbers(text, alone=True)).difference(in_question, in_final_answer)


def fed_the_same(group: Group) -> bool:
    """Whether all responses of a group had the same inputs, position by position, although their texts differ.

    Two are compared up to the last input of the shorter one. Noise of different seeds is different.
    """
    first, *others = group
    texts_differ = False
    for other in others:
        fed = min(len(first.tokens), len(other.tokens)) - 1  # the last token is no input
        if first.tokens[:fed] != other.tokens[:fed]:
            texts_differ = True
        first_inputs = _inputs(first)[:fed]
        other_inputs = _inputs(other)[:fed]
        if first_inputs.shape != other_inputs.shape:
            return False
        if not np.allclose(first_inputs, other_inputs, rtol=0, atol=_SAME_WEIGHT):
            return False
    return texts_differ


def _inputs(sample: Sample) -> np.ndarray:
    """Each input of a response as a row that can be compared with another response's.

    A plain input is its token and zeros. A mixture is -1, the candidates and their weights. Noise, which no row can
    hold, is -1 and NaN, which equals nothing.
    """
    record = sample.record
    if record is None:
        return np.array(sample.tokens, dtype=np.float64)[:, None]
    perturbed = sample.perturbed
    candidates = record.ids.shape[1]
    inputs = np.zeros((len(sample.tokens), 1 + 2 * candidates))
    inputs[:, 0] = sample.tokens
    inputs[perturbed, 0] = -1
    if record.sigma is None and record.vectors is None:
        mixtures = np.column_stack([record.ids, record.weights])
        inputs[perturbed, 1:] = mixtures[: len(perturbed)]
    else:
        inputs[perturbed, 1:] = np.nan
    return inputs


# --- the two axes -----------------------------------------------------------------------------------


class PromptStatistics:
    """Sums and means of each prompt's group, (P,) float64 each.

    Attributes:
        group_size: G.
        everyone: all prompts once, as one draw, (1, P) int64.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        """``groups``: P groups of G samples."""

        def per_group(value: Callable[[Group], Any]) -> np.ndarray:
            return np.array([value(group) for group in groups], dtype=np.float64)

        self.group_size = len(groups[0])
        self.everyone = np.arange(len(groups))[None]
        self.reward = per_group(lambda group: np.mean([sample.reward for sample in group]))
        self.edit_distance = per_group(lambda group: edit_distance([sample.response for sample in group]))
        self.distinct = per_group(_distinct_answers)
        self.parseable = per_group(lambda group: np.mean([sample.parsed for sample in group]))
        self.repetition = per_group(lambda group: np.mean([loops(sample.response) for sample in group]))
        self.nll = per_group(lambda group: sum(sample.nll for sample in group))
        self.tokens = per_group(lambda group: sum(len(sample.tokens) for sample in group))


def _has_two_rewards(group: Group) -> bool:
    """Whether the rewards of a group differ, without which GRPO has nothing to learn from it."""
    return len({sample.reward for sample in group}) > 1


def _is_one_trajectory(group: Group) -> bool:
    """Whether all responses of a group have the same tokens."""
    return len({tuple(sample.tokens) for sample in group}) == 1


def _distinct_answers(group: Group) -> float:
    """The number of different final answers of a group, over its responses; no answer is none of them."""
    answers = {sample.extracted for sample in group if sample.extracted is not None}
    return len(answers) / len(group)


def diversity(stats: PromptStatistics, draws: np.ndarray) -> np.ndarray:
    """The diversity axis of prompts ``draws`` (N, P): (N,) in [0, 1].

    The mean of two terms: the normalised edit distance; and the share of distinct final answers, scaled so that a group
    with a single answer has 0.
    """
    distinct = np.clip((stats.distinct * stats.group_size - 1) / (stats.group_size - 1), 0.0, 1.0)
    return ((stats.edit_distance + distinct) / 2)[draws].mean(axis=1)


def perplexity(stats: PromptStatistics, draws: np.ndarray) -> np.ndarray:
    """exp of the mean -log p over all tokens of prompts ``draws`` (N, P): (N,)."""
    return np.exp(stats.nll[draws].sum(axis=1) / stats.tokens[draws].sum(axis=1))


def validity(stats: PromptStatistics, baseline: PromptStatistics | None, draws: np.ndarray) -> np.ndarray:
    """The validity axis of prompts ``draws`` (N, P): (N,) in [0, 1].

    The mean of three terms: the fraction of responses with a final answer, the fraction that does not end in a loop,
    and with a ``baseline`` its perplexity over this one's, at most 1.
    """
    terms = [stats.parseable[draws].mean(axis=1), 1.0 - stats.repetition[draws].mean(axis=1)]
    if baseline is not None:
        terms.append(np.minimum(1.0, perplexity(baseline, draws) / perplexity(stats, draws)))
    return np.mean(terms, axis=0)


# --- rows of diagnosis.json -------------------------------------------------------------------------


def groups_of(samples: Group) -> list[list[Sample]]:
    """The samples of one arm by prompt, members in order."""
    ordered = sorted(samples, key=lambda sample: (sample.group, sample.member))
    return [list(group) for _, group in itertools.groupby(ordered, key=lambda sample: sample.group)]


Curve = Callable[[PromptStatistics, np.ndarray], np.ndarray]
"""A number of an arm, from its statistics and N draws of its prompts (N, P): (N,)."""


def arm_rows(
    arms: Sequence[Arm],
    groups: Mapping[str, Sequence[Group]],
    problems: Sequence[Problem],
    facts: Mapping[str, dict[str, Any]],
    against: str | None,
    seed: int,
) -> list[dict[str, Any]]:
    """``strategies`` of diagnosis.json: one row for each arm, in the order of ``arms``.

    Args:
        arms: those to describe.
        groups: by arm, P groups of G samples each.
        problems: the P prompts.
        facts: by arm, the numbers of `group_sampling.sample_arm`; an old folder has no ``relative_shift``.
        against: the id of the arm that the others are compared with, or None.
        seed: of the bootstrap.
    """
    statistics = {arm.id: PromptStatistics(groups[arm.id]) for arm in arms}
    baseline = None if against is None else statistics[against]
    questions = [" ".join(message["content"] or "" for message in problem.messages) for problem in problems]
    rows = []
    for arm in arms:
        row = _numbers(arm, groups[arm.id], questions, statistics[arm.id], baseline, facts[arm.id])
        rows.append({**row, **_intervals(statistics[arm.id], baseline, seed)})
    return rows


def _numbers(
    arm: Arm,
    groups: Sequence[Group],
    questions: Sequence[str],
    stats: PromptStatistics,
    baseline: PromptStatistics | None,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The measures of one arm over all its prompts; see :func:`arm_rows`."""
    samples = [sample for group in groups for sample in group]
    generated = sum(len(sample.tokens) for sample in samples)
    record_bytes = [len(sample.record.to_bytes()) for sample in samples if sample.record is not None]
    return {
        "name": arm.id,
        "perturbation": arm.spec,
        "reward": float(stats.reward.mean()),
        "pass_at_k": _pass_at_powers_of_two(groups, stats.group_size),
        "diversity": _diversity_measures(groups, questions, stats),
        "validity": {
            "parseable": float(stats.parseable.mean()),
            "repetition": float(stats.repetition.mean()),
            "perplexity": float(perplexity(stats, stats.everyone)[0]),
            "anchor_nearest": facts["anchor_nearest"],
            "text_nearest": facts["text_nearest"],
            "score": float(validity(stats, baseline, stats.everyone)[0]),
        },
        "learnable_groups": mean_of_known(map(_has_two_rewards, groups)),
        "single_trajectory_groups": mean_of_known(map(_is_one_trajectory, groups)),
        "same_input_groups": mean_of_known(map(fed_the_same, groups)),
        "truncated": mean_of_known(not sample.ended for sample in samples),
        "relative_shift": facts.get("relative_shift"),
        "rate": sum(len(sample.perturbed) for sample in samples) / generated,
        "tokens_per_second": facts["tokens_per_second"],
        "record_bytes_per_token": sum(record_bytes) / generated if record_bytes else None,
    }


def _pass_at_powers_of_two(groups: Sequence[Group], size: int) -> dict[str, float | None]:
    """Pass@k, by k, for the powers of two up to the groups' size and for the size itself."""
    right_by_group = [sum(sample.correct for sample in group) for group in groups]
    powers_of_two = (1 << power for power in range(size.bit_length()))
    return {
        str(k): mean_of_known(pass_at_k(size, right, k) for right in right_by_group)
        for k in sorted({*powers_of_two, size})
    }


def _diversity_measures(
    groups: Sequence[Group], questions: Sequence[str], stats: PromptStatistics
) -> dict[str, float | None]:
    """The measures of how much the responses of a group differ, each as a mean over the groups."""
    responses_by_group = [[sample.response for sample in group] for group in groups]
    bigrams_by_group = [[ngrams(response, 2) for response in responses] for responses in responses_by_group]
    results_by_group = []
    for group, question in zip(groups, questions):
        results = [intermediate_results(sample.text, question, sample.extracted) for sample in group]
        results_by_group.append(results)
    return {
        "distinct_answers": float(stats.distinct.mean()),
        "distinct_intermediate": mean_of_known(map(distinct_share, results_by_group)),
        "self_bleu": mean_of_known(map(self_bleu, responses_by_group)),
        "distinct_2": mean_of_known(map(distinct_share, bigrams_by_group)),
        "edit_distance": float(stats.edit_distance.mean()),
        "score": float(diversity(stats, stats.everyone)[0]),
    }


def _intervals(stats: PromptStatistics, baseline: PromptStatistics | None, seed: int) -> dict[str, Any]:
    """An arm's ``intervals`` over prompts, and its ``difference`` to a baseline; None where nothing can be said."""
    curves: dict[str, Curve] = {
        "diversity": diversity,
        "validity": lambda arm_stats, draws: validity(arm_stats, baseline, draws),
        "reward": lambda arm_stats, draws: arm_stats.reward[draws].mean(axis=1),
    }
    prompts = len(stats.reward)
    if prompts == 1:  # there is nothing to resample
        return {"intervals": dict.fromkeys(curves), "difference": None}

    draws = resamples(prompts, seed)
    intervals = {name: list(bounds(curve(stats, draws), prompts)) for name, curve in curves.items()}
    if baseline is None or baseline is stats:
        return {"intervals": intervals, "difference": None}

    difference = {}
    for name, curve in curves.items():
        value = curve(stats, stats.everyone) - curve(baseline, stats.everyone)
        low, high = bounds(curve(stats, draws) - curve(baseline, draws), prompts)
        difference[name] = with_noise({"value": float(value[0]), "low": low, "high": high}, prompts)
    return {"intervals": intervals, "difference": difference}
