# SPDX-License-Identifier: Apache-2.0
"""The lines that a comparison prints while it runs, and the time that they say is left."""

import time
from types import SimpleNamespace

import pytest

from ngrpo.workbench.compare.runs import Screen

RUN = SimpleNamespace(arm=SimpleNamespace(id="none"), seed=3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.seconds)
    return now


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_the_first_run_goes_by_its_steps(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """Step 2 of 8 after 90 s, 10 s for it: 6 × 10 s more, and two more runs of 90 + 60 s. Start-up is counted once."""
    view = Screen(total=3)
    view.begin(1, RUN)
    clock.seconds += 90
    view.step({"step": 2, "steps": 8, "reward": 0.25, "seconds": 10.0})
    assert said(capsys) == "[1/3] none, seed 3: step 2/8: reward 0.250, 10 s, about 6 min left"


def test_later_runs_take_as_long_as_the_finished_ones(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two took 280 and 320 s, one earlier and one now: 300 each. At step 1 after 60 s 240 s are left, and one run."""
    view = Screen(total=4, took=[280.0])
    view.begin(2, RUN)
    clock.seconds += 320
    view.end({"status": "done", "seconds": 320.0}, {"n": 8, "mean_at_n": 0.25, "cut": 0.5})
    assert said(capsys) == (
        "[2/4] none, seed 3: done in 5 min, Mean@8 0.250; warning: 50% of the responses were cut by the length limit"
    )
    view.begin(3, RUN)
    clock.seconds += 60
    view.step({"step": 1, "steps": 8, "reward": 0.5, "seconds": 30.0})
    assert said(capsys).endswith("step 1/8: reward 0.500, 30 s, about 9 min left")
