# SPDX-License-Identifier: Apache-2.0
"""Measures of groups, the two axes, a strategy's row, nearest tokens and warnings, by hand and without an engine."""

import dataclasses
import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.config.arms import Arm, parse_arms
from ngrpo.workbench import statistics
from ngrpo.workbench.diagnose import measures
from ngrpo.workbench.diagnose.diagnosis import differences, table, warnings_of
from ngrpo.workbench.diagnose.group_sampling import Sample, fed_inputs, recorded_inputs
from ngrpo.workbench.evaluate import Problem
from perturbations import ReplayRecord, streams
from perturbations.embeddings import matrix_embeddings, nearest_tokens


def test_edit_distance() -> None:
    # (1 2 3) and (1 3): one deletion, 1/3. (1 2 3) and (): 3/3. (1 3) and (): 2/2. Mean (1/3 + 1 + 1) / 3 = 7/9.
    assert measures.edit_distance([[1, 2, 3], [1, 3], []]) == pytest.approx(7 / 9)

    def textbook(a: list[int], b: list[int]) -> int:
        row = list(range(len(b) + 1))
        for i, x in enumerate(a):
            following = [i + 1]
            for j, y in enumerate(b):
                following.append(min(row[j + 1] + 1, following[j] + 1, row[j] + (x != y)))
            row = following
        return row[-1]

    chance = random.Random(0)
    for _ in range(200):
        group = [[chance.randrange(3) for _ in range(chance.randrange(9))] for _ in range(chance.randrange(2, 6))]
        pairs = list(itertools.combinations(group, 2))
        expected = sum(textbook(a, b) / max(len(a), len(b), 1) for a, b in pairs) / len(pairs)
        assert measures.edit_distance(group) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hypothesis", "references", "expected"),
    [
        ([1, 2, 3, 4, 5], [[1, 2, 3, 4, 5]], 1.0),
        # 1 2 3 4 5 against 1 2 3 9 5. Unigrams: 4 of 5. Bigrams: 12 23 match of 12 23 34 45: (2+1)/(4+1).
        # Trigrams: 123 of 123 234 345: (1+1)/(3+1). 4-grams: none of 2: (0+1)/(2+1). Equal lengths: no penalty.
        ([1, 2, 3, 4, 5], [[1, 2, 3, 9, 5]], (4 / 5 * 3 / 5 * 2 / 4 * 1 / 3) ** (1 / 4)),
        # Counts are clipped at the best single reference: 1 1 1 against 1 1 and 1 2: one reference has two 1s, so 2 of
        # 3 unigrams. Bigrams: 11 once of two: (1+1)/(2+1). Trigrams: 0 of 1: (0+1)/(1+1). Closest reference length 2,
        # hypothesis longer: no penalty.
        ([1, 1, 1], [[1, 1], [1, 2]], (2 / 3 * 2 / 3 * 1 / 2) ** (1 / 3)),
        # 1 2 against 1 2 3 4: both precisions are 1 (2/2 and (1+1)/(1+1)); the penalty is exp(1 - 4/2).
        ([1, 2], [[1, 2, 3, 4]], math.exp(-1.0)),
        ([], [[3, 4]], 0.0),
    ],
)
def test_bleu(hypothesis: list[int], references: list[list[int]], expected: float) -> None:
    assert measures.bleu(hypothesis, references) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tokens", "looped"),
    [
        ([1, 2, 3] * 10, True),  # 27 4-grams, 3 different: 24/27 have occurred before
        ([*range(50)], False),
        ([1] * 8 + [*range(10, 18)], False),  # 13 4-grams, 4 repeats: 0.31
        ([*range(1000, 1400), *[5, 6] * 64], True),  # the end counts
        ([*[5, 6] * 64, *range(1000, 1400)], False),
    ],
)
def test_loops(tokens: list[int], looped: bool) -> None:
    assert measures.loops(tokens) is looped


def test_measures_of_a_group() -> None:
    # The two equal responses have 1; the third has no token in common with either.
    assert measures.self_bleu([[1, 2, 3, 4], [1, 2, 3, 4], [7, 8]]) == pytest.approx(2 / 3)
    # Bigrams 12 21 12 and 12 22: five, of them 12, 21, 22 different.
    assert measures.distinct_share(measures.ngrams(tokens, 2) for tokens in ([1, 2, 1, 2], [1, 2, 2])) == 3 / 5
    text = "3 * 4 = 12, and 12 + 5 = 17, so 17.00 + 3 = 20. The answer is 20."
    assert measures.intermediate_results(text, "What is 3 * 4 + 5 + 3?", "20") == {"12", "17"}
    assert measures.intermediate_results(text, "What is 3 * 4 + 5 + 3?", None) == {"12", "17", "20"}
    # Three elements in all sets together, two of them different.
    assert measures.distinct_share([{"1"}, {"1", "2"}]) == pytest.approx(2 / 3)
    assert measures.distinct_share([set(), set()]) is None


