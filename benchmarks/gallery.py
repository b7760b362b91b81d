# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/gallery.md: charts as `report.html` draws them, from the results that docs/results/ holds.

python -m benchmarks.gallery [--out docs/gallery]
"""

import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from benchmarks.command_line import parser_of
from benchmarks.machine import ROOT
from ngrpo.machine.storage.result_folder import write_text
from ngrpo.workbench import report
from ngrpo.workbench.report import charts, diagnosis_charts
from ngrpo.workbench.report.drawing import Series, all_series

DOCS = ROOT / "docs"
_RULES = r"\.(h\d|d\d|line|band|whisker|mark|grid|axis|plot text|plot \.|plot\.wide (text|\.mark)|plot\.square text)"
_ROW_HEIGHT = 18  # of a strategy in the legend
_TEMPLATE = '{% import "charts.html" as charts %}{% import "parts.html" as parts %}{{ charts.plot(chart) }}'

Draw = Callable[[Mapping[str, Any], Mapping[str, Series]], charts.Chart]


class Picture(NamedTuple):
    """A chart of a published comparison; ``arms`` are the strategies that it shows, () for all."""

    name: str
    results: str
    draw: Draw
    arms: Sequence[str] = ()


def reward(results: Mapping[str, Any], series: Mapping[str, Series]) -> charts.Chart:
    return charts.learning(results, series)["reward"]


def diversity(results: Mapping[str, Any], series: Mapping[str, Series]) -> charts.Chart:
    return diagnosis_charts.diversity_validity(results["diagnosis"], series)["chart"]


_PKPO = "none advantage=pkpo advantage.k=2"
_STHT = "gaussian sigma_of=vector"
PICTURES = (
    Picture(
        "local_optimum", "study2/shortcut-late", reward, ("none", _PKPO, "neighbor", "gumbel density=gumbel", "cuts")
    ),
    Picture("two_peaks", "study2/two_peaks", reward),
    Picture("sums", "sums", reward, ("none", "neighbor", "gumbel", "multiplex", "soft")),
    Picture("diversity", "sums", diversity, ("none", "neighbor", "neighbor variant=released", _STHT, "gumbel")),
)


def published(picture: Picture) -> dict[str, Any]:
    """The committed results of the strategies that a picture shows."""
    packed = DOCS / "results" / picture.results / "results.json.gz"
    results = json.loads(gzip.decompress(packed.read_bytes()))
    return with_arms(results, picture.arms) if picture.arms else results


def with_arms(results: Mapping[str, Any], arms: Sequence[str]) -> dict[str, Any]:
    """A comparison with these strategies alone, in their order."""
    strategies = {row["id"]: row for row in results["strategies"]}
    diagnosis = results["diagnosis"]
    diagnosed = [row for row in diagnosis["strategies"] if row.get("id", row.get("name")) in arms]
    return {
        **results,
        "strategies": [strategies[arm] for arm in arms],
        "runs": [run for run in results["runs"] if run["strategy"] in arms],
        "summary": [row for row in results["summary"] if row["strategy"] in arms],
        "diagnosis": {**diagnosis, "strategies": diagnosed},
    }


def minutes(results: Mapping[str, Any]) -> tuple[float, float]:
    """The shortest and the longest mean time of a strategy's runs."""
    seconds: dict[str, list[float]] = {}
    for run in results["runs"]:
        seconds.setdefault(run["strategy"], []).append(run["seconds"])
    means = [sum(run_seconds) / len(run_seconds) / 60 for run_seconds in seconds.values()]
    return min(means), max(means)


def drawn(picture: Picture) -> str:
    """A picture as an SVG file with its own style and legend."""
    results = published(picture)
    series = all_series(results)
    chart = picture.draw(results, series)
    svg = report.TEMPLATES.from_string(_TEMPLATE).render(chart=chart)
    inside = re.search(r"<svg[^>]*>(.*)</svg>", svg, re.DOTALL)[1]
    legend = ""
    height = chart.size.height
    for strategy in series.values():
        legend += _legend_row(strategy, height)
        height += _ROW_HEIGHT
    width = chart.size.width
    label = f"{escape(chart.title)}. {escape(chart.desc)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" aria-label="{label}" class="plot {chart.size.kind}">\n'
        f'<style>{_style()}</style>\n<rect width="100%" height="100%" fill="var(--paper)"/>{inside}{legend}</svg>\n'
    )


def _legend_row(strategy: Series, y: float) -> str:
    hollow = " hollow" if strategy.hollow else ""
    mark = f'<g transform="translate(65 {y})"><path class="mark{hollow}" d="{strategy.shape}"/></g>'
    name = escape(strategy.name)
    return Markup(
        f'<g class="{strategy.classes}"><path class="line" d="M50 {y}h30"/>{mark}</g>'
        f'<text class="axis-title" x="88" y="{y}" dy=".35em">{name}</text>\n'
    )


def _style() -> str:
    """The rules of the report's style that charts need, in its light colors."""
    lines = Path(report.__file__).with_name("style.css").read_text(encoding="utf-8").splitlines()
    colors = "".join(line for line in lines[:8] if line.lstrip().startswith("--"))
    rules = " ".join(line for line in lines if re.match(_RULES, line))
    return f":root {{{colors}}} text {{font-family: sans-serif}} {rules}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=DOCS / "gallery")
    folder = parser.parse_args(argv).out
    folder.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        file = folder / f"{picture.name}.svg"
        write_text(file, drawn(picture))
        print(file)


if __name__ == "__main__":
    main()
