# SPDX-License-Identifier: Apache-2.0
"""The charts of a diagnosis: its measures, diversity against validity, and the embedding map."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ngrpo.workbench.report import drawing
from ngrpo.workbench.report.charts import Chart, Group, Label
from ngrpo.workbench.report.drawing import SQUARE, Series, beginning, spread
from ngrpo.workbench.report.values import MISSING, dig, ends, format_number, number, rows, token, with_ends

_MOST_READINGS = 6


class Measure(NamedTuple):
    """A number of a diagnosis, and how the page and the screen show it.

    Attributes:
        path: the keys of its value in an arm's row; ``{group}`` stands for the size of a group.
        page_heading: the column's heading on the page, with an arrow towards the better values; None leaves it out.
        page_digits: decimals on the page.
        screen_heading: the column's heading on the screen; None leaves it out.
        screen_digits: decimals on the screen.
    """

    path: tuple[str, ...]
    page_heading: str | None = None
    page_digits: int = 3
    screen_heading: str | None = None
    screen_digits: int = 2


MEASURES = (
    Measure(("reward",), page_heading="Reward ↑", screen_heading="reward", screen_digits=3),
    Measure(("pass_at_k", "{group}"), screen_heading="pass@{group}", screen_digits=3),
    Measure(("learnable_groups",), page_heading="Learnable groups ↑", screen_heading="learnable"),
    Measure(("single_trajectory_groups",), page_heading="Groups of one trajectory ↓"),
    Measure(("same_input_groups",), page_heading="Groups fed the same inputs ↓"),
    Measure(("diversity", "score"), screen_heading="DIVERSITY", screen_digits=3),
    Measure(("diversity", "distinct_answers"), page_heading="Distinct answers ↑", screen_heading="answers"),
    Measure(
        ("diversity", "distinct_intermediate"),
        page_heading="Distinct intermediate results ↑",
        screen_heading="results",
    ),
    Measure(("diversity", "self_bleu"), page_heading="Self-BLEU ↓", screen_heading="self-BLEU"),
    Measure(("diversity", "distinct_2"), page_heading="Distinct-2 ↑"),
    Measure(("diversity", "edit_distance"), page_heading="Edit distance ↑", screen_heading="edit"),
    Measure(("validity", "score"), screen_heading="VALIDITY", screen_digits=3),
    Measure(("validity", "parseable"), page_heading="Parseable ↑", screen_heading="parsed"),
    Measure(("validity", "repetition"), page_heading="Repetition ↓", screen_heading="loops"),
    Measure(("validity", "perplexity"), page_heading="Perplexity ↓", page_digits=2, screen_heading="perplexity"),
    Measure(("validity", "anchor_nearest"), page_heading="Anchor still nearest ↑", screen_heading="anchor near"),
    Measure(("validity", "text_nearest"), page_heading="Text still nearest ↑"),
    Measure(("truncated",), page_heading="Cut off at the limit ↓"),
    Measure(("relative_shift",), page_heading="Relative shift of the input", screen_heading="shift", screen_digits=3),
    Measure(("rate",), page_heading="Actual rate", screen_heading="rate", screen_digits=3),
    Measure(
        ("tokens_per_second",),
        page_heading="Tokens per second",
        page_digits=1,
        screen_heading="tokens/s",
        screen_digits=0,
    ),
    Measure(("record_bytes_per_token",), page_heading="Record (bytes per token)", page_digits=2),
)
_VALIDITY_TITLE = "validity → more valid is better"
_DIVERSITY_TITLE = "↑ diversity: more diverse is better"


class Mark(NamedTuple):
    """A mark of the embedding map: its CSS class, its outline around a point, and its meaning."""

    css_class: str
    outline: str
    meaning: str

    def path(self, pixels: Sequence[tuple[float, float]]) -> tuple[str, str]:
        """The marks at all these points as one path, with its class."""
        return self.css_class, "".join(self.outline.format(x, y) for x, y in pixels) or "M0 0"


_DOT = Mark("anchor", "M{:g} {:g}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", "a token")
_NEAR = Mark("near", "M{:g} {:g}h0", "perturbed, still the token or one related to it")
_FAR = Mark("far", "M{:g} {:g}m-2.5 -2.5l5 5m-5 0l5 -5", "perturbed, nearest to an unrelated token")
_DIAMOND = Mark("nearby", "M{:g} {:g}m-3 0l3 -3l3 3l-3 3Z", "a neighbor of a token")


class _Place(NamedTuple):
    """An arm's place in the picture of diversity and validity, with the interval of each."""

    series: Series
    row: Mapping[str, Any]
    validity: float
    diversity: float
    validity_ends: tuple[float, float] | None
    diversity_ends: tuple[float, float] | None