def record(tokens: int, positions: list[int], ids: list[list[int]], weights: list[list[float]]) -> ReplayRecord:
    """Of a trajectory with a prompt of two tokens."""
    return ReplayRecord(
        5,
        2,
        2 + tokens,
        np.array(positions, dtype=np.int32),
        np.array(ids, dtype=np.int32),
        np.array(weights, dtype=np.float32),
        None,
        np.ones(len(positions), dtype=bool),
    )


def sample(group: int, member: int, tokens: list[int], answer: str | None, right: bool = False, **more: Any) -> Sample:
    text = "" if answer is None else f"so {answer}"
    fields: dict[str, Any] = {"strategy": "s", "problem": f"p{group}", "text": text, "ended": False, "nll": 1.0}
    fields |= {"reward": float(right), "correct": right, "extracted": answer, "parsed": answer is not None}
    return Sample(group=group, member=member, tokens=tokens, **{"record": None, **fields, **more})


PROBLEMS = [Problem(f"p{i}", ({"role": "user", "content": "What is 2 + 2?"},), "4", "math") for i in range(2)]
FACTS = {"anchor_nearest": None, "text_nearest": None, "tokens_per_second": 7.0}


def row(samples: list[Sample], baseline: list[Sample] | None = None, strategy: Arm | None = None) -> Any:
    """The row of a perturbed strategy beside an unperturbed one, or alone."""
    strategy = strategy or Arm("s", id="s", spec={})
    groups = {"none": measures.groups_of(baseline or []), strategy.id: measures.groups_of(samples)}
    strategies = [Arm("none", id="none"), strategy] if baseline else [strategy]
    against = next((each.id for each in strategies if each.spec is None), None)
    return measures.arm_rows(strategies, groups, PROBLEMS, dict.fromkeys(groups, FACTS), against, seed=0)[-1]


TWO_GROUPS = [
    sample(0, 0, [1, 2, 3], "4", right=True, nll=3.0),
    sample(0, 1, [1, 2], "5", nll=1.0),
    sample(1, 1, [1, 2, 3, 4], "4", right=True, nll=4.0),  # out of order on purpose
    sample(1, 0, [1, 2, 3, 4], None, nll=4.0),
]


def test_a_row_by_hand() -> None:
    found = row(TWO_GROUPS)
    assert found["reward"] == 0.5
    # One of two right in each group: pass@1 = 1/2, pass@2 = 1.
    assert found["pass_at_k"] == {"1": 0.5, "2": 1.0}
    # Two different answers of 2; then one of 2, since no answer is no distinct answer.
    assert found["diversity"]["distinct_answers"] == pytest.approx((2 / 2 + 1 / 2) / 2)
    # 1 2 3 and 1 2 are one deletion apart, of 3; the second group is equal.
    assert found["diversity"]["edit_distance"] == pytest.approx((1 / 3 + 0) / 2)
    # Distinct scaled: (2-1)/(2-1) = 1 and (1-1)/1 = 0. Axis: ((1/3 + 1)/2 + 0) / 2 = 1/3.
    assert found["diversity"]["score"] == pytest.approx(1 / 3)
    # Bigrams of the first group: 12 23 12, two different of three; of the second: 12 23 34 twice.
    assert found["diversity"]["distinct_2"] == pytest.approx((2 / 3 + 3 / 6) / 2)
    # 12 nats over 13 tokens.
    assert found["validity"]["perplexity"] == pytest.approx(math.exp(12 / 13))
    assert found["validity"]["parseable"] == 0.75
    # Without a baseline: parseable 3/4 and no loops.
    assert found["validity"]["score"] == pytest.approx((0.75 + 1.0) / 2)
    assert found["learnable_groups"] == 1.0
    assert found["truncated"] == 1.0
    assert found["rate"] == 0.0 and found["record_bytes_per_token"] is None
    assert row(list(reversed(TWO_GROUPS))) == found


def test_intermediate_results_of_a_row() -> None:
    # The question has 2; the answers 4 and 5 are final. What is left is {7}, {7, 9}; then {} and {}.
    texts = ["7, so 4", "2 + 7 = 9, so 5", "4", ""]
    samples = [Sample(**{**vars(s), "text": text}) for s, text in zip(TWO_GROUPS, texts)]
    assert row(samples)["diversity"]["distinct_intermediate"] == pytest.approx(2 / 3)


def test_rate_and_record_size() -> None:
    records = [record(4, [2, 5], [[1, 2]] * 2, [[0.9, 0.1]] * 2), None]
    samples = [sample(0, i, [1, 2, 3, 4], "4", record=r) for i, r in enumerate(records)]
    found = row(samples)
    assert samples[0].perturbed == [0, 3]
    assert found["rate"] == 2 / 8
    assert found["record_bytes_per_token"] == len(records[0].to_bytes()) / 8


