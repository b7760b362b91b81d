# SPDX-License-Identifier: Apache-2.0
"""Learning curves and Pass@k curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.workbench.report.charts import SMALL, WIDE, Chart, Line, line_chart
from ngrpo.workbench.report.marks import Series
from ngrpo.workbench.report.scale import counted, doubling
from ngrpo.workbench.report.values import dig, number, rows

_MOST_POINTS = 60
# Key in a step, title, decimals, whether never negative.
_SMALL = (
    ("rate", "Perturbation rate", 3),
    ("shift", "Relative shift of the input", 4),
    ("gap_perturbed_mean", "Rollout–trainer gap, perturbed", 5),
    ("gap_plain_mean", "Rollout–trainer gap, plain", 5),
)


def learning(results: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Evaluation and reward over steps, and small charts of rate, shift and gap.

    Means are over the finished runs of a strategy. Only the evaluation is the same for all: rewards are of rollouts
    that each strategy draws in its own way.
    """
    runs, evaluated = _by_step(results, series, "steps"), _by_step(results, series, "evaluations")
    steps = sorted({step for group in runs.values() for run in group for step in run})
    if not steps:
        return {"order": []}
    width = -(-len(steps) // _MOST_POINTS)
    bins = [steps[i : i + width] for i in range(0, len(steps), width)]
    labels = [f"step {part[0]}" if len(part) == 1 else f"steps {part[0]}–{part[-1]}" for part in bins]
    order = [one for one in series.values() if one.name in runs]
    at = sorted({step for group in evaluated.values() for run in group for step in run})

    def held_out() -> Chart | None:
        if not at:
            return None
        lines = [Line(one, _points(evaluated[one.name], "mean_at_n", [[s] for s in at])) for one in order]
        xs = counted(sorted({*steps, *at}), *WIDE.across, count=7)
        return line_chart(
            "learning-evaluation", lines, xs, [f"step {s}" for s in at],
            title="Evaluation while training, unperturbed, over training steps", x_title="training step",
            y_title="Mean@n", size=WIDE,
        )  # fmt: skip

    def chart(key: str, title: str, digits: int, small: bool) -> Chart | None:
        size = SMALL if small else WIDE
        lines = [Line(one, _points(runs[one.name], key, bins)) for one in order]
        lines = [line for line in lines if any(point[1] is not None for point in line.points)]
        xs = counted(steps, *size.across, count=4 if small else 7)
        return line_chart(
            f"learning-{key}", lines, xs, labels, title=f"{title} over training steps", x_title="training step",
            y_title=title, size=size, digits=digits,
        )  # fmt: skip

    notes = ["Lines are means over the finished runs of a strategy."]
    if any(len(group) > 1 for group in runs.values()):
        notes.append("Bands run from the lowest to the highest seed.")
    if width > 1:
        notes.append(f"Each point is the mean of {width} steps.")
    ids = [row.get("id") for row in rows(results, "strategies")]
    absent = [one.name for one in series.values() if one.name in ids and one.name not in runs]
    if absent:
        notes.append(f"No finished run, so no curve: {', '.join(absent)}.")
    small = [made for key, title, digits in _SMALL if (made := chart(key, title, digits, True))]
    reward = chart("reward", "Reward of the training rollouts", 3, False)
    return {"order": order, "notes": notes, "evaluation": held_out(), "reward": reward, "small": small}


def _by_step(
    results: Mapping[str, Any], series: Mapping[str, Series], key: str
) -> dict[str, list[Mapping[int, Mapping[str, Any]]]]:
    """What the finished runs of each strategy logged under a key, by step."""
    runs: dict[str, list[Mapping[int, Mapping[str, Any]]]] = {}
    for run in rows(results, "runs"):
        name = str(run.get("strategy"))
        if run.get("status") == "done" and name in series:
            by_step = {int(step): row for row in rows(run, key) if (step := number(row.get("step"))) is not None}
            runs.setdefault(name, []).append(by_step)
    return runs


def _at(
    x: float, values: tuple[float, float | None, float | None] | None
) -> tuple[float, float | None, float | None, float | None]:
    centre, low, high = values or (None, None, None)
    return x, centre, low, high


def pass_at_k(source: Mapping[str, Any], series: Mapping[str, Series], *, trained: bool) -> dict[str, Any] | None:
    """Pass@k over k.

    Args:
        source: results (their ``summary``) or a diagnosis (its ``strategies``).
        series: the look of each strategy.
        trained: whether the source is results.
    """
    by_strategy: dict[str, dict[int, tuple[float, float | None, float | None]]] = {}
    for row in rows(source, "summary" if trained else "strategies"):
        name = str(row.get("strategy" if trained else "name"))
        by_k = row.get("pass_at_k")
        for k, value in by_k.items() if isinstance(by_k, Mapping) else ():
            centre = number(dig(value, "value") if trained else value)
            if str(k).isdigit() and int(k) > 0 and centre is not None and name in series:
                interval = (number(dig(value, "low")), number(dig(value, "high")))
                by_strategy.setdefault(name, {})[int(k)] = (centre, *interval)
    ks = sorted({k for by_k in by_strategy.values() for k in by_k})
    if not ks:
        return None
    lines = [
        Line(one, [_at(math.log2(k), by_strategy[one.name].get(k)) for k in ks])
        for one in series.values()
        if one.name in by_strategy
    ]
    over = [dig(row, "mean_at_n", "over") for row in rows(source, "summary")]
    banded = " or ".join(what for what in ("seeds", "problems") if what in over)
    chart = line_chart(
        "pass-at-k", lines, doubling(ks, *WIDE.across), [f"Pass@{k}" for k in ks],
        title="Pass@k over the number of samples k", x_title="samples k", y_title="Pass@k", size=WIDE,
    )  # fmt: skip
    return {"order": [line.series for line in lines], "chart": chart, "banded": banded}


def _points(
    runs: Sequence[Mapping[int, Mapping[str, Any]]], key: str, bins: Sequence[Sequence[int]]
) -> list[tuple[float, float | None, float | None, float | None]]:
    """Mean over seeds in each bin of steps, with the lowest and the highest seed where there are several."""
    points = []
    for part in bins:
        x = sum(part) / len(part)
        seeds = []
        for run in runs:
            values = [value for step in part if (value := number(dig(run.get(step), key))) is not None]
            if values:
                seeds.append(sum(values) / len(values))
        several = len(seeds) > 1
        mean = sum(seeds) / len(seeds) if seeds else None
        points.append((x, mean, min(seeds) if several else None, max(seeds) if several else None))
    return points
