# SPDX-License-Identifier: Apache-2.0
"""Measures of groups, the two axes, an arm's row, nearest tokens and warnings, by hand and without an engine."""

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

PROBLEMS = [
    Problem("p0", ({"role": "user", "content": "What is 2 + 2?"},), "4", "math"),
    Problem("p1", ({"role": "user", "content": "What is 2 + 2?"},), "4", "math"),
]
FACTS = {"anchor_nearest": None, "text_nearest": None, "tokens_per_second": 7.0}
ARM = Arm("s", id="s")


def record(tokens: int, positions: list[int], ids: Any, weights: Any) -> ReplayRecord:
    """The record of a trajectory with a prompt of two tokens and ``tokens`` generated ones."""
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
    """A response of ``group``, with ``more`` in place of the usual fields; ``answer`` None is none that can be read."""
    fields: dict[str, Any] = {
        "strategy": "s",
        "problem": f"p{group}",
        "group": group,
        "member": member,
        "text": "" if answer is None else f"so {answer}",
        "tokens": tokens,
        "ended": False,
        "reward": float(right),
        "correct": right,
        "extracted": answer,
        "parsed": answer is not None,
        "nll": 1.0,
        "record": None,
    }
    return Sample(**{**fields, **more})


def arm_row(samples: list[Sample], baseline: list[Sample] | None = None, arm: Arm | None = None) -> dict[str, Any]:
    """The row of a perturbed arm, alone or beside an unperturbed ``baseline``."""
    arm = arm or Arm("s", id="s", spec={})
    groups = {"none": measures.groups_of(baseline or []), arm.id: measures.groups_of(samples)}
    arms = [arm]
    if baseline:
        arms = [Arm("none", id="none"), arm]
    unperturbed = [candidate.id for candidate in arms if candidate.spec is None]
    against = unperturbed[0] if unperturbed else None
    return measures.arm_rows(arms, groups, PROBLEMS, dict.fromkeys(groups, FACTS), against, seed=0)[-1]


TWO_GROUPS = [
    sample(0, 0, [1, 2, 3], "4", right=True, nll=3.0),
    sample(0, 1, [1, 2], "5", nll=1.0),
    sample(1, 1, [1, 2, 3, 4], "4", right=True, nll=4.0),  # before member 0 on purpose
    sample(1, 0, [1, 2, 3, 4], None, nll=4.0),
]


# --- measures of tokens and texts


def test_edit_distance_by_hand() -> None:
    # (1 2 3) and (1 3): one deletion, 1/3. (1 2 3) and (): 3/3. (1 3) and (): 2/2. Mean (1/3 + 1 + 1) / 3 = 7/9.
    assert measures.edit_distance([[1, 2, 3], [1, 3], []]) == pytest.approx(7 / 9)


def levenshtein(one: list[int], other: list[int]) -> int:
    """The textbook's dynamic program, a row of the table at a time."""
    row = list(range(len(other) + 1))
    for i, one_token in enumerate(one):
        next_row = [i + 1]
        for j, other_token in enumerate(other):
            deletion = row[j + 1] + 1
            insertion = next_row[j] + 1
            substitution = row[j] + (one_token != other_token)
            next_row.append(min(deletion, insertion, substitution))
        row = next_row
    return row[-1]


def test_edit_distance_is_the_textbooks() -> None:
    """200 groups of two to five responses, each of up to eight of three tokens."""
    chance = random.Random(0)
    for _ in range(200):
        group = []
        for _ in range(chance.randrange(2, 6)):
            length = chance.randrange(9)
            group.append([chance.randrange(3) for _ in range(length)])
        distances = []
        for one, other in itertools.combinations(group, 2):
            longer = max(len(one), len(other), 1)
            distances.append(levenshtein(one, other) / longer)
        assert measures.edit_distance(group) == pytest.approx(sum(distances) / len(distances))


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
        pytest.param([1, 2, 3] * 10, True, id="27 4-grams, 3 different: 24/27 have occurred before"),
        pytest.param([*range(50)], False, id="no repeat"),
        pytest.param([1] * 8 + [*range(10, 18)], False, id="13 4-grams, 4 repeats: 0.31"),
        pytest.param([*range(1000, 1400), *[5, 6] * 64], True, id="a loop at the end"),
        pytest.param([*[5, 6] * 64, *range(1000, 1400)], False, id="a loop at the start alone"),
    ],
)
def test_loops(tokens: list[int], looped: bool) -> None:
    assert measures.loops(tokens) is looped


