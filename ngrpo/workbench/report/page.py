# SPDX-License-Identifier: Apache-2.0
"""Reading a result file, and its page: sections in their order, rendered from templates, style and script inside."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from ngrpo.machine.storage.result_folder import read_json, write_text
from ngrpo.workbench.report import charts, drawing, headline, responses, values
from perturbations.errors import UsageError

FORMAT = 1
# Kind of result: its file, the command that writes it, and the lists that it must hold.
KINDS = {
    "comparison": ("results.json", "ngrpo compare", ("strategies", "runs")),
    "diagnosis": ("diagnosis.json", "ngrpo diagnose", ("strategies",)),
    "training run": ("summary.json", "ngrpo train", ("steps",)),
}
_PROVENANCE = ("perturbation", "base", "settings", "paper")
# Name to link to, heading, content; None leaves the section out.
Section = tuple[str, str, dict[str, Any] | None]


def load(path: Path) -> tuple[str, dict[str, Any], Path]:
    """Reads a result.

    Args:
        path: ``results.json``, ``diagnosis.json``, ``summary.json``, or a folder with one of them, in this order.

    Returns:
        A key of :data:`KINDS`, the content, and the file it was read from.

    Raises:
        UsageError: for a file that is missing, cannot be read, is not JSON, is something else, or is of a newer format.
    """
    names = [name for name, _, _ in KINDS.values()]
    file = next((path / name for name in names if (path / name).is_file()), path)
    if file.is_dir():
        raise UsageError(
            f"{path} has neither {' nor '.join(names)}. Give the folder that `ngrpo compare`, `ngrpo diagnose` or"
            " `ngrpo train` wrote."
        )
    data = read_json(file)
    if data is None and not file.exists():
        raise UsageError(f"{file}: there is no such file or folder. Give a folder, {' or '.join(names)}.")
    if not isinstance(data, dict):
        raise UsageError(f"{file}: a JSON object was expected, found {type(data).__name__}.")
    kind = "comparison" if "runs" in data else "training run" if "steps" in data else "diagnosis"
    _, made_by, needed = KINDS[kind]
    what, advice = f"{file}: not a {kind} of ngrpo", f"Give a file that `{made_by}` wrote."
    version = data.get("format")
    if type(version) is not int or version < 1:
        raise UsageError(f"{what}: format is {version!r}, must be {FORMAT}. {advice}")
    if version > FORMAT:
        raise UsageError(f"{file}: format {version} is newer than this ngrpo knows ({FORMAT}). Update ngrpo.")
    for key in needed:
        if not isinstance(data.get(key), list):
            raise UsageError(f"{what}: {key!r} must be a list, found {type(data.get(key)).__name__}. {advice}")
    return kind, data, file


def write_report(results: Mapping[str, Any], path: Path) -> None:
    """Writes the report of a comparison.

    Args:
        results: the content of ``results.json``. Numbers that are missing, null or not finite are shown as ``–``.
        path: the HTML file; its folder must exist. A report already there is replaced whole or left as it is.

    Raises:
        UsageError: where the file cannot be written.
    """
    series = drawing.all_series(results)
    diagnosis = results.get("diagnosis") or {}
    runs = values.rows(results, "runs")
    sections = [
        ("results", "Results", headline.results_table(results, series)),
        ("learning", "Learning curves", charts.learning(results, series)),
        ("pass-at-k", "Pass@k", charts.pass_at_k(results, series)),
        ("cost", "Cost", headline.cost_table(results, series)),
        ("diversity", "Diversity and validity", charts.diversity_validity(diagnosis, series)),
        ("samples", "Sample answers", responses.samples(diagnosis, series)),
        ("groups", "Groups", responses.groups(runs, series)),
        ("map", "Embedding map", charts.embedding_map(diagnosis, series)),
        ("runs", "Runs", {"runs": runs}),
        ("made", "How it was made", _provenance(results)),
    ]
    title = headline.comparison_title(results)
    _write(path, "Comparison", title, headline.comparison_headline(results, series), sections)


def write_diagnosis(diagnosis: Mapping[str, Any], path: Path) -> None:
    """Writes the report of a diagnosis; arguments and errors as in `write_report`."""
    series = drawing.all_series({"diagnosis": diagnosis})
    listed = drawing.by_series(diagnosis, series)
    sections = [
        ("results", "Results", {"listed": listed} if listed else None),
        ("diversity", "Diversity and validity", charts.diversity_validity(diagnosis, series)),
        ("pass-at-k", "Pass@k", charts.pass_at_k(diagnosis, series)),
        ("samples", "Sample answers", responses.samples(diagnosis, series)),
        ("map", "Embedding map", charts.embedding_map(diagnosis, series)),
        ("made", "How it was made", _provenance(diagnosis)),
    ]
    title = headline.diagnosis_title(diagnosis)
    _write(path, "Diagnosis", title, headline.diagnosis_headline(diagnosis, series), sections)


def write_training(summary: Mapping[str, Any], path: Path) -> None:
    """Writes the report of one training run from its ``summary.json``; errors as in `write_report`."""
    name = str(values.dig(summary, "perturbation", "name") or "none")
    strategy = {"id": name, "perturbation": summary.get("perturbation")}
    run = {"strategy": name, "status": "done", **{key: summary.get(key) for key in ("seed", "steps", "groups")}}
    results = {**summary, "strategies": [strategy], "runs": [run]}
    series = drawing.all_series(results)
    sections = [
        ("learning", "Learning curves", charts.learning(results, series)),
        ("groups", "Groups", responses.groups([run], series)),
        ("made", "How it was made", _provenance(results)),
    ]
    _write(path, "Training run", name, headline.training_headline(summary), sections)


def _provenance(source: Mapping[str, Any]) -> dict[str, Any]:
    """Command, machine, versions, seeds and specs: enough to make the result again."""
    facts = []
    for key in ("versions", "machine", "sampling"):
        if section := source.get(key):
            plain = {
                name: json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else values.shown(value)
                for name, value in section.items()
            }
            facts.append((key.capitalize(), plain))
    strategies = {
        str(row.get("id", row.get("name"))): {key: row[key] for key in _PROVENANCE if key in row}
        for row in values.rows(source, "strategies")
    }
    seeds = dict.fromkeys(str(run.get("seed")) for run in values.rows(source, "runs"))
    texts = {
        "Command": shlex.join(map(str, source.get("command") or ())),
        "Strategies: perturbation and settings": strategies and json.dumps(strategies, indent=1, ensure_ascii=False),
        "Seeds": shlex.join(seeds),
        "Flags of OpenRLHF shared by all": shlex.join(map(str, source.get("openrlhf_args") or ())),
    }
    return {"facts": facts, "quoted": {title: text for title, text in texts.items() if text}}


def _write(path: Path, kind: str, title: str, head: dict[str, Any], sections: list[Section]) -> None:
    style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("style.css", "script.js"))
    template = _templates().get_template("page.html")
    page = template.render(
        kind=kind,
        title=title,
        headline=head,
        sections=[section for section in sections if section[2] is not None],
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
    names = "between dig duration ends format_number noise number plural rows signed size"
    environment.globals.update({name: getattr(values, name) for name in names.split()})
    return environment
