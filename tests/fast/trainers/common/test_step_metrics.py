# SPDX-License-Identifier: Apache-2.0
"""The measures of a training step, by hand, and which of them are judged."""

import io
from typing import Any

import numpy as np
import pytest

from ngrpo.machine.progress import show_progress
from ngrpo.trainers.common.mismatch import MismatchTooLarge, check_gap, step_metrics
from ngrpo.trainers.openrlhf.actor_trainer import MEAN_METRICS
from ngrpo.trainers.openrlhf.trainer import add_measures
from perturbations import FinishedTrajectory, Positions, ReplayRecord, create

NAN = np.nan
SHIFT_SUM, SHIFT_COUNT = MEAN_METRICS["perturbation/shift"]


def trajectory(positions: list[int], agreed: list[bool], log_probs: list[float]) -> FinishedTrajectory:
    """A trajectory with a prompt of two tokens, one mixture of one candidate at each of ``positions``."""
    shape = (len(positions), 1)
    record = ReplayRecord(
        seed=1,
        prompt_tokens=2,
        num_tokens=len(log_probs),
        positions=np.array(positions, np.int32),
        ids=np.zeros(shape, np.int32),
        weights=np.ones(shape, np.float32),
        sigma=None,
        agreed=np.array(agreed, bool),
    )
    return FinishedTrajectory(record, np.array(log_probs, np.float32))


def without_prefix(measures: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("perturbation/"): value for name, value in measures.items()}


