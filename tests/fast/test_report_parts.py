# SPDX-License-Identifier: Apache-2.0
"""Parts of the report by their numbers: scales, figures as text, means over seeds, looks, contrast."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ngrpo.workbench.report
from ngrpo.workbench.report.charts import _points
from ngrpo.workbench.report.drawing import Series, counted, spread
from ngrpo.workbench.report.values import between, duration, format_number, shown, signed, size, token


def test_looks_of_twelve_strategies_differ_without_colour() -> None:
    """Any two of twelve differ in dash, or in the marker's shape or fill."""
    looks = [Series(index, "x") for index in range(12)]
    assert len({(one.classes.split()[1], one.shape, one.hollow) for one in looks}) == 12
    assert len({one.classes for one in (Series(index, "x") for index in range(37))}) == 37


def test_seeds_are_averaged_per_bin() -> None:
    """Steps 1 and 2 share a bin. Seed a: (0.2 + 0.4) / 2 = 0.3; seed b: 0.5. Mean 0.4, band from 0.3 to 0.5."""
    runs = [{1: {"reward": 0.2}, 2: {"reward": 0.4}, 3: {"reward": float("nan")}}, {2: {"reward": 0.5}}]
    first, second = _points(runs, "reward", [[1, 2], [3]])
    assert first == pytest.approx((1.5, 0.4, 0.3, 0.5))
    assert second == (3.0, None, None, None)
    assert _points(runs[:1], "reward", [[1, 2]])[0] == pytest.approx((1.5, 0.3, None, None))


def test_scales() -> None:
    """Steps of 1, 2, 2.5 or 5: 0.13 to 0.92 in five is 0.158 each, so 0.2."""
    scale = spread([0.13, 0.92], 100.0, 0.0, share=True)
    assert scale.labels == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert scale(0.5) == 50.0 and scale(7.0) == 0.0
    assert spread([0.8, 0.81], 0, 1).labels == ["0.800", "0.802", "0.804", "0.806", "0.808", "0.810"]
    assert spread([3.0, 3.0], 0.0, 1.0)(3.0) == 0.5
    assert spread([0.0, 4e-8], 0, 1, count=4).labels == ["0", "1e−8", "2e−8", "3e−8", "4e−8"]
    assert spread([-2e6, 0.0], 0, 1, count=4).labels[0] == "−2,000,000"
    near = spread([0.0359, 0.0366], 0, 1, count=4).labels
    assert len(set(near)) == len(near)
    steps = counted(list(range(1, 41)), 0.0, 39.0, count=6)
    assert steps.labels == ["1", "10", "20", "30", "40"] and steps(11) == 10.0
    assert counted([5], 0.0, 10.0, count=6).labels == ("5",) and counted([5], 0.0, 10.0, count=6)(5) == 5.0


def test_values() -> None:
    assert [format_number(v) for v in (0.12345, -1, None, float("nan"), True, "3", 1234.5)] == [
        "0.123", "−1.000", "–", "–", "–", "–", "1,234.500",
    ]  # fmt: skip
    assert format_number(3.2e-6, 5) == "3.2e−06"
    assert (signed(0.03), signed(-0.03), signed(0), signed(None)) == ("+0.030", "−0.030", "0.000", "–")
    assert between(-0.1, 0.2, 1, sign=True) == "−0.1 to +0.2" and between(None, 1) == "–"
    assert (size(0), size(1536), size(2 * 1024**3)) == ("0 B", "1.50 KiB", "2.00 GiB")
    assert (duration(59.6), duration(720), duration(11100)) == ("60 s", "12 min", "3 h 05 min")
    assert [shown(v) for v in (None, "", float("nan"), 0, "ab\x07\ud800")] == ["–", "–", "–", "0", "ab␇\ufffd"]
    assert (token("\n\n"), token(" "), token("\ta")) == ("⏎⏎", "␣", "⇥a")


def hues(scheme: str) -> dict[str, str]:
    return dict(re.findall(r"--(hue\d|near|far|soft|ink|link|paper|mark-edge|panel): (#\w{6})", scheme))


def luminance(colour: str) -> float:
    """Relative luminance of sRGB (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(dark: bool) -> None:
    """WCAG 2.1: 3 to 1 for what is drawn, 4.5 to 1 for text."""
    style = (Path(ngrpo.workbench.report.__file__).parent / "style.css").read_text(encoding="utf-8")
    light, _, rest = style.partition("@media (prefers-color-scheme: dark)")
    found = hues(rest.split("* {")[0] if dark else light)
    assert len(found) == 15
    for name, colour in found.items():
        for ground in (found["paper"], found["panel"]):
            bright, dim = sorted((luminance(colour), luminance(ground)), reverse=True)
            if name not in ("paper", "panel"):
                assert (bright + 0.05) / (dim + 0.05) >= (4.5 if name in ("soft", "ink", "link") else 3.0), name
