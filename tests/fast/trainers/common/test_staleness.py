# SPDX-License-Identifier: Apache-2.0
"""Ages of responses in weight syncs, and the metrics of tokens and mismatch by age, against numbers by hand."""

import numpy as np
import pytest

from ngrpo.trainers.common import mismatch, staleness
from perturbations import FinishedTrajectory
from tests.support.replay_examples import small


def test_ages_are_the_syncs_since_the_draw() -> None:
    assert staleness.ages([5, 4, 2], trainer_version=5).tolist() == [0, 1, 3]


def test_a_later_version_than_the_trainers_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the weights of sync 6, and the trainer has made 5 syncs"):
        staleness.ages([5, 6], trainer_version=5)


def test_tokens_and_gaps_by_age() -> None:
    """Four responses of 2, 3, 1 and 4 tokens; ages 3 and 2 are one class."""
    gaps = [np.array([0.1, 0.3]), np.array([0.2, 0.2, 0.5]), np.array([1.0]), np.array([0.0, 0.0, 0.0, 2.0])]
    measures = staleness.measures(np.array([0, 1, 3, 2]), np.array([2, 3, 1, 4]), gaps)
    assert measures == {
        "staleness/mean": pytest.approx((0 * 2 + 1 * 3 + 3 * 1 + 2 * 4) / 10),
        "staleness/max": 3.0,
        "staleness/tokens_0": 2.0,
        "staleness/gap_0": pytest.approx(0.2),
        "staleness/tokens_1": 3.0,
        "staleness/gap_1": pytest.approx(0.3),
        "staleness/tokens_2_up": 5.0,
        "staleness/gap_2_up": pytest.approx(3.0 / 5),
    }


def test_an_age_without_tokens_has_a_count_of_zero_and_no_gap() -> None:
    measures = staleness.measures(np.array([1, 1]), np.array([2, 2]), [np.ones(2), np.ones(2)])
    assert measures["staleness/tokens_0"] == 0.0 and "staleness/gap_0" not in measures
    without_gaps = staleness.measures(np.array([1, 1]), np.array([2, 2]), None)
    assert not any("gap" in name for name in without_gaps) and without_gaps["staleness/tokens_1"] == 4.0


def test_gaps_are_of_tokens_that_were_drawn_and_are_trained() -> None:
    """Position 0 is the prompt's; 2 is not trained; the record has a token that was cut off before the training."""
    nan = np.nan
    log_probs = np.array([nan, -1.0, -2.0, -3.0, -4.0], dtype=np.float32)
    rollout = FinishedTrajectory(record=small([]), log_probs=log_probs)
    trainer_log_probs = np.array([nan, -1.5, nan, -2.0], dtype=np.float32)
    gaps, without_record = mismatch.gaps_of_samples([rollout, None], [trainer_log_probs, trainer_log_probs])
    assert gaps.tolist() == [0.5, 1.0]
    assert len(without_record) == 0