def diversity_validity(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """One point per arm, with whiskers: more valid to the right, more diverse upward; and all numbers."""
    listed = drawing.by_series(diagnosis, series)
    if not listed:
        return None
    columns = []
    for measure in MEASURES:
        if measure.page_heading and any(number(row, *measure.path) is not None for _, row in listed):
            columns.append(measure)
    placed = []
    for arm_series, row in listed:
        validity = number(row, "validity", "score")
        diversity = number(row, "diversity", "score")
        if validity is not None and diversity is not None:
            validity_ends = ends(dig(row, "intervals", "validity"))
            diversity_ends = ends(dig(row, "intervals", "diversity"))
            placed.append(_Place(arm_series, row, validity, diversity, validity_ends, diversity_ends))
    chart = _axes_chart(placed) if placed else None
    return {"chart": chart, "order": [arm.series for arm in placed], "columns": columns, "listed": listed}


def _axes_chart(arms: Sequence[_Place]) -> Chart:
    across = [value for arm in arms for value in (arm.validity, *(arm.validity_ends or ()))]
    upward = [value for arm in arms for value in (arm.diversity, *(arm.diversity_ends or ()))]
    xs = spread(across, SQUARE.across)
    ys = spread(upward, SQUARE.upward)
    groups, readings, descriptions = [], [], []
    for arm in arms:
        x = xs(arm.validity)
        y = ys(arm.diversity)
        whiskers = []
        if arm.validity_ends:
            left, right = arm.validity_ends
            whiskers.append(("whisker", f"M{xs(left):g} {y:g}H{xs(right):g}"))
        if arm.diversity_ends:
            low, high = arm.diversity_ends
            whiskers.append(("whisker", f"M{x:g} {ys(low):g}V{ys(high):g}"))
        groups.append(Group(f"{arm.series.classes} big", whiskers, arm.series, [(x, y)]))
        notes = [
            f"validity {with_ends(arm.validity, *(arm.validity_ends or (None, None)))}",
            f"diversity {with_ends(arm.diversity, *(arm.diversity_ends or (None, None)))}",
        ]
        if number(arm.row.get("reward")) is not None:
            notes.append(f"reward {format_number(arm.row['reward'])}")
        readings.append([x, y, arm.series.index, [arm.series.name, *notes]])
        descriptions.append(
            f"{arm.series.name}: {_VALIDITY_TITLE} {format_number(arm.validity)},"
            f" {_DIVERSITY_TITLE} {format_number(arm.diversity)}"
        )
    return Chart(
        name="diversity-validity",
        title="Diversity against validity, one point per arm",
        desc=f"{'; '.join(descriptions)}.",
        size=SQUARE,
        xs=xs,
        ys=ys,
        x_title=f"{_VALIDITY_TITLE}{beginning(xs)}",
        y_title=f"{_DIVERSITY_TITLE}{beginning(ys)}",
        groups=groups,
        data={"kind": "points", "points": readings},
    )


def embedding_map(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """Tokens and their perturbed copies in the plane of two principal components, one panel per perturbation.

    Copies related and unrelated to their token differ in shape and color.
    """
    map_data = dig(diagnosis, "embedding_map")
    tokens = _placed([{**row, "index": index} for index, row in enumerate(rows(map_data, "tokens"))])
    neighbors = _placed(rows(map_data, "neighbors"))
    perturbations = rows(map_data, "perturbations")
    if not tokens or not perturbations:
        return None
    copies_by_perturbation = [_placed(rows(row, "points")) for row in perturbations]
    plane = _Plane(map_data, tokens, neighbors, copies_by_perturbation)
    panels = []
    for index, (row, copies) in enumerate(zip(perturbations, copies_by_perturbation)):
        panels.append(plane.panel(index, row, copies, series.get(str(row.get("strategy")))))
    marks = [_DOT, _NEAR, _FAR]
    if neighbors:
        marks.append(_DIAMOND)
    legend = [(mark.css_class, mark.outline.format(6, 6), mark.meaning) for mark in marks]
    return {"panels": panels, "legend": legend, "metric": dig(map_data, "metric")}


def _placed(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The points that have both coordinates."""
    return [point for point in points if number(point, "x") is not None and number(point, "y") is not None]


class _Plane:
    """The plane of the embedding map, the same in every panel, with what every panel shows: tokens and neighbors."""

    def __init__(
        self,
        map_data: object,
        tokens: Sequence[Mapping[str, Any]],
        neighbors: Sequence[Mapping[str, Any]],
        copies: Sequence[Sequence[Mapping[str, Any]]],
    ) -> None:
        """``copies``: the perturbed copies of the tokens, one list per perturbation."""
        all_points = [*tokens, *neighbors, *itertools.chain.from_iterable(copies)]
        self._xs = spread([point["x"] for point in all_points], SQUARE.across, count=7)
        self._ys = spread([point["y"] for point in all_points], SQUARE.upward, count=7)
        self._tokens = tokens
        self._anchors = self._pixels(tokens)
        self._nearby = self._pixels(neighbors)
        self._neighbor_readings: list[list[Any]] = []
        for row, (x, y) in zip(neighbors, self._nearby):
            tooltip = [f"“{token(row.get('text'))}”", "a neighbor of a token"]
            self._neighbor_readings.append([x, y, -1, tooltip])
        x_variance, y_variance = dig(map_data, "explained_variance") or (None, None)
        self._x_title = _component(1, x_variance)
        self._y_title = _component(2, y_variance)

    def _pixels(self, points: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
        return [(self._xs(point["x"]), self._ys(point["y"])) for point in points]

    def panel(
        self,
        index: int,
        perturbation: Mapping[str, Any],
        copies: Sequence[Mapping[str, Any]],
        series: Series | None,
    ) -> dict[str, Any]:
        """The panel of one perturbation, the ``index``-th from 0, for templates/map.html."""
        name = str(perturbation.get("strategy"))
        related = self._pixels([point for point in copies if point.get("related")])
        unrelated = self._pixels([point for point in copies if not point.get("related")])
        share = f"{_percent(perturbation, 'unrelated_share')} became an unrelated token"
        changed = f"{_percent(perturbation, 'changed_share')} changed their nearest token"
        marks = [_NEAR.path(related), _FAR.path(unrelated), _DIAMOND.path(self._nearby), _DOT.path(self._anchors)]
        readings = [*self._neighbor_readings]
        for row, (x, y) in zip(self._tokens, self._anchors):
            readings.append([x, y, -1, _read_as(row, copies)])
        chart = Chart(
            name=f"map-{index}",
            title=f"{name}: perturbed embeddings and their nearest tokens",
            desc=f"{share}, {changed}.",
            size=SQUARE,
            xs=self._xs,
            ys=self._ys,
            x_title=self._x_title,
            y_title=self._y_title,
            groups=[Group("halo", marks, labels=self._labels())],
            data={"kind": "points", "points": readings},
        )
        return {
            "name": name,
            "series": series,
            "share": share,
            "changed": changed,
            "points": len(copies),
            "chart": chart,
        }

    def _labels(self) -> list[Label]:
        """The tokens' texts, on the side towards the middle of the picture, where there is room."""
        labels = []
        for row, (x, y) in zip(self._tokens, self._anchors):
            text = token(row.get("text")).strip()
            if x < SQUARE.width / 2:
                labels.append(Label(text, x + 9, y, "start"))
            else:
                labels.append(Label(text, x - 9, y, "end"))
        return labels


def _component(component: int, variance: float | None) -> str:
    if variance is None:
        return f"component {component}"
    return f"component {component} ({100 * variance:.0f}% of variance)"


def _percent(perturbation: Mapping[str, Any], key: str) -> str:
    share = number(perturbation.get(key))
    return MISSING if share is None else f"{format_number(100 * share, 1)}%"


def _read_as(anchor: Mapping[str, Any], copies: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tooltip of a token: the tokens that its copies are nearest to, the most frequent first."""
    own_copies = [copy for copy in copies if copy.get("token") == anchor["index"]]
    counts = Counter(token(copy.get("nearest")) for copy in own_copies)
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    lines = [f"“{token(anchor.get('text'))}” is read as"]
    lines += [f"“{nearest}” {count}×" for nearest, count in ordered[:_MOST_READINGS]]
    if len(ordered) > _MOST_READINGS:
        lines.append(f"and {len(ordered) - _MOST_READINGS} others")
    return lines
