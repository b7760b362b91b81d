"""A diagnosis: diversity against validity, and the numbers behind the two axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ngrpo.report.charts import SQUARE, Point, scatter
from ngrpo.report.marks import Series, legend
from ngrpo.report.tables import cell, name_cell, sub, table
from ngrpo.report.values import between, dig, figure, number, numbers, rows

# Heading with what is better, keys, decimals.
_COLUMNS = (
    ("Reward ↑", ("reward",), 3),
    ("Learnable groups ↑", ("learnable_groups",), 3),
    ("Groups of one trajectory ↓", ("single_trajectory_groups",), 3),
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
    ("Actual rate", ("rate",), 3),
    ("Tokens per second", ("tokens_per_second",), 1),
    ("Record (bytes per token)", ("record_bytes_per_token",), 2),
)


def diversity_validity(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> str:
    """One point per strategy, with whiskers: more valid to the right, more diverse upward."""
    points = []
    for row in rows(diagnosis, "strategies"):
        x, y = number(dig(row, "validity", "score")), number(dig(row, "diversity", "score"))
        one = series.get(str(row.get("name")))
        if one is None or x is None or y is None:
            continue
        across, upward = (numbers(dig(row, "intervals", key), 2) for key in ("validity", "diversity"))
        notes = [
            f"{word} {figure(value)}" + (f" ({between(*interval)})" if interval else "")
            for word, value, interval in (("validity", x, across), ("diversity", y, upward))
        ]
        if number(row.get("reward")) is not None:
            notes.append(f"reward {figure(row['reward'])}")
        points.append(Point(one, x, y, across, upward, notes))
    chart = scatter(
        "diversity-validity", points, title="Diversity against validity, one point per strategy",
        x_title="validity → more valid is better", y_title="↑ diversity: more diverse is better", size=SQUARE,
    )  # fmt: skip
    if not chart:
        return _numbers(diagnosis, series)
    return (
        f"{legend(point.series for point in points)}<figure>{chart}<figcaption>Up and to the right is what exploration "
        "should buy: answers of a group that differ and still make sense. Whiskers are 95% intervals over problems."
        f"</figcaption></figure><details><summary>The numbers behind the picture</summary>{_numbers(diagnosis, series)}"
        "</details>"
    )


def diagnosis_table(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> str:
    """The two axes, the reward and what GRPO can learn from, per strategy."""
    body = []
    for row in rows(diagnosis, "strategies"):
        cells = [name_cell(series[str(row.get("name"))])]
        for keys in (("diversity", "score"), ("validity", "score"), ("reward",), ("learnable_groups",)):
            ends = numbers(dig(row, "intervals", keys[0]), 2)
            cells.append(cell(figure(dig(row, *keys)), *([sub(between(*ends))] if ends else [])))
        body.append("".join(cells))
    note = (
        "Under each value its 95% interval over problems. Learnable groups: the share of groups whose answers do not "
        "all have the same reward, the only ones that GRPO can learn from. Higher is better in every column."
    )
    headings = ["Strategy", "Diversity", "Validity", "Reward", "Learnable groups"]
    return table("Diagnosis per strategy", headings, body) + f'<p class="note">{note}</p>' if body else ""


def _numbers(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> str:
    found = rows(diagnosis, "strategies")
    columns = [column for column in _COLUMNS if any(number(dig(row, *column[1])) is not None for row in found)]
    body = [
        name_cell(series[str(row.get("name"))])
        + "".join(f"<td>{figure(dig(row, *keys), digits)}</td>" for _, keys, digits in columns)
        for row in found
    ]
    note = "↑ higher is better, ↓ lower is better."
    headings = ["Strategy", *(heading for heading, _, _ in columns)]
    return table("All measures of the diagnosis", headings, body, classes="dense") + f'<p class="note">{note}</p>'
