"""The embedding map: tokens and their perturbed copies in the plane of the first two principal components."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.report.charts import SQUARE, axes, place_label, plot
from ngrpo.report.marks import Series
from ngrpo.report.scale import spread
from ngrpo.report.values import dig, escape, figure, number, numbers, plural, rows, token

_MOST_POINTS = 1500
_DIAMOND = "M{:g} {:g}m-3 0l3 -3l3 3l-3 3Z"


def embedding_map(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> str:
    """One panel per perturbation; related and unrelated points differ in shape and colour."""
    found = dig(diagnosis, "embedding_map")
    tokens = {i: row for i, row in enumerate(rows(found, "tokens")) if _coordinates([row])}
    neighbors = [row for row in rows(found, "neighbors") if _coordinates([row])]
    perturbations = rows(found, "perturbations")
    if not tokens or not perturbations:
        return ""
    copies = [row for perturbation in perturbations for row in rows(perturbation, "points")]
    every = _coordinates([*tokens.values(), *neighbors, *copies])
    xs = spread([x for x, _ in every], *SQUARE.across, count=7)  # The same plane in every panel.
    ys = spread([y for _, y in every], *SQUARE.upward, count=7)

    def pixels(points: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
        return [(xs(x), ys(y)) for x, y in _coordinates(points)]

    anchors, nearby = (pixels(points) for points in (list(tokens.values()), neighbors))
    variance = numbers(dig(found, "explained_variance"), 2) or (None, None)
    shares = ["" if v is None else f" ({100 * v:.0f}% of variance)" for v in variance]
    plane = axes(xs, ys, SQUARE, f"component 1{shares[0]}", f"component 2{shares[1]}")
    around = "".join(f'<path class="nearby" d="{_DIAMOND.format(x, y)}"/>' for x, y in nearby)
    dots = "".join(f'<circle class="anchor" cx="{x:g}" cy="{y:g}" r="4"/>' for x, y in anchors)
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in anchors]
    bold, faint = (
        "".join(
            place_label(token(row.get("text")).strip(), x, y, SQUARE, taken, force=force)
            for row, (x, y) in zip(named, at)
        )
        for named, at, force in ((tokens.values(), anchors, True), (neighbors, nearby, False))
    )
    panels = []
    for count, perturbation in enumerate(perturbations):
        name = str(perturbation.get("strategy"))
        points = rows(perturbation, "points")
        stride = -(-len(points) // _MOST_POINTS) or 1
        related, unrelated = ([p for p in points[::stride] if bool(p.get("related")) is kind] for kind in (True, False))
        near = "".join(f"M{x:g} {y:g}h0" for x, y in pixels(related))
        far = "".join(f"M{x - 2.5:g} {y - 2.5:g}l5 5m-5 0l5 -5" for x, y in pixels(unrelated))
        share = f"{_percent(perturbation.get('unrelated_share'))} became an unrelated token"
        changed = f"{_percent(perturbation.get('changed_share'))} changed their nearest token"
        data = [
            [x, y, -1, _nearest(token(row.get("text")), index, points)]
            for (index, row), (x, y) in zip(tokens.items(), anchors)
        ]
        body = (
            f'{plane}<path class="near" d="{near or "M0 0"}"/><path class="far" d="{far or "M0 0"}"/>{around}{dots}'
            f'<g class="halo faint">{faint}</g><g class="halo">{bold}</g>'
        )
        title = f"{name}: perturbed embeddings and their nearest tokens"
        chart = plot(f"map-{count}", body, SQUARE, title, f"{share}, {changed}.", {"kind": "points", "points": data})
        swatch = series[name].swatch() if name in series else ""
        thinned = f" One in {stride} is drawn." if stride > 1 else ""
        panels.append(
            f'<figure><h3 class="who">{swatch}<bdi>{escape(name)}</bdi></h3><p class="sub"><b>{share}</b>; {changed} '
            f"({plural(len(points), 'point')}).{thinned}</p>{chart}</figure>"
        )
    metric = escape(dig(found, "metric"))
    keys = "".join(
        '<span><svg class="swatch" viewBox="0 0 12 12" width="12" height="12" aria-hidden="true">'
        f"{shape}</svg> {words}</span>"
        for shape, words in (
            ('<circle class="anchor" cx="6" cy="6" r="4"/>', "a token"),
            ('<path class="near" d="M6 6h0"/>', "perturbed, still the token or one related to it"),
            ('<path class="far" d="M3.5 3.5l5 5m-5 0l5 -5"/>', "perturbed, nearest to an unrelated token"),
            *([(f'<path class="nearby" d="{_DIAMOND.format(6, 6)}"/>', "a neighbor of a token")] if neighbors else []),
        )
    )
    note = f"Nearest by {metric} in the full space; the plane shows only its first two principal components."
    return f'<p class="note key-note">{keys}</p><div class="panels">{"".join(panels)}</div><p class="note">{note}</p>'


def _coordinates(points: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    found = [(number(point.get("x")), number(point.get("y"))) for point in points]
    return [(x, y) for x, y in found if x is not None and y is not None]


def _nearest(name: str, index: int, points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of the tooltip: what a token's copies decode to, the most frequent first."""
    counts = Counter(token(point.get("nearest")) for point in points if point.get("token") == index)
    lines = [f"“{other}” {count}×" for other, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))]
    return [f"“{name}” is read as", *lines[:6], *([f"and {len(lines) - 6} others"] if len(lines) > 6 else [])]


def _percent(share: Any) -> str:
    known = number(share)
    return f"{figure(100 * known, 1)}%" if known is not None else "–"