def test_self_bleu_is_the_mean_against_the_others() -> None:
    # The two equal responses have 1; the third has no token in common with either.
    assert measures.self_bleu([[1, 2, 3, 4], [1, 2, 3, 4], [7, 8]]) == pytest.approx(2 / 3)


def test_distinct_share_of_bigrams() -> None:
    # Bigrams 12 21 12 and 12 22: five, of them 12, 21, 22 different.
    bigrams = [measures.ngrams([1, 2, 1, 2], 2), measures.ngrams([1, 2, 2], 2)]
    assert measures.distinct_share(bigrams) == 3 / 5


def test_distinct_share_of_sets() -> None:
    # Three elements in all sets together, two of them different.
    assert measures.distinct_share([{"1"}, {"1", "2"}]) == pytest.approx(2 / 3)
    assert measures.distinct_share([set(), set()]) is None


def test_intermediate_results_are_neither_of_the_question_nor_final() -> None:
    text = "3 * 4 = 12, and 12 + 5 = 17, so 17.00 + 3 = 20. The answer is 20."
    question = "What is 3 * 4 + 5 + 3?"
    assert measures.intermediate_results(text, question, "20") == {"12", "17"}
    assert measures.intermediate_results(text, question, None) == {"12", "17", "20"}


# --- the row of an arm


def test_a_row_by_hand() -> None:
    row = arm_row(TWO_GROUPS)

    assert row["reward"] == 0.5
    # One of two right in each group: pass@1 = 1/2, pass@2 = 1.
    assert row["pass_at_k"] == {"1": 0.5, "2": 1.0}
    diversity = row["diversity"]
    # Two different answers of 2; then one of 2, since no answer is no distinct answer.
    assert diversity["distinct_answers"] == pytest.approx((2 / 2 + 1 / 2) / 2)
    # 1 2 3 and 1 2 are one deletion apart, of 3; the second group is equal.
    assert diversity["edit_distance"] == pytest.approx((1 / 3 + 0) / 2)
    # Distinct scaled: (2-1)/(2-1) = 1 and (1-1)/1 = 0. Axis: ((1/3 + 1)/2 + 0) / 2 = 1/3.
    assert diversity["score"] == pytest.approx(1 / 3)
    # Bigrams of the first group: 12 23 12, two different of three; of the second: 12 23 34 twice.
    assert diversity["distinct_2"] == pytest.approx((2 / 3 + 3 / 6) / 2)
    validity = row["validity"]
    # 12 nats over 13 tokens.
    assert validity["perplexity"] == pytest.approx(math.exp(12 / 13))
    assert validity["parseable"] == 0.75
    # Without a baseline: parseable 3/4 and no loops.
    assert validity["score"] == pytest.approx((0.75 + 1.0) / 2)
    assert row["learnable_groups"] == 1.0
    assert row["truncated"] == 1.0
    assert row["rate"] == 0.0
    assert row["record_bytes_per_token"] is None


def test_a_row_does_not_depend_on_the_order_of_the_samples() -> None:
    assert arm_row(list(reversed(TWO_GROUPS))) == arm_row(TWO_GROUPS)


def test_intermediate_results_of_a_row() -> None:
    # The question has 2; the answers 4 and 5 are final. What is left is {7}, {7, 9}; then {} and {}.
    texts = ["7, so 4", "2 + 7 = 9, so 5", "4", ""]
    samples = [dataclasses.replace(response, text=text) for response, text in zip(TWO_GROUPS, texts)]
    assert arm_row(samples)["diversity"]["distinct_intermediate"] == pytest.approx(2 / 3)


