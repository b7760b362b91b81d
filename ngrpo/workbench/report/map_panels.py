# SPDX-License-Identifier: Apache-2.0
"""The embedding map: tokens and their perturbed copies in the plane of the first two principal components."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.workbench.report.charts import SQUARE, Chart, Group, place_label
from ngrpo.workbench.report.marks import Series
from ngrpo.workbench.report.scale import spread
from ngrpo.workbench.report.values import dig, figure, number, numbers, rows, token

_MOST_POINTS = 1500
# Class, outline around a point, and what it stands for.
_DOT = ("anchor", "M{:g} {:g}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", "a token")
_NEAR = ("near", "M{:g} {:g}h0", "perturbed, still the token or one related to it")
_FAR = ("far", "M{:g} {:g}m-2.5 -2.5l5 5m-5 0l5 -5", "perturbed, nearest to an unrelated token")
_DIAMOND = ("nearby", "M{:g} {:g}m-3 0l3 -3l3 3l-3 3Z", "a neighbor of a token")


def embedding_map(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """One panel per perturbation; related and unrelated points differ in shape and colour."""
    map_data = dig(diagnosis, "embedding_map")
    tokens = {i: row for i, row in enumerate(rows(map_data, "tokens")) if _coordinates([row])}
    neighbors = [row for row in rows(map_data, "neighbors") if _coordinates([row])]
    perturbations = rows(map_data, "perturbations")
    if not tokens or not perturbations:
        return None
    copies = [row for perturbation in perturbations for row in rows(perturbation, "points")]
    every = _coordinates([*tokens.values(), *neighbors, *copies])
    xs = spread([x for x, _ in every], *SQUARE.across, count=7)  # The same plane in every panel.
    ys = spread([y for _, y in every], *SQUARE.upward, count=7)

    def pixels(points: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
        return [(xs(x), ys(y)) for x, y in _coordinates(points)]

    def path(mark: tuple[str, str, str], points: Sequence[tuple[float, float]]) -> tuple[str, str]:
        return mark[0], "".join(mark[1].format(x, y) for x, y in points) or "M0 0"

    anchors, nearby = (pixels(points) for points in (list(tokens.values()), neighbors))
    boxes = [(x - 5, y - 5, x + 5, y + 5) for x, y in anchors]
    bold, faint = (
        [
            label
            for row, (x, y) in zip(named, at)
            for label in place_label(token(row.get("text")).strip(), x, y, SQUARE, boxes, force=force)
        ]
        for named, at, force in ((tokens.values(), anchors, True), (neighbors, nearby, False))
    )
    variance = numbers(dig(map_data, "explained_variance"), 2) or (None, None)
    titles = [
        f"component {i + 1}" + ("" if v is None else f" ({100 * v:.0f}% of variance)") for i, v in enumerate(variance)
    ]
    panels = []
    for count, perturbation in enumerate(perturbations):
        name, points = str(perturbation.get("strategy")), rows(perturbation, "points")
        stride = -(-len(points) // _MOST_POINTS) or 1
        near, far = (pixels([p for p in points[::stride] if bool(p.get("related")) is kind]) for kind in (True, False))
        share = f"{_percent(perturbation.get('unrelated_share'))} became an unrelated token"
        changed = f"{_percent(perturbation.get('changed_share'))} changed their nearest token"
        read = [
            [x, y, -1, _nearest(token(row.get("text")), index, points)]
            for (index, row), (x, y) in zip(tokens.items(), anchors)
        ]
        marks = [path(_NEAR, near), path(_FAR, far), path(_DIAMOND, nearby), path(_DOT, anchors)]
        groups = [Group("halo faint", marks, labels=faint), Group("halo", (), labels=bold)]
        title = f"{name}: perturbed embeddings and their nearest tokens"
        data = {"kind": "points", "points": read}
        chart = Chart(f"map-{count}", title, f"{share}, {changed}.", SQUARE, xs, ys, titles[0], titles[1], groups, data)
        panel = {"name": name, "series": series.get(name), "share": share, "changed": changed, "points": len(points)}
        panels.append({**panel, "stride": stride, "chart": chart})
    shapes = [_DOT, _NEAR, _FAR, *([_DIAMOND] if neighbors else [])]
    legend = [(kind, outline.format(6, 6), words) for kind, outline, words in shapes]
    return {"panels": panels, "legend": legend, "metric": dig(map_data, "metric")}


def _coordinates(points: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    pairs = [(number(point.get("x")), number(point.get("y"))) for point in points]
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def _nearest(name: str, index: int, points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of the tooltip: what a token's copies decode to, the most frequent first."""
    counts = Counter(token(point.get("nearest")) for point in points if point.get("token") == index)
    lines = [f"“{other}” {count}×" for other, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))]
    return [f"“{name}” is read as", *lines[:6], *([f"and {len(lines) - 6} others"] if len(lines) > 6 else [])]


def _percent(share: object) -> str:
    fraction = number(share)
    return f"{figure(100 * fraction, 1)}%" if fraction is not None else "–"
