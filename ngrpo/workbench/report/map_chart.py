# SPDX-License-Identifier: Apache-2.0
"""The embedding map: tokens and their perturbed copies in the plane of two principal components."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.workbench.report.charts import Chart, Group
from ngrpo.workbench.report.drawing import SQUARE, Label, Series, place_label, spread
from ngrpo.workbench.report.values import dig, ends, format_number, number, rows, token

_MOST_COPIES = 1500
# Class, outline around a point, and meaning of the map's marks.
_DOT = ("anchor", "M{:g} {:g}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", "a token")
_NEAR = ("near", "M{:g} {:g}h0", "perturbed, still the token or one related to it")
_FAR = ("far", "M{:g} {:g}m-2.5 -2.5l5 5m-5 0l5 -5", "perturbed, nearest to an unrelated token")
_DIAMOND = ("nearby", "M{:g} {:g}m-3 0l3 -3l3 3l-3 3Z", "a neighbor of a token")


def embedding_map(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """Tokens and their perturbed copies in the plane of two principal components, one panel per perturbation.

    Copies related and unrelated to their token differ in shape and colour.
    """
    map_data = dig(diagnosis, "embedding_map")
    tokens = _placed([{**row, "index": i} for i, row in enumerate(rows(map_data, "tokens"))])
    neighbors, perturbations = _placed(rows(map_data, "neighbors")), rows(map_data, "perturbations")
    if not tokens or not perturbations:
        return None
    copies = [point for perturbation in perturbations for point in _placed(rows(perturbation, "points"))]
    xs, ys = (  # The same plane in every panel.
        spread([point[axis] for point in (*tokens, *neighbors, *copies)], *edges, count=7)
        for axis, edges in (("x", SQUARE.across), ("y", SQUARE.upward))
    )

    def pixels(points: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
        return [(xs(point["x"]), ys(point["y"])) for point in _placed(points)]

    def path(mark: tuple[str, str, str], points: Sequence[tuple[float, float]]) -> tuple[str, str]:
        return mark[0], "".join(mark[1].format(x, y) for x, y in points) or "M0 0"

    anchors, nearby = pixels(tokens), pixels(neighbors)
    boxes = [(x - 5, y - 5, x + 5, y + 5) for x, y in anchors]

    def labels(named: Sequence[Mapping[str, Any]], at: Sequence[tuple[float, float]], force: bool) -> list[Label]:
        texts = [token(row.get("text")).strip() for row in named]
        return [label for text, xy in zip(texts, at) for label in place_label(text, *xy, SQUARE, boxes, force=force)]

    bold, faint = labels(tokens, anchors, True), labels(neighbors, nearby, False)
    variance = dig(map_data, "explained_variance") or (None, None)
    x_title, y_title = (
        f"component {i}" + ("" if v is None else f" ({100 * v:.0f}% of variance)") for i, v in enumerate(variance, 1)
    )
    panels = []
    for count, perturbation in enumerate(perturbations):
        name, points = str(perturbation.get("strategy")), rows(perturbation, "points")
        stride = -(-len(points) // _MOST_COPIES) or 1
        near, far = (pixels([p for p in points[::stride] if bool(p.get("related")) is kind]) for kind in (True, False))
        share = f"{_percent(perturbation.get('unrelated_share'))} became an unrelated token"
        changed = f"{_percent(perturbation.get('changed_share'))} changed their nearest token"
        readings = [[x, y, -1, _nearest(row, points)] for row, (x, y) in zip(tokens, anchors)]
        marks = [path(_NEAR, near), path(_FAR, far), path(_DIAMOND, nearby), path(_DOT, anchors)]
        groups = [Group("halo faint", marks, labels=faint), Group("halo", (), labels=bold)]
        title = f"{name}: perturbed embeddings and their nearest tokens"
        data = {"kind": "points", "points": readings}
        chart = Chart(f"map-{count}", title, f"{share}, {changed}.", SQUARE, xs, ys, x_title, y_title, groups, data)
        panel = {"name": name, "series": series.get(name), "share": share, "changed": changed, "points": len(points)}
        panels.append({**panel, "stride": stride, "chart": chart})
    shapes = [_DOT, _NEAR, _FAR, *([_DIAMOND] if neighbors else [])]
    legend = [(kind, outline.format(6, 6), words) for kind, outline, words in shapes]
    return {"panels": panels, "legend": legend, "metric": dig(map_data, "metric")}


def _placed(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [point for point in points if ends((point.get("x"), point.get("y"))) is not None]


def _nearest(row: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of the tooltip: the tokens that a token's copies are read as, the most frequent first."""
    counts = Counter(token(point.get("nearest")) for point in points if point.get("token") == row["index"])
    lines = [f"“{other}” {count}×" for other, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))]
    more = [f"and {len(lines) - 6} others"] if len(lines) > 6 else []
    return [f"“{token(row.get('text'))}” is read as", *lines[:6], *more]


def _percent(share: object) -> str:
    fraction = number(share)
    return "–" if fraction is None else f"{format_number(100 * fraction, 1)}%"
