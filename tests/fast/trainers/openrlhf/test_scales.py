# SPDX-License-Identifier: Apache-2.0
"""Rewards on another scale than OpenRLHF's bounds: dynamic filtering and the clip of advantages say what they cut."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo.trainers.openrlhf.experience_maker import experience_maker
from ngrpo.trainers.openrlhf.samples_generator import samples_generator
from ngrpo.trainers.openrlhf.step_advantages import compute_reward, noting_clipped

# ---- dynamic filtering -------------------------------------------------------------------------------------------


class PlainGenerator:
    """What the subclass needs of OpenRLHF's `SamplesGenerator`."""

    def _process_response_into_experience(self, response: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return response


def generator(bounds: tuple[float, float] = (0.0, 1.0), enabled: bool = True) -> Any:
    made = samples_generator(PlainGenerator)()
    made.args = SimpleNamespace(
        algo=SimpleNamespace(dynamic_filtering_enable=enabled, dynamic_filtering_range=bounds),
    )
    return made


def warnings_of(made: Any, scores: list[float | None], capsys: pytest.CaptureFixture[str]) -> str:
    for score in scores:
        made._process_response_into_experience({"scores": score})
    return capsys.readouterr().out


def test_a_score_beyond_the_range_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = warnings_of(generator(), [1.0, -1.0, -1.0], capsys)
    assert said.count("a response has the score -1. Dynamic filtering keeps groups") == 1
    assert "between 0 and 1" in said and "--algo.dynamic_filtering_range LEAST GREATEST" in said


@pytest.mark.parametrize(
    ("made", "scores"),
    [
        pytest.param(generator(), [0.0, 1.0, 0.5, None], id="in the range"),
        pytest.param(generator((-1.0, 1.0)), [-1.0, 1.0], id="in a wider range"),
        pytest.param(generator((0.2, 0.8)), [0.0, 1.0], id="a narrower range is chosen for means of 0 and 1"),
        pytest.param(generator(enabled=False), [-1.0], id="no filtering"),
    ],
)
def test_other_scores_are_not(made: Any, scores: list[float | None], capsys: pytest.CaptureFixture[str]) -> None:
    assert warnings_of(made, scores, capsys) == ""


def test_an_evaluation_filters_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    made = generator()
    made.evaluating = True
    assert warnings_of(made, [-1.0], capsys) == ""


# ---- the clip of advantages --------------------------------------------------------------------------------------


def test_advantages_beyond_the_clip_are_counted_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Dr. GRPO's advantages of the rewards 0, 30, 60 and 100: all become ±10."""
    given = []
    wrapped = compute_reward(lambda r, *_args, **_kwargs: given.append(r))
    maker = experience_maker(type("Plain", (), {}))()
    maker.args = SimpleNamespace(reward=SimpleNamespace(clip_range=(-10.0, 10.0)))
    for _ in range(2):
        with noting_clipped() as clipped:
            wrapped(torch.tensor([-47.5, -17.5]), 0.0, None, reward_clip_range=(-10.0, 10.0))
            wrapped(torch.tensor([12.5, 10.0]), 0.0, None, reward_clip_range=(-10.0, 10.0))
        maker.warn_of_clipped(clipped)
        assert maker.step_measures == {"advantage/clipped": 3.0}
    assert [row.tolist() for row in given[:2]] == [[-47.5, -17.5], [12.5, 10.0]]
    said = capsys.readouterr().out
    assert said.count("step 1: 3 advantages (with gae, rewards) lie beyond --reward.clip_range -10 10") == 1
    assert "such as -47.5" in said


def test_nothing_is_said_of_advantages_within_the_clip(capsys: pytest.CaptureFixture[str]) -> None:
    wrapped = compute_reward(lambda r, *_args, **_kwargs: r)
    maker = experience_maker(type("Plain", (), {}))()
    with noting_clipped() as clipped:
        wrapped(torch.tensor([-1.0, 10.0]), 0.0, None, reward_clip_range=(-10.0, 10.0))
        wrapped(torch.tensor([-100.0]), 0.0, None, reward_clip_range=None)
    maker.warn_of_clipped(clipped)
    assert maker.step_measures == {}
    assert capsys.readouterr().out == ""
