# SPDX-License-Identifier: Apache-2.0
"""The measures of a training step, by hand, and which of them are judged."""

import contextlib
import io
from typing import Any

import numpy as np
import pytest

from ngrpo.machine.progress import show_progress
from ngrpo.trainers.common.mismatch import ReplayGap, check_gap, step_metrics
from ngrpo.trainers.openrlhf.actor_trainer import MEAN_METRICS
from ngrpo.trainers.openrlhf.trainer import add_measures
from perturbations import FinishedTrajectory, Positions, ReplayRecord, create

NAN = np.nan
SHIFT_SUM, SHIFT_COUNT = MEAN_METRICS["perturbation/shift"]


def kept(positions: list[int], agreed: list[bool], log_probs: list[float]) -> FinishedTrajectory:
    at, shape = np.array(positions, np.int32), (len(positions), 1)
    ids, weights = np.zeros(shape, np.int32), np.ones(shape, np.float32)
    record = ReplayRecord(1, 2, len(log_probs), at, ids, weights, None, np.array(agreed, bool))
    return FinishedTrajectory(record, np.array(log_probs, np.float32))


def values(found: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("perturbation/"): value for name, value in found.items()}


def test_measures_by_hand() -> None:
    """Prompt of 2, four generated tokens at 2 to 5; inputs 2 and 4 are perturbed, so tokens 3 and 5 come after."""
    rollout = [NAN, NAN, -1.0, -2.0, -3.0, -4.0]
    trainer = np.array([0.0, 0.0, -1.1, -2.4, -3.0, -4.2])
    found = values(step_metrics([kept([2, 4], [True, False], rollout), None], [trainer, np.zeros(9)]))
    del found["record_bytes_per_token"]
    assert found == pytest.approx(
        {
            "rate": 2 / 4,
            "sampled_token_kept": 1 / 2,
            "gap_perturbed_mean": (0.4 + 0.2) / 2,
            "gap_perturbed_max": 0.4,
            "gap_plain_mean": (0.1 + 0.0) / 2,
            "gap_plain_max": 0.1,
            "gap_before_mean": 0.1,  # token 2 alone, not token 4
            "gap_before_max": 0.1,
        },
        abs=1e-6,
    )
    assert step_metrics([None], [np.zeros(3)]) == {}


def test_the_sequence_may_have_been_cut() -> None:
    """OpenRLHF truncates at --data.max_len: every measure is of what remains, as if no more had been generated."""
    whole = kept([1, 3], [True, True], [NAN, -1.0, -2.0, -3.0])
    trainer = np.array([NAN, -1.0, -2.0])
    assert step_metrics([whole], [trainer]) == step_metrics([kept([1], [True], [NAN, -1.0, -2.0])], [trainer])


def test_tokens_that_are_not_trained_on_do_not_count() -> None:
    """Tokens 1 and 3 are not in the loss: nor are their positions in the rate, the agreement or the gaps."""
    one = kept([1, 2, 3], [True, False, True], [NAN, -1.0, -2.0, -3.0, -4.0])
    found = values(step_metrics([one], [np.array([NAN, NAN, -2.5, NAN, -4.1])]))
    assert (found["rate"], found["sampled_token_kept"]) == (1 / 2, 0.0) and "gap_plain_mean" not in found
    assert found["gap_perturbed_mean"] == pytest.approx((0.5 + 0.1) / 2, abs=1e-6)


def test_shift_is_the_quotient_of_the_sums() -> None:
    status = {"reward": 1.0, SHIFT_SUM: 0.06, SHIFT_COUNT: 1.5}
    add_measures(status, {"perturbation/rate": 0.1})
    assert status == {"reward": 1.0, "perturbation/rate": 0.1, "perturbation/shift": pytest.approx(0.04)}
    status = {SHIFT_SUM: 0.0, SHIFT_COUNT: 0.0}
    add_measures(status, {})
    assert status == {}


@pytest.mark.parametrize(("burn_in", "planned"), [(0, 1.0), (3, 1 / 4)])
def test_the_planned_rate_is_the_share_that_draw_and_schedule_select(burn_in: int, planned: float) -> None:
    """Prompt of 2, four generated tokens; with a burn-in of 3 only the last of them is selected."""
    rollout, gumbel = [NAN, NAN, -1.0, -2.0, -3.0, -4.0], create("gumbel", rate=1.0, burn_in=burn_in)
    found = values(step_metrics([kept([4], [True], rollout)], [np.array(rollout)], gumbel))
    assert (found["planned_rate"], found["rate"]) == (planned, 1 / 4)


def test_the_planned_rate_follows_the_draws_of_the_rollout() -> None:
    neighbor = create("neighbor", rate=0.3)
    rollout = np.full(2000, -1.0)
    rollout[:2] = NAN
    record = kept([], [], rollout.tolist())
    at = Positions(np.ones(1998, np.int64), np.full(1998, 2), np.arange(2, 2000))
    measured = step_metrics([record], [rollout], neighbor)["perturbation/planned_rate"]
    assert measured == neighbor.selects(at).mean() == pytest.approx(0.3, abs=0.04)


def gaps(perturbed: float | None, plain: float | None, before: float | None = None) -> dict[str, float]:
    given = {"perturbed": perturbed, "plain": plain, "before": before}
    return {f"perturbation/gap_{name}_mean": value for name, value in given.items() if value is not None}


@pytest.mark.parametrize(
    ("given", "limit", "expected"),
    [
        (gaps(0.19, 0.02), 10.0, False),
        (gaps(0.21, 0.02), 10.0, True),
        (gaps(0.21, 0.02), 11.0, False),
        (gaps(9e-5, 1e-7), 10.0, False),  # an exact plain position says nothing: it counts as 1e-5
        (gaps(2e-4, 1e-7), 10.0, True),
        (gaps(0.2, None), 10.0, True),
        (gaps(None, 0.5), 10.0, False),
        (gaps(5.9, 1.0, 0.04), 10.0, True),  # a wrong replay: what is plain sees wrong inputs as well
        (gaps(0.3, 0.04, 1e-4), 10.0, False),  # a few certain tokens say nothing: they count as 2^-5
        (gaps(0.3, 1e-4, 1e-4), 10.0, False),  # and at rate 1 there are no others
        (gaps(0.32, 1e-4, 1e-4), 10.0, True),
        (gaps(0.3, 0.02, 0.04), 10.0, True),
        (gaps(4.0, 1.0, 1.0), 10.0, False),  # other weights, by design: noise on the policy
    ],
)
def test_a_gap_that_is_too_large(given: dict[str, float], limit: float, expected: bool) -> None:
    likely = rf"differ by {given.get('perturbation/gap_perturbed_mean', 0):.2g} .*\n  1\. The replay does not reach"
    with pytest.raises(ReplayGap, match=likely) if expected else contextlib.nullcontext():
        check_gap(given, limit, strict=True)


def test_the_warning_comes_once_and_reaches_the_screen(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("ngrpo.trainers.common.mismatch._warned", [])
    for _ in range(3):
        check_gap(gaps(1.0, 0.01), 10.0, strict=False)
    printed = capsys.readouterr().out
    assert printed.count("differ by 1 on average") == 1 and "--perturbation.strict" in printed
    screen = io.StringIO()
    show_progress([f"(PPOTrainer pid=7) {line}" for line in printed.splitlines()], screen)
    assert "warning: log-probabilities of rollout and trainer differ by 1" in screen.getvalue()
