# SPDX-License-Identifier: Apache-2.0
"""The head of a comparison's report: one sentence, and each strategy's difference to the baseline in one picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ngrpo.workbench.report.marks import Series
from ngrpo.workbench.report.values import MISSING, between, dig, figure, noise, number, plural, signed

ENOUGH_SEEDS = 3
"""As many seeds as tell a method from luck: `ngrpo.workbench.compare.results`."""
_MIDDLE, _HALF = 100.0, 92.0  # of a drawing 200 wide
# A column: its heading, and the keys of its value in a row of the summary.
Metric = tuple[str, tuple[str, ...]]
Summary = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One strategy's line of the picture.

    Attributes:
        series: the strategy.
        text: its difference, interval and test in words; its verdict where there is no difference.
        hint: the lines that a pointer, a tap or the keyboard shows, its whole verdict among them.
        at: where the difference stands, no difference being at 100 of 200; None where there is none.
        ends: the ends of its interval there.
        band: the ends there of what so many seeds would often have missed.
    """

    series: Series
    text: str
    hint: Sequence[str]
    at: float | None = None
    ends: tuple[float, float] | None = None
    band: tuple[float, float] | None = None


def forest(series: Mapping[str, Series], summary: Summary, baseline: str, metric: Metric) -> list[Row]:
    """A line for each strategy but the baseline, the best first, those without a difference last."""
    measure, keys = metric
    changes = {name: dig(row, "difference", *keys) for name, row in summary.items() if name != baseline}
    lengths = [
        abs(v) for c in changes.values() for k in ("value", "low", "high", "detectable") if (v := number(dig(c, k)))
    ]
    reach = max(lengths, default=1.0)

    def beside(value: float) -> float:
        return round(_MIDDLE + _HALF * value / reach, 1)

    rows = []
    for name, change in changes.items():
        verdict = summary[name].get("verdict") or MISSING
        value, low, high, least = (number(dig(change, key)) for key in ("value", "low", "high", "detectable"))
        if value is None:
            rows.append(Row(series[name], str(verdict), (name, str(verdict))))
            continue
        text = f"{signed(value)} ({between(low, high, sign=True)}), {noise(change) or MISSING}"
        hint = [name, f"{measure} {text}", str(verdict)]
        if least is not None:
            hint.append(f"a difference below about {figure(least)} would often have been missed")
        ends = None if low is None or high is None else (beside(low), beside(high))
        band = None if least is None else (beside(-least), beside(least))
        rows.append(Row(series[name], text, hint, beside(value), ends, band))
    values = {name: number(dig(change, "value")) for name, change in changes.items()}
    rows.sort(key=lambda row: (row.at is None, -(values[row.series.name] or 0.0)))
    return rows


def sentence(summary: Summary, baseline: str, metrics: Sequence[Metric]) -> str | None:
    """What the comparison has found: who is better or worse than the baseline beyond noise, in which measure.

    Args:
        summary: by strategy.
        baseline: its name.
        metrics: the evaluation's columns; the first one decides, a later one is named for who is not named already.

    Returns:
        None where nothing was compared.
    """
    names = [name for name in summary if name != baseline]
    if not names or not metrics or baseline not in summary:
        return None
    first = metrics[0]
    tested = {name: change for name in names if noise(change := dig(summary[name], "difference", *first[1]))}
    against = f"“{baseline}” in {first[0]}"
    if not tested:
        return f"Nothing could be compared with {against}: no evaluation has finished for both."
    if all(dig(change, "over") == "problems" for change in tested.values()):
        return f"One seed each: no strategy can be called better or worse than {against}."
    better, worse = _beyond(summary, names, first)
    if better:
        text = f"Better than {against} beyond noise: {', '.join(better)}"
    elif len(names) == 1:
        text = f"{names[0]} is not better than {against} beyond noise"
    else:
        text = f"None of {len(names)} strategies is better than {against} beyond noise"
    if worse:
        text += f"; worse: {', '.join(worse)}"
    for metric in metrics[1:]:
        others = _beyond(summary, names, metric)
        for word, known, more in zip(("better", "worse"), (better, worse), others):
            new = [name for name in more if name not in known]
            text += f"; {word} in {metric[0]}: {', '.join(new)}" if new else ""
    missing = len(names) - len(tested)
    text += f" ({plural(missing, 'strategy')} could not be compared)" if missing else ""
    few = [dig(change, "seeds") for change in tested.values() if noise(change) == "beyond noise"]
    least = min((seeds for seeds in few if isinstance(seeds, int)), default=ENOUGH_SEEDS)
    few_seeds = f" Of {plural(least, 'seed')}: too few to tell a method from luck." if least < ENOUGH_SEEDS else ""
    return f"{text}.{few_seeds}"


def _beyond(summary: Summary, names: Iterable[str], metric: Metric) -> tuple[list[str], list[str]]:
    """The strategies that are better, and those that are worse, than the baseline beyond noise."""
    differences = {name: dig(summary[name], "difference", *metric[1]) for name in names}
    judged = {name: number(dig(c, "value")) or 0.0 for name, c in differences.items() if noise(c) == "beyond noise"}
    return [name for name in judged if judged[name] > 0], [name for name in judged if judged[name] < 0]