def test_the_end_token_is_part_of_the_perplexity_alone() -> None:
    ended = [sample(0, 0, [1, 2, 9], "4", ended=True), sample(0, 1, [1, 2], "4")]
    found = row(ended)
    assert found["diversity"]["edit_distance"] == 0.0
    assert found["validity"]["perplexity"] == pytest.approx(math.exp(2 / 5))
    assert found["single_trajectory_groups"] == 0.0


def made(**more: Any) -> Any:
    """Statistics of two prompts with groups of four."""
    names = ("reward", "edit_distance", "distinct", "parseable", "repetition", "nll")
    fields = {**dict.fromkeys(names, np.array([0.5, 1.0])), "tokens": np.array([10.0, 30.0]), "group": 4, **more}
    return SimpleNamespace(everyone=np.array([[0, 1]]), **fields)


def test_the_axes_by_hand() -> None:
    stats = made(distinct=np.array([1 / 4, 1.0]), edit_distance=np.array([0.0, 0.5]), nll=np.array([10.0, 70.0]))
    # (0 + 0)/2 for the group of one answer, (0.5 + 1)/2 for the other.
    assert measures.diversity(stats, stats.everyone)[0] == pytest.approx(0.75 / 2)
    # 80 nats over 40 tokens against 40 over 40: exp(1 - 2). Parts: 0.75, 1 - 0.75, 1/e.
    baseline = made(nll=np.array([10.0, 30.0]))
    assert measures.validity(stats, baseline, stats.everyone)[0] == pytest.approx((0.75 + 0.25 + math.exp(-1)) / 3)
    # Likelier text than the baseline's is not more than valid.
    assert measures.validity(baseline, stats, stats.everyone)[0] == pytest.approx((0.75 + 0.25 + 1.0) / 3)
    unparseable = made(distinct=np.zeros(2), edit_distance=np.zeros(2))
    assert measures.diversity(unparseable, stats.everyone)[0] == 0.0, "not below 0"


def test_the_interval_is_that_of_a_binomial() -> None:
    # 100 prompts, half with reward 1: the bootstrap mean is Binomial(100, 1/2)/100, whose 2.5% and 97.5% quantiles
    # are 40 and 60. The quantile over 2000 draws may miss by one.
    draws = statistics.resamples(100, 3)
    assert (draws == statistics.resamples(100, 3)).all() and (draws != statistics.resamples(100, 1)).any()
    low, high = statistics.bounds(np.array([0.0, 1.0] * 50)[draws].mean(axis=1))
    assert low == pytest.approx(0.40, abs=0.011) and high == pytest.approx(0.60, abs=0.011)
    assert row(TWO_GROUPS[:2])["intervals"] == {"diversity": None, "validity": None, "reward": None}


def test_the_difference_is_paired() -> None:
    # Prompts differ by far more than the strategies do, and every prompt gains the same: no noise is left.
    plain = [sample(g, m, [1, 2], "4", reward=r) for g, r in enumerate([0.0, 1.0]) for m in range(2)]
    better = [Sample(**{**vars(s), "reward": s.reward + 0.1}) for s in plain]
    found = row(better, plain)
    gained = dict.fromkeys(("value", "low", "high"), pytest.approx(0.1))
    assert found["difference"]["reward"] == {**gained, "within_noise": False}
    assert found["intervals"]["reward"] == [pytest.approx(0.1), pytest.approx(1.1)]
    same = {"value": 0.0, "low": 0.0, "high": 0.0, "within_noise": True}
    assert row(plain, plain)["difference"] == dict.fromkeys(("diversity", "validity", "reward"), same)
    assert row(plain)["difference"] is row(plain, strategy=Arm("none", id="none"))["difference"] is None


def test_nearest_token_and_ties() -> None:
    matrix = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 1.0], [-1.0, 0.0]])
    # Cosine, not distance: (0.2, 3) points along 1 and 2, which tie; the token's own wins.
    vectors = torch.tensor([[0.2, 3.0], [0.2, 3.0], [5.0, 1.0], [-0.1, 0.01]])
    assert nearest_tokens(vectors, matrix, torch.tensor([2, 3, 1, 0])).tolist() == [2, 1, 0, 3]


