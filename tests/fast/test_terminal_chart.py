# SPDX-License-Identifier: Apache-2.0
"""The chart at the end of a run."""

from __future__ import annotations

from ngrpo.machine.console.terminal_chart import columns


def test_bars_and_marks_stand_at_their_height() -> None:
    lines = columns({1: 0.0, 2: 0.5, 3: 1.0}, {0: 0.3, 3: 0.6})
    assert lines == [
        "  1.0 │      ██",
        "      │      ██",
        "      │      ██",
        "      │      ●",
        "  0.5 │    ████",
        "      │●   ████",
        "      │    ████",
        "  0.0 │    ████",
        "      └────────",
        "step   0      3",
    ]


def test_many_steps_share_columns() -> None:
    lines = columns({step: step / 240 for step in range(1, 241)}, {240: 1.0})
    assert max(len(line) for line in lines) == 7 + 61 and lines[-1].endswith("240")
    assert lines[0].endswith("●")


def test_values_outside_stay_inside() -> None:
    assert columns({1: -0.2, 2: 1.2}, {})[0] == "  1.0 │    ██"
