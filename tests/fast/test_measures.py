"""The measures of a training step, by hand, and the trajectory records they are taken from."""

from __future__ import annotations

import numpy as np
import pytest

from ngrpo.trainer.metrics import SHIFT_COUNT, SHIFT_SUM, add_measures, step_metrics
from ngrpo.trainer.trajectory_record import TrajectoryRecord, records, unpack
from perturbations import ReplayRecord

NAN = np.nan


def kept(positions: list[int], agreed: list[bool], log_probs: list[float]) -> TrajectoryRecord:
    count = len(positions)
    record = ReplayRecord(
        1,
        2,
        len(log_probs),
        np.array(positions, np.int32),
        np.zeros((count, 1), np.int32),
        np.ones((count, 1), np.float32),
        None,
        np.array(agreed, bool),
    )
    return TrajectoryRecord(record, np.array(log_probs, np.float32))


def test_measures_by_hand() -> None:
    """Prompt of 2, four generated tokens at 2 to 5; inputs 2 and 4 are perturbed, so tokens 3 and 5 come after."""
    rollout = [NAN, NAN, -1.0, -2.0, -3.0, -4.0]
    trainer = np.array([0.0, 0.0, -1.1, -2.4, -3.0, -4.2])
    metrics = step_metrics([kept([2, 4], [True, False], rollout), None], [trainer, np.zeros(9)])
    assert metrics["perturbation/rate"] == pytest.approx(2 / 4)
    assert metrics["perturbation/anchor_agreement"] == pytest.approx(1 / 2)
    assert metrics["perturbation/gap_perturbed_mean"] == pytest.approx((0.4 + 0.2) / 2, abs=1e-6)
    assert metrics["perturbation/gap_perturbed_max"] == pytest.approx(0.4, abs=1e-6)
    assert metrics["perturbation/gap_plain_mean"] == pytest.approx((0.1 + 0.0) / 2, abs=1e-6)
    assert metrics["perturbation/gap_plain_max"] == pytest.approx(0.1, abs=1e-6)


def test_nothing_perturbed_and_nothing_there() -> None:
    metrics = step_metrics([kept([], [], [NAN, -1.0])], [np.array([0.0, -1.0])])
    assert metrics["perturbation/rate"] == 0.0
    assert "perturbation/anchor_agreement" not in metrics and "perturbation/gap_perturbed_mean" not in metrics
    assert step_metrics([None], [np.zeros(3)]) == {}


def test_the_sequence_may_have_been_cut() -> None:
    """OpenRLHF truncates at --data.max_len: every measure is of what remains, as if no more had been generated."""
    whole = kept([1, 3], [True, True], [NAN, -1.0, -2.0, -3.0])
    trainer = np.array([NAN, -1.0, -2.0])
    metrics = step_metrics([whole], [trainer])
    assert metrics["perturbation/rate"] == pytest.approx(1 / 2)
    assert metrics["perturbation/anchor_agreement"] == 1.0
    assert metrics == step_metrics([kept([1], [True], [NAN, -1.0, -2.0])], [trainer])


def test_tokens_that_are_not_trained_on_do_not_count() -> None:
    """Tokens 1 and 3 are not in the loss: nor are their positions in the rate, the agreement or the gaps."""
    one = kept([1, 2, 3], [True, False, True], [NAN, -1.0, -2.0, -3.0, -4.0])
    metrics = step_metrics([one], [np.array([NAN, NAN, -2.5, NAN, -4.1])])
    assert metrics["perturbation/rate"] == pytest.approx(1 / 2)
    assert metrics["perturbation/anchor_agreement"] == 0.0
    assert metrics["perturbation/gap_perturbed_mean"] == pytest.approx((0.5 + 0.1) / 2, abs=1e-6)
    assert "perturbation/gap_plain_mean" not in metrics


def test_shift_is_the_quotient_of_the_sums() -> None:
    status = {"reward": 1.0, SHIFT_SUM: 0.06, SHIFT_COUNT: 1.5}
    add_measures(status, {"perturbation/rate": 0.1})
    assert status == {"reward": 1.0, "perturbation/rate": 0.1, "perturbation/shift": pytest.approx(0.04)}
    status = {SHIFT_SUM: 0.0, SHIFT_COUNT: 0.0}
    add_measures(status, {})
    assert status == {}


def test_records_round_trip() -> None:
    one = kept([1], [True], [NAN, -1.5])
    (back, nobody, image) = unpack([one.pack(), None, {"pixel_values": 3}])
    assert back.replay == one.replay
    np.testing.assert_array_equal(back.log_probs, one.log_probs)
    assert nobody is None and image is None
    assert records([one.pack(), one.pack()], 2) == [one.replay, one.replay]
    for side_inputs in (None, [one.pack(), None], [one.pack()]):
        with pytest.raises(RuntimeError, match="of 2 samples have no replay record"):
            records(side_inputs, 2)