def test_nearest_token_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.nn.functional.normalize(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    expected = (matrix @ matrix.T - 2 * torch.eye(50)).argmax(dim=-1)  # the nearest other token
    vectors = matrix[expected]
    monkeypatch.setattr("perturbations.embeddings._VOCABULARY_BLOCK", 7)
    assert nearest_tokens(vectors, matrix, torch.arange(50)).tolist() == expected.tolist()


def test_anchor_is_the_heaviest_candidate() -> None:
    embeddings = matrix_embeddings(2 * torch.eye(4))
    # Position 2: mostly token 1, which stands in the text. Position 3: mostly token 2, but the text has 0.
    # Position 4: an even mixture of 1 and 3 plus nothing: nearest to either, a tie that the anchor wins.
    weights = [[0.8, 0.2], [0.7, 0.3], [0.5, 0.5]]
    fed = record(3, [2, 3, 4], [[1, 2], [2, 0], [1, 3]], weights)
    found = fed_inputs([fed], [[1, 0, 1]], embeddings, None)
    assert (found["anchor_nearest"], found["text_nearest"]) == (1.0, pytest.approx(2 / 3))
    # ‖(−0.2, 0.2)‖, ‖(−0.7, 0.7)‖ and ‖(−0.5, 0.5)‖, of embeddings of length 2 and relative to it.
    assert found["relative_shift"] == pytest.approx(2**0.5 * (0.2 + 0.7 + 0.5) / 3)
    nothing = record(3, [], np.zeros((0, 2)), np.zeros((0, 2)))
    assert fed_inputs([nothing], [[1, 0, 1]], embeddings, None) == dict.fromkeys(found)


def test_noise_is_drawn_as_in_the_rollout() -> None:
    matrix = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    embeddings = matrix_embeddings(matrix)
    fields = vars(record(2, [3], [[4]], [[1.0]]))
    noisy = ReplayRecord(**{**fields, "sigma": np.array([0.7], dtype=np.float32)})
    (vector,) = recorded_inputs(noisy, noisy.positions, embeddings.matrix(), None)
    key = streams.keys(torch.tensor([5]), torch.tensor([3]), streams.Stream.NOISE)
    assert torch.equal(vector, matrix[4] + 0.7 * streams.normal(key, 8)[0])


def test_warnings() -> None:
    (greedy,) = parse_arms(None, (), ["neighbor rate=1"])
    same = [sample(0, i, [1, 2], "4", right=True) for i in range(2)]
    (warning,) = warnings_of([row(same)], [greedy])
    assert "every group is one trajectory" in warning and "greedy decoding" in warning
    # Different tokens, all right, at the length limit.
    right = [sample(0, i, [1, 2 + i], "4", right=True) for i in range(2)]
    found = warnings_of([row(right)], [Arm("s", id="s")])
    assert ["right" in found[0], "length limit" in found[1], len(found)] == [True, True, 2]
    assert warnings_of([row(TWO_GROUPS)], [Arm("s", id="s")]) == [found[1]]


def mixed(tokens: list[int], weight: float = 0.9, **more: Any) -> Sample:
    """An answer whose first two tokens were fed as one mixture of tokens 1 and 2."""
    fed = record(len(tokens), [2, 3], [[1, 2]] * 2, [[weight, 1 - weight]] * 2)
    return sample(0, len(tokens), tokens, "4", record=dataclasses.replace(fed, **more))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (mixed([1, 2, 3]), mixed([2, 2, 3]), True),
        (mixed([1, 2, 3]), mixed([2, 2, 4], weight=0.8999), True),  # rounding, and a last token, which is not fed
        (mixed([1, 2, 3]), mixed([1, 2, 4]), False),  # the same text as far as it was fed
        (mixed([1, 2, 3]), mixed([2, 2, 3], weight=0.8), False),
        (mixed([1, 2, 3], sigma=np.ones(2)), mixed([2, 2, 3], sigma=np.ones(2)), False),
        (mixed([1, 2, 3, 5]), mixed([2, 2, 4, 5]), False),  # the third is fed as it is
    ],
)
def test_texts_that_differ_with_inputs_that_do_not(one: Sample, other: Sample, same: bool) -> None:
    assert measures.fed_the_same([one, other]) is same
    assert measures.fed_the_same([one, other, sample(0, 9, [7, 7, 7], "4")]) is False
    found = warnings_of([row([one, dataclasses.replace(other, member=9)])], [Arm("s", id="s")])
    assert any("100% of the groups all responses had the same inputs" in text for text in found) is same


def test_the_numbers_in_words() -> None:
    lines = table({"group": 2, "strategies": [row(TWO_GROUPS)]}).splitlines()
    assert "pass@2" in lines[0]
    assert "–" in lines[1] and "0.333" in lines[1], "a dash for an unknown number"
    found = {"value": 0.25, "low": -0.1, "high": 0.5, "within_noise": True}
    rows = [{"name": "none", "difference": None}, {"name": "soft", "difference": {"diversity": found}}]
    line = differences({"baseline": "none", "strategies": rows})
    assert line == "soft against none: diversity +0.250 (-0.100 to +0.500, within noise)"