def test_rate_and_record_size() -> None:
    two_perturbed = record(4, [2, 5], [[1, 2]] * 2, [[0.9, 0.1]] * 2)
    perturbed = sample(0, 0, [1, 2, 3, 4], "4", record=two_perturbed)
    plain = sample(0, 1, [1, 2, 3, 4], "4", record=None)

    row = arm_row([perturbed, plain])

    assert perturbed.perturbed == [0, 3]
    assert row["rate"] == 2 / 8
    assert row["record_bytes_per_token"] == len(two_perturbed.to_bytes()) / 8


def test_the_end_token_is_part_of_the_perplexity_alone() -> None:
    ended = sample(0, 0, [1, 2, 9], "4", ended=True)
    cut = sample(0, 1, [1, 2], "4")

    row = arm_row([ended, cut])

    assert row["diversity"]["edit_distance"] == 0.0
    # 2 nats over 3 and 2 tokens.
    assert row["validity"]["perplexity"] == pytest.approx(math.exp(2 / 5))
    assert row["single_trajectory_groups"] == 0.0


# --- the two axes


def prompt_statistics(**fields: Any) -> Any:
    """Statistics of two prompts with groups of four, with ``fields`` in place of the usual ones."""
    usual = dict.fromkeys(
        ("reward", "edit_distance", "distinct", "parseable", "repetition", "nll"), np.array([0.5, 1.0])
    )
    usual |= {"tokens": np.array([10.0, 30.0]), "group_size": 4, "everyone": np.array([[0, 1]])}
    return SimpleNamespace(**{**usual, **fields})


def test_the_diversity_axis_by_hand() -> None:
    stats = prompt_statistics(distinct=np.array([1 / 4, 1.0]), edit_distance=np.array([0.0, 0.5]))
    # (0 + 0)/2 for the group of one answer, (0.5 + 1)/2 for the other.
    assert measures.diversity(stats, stats.everyone)[0] == pytest.approx(0.75 / 2)


def test_the_diversity_of_responses_without_answers_is_not_below_0() -> None:
    unparseable = prompt_statistics(distinct=np.zeros(2), edit_distance=np.zeros(2))
    assert measures.diversity(unparseable, unparseable.everyone)[0] == 0.0


def test_the_validity_axis_by_hand() -> None:
    stats = prompt_statistics(nll=np.array([10.0, 70.0]))
    baseline = prompt_statistics(nll=np.array([10.0, 30.0]))
    # 80 nats over 40 tokens against 40 over 40: exp(1 - 2). Terms: 0.75, 1 - 0.75, 1/e.
    against_likelier = measures.validity(stats, baseline, stats.everyone)[0]
    assert against_likelier == pytest.approx((0.75 + 0.25 + math.exp(-1)) / 3)
    # Likelier text than the baseline's is not more than valid.
    against_unlikelier = measures.validity(baseline, stats, stats.everyone)[0]
    assert against_unlikelier == pytest.approx((0.75 + 0.25 + 1.0) / 3)


# --- intervals and differences


def test_resamples_are_those_of_their_seed() -> None:
    draws = statistics.resamples(100, 3)
    assert (draws == statistics.resamples(100, 3)).all()
    assert (draws != statistics.resamples(100, 1)).any()


def test_the_interval_is_that_of_a_binomial() -> None:
    # 100 prompts, half with reward 1: the bootstrap mean is Binomial(100, 1/2)/100, whose 2.5% and 97.5% quantiles
    # are 40 and 60. The quantile over 2000 draws may miss by one.
    rewards = np.array([0.0, 1.0] * 50)
    draws = statistics.resamples(100, 3)
    low, high = statistics.bounds(rewards[draws].mean(axis=1))
    assert low == pytest.approx(0.40, abs=0.011)
    assert high == pytest.approx(0.60, abs=0.011)


def test_one_prompt_has_no_interval() -> None:
    one_group = TWO_GROUPS[:2]
    assert arm_row(one_group)["intervals"] == {"diversity": None, "validity": None, "reward": None}


