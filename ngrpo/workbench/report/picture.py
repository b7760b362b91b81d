# SPDX-License-Identifier: Apache-2.0
"""A diagnosis: diversity against validity, and the numbers behind the two axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.workbench.report.charts import SQUARE, Point, scatter
from ngrpo.workbench.report.marks import Series
from ngrpo.workbench.report.values import between, dig, figure, number, numbers, rows

# Heading with what is better, keys, decimals.
_COLUMNS = (
    ("Reward ↑", ("reward",), 3),
    ("Learnable groups ↑", ("learnable_groups",), 3),
    ("Groups of one trajectory ↓", ("single_trajectory_groups",), 3),
    ("Groups fed the same inputs ↓", ("same_input_groups",), 3),
    ("Distinct answers ↑", ("diversity", "distinct_answers"), 3),
    ("Distinct intermediate results ↑", ("diversity", "distinct_intermediate"), 3),
    ("Self-BLEU ↓", ("diversity", "self_bleu"), 3),
    ("Distinct-2 ↑", ("diversity", "distinct_2"), 3),
    ("Edit distance ↑", ("diversity", "edit_distance"), 3),
    ("Parseable ↑", ("validity", "parseable"), 3),
    ("Repetition ↓", ("validity", "repetition"), 3),
    ("Perplexity ↓", ("validity", "perplexity"), 2),
    ("Anchor still nearest ↑", ("validity", "anchor_nearest"), 3),
    ("Text still nearest ↑", ("validity", "text_nearest"), 3),
    ("Cut off at the limit ↓", ("truncated",), 3),
    ("Relative shift of the input", ("relative_shift",), 3),
    ("Actual rate", ("rate",), 3),
    ("Tokens per second", ("tokens_per_second",), 1),
    ("Record (bytes per token)", ("record_bytes_per_token",), 2),
)


def diversity_validity(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """One point per strategy, with whiskers: more valid to the right, more diverse upward; and all numbers."""
    strategies = rows(diagnosis, "strategies")
    points = []
    for row in strategies:
        x, y = number(dig(row, "validity", "score")), number(dig(row, "diversity", "score"))
        if x is None or y is None:
            continue
        across, upward = (numbers(dig(row, "intervals", key), 2) for key in ("validity", "diversity"))
        notes = [
            f"{word} {figure(value)}" + (f" ({between(interval[0], interval[1])})" if interval else "")
            for word, value, interval in (("validity", x, across), ("diversity", y, upward))
        ]
        if number(row.get("reward")) is not None:
            notes.append(f"reward {figure(row['reward'])}")
        points.append(Point(series[str(row.get("name"))], x, y, across, upward, notes))
    chart = scatter(
        "diversity-validity", points, title="Diversity against validity, one point per strategy",
        x_title="validity → more valid is better", y_title="↑ diversity: more diverse is better", size=SQUARE,
    )  # fmt: skip
    columns = [column for column in _COLUMNS if any(number(dig(row, *column[1])) is not None for row in strategies)]
    order = [point.series for point in points]
    return {"chart": chart, "order": order, "columns": columns, **_listed(strategies, series)} if strategies else None


def diagnosis_table(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """The two axes, the reward and what GRPO can learn from, per strategy."""
    strategies = rows(diagnosis, "strategies")
    return _listed(strategies, series) if strategies else None


def _listed(strategies: Sequence[Mapping[str, Any]], series: Mapping[str, Series]) -> dict[str, Any]:
    return {"listed": [(series[str(row.get("name"))], row) for row in strategies]}
