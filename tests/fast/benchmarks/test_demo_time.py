# SPDX-License-Identifier: Apache-2.0
"""The time that `make demo` announces counts what else the machine does."""

from pathlib import Path

import pytest

from benchmarks import demo_time


@pytest.mark.parametrize(
    ("others", "cores_of_machine", "cores_of_run", "factor"),
    [(0.0, 2, 2, 1.0), (0.9, 2, 2, 1.45), (2.0, 2, 2, 2.0), (2.0, 64, 2, 1.0), (63.0, 64, 2, 65 / 64)],
)
def test_a_core_that_others_use_is_shared(
    others: float, cores_of_machine: int, cores_of_run: int, factor: float
) -> None:
    """A run on 2 of 64 cores has them alone, until all are in use."""
    assert demo_time.slowdown(others, cores_of_machine, cores_of_run) == pytest.approx(factor)


def test_the_message_says_what_the_other_work_costs() -> None:
    assert demo_time.message(4, 180.0, 1.0) == "4 steps take about 3 min on this machine"
    assert demo_time.message(4, 180.0, 1.45) == (
        "4 steps take about 4 min on this machine, 1.4 times as long as without the other work that it does now"
    )
    assert demo_time.message(1, 10.0, 1.0) == "1 step takes about 60 s on this machine"


def test_other_processes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads compute, of which one is this one."""
    loadavg = tmp_path / "loadavg"
    loadavg.write_text("0.50 0.40 0.30 4/812 99\n")
    monkeypatch.setattr(demo_time, "Path", lambda name: loadavg)
    monkeypatch.setattr(demo_time, "_LOOK_SECONDS", 0.0)
    assert demo_time.other_processes() == 3.0