def two_prompts() -> list[Sample]:
    """Two equal responses to each of two prompts, with the rewards 0 and 1."""
    samples = []
    for group, reward in enumerate([0.0, 1.0]):
        samples += [sample(group, member, [1, 2], "4", reward=reward) for member in range(2)]
    return samples


def test_the_difference_is_paired() -> None:
    """Prompts differ by far more than the arms do, and every prompt gains the same; but two prompts are few."""
    plain = two_prompts()
    better = [dataclasses.replace(response, reward=response.reward + 0.1) for response in plain]

    row = arm_row(better, plain)

    assert row["difference"]["reward"] == {
        "value": pytest.approx(0.1),
        "low": pytest.approx(0.1),
        "high": pytest.approx(0.1),
        "within_noise": True,
    }
    assert row["intervals"]["reward"] == [pytest.approx(0.1), pytest.approx(1.1)]


def test_equal_arms_differ_by_0_within_noise() -> None:
    no_difference = {"value": 0.0, "low": 0.0, "high": 0.0, "within_noise": True}
    row = arm_row(two_prompts(), two_prompts())
    assert row["difference"] == {
        "diversity": no_difference,
        "validity": no_difference,
        "reward": no_difference,
    }


def test_without_another_arm_there_is_no_difference() -> None:
    assert arm_row(two_prompts())["difference"] is None
    assert arm_row(two_prompts(), arm=Arm("none", id="none"))["difference"] is None


# --- inputs and their nearest tokens


def test_nearest_token_is_by_cosine_and_its_own_token_wins_a_tie() -> None:
    matrix = torch.tensor(
        [
            [1.0, 0.0],
            [0.0, 2.0],
            [0.0, 1.0],
            [-1.0, 0.0],
        ]
    )
    # (0.2, 3) points along rows 1 and 2, which tie, though row 1 is nearer by distance.
    vectors = torch.tensor([[0.2, 3.0], [0.2, 3.0], [5.0, 1.0], [-0.1, 0.01]])
    own_tokens = torch.tensor([2, 3, 1, 0])
    assert nearest_tokens(vectors, matrix, own_tokens).tolist() == [2, 1, 0, 3]


def test_nearest_token_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.nn.functional.normalize(torch.randn(50, 8, generator=generator), dim=-1)
    similarity = matrix @ matrix.T
    nearest_other = (similarity - 2 * torch.eye(50)).argmax(dim=-1)
    monkeypatch.setattr("perturbations.embeddings._VOCABULARY_BLOCK", 7)
    found_tokens = nearest_tokens(matrix[nearest_other], matrix, torch.arange(50))
    assert found_tokens.tolist() == nearest_other.tolist()


def test_anchor_is_the_heaviest_candidate() -> None:
    embeddings = matrix_embeddings(2 * torch.eye(4))
    # Position 2: mostly token 1, which stands in the text. Position 3: mostly token 2, but the text has 0.
    # Position 4: an even mixture of 1 and 3 plus nothing: nearest to either, a tie that the anchor wins.
    mixtures = record(3, [2, 3, 4], [[1, 2], [2, 0], [1, 3]], [[0.8, 0.2], [0.7, 0.3], [0.5, 0.5]])

    facts = fed_inputs([mixtures], [[1, 0, 1]], embeddings, None)

    assert facts["anchor_nearest"] == 1.0
    assert facts["text_nearest"] == pytest.approx(2 / 3)
    # ‖(−0.2, 0.2)‖, ‖(−0.7, 0.7)‖ and ‖(−0.5, 0.5)‖, of embeddings of length 2 and relative to it.
    assert facts["relative_shift"] == pytest.approx(2**0.5 * (0.2 + 0.7 + 0.5) / 3)


def test_without_a_perturbed_input_there_is_no_nearest_token() -> None:
    unperturbed = record(3, [], np.zeros((0, 2)), np.zeros((0, 2)))
    facts = fed_inputs([unperturbed], [[1, 0, 1]], matrix_embeddings(2 * torch.eye(4)), None)
    assert facts == {"anchor_nearest": None, "text_nearest": None, "relative_shift": None}


