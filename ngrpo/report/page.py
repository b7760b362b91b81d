"""The page: sections in their order, style and script inside, written in one go."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ngrpo.report import curves, headline, map_panels, picture, provenance, samples, tables
from ngrpo.report.load import check
from ngrpo.report.marks import all_series
from ngrpo.report.values import escape
from ngrpo.result_folder import write_text

Section = tuple[str, str, str]


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
    title = headline.comparison_title(results)
    sections = [
        ("results", "Results", tables.results_table(results, series)),
        ("learning", "Learning curves", curves.learning(results, series)),
        ("pass-at-k", "Pass@k", curves.pass_at_k(results, series, trained=True)),
        ("cost", "Cost", tables.cost_table(results, series)),
        ("diversity", "Diversity and validity", picture.diversity_validity(diagnosis, series)),
        ("samples", "Sample answers", samples.samples(diagnosis, series)),
        ("map", "Embedding map", map_panels.embedding_map(diagnosis, series)),
        ("runs", "Runs", provenance.all_runs(results)),
        ("made", "How it was made", provenance.made(results)),
    ]
    write_text(path, _page("Comparison", title, headline.comparison_headline(results, series), sections))


def write_diagnosis(diagnosis: Mapping[str, Any], path: Path) -> None:
    """Writes the report of a diagnosis; arguments and errors as in `write_report`."""
    check(diagnosis, "diagnosis")
    series = all_series({"diagnosis": diagnosis})
    title = headline.diagnosis_title(diagnosis)
    sections = [
        ("results", "Results", picture.diagnosis_table(diagnosis, series)),
        ("diversity", "Diversity and validity", picture.diversity_validity(diagnosis, series)),
        ("pass-at-k", "Pass@k", curves.pass_at_k(diagnosis, series, trained=False)),
        ("samples", "Sample answers", samples.samples(diagnosis, series)),
        ("map", "Embedding map", map_panels.embedding_map(diagnosis, series)),
        ("made", "How it was made", provenance.made(diagnosis)),
    ]
    write_text(path, _page("Diagnosis", title, headline.diagnosis_headline(diagnosis, series), sections))


def _page(kind: str, title: str, headline: str, sections: list[Section]) -> str:
    style = files("ngrpo.report").joinpath("style.css").read_text(encoding="utf-8")
    script = files("ngrpo.report").joinpath("script.js").read_text(encoding="utf-8")
    shown = [section for section in sections if section[2]]
    nav = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading, _ in shown)
    body = "".join(f'<section id="{name}"><h2>{heading}</h2>{html}</section>' for name, heading, html in shown)
    # Nothing may be fetched, and no script runs but ours, whatever a model wrote into a sample.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="generator" content="ngrpo">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)} – ngrpo</title>\n<style>\n{style}</style>\n</head>\n'
        f'<body>\n<main>\n<header><p class="kind">{kind}</p><h1><bdi>{escape(title)}</bdi></h1>{headline}'
        f'<nav aria-label="Sections"><ul>{nav}</ul></nav></header>\n{body}\n</main>\n'
        f'<div id="tip" role="tooltip" hidden></div>\n<script>{script}</script>\n</body>\n</html>\n'
    )
