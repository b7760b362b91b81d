# SPDX-License-Identifier: Apache-2.0
"""The page: sections in their order, rendered from the templates beside this file, style and script inside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from ngrpo.machine.storage.result_folder import write_text
from ngrpo.workbench.report import curves, groups, headline, map_panels, picture, provenance, samples, tables, values
from ngrpo.workbench.report.load import check
from ngrpo.workbench.report.marks import all_series

Content = dict[str, Any] | None


class Section(NamedTuple):
    """A section of the page: the name to link to, its heading, its content (None: left out) and its template."""

    name: str
    heading: str
    content: Content
    template: str


def write_report(results: Mapping[str, Any], path: Path) -> None:
    """Writes the report of a comparison.

    Args:
        results: the content of ``results.json``. Numbers that are missing, null or not finite are shown as ``–``.
        path: the HTML file; its folder must exist. A report already there is replaced whole or left as it is.

    Raises:
        UsageError: where this is no comparison, is of a newer format, or the file cannot be written.
    """
    check(results, "comparison")
    series = all_series(results)
    diagnosis = results.get("diagnosis") or {}
    sections = [
        _section("results", "Results", tables.results_table(results, series)),
        _section("learning", "Learning curves", curves.learning(results, series)),
        _section("pass-at-k", "Pass@k", curves.pass_at_k(results, series, trained=True)),
        _section("cost", "Cost", tables.cost_table(results, series)),
        _section("diversity", "Diversity and validity", picture.diversity_validity(diagnosis, series)),
        _section("samples", "Sample answers", samples.samples(diagnosis, series)),
        _section("groups", "Groups", groups.groups(values.rows(results, "runs"), series)),
        _section("map", "Embedding map", map_panels.embedding_map(diagnosis, series)),
        _section("runs", "Runs", {"runs": values.rows(results, "runs")}),
        _section("made", "How it was made", provenance.made(results)),
    ]
    title = headline.comparison_title(results)
    _write(path, "Comparison", title, headline.comparison_headline(results, series), sections)


def write_diagnosis(diagnosis: Mapping[str, Any], path: Path) -> None:
    """Writes the report of a diagnosis; arguments and errors as in `write_report`."""
    check(diagnosis, "diagnosis")
    series = all_series({"diagnosis": diagnosis})
    sections = [
        _section("results", "Results", picture.diagnosis_table(diagnosis, series), "diagnosis"),
        _section("diversity", "Diversity and validity", picture.diversity_validity(diagnosis, series)),
        _section("pass-at-k", "Pass@k", curves.pass_at_k(diagnosis, series, trained=False)),
        _section("samples", "Sample answers", samples.samples(diagnosis, series)),
        _section("map", "Embedding map", map_panels.embedding_map(diagnosis, series)),
        _section("made", "How it was made", provenance.made(diagnosis)),
    ]
    title = headline.diagnosis_title(diagnosis)
    _write(path, "Diagnosis", title, headline.diagnosis_headline(diagnosis, series), sections)


def write_training(summary: Mapping[str, Any], path: Path) -> None:
    """Writes the report of one training run from its ``summary.json``; errors as in `write_report`."""
    check(summary, "training run")
    name = str(values.dig(summary, "perturbation", "name") or "none")
    strategy = {"id": name, "perturbation": summary.get("perturbation")}
    parts = {key: summary.get(key) for key in ("seed", "steps", "groups")}
    run = {"strategy": name, "status": "done", **parts}
    results = {**summary, "strategies": [strategy], "runs": [run]}
    series = all_series(results)
    sections = [
        _section("learning", "Learning curves", curves.learning(results, series)),
        _section("groups", "Groups", groups.groups([run], series)),
        _section("made", "How it was made", provenance.made(results)),
    ]
    _write(path, "Training run", name, headline.training_headline(summary), sections)


def _section(name: str, heading: str, content: Content, template: str | None = None) -> Section:
    return Section(name, heading, content, f"{template or name}.html")


def _write(path: Path, kind: str, title: str, summary: dict[str, Any], sections: list[Section]) -> None:
    style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("style.css", "script.js"))
    template = _templates().get_template("page.html")
    page = template.render(
        kind=kind,
        title=title,
        headline=summary,
        sections=[section for section in sections if section.content is not None],
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    write_text(path, page)


@lru_cache
def _templates() -> Environment:
    """Templates in which every value is text: made visible by `values.shown`, then escaped."""
    environment = Environment(
        loader=PackageLoader("ngrpo.workbench.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else values.shown(value),
    )
    environment.filters["shown"] = values.shown
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    functions: tuple[Any, ...] = (
        *(values.between, values.dig, values.duration, values.figure, values.number, values.numbers, values.plural),
        *(values.rows, values.signed, values.size, values.noise),
    )
    for function in functions:
        environment.globals.update({function.__name__: function})
    return environment