def test_noise_is_drawn_as_in_the_rollout() -> None:
    matrix = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    embeddings = matrix_embeddings(matrix)
    plain = record(2, [3], [[4]], [[1.0]])
    noisy = dataclasses.replace(plain, sigma=np.array([0.7], dtype=np.float32))

    (vector,) = recorded_inputs(noisy, noisy.positions, embeddings.matrix(), None)

    # Seed 5 and position 3 are those of the record.
    key = streams.keys(torch.tensor([5]), torch.tensor([3]), streams.Stream.NOISE)
    assert torch.equal(vector, matrix[4] + 0.7 * streams.normal(key, 8)[0])


# --- warnings and words


def test_groups_of_one_trajectory_are_warned_of() -> None:
    (greedy,) = parse_arms(None, (), ["neighbor rate=1"])
    same = [sample(0, member, [1, 2], "4", right=True) for member in range(2)]
    (warning,) = warnings_of([arm_row(same)], [greedy])
    assert "every group is one trajectory" in warning
    assert "greedy decoding" in warning


def test_groups_that_are_all_right_and_cut_are_warned_of() -> None:
    different_and_right = [sample(0, member, [1, 2 + member], "4", right=True) for member in range(2)]
    all_right, cut = warnings_of([arm_row(different_and_right)], [ARM])
    assert "right" in all_right
    assert "length limit" in cut
    # Groups with both rewards are cut as well.
    assert warnings_of([arm_row(TWO_GROUPS)], [ARM]) == [cut]


def mixed(tokens: list[int], weight: float = 0.9, **changes: Any) -> Sample:
    """A response whose first two tokens were fed as one mixture of tokens 1 and 2."""
    fed = record(len(tokens), [2, 3], [[1, 2]] * 2, [[weight, 1 - weight]] * 2)
    return sample(0, len(tokens), tokens, "4", record=dataclasses.replace(fed, **changes))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        pytest.param(mixed([1, 2, 3]), mixed([2, 2, 3]), True, id="other texts, equal mixtures"),
        pytest.param(
            mixed([1, 2, 3]),
            mixed([2, 2, 4], weight=0.8999),
            True,
            id="weights that differ by rounding, and a last token, which is not fed",
        ),
        pytest.param(mixed([1, 2, 3]), mixed([1, 2, 4]), False, id="the same text as far as it was fed"),
        pytest.param(mixed([1, 2, 3]), mixed([2, 2, 3], weight=0.8), False, id="other weights"),
        pytest.param(
            mixed([1, 2, 3], sigma=np.ones(2)), mixed([2, 2, 3], sigma=np.ones(2)), False, id="noise is never the same"
        ),
        pytest.param(mixed([1, 2, 3, 5]), mixed([2, 2, 4, 5]), False, id="another third token, fed as it is"),
    ],
)
def test_texts_that_differ_with_inputs_that_do_not(one: Sample, other: Sample, same: bool) -> None:
    third = sample(0, 9, [7, 7, 7], "4")
    assert measures.fed_the_same([one, other]) is same
    assert measures.fed_the_same([one, other, third]) is False
    warnings = warnings_of([arm_row([one, dataclasses.replace(other, member=9)])], [ARM])
    warned = any("100% of the groups all responses had the same inputs" in warning for warning in warnings)
    assert warned is same


def test_the_table_has_a_dash_for_an_unknown_number() -> None:
    head, row = table({"group": 2, "strategies": [arm_row(TWO_GROUPS)]}).splitlines()[:2]
    assert "pass@2" in head
    assert "–" in row
    assert "0.333" in row


def test_a_difference_in_words() -> None:
    diversity = {"value": 0.25, "low": -0.1, "high": 0.5, "within_noise": True}
    rows = [
        {"name": "none", "difference": None},
        {"name": "soft", "difference": {"diversity": diversity}},
    ]
    line, caution = differences({"baseline": "none", "strategies": rows}).splitlines()
    assert line == "soft against none: diversity +0.250 (-0.100 to +0.500, within noise)"
    assert "of twenty comparisons of equal arms, about one is called different by chance" in caution
    assert differences({"baseline": "none", "strategies": [{"name": "none", "difference": None}]}) == ""
