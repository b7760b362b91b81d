# SPDX-License-Identifier: Apache-2.0
"""From the samples of a strategy to its row in ``diagnosis.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np

from ngrpo.workbench.diagnose import axes, measures
from ngrpo.workbench.diagnose.axes import PromptStatistics
from ngrpo.workbench.diagnose.same_inputs import fed_the_same
from ngrpo.workbench.diagnose.sample import Sample
from ngrpo.workbench.statistics import bounds, resamples, with_noise

if TYPE_CHECKING:
    from ngrpo.config.arms import Arm
    from ngrpo.workbench.evaluate import Problem


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of one strategy by prompt, members in order."""
    groups: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda s: (s.group, s.member)):
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())


def prompt_statistics(groups: Sequence[Sequence[Sample]]) -> PromptStatistics:
    """What the axes and their intervals are made of."""

    def per_group(value: Callable[[Sequence[Sample]], SupportsFloat]) -> np.ndarray:
        return np.array([value(group) for group in groups], dtype=np.float64)

    return PromptStatistics(
        reward=per_group(lambda g: np.mean([s.reward for s in g])),
        edit_distance=per_group(lambda g: measures.edit_distance([s.answer_tokens for s in g])),
        distinct=per_group(lambda g: len({s.extracted for s in g} - {None}) / len(g)),
        parseable=per_group(lambda g: np.mean([s.parsed for s in g])),
        repetition=per_group(lambda g: np.mean([measures.loops(s.answer_tokens) for s in g])),
        nll=per_group(lambda g: sum(s.nll for s in g)),
        tokens=per_group(lambda g: sum(len(s.tokens) for s in g)),
        group=len(groups[0]),
    )


def strategy_rows(
    strategies: Sequence[Arm],
    groups: Mapping[str, Sequence[Sequence[Sample]]],
    problems: Sequence[Problem],
    facts: Mapping[str, dict[str, Any]],
    seed: int,
) -> list[dict[str, Any]]:
    """``strategies`` of diagnosis.json; the first unperturbed one is the baseline. Arguments as in `strategy_row`."""
    stats = {strategy.id: prompt_statistics(groups[strategy.id]) for strategy in strategies}
    baseline = next((stats[strategy.id] for strategy in strategies if strategy.spec is None), None)
    return [strategy_row(s, groups[s.id], problems, stats[s.id], baseline, facts[s.id], seed) for s in strategies]


def strategy_row(
    strategy: Arm,
    groups: Sequence[Sequence[Sample]],
    problems: Sequence[Problem],
    stats: PromptStatistics,
    baseline: PromptStatistics | None,
    facts: dict[str, Any],
    seed: int,
) -> dict[str, Any]:
    """One entry of ``strategies``.

    Args:
        strategy: whose samples these are.
        groups: P groups of G samples.
        problems: the P problems.
        stats: of these groups.
        baseline: of the unperturbed strategy, which may be ``stats`` itself; None where none was asked for.
        facts: what only the engine knows: ``tokens_per_second`` and those of
            `diagnose.inputs.FedInputs`; a folder of an earlier version has no ``relative_shift``.
        seed: of the bootstrap.
    """
    samples = [sample for group in groups for sample in group]
    whole, draws = stats.everyone, resamples(len(groups), seed)
    several = len(groups) > 1
    # Each axis and the reward as a function of prompts drawn: for all prompts, and for bootstrap draws.
    curves = {
        "diversity": axes.diversity,
        "validity": lambda s, prompts: axes.validity(s, baseline, prompts),
        "reward": lambda s, prompts: s.reward[prompts].mean(axis=1),
    }
    difference = None
    if several and baseline is not None and baseline is not stats:
        difference = {
            name: _difference(*(curve(stats, prompts) - curve(baseline, prompts) for prompts in (whole, draws)))
            for name, curve in curves.items()
        }
    generated = sum(len(s.tokens) for s in samples)
    records = [s.record for s in samples if s.record is not None]
    return {
        "name": strategy.id,
        "perturbation": strategy.spec,
        "reward": float(stats.reward.mean()),
        "pass_at_k": _pass_at_k(groups),
        "diversity": {
            "distinct_answers": float(stats.distinct.mean()),
            "distinct_intermediate": _distinct_intermediate(groups, problems),
            "self_bleu": float(np.mean([measures.self_bleu([s.answer_tokens for s in g]) for g in groups])),
            "distinct_2": _mean([measures.distinct_n([s.answer_tokens for s in g], 2) for g in groups]),
            "edit_distance": float(stats.edit_distance.mean()),
            "score": float(curves["diversity"](stats, whole)[0]),
        },
        "validity": {
            "parseable": float(stats.parseable.mean()),
            "repetition": float(stats.repetition.mean()),
            "perplexity": float(axes.perplexity(stats, whole)[0]),
            "anchor_nearest": facts["anchor_nearest"],
            "text_nearest": facts["text_nearest"],
            "score": float(curves["validity"](stats, whole)[0]),
        },
        "learnable_groups": float(np.mean([len({s.reward for s in g}) > 1 for g in groups])),
        "single_trajectory_groups": float(np.mean([len({tuple(s.tokens) for s in g}) == 1 for g in groups])),
        "same_input_groups": float(np.mean([fed_the_same(g) for g in groups])),
        "truncated": float(np.mean([not s.ended for s in samples])),
        "relative_shift": facts.get("relative_shift"),
        "rate": sum(len(s.perturbed) for s in samples) / generated,
        "tokens_per_second": facts["tokens_per_second"],
        "record_bytes_per_token": sum(len(r.to_bytes()) for r in records) / generated if records else None,
        "intervals": {name: list(bounds(curve(stats, draws))) if several else None for name, curve in curves.items()},
        "difference": difference,
    }


def _difference(value: np.ndarray, draws: np.ndarray) -> dict[str, Any]:
    low, high = bounds(draws)
    return with_noise({"value": float(value[0]), "low": low, "high": high})


def _pass_at_k(groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    from ngrpo.workbench.evaluate import pass_at_k

    size = len(groups[0])
    powers = [1 << i for i in range(size.bit_length()) if 1 << i <= size]
    right = [sum(s.correct for s in group) for group in groups]
    return {str(k): float(np.mean([pass_at_k(size, c, k) for c in right])) for k in sorted({*powers, size})}


def _distinct_intermediate(groups: Sequence[Sequence[Sample]], problems: Sequence[Problem]) -> float | None:
    shares = []
    for group, problem in zip(groups, problems):
        question = " ".join(message["content"] for message in problem.messages)
        sets = [measures.intermediate_results(s.text, question, s.extracted) for s in group]
        shares.append(measures.distinct_share(sets))
    return _mean(shares)


def _mean(values: Sequence[float | None]) -> float | None:
    """Over the groups that have the value; None where none has."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None