def test_measures_by_hand() -> None:
    """Prompt of 2, four generated tokens at 2 to 5; inputs 2 and 4 are perturbed, so tokens 3 and 5 come after."""
    rollout = [NAN, NAN, -1.0, -2.0, -3.0, -4.0]
    trainer = np.array([0.0, 0.0, -1.1, -2.4, -3.0, -4.2])
    perturbed = trajectory([2, 4], [True, False], rollout)

    measures = without_prefix(step_metrics([perturbed, None], [trainer, np.zeros(9)]))

    del measures["record_bytes_per_token"]
    assert measures == pytest.approx(
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


def test_samples_without_a_record_have_no_measures() -> None:
    assert step_metrics([None], [np.zeros(3)]) == {}


def test_the_sequence_may_have_been_cut() -> None:
    """OpenRLHF truncates at --data.max_len: every measure is of what remains, as if no more had been generated."""
    uncut = trajectory([1, 3], [True, True], [NAN, -1.0, -2.0, -3.0])
    cut = trajectory([1], [True], [NAN, -1.0, -2.0])
    trainer = np.array([NAN, -1.0, -2.0])
    assert step_metrics([uncut], [trainer]) == step_metrics([cut], [trainer])


def test_tokens_that_are_not_trained_on_do_not_count() -> None:
    """Tokens 1 and 3 are not in the loss: nor are their positions in the rate, the agreement or the mismatch."""
    rollout = trajectory([1, 2, 3], [True, False, True], [NAN, -1.0, -2.0, -3.0, -4.0])
    trainer = np.array([NAN, NAN, -2.5, NAN, -4.1])

    measures = without_prefix(step_metrics([rollout], [trainer]))

    assert measures["rate"] == 1 / 2
    assert measures["sampled_token_kept"] == 0.0
    assert "gap_plain_mean" not in measures
    assert measures["gap_perturbed_mean"] == pytest.approx((0.5 + 0.1) / 2, abs=1e-6)


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
    log_probs = [NAN, NAN, -1.0, -2.0, -3.0, -4.0]
    perturbation = create("gumbel", rate=1.0, burn_in=burn_in)
    rollout = trajectory([4], [True], log_probs)
    measures = without_prefix(step_metrics([rollout], [np.array(log_probs)], perturbation))
    assert measures["planned_rate"] == planned
    assert measures["rate"] == 1 / 4


def test_the_planned_rate_follows_the_draws_of_the_rollout() -> None:
    neighbor = create("neighbor", rate=0.3)
    log_probs = np.full(2000, -1.0)
    log_probs[:2] = NAN
    rollout = trajectory([], [], log_probs.tolist())

    planned = step_metrics([rollout], [log_probs], neighbor)["perturbation/planned_rate"]

    # Seed 1, a prompt of two tokens, and the positions of 1998 generated ones.
    generated = Positions(np.ones(1998, np.int64), np.full(1998, 2), np.arange(2, 2000))
    assert planned == neighbor.selects(generated).mean()
    assert planned == pytest.approx(0.3, abs=0.04)


def mismatches(perturbed: float | None, plain: float | None, before: float | None = None) -> dict[str, float]:
    """The means of a step right after perturbed inputs, at other tokens, and before the first perturbed input."""
    means = {"perturbed": perturbed, "plain": plain, "before": before}
    return {f"perturbation/gap_{name}_mean": value for name, value in means.items() if value is not None}


@pytest.mark.parametrize(
    ("means", "limit"),
    [
        pytest.param(mismatches(0.21, 0.02), 10.0, id="more than 10 times the plain mean"),
        pytest.param(mismatches(2e-4, 1e-7), 10.0, id="an exact plain position counts as 1e-5"),
        pytest.param(mismatches(0.2, None), 10.0, id="without a plain position"),
        pytest.param(
            mismatches(5.9, 1.0, 0.04), 10.0, id="a wrong replay, where plain positions see wrong inputs as well"
        ),
        pytest.param(mismatches(0.32, 1e-4, 1e-4), 10.0, id="certain tokens count as 2^-5"),
        pytest.param(mismatches(0.3, 0.02, 0.04), 10.0, id="plain positions decide"),
    ],
)
def test_a_mismatch_that_is_too_large_is_an_error(means: dict[str, float], limit: float) -> None:
    perturbed = means["perturbation/gap_perturbed_mean"]
    message = rf"differ by {perturbed:.2g} .*\n  1\. The replay does not reach"
    with pytest.raises(MismatchTooLarge, match=message):
        check_gap(means, limit, strict=True)


@pytest.mark.parametrize(
    ("means", "limit"),
    [
        pytest.param(mismatches(0.19, 0.02), 10.0, id="less than 10 times the plain mean"),
        pytest.param(mismatches(0.21, 0.02), 11.0, id="another limit"),
        pytest.param(mismatches(9e-5, 1e-7), 10.0, id="an exact plain position counts as 1e-5"),
        pytest.param(mismatches(None, 0.5), 10.0, id="without a perturbed position"),
        pytest.param(mismatches(0.3, 0.04, 1e-4), 10.0, id="certain tokens count as 2^-5"),
        pytest.param(mismatches(0.3, 1e-4, 1e-4), 10.0, id="all tokens are certain, as at rate 1"),
        pytest.param(mismatches(4.0, 1.0, 1.0), 10.0, id="other weights by design, with noise on the policy"),
    ],
)
def test_a_usual_mismatch_passes(means: dict[str, float], limit: float) -> None:
    check_gap(means, limit, strict=True)


def test_the_warning_comes_once_and_reaches_the_screen(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("ngrpo.trainers.common.mismatch._warned", [])
    for _ in range(3):
        check_gap(mismatches(1.0, 0.01), 10.0, strict=False)
    printed = capsys.readouterr().out
    assert printed.count("differ by 1 on average") == 1
    assert "--perturbation.strict" in printed

    screen = io.StringIO()
    show_progress([f"(PPOTrainer pid=7) {line}" for line in printed.splitlines()], screen)
    assert "warning: log-probabilities of rollout and trainer differ by 1" in screen.getvalue()


def test_the_planned_rate_counts_from_the_beginning_of_each_turn() -> None:
    """Two turns of two tokens: a burn-in of 1 leaves the second token of each."""
    log_probs = [NAN, NAN, -1.0, -2.0, NAN, NAN, -3.0, -4.0]
    perturbation = create("gumbel", rate=1.0, burn_in=1)
    measures = step_metrics([trajectory([3], [True], log_probs)], [np.array(log_probs)], perturbation)
    assert measures["perturbation/planned_rate"] == 2 / 4
