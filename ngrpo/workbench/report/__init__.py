# SPDX-License-Identifier: Apache-2.0
"""Reports: one HTML file that opens offline, made from ``results.json``, ``diagnosis.json`` or ``summary.json`` alone.

The page is rendered from templates, charts as SVG. A little JavaScript reads out values, shows the neighbor sets of
tokens, and hides arms. The same result gives the same bytes.
"""

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from ngrpo.machine.storage.result_folder import read_json, write_text
from ngrpo.workbench.report import charts, diagnosis_charts, headline, responses, values
from ngrpo.workbench.report.drawing import Series, all_series
from perturbations.errors import UsageError

FORMAT = 1


class _Kind(NamedTuple):
    """A kind of result.

    Attributes:
        file: the name of its file.
        command: the command that writes it.
        lists: the keys under which the file must hold lists.
        headline: makes what its page begins with.
    """

    file: str
    command: str
    lists: tuple[str, ...]
    headline: Callable[[Mapping[str, Any], Mapping[str, Series]], dict[str, Any]]


_KINDS = {
    "comparison": _Kind("results.json", "ngrpo compare", ("strategies", "runs"), headline.comparison),
    "diagnosis": _Kind("diagnosis.json", "ngrpo diagnose", ("strategies",), headline.diagnosis),
    "training run": _Kind("summary.json", "ngrpo train", ("steps",), headline.training),
}
_PROVENANCE = ("perturbation", "base", "settings", "paper")
TEMPLATES = Environment(
    loader=PackageLoader("ngrpo.workbench.report"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: value if isinstance(value, Markup) else values.shown(value),
)
"""Templates in which every value is text: made visible by `values.shown`, then escaped."""
TEMPLATES.filters |= {"shown": values.shown, "json": lambda value: json.dumps(value, ensure_ascii=False)}
TEMPLATES.globals |= {name: function for name, function in vars(values).items() if callable(function)}


def load(path: Path) -> tuple[dict[str, Any], Path]:
    """Reads ``results.json``, ``diagnosis.json``, ``summary.json``, or the first one of these in a folder.

    Returns:
        The content, and the file it was read from.

    Raises:
        UsageError: for a file that is missing, cannot be read, is not JSON, is something else, or is of a newer format.
    """
    names = [kind.file for kind in _KINDS.values()]
    file = next((path / name for name in names if (path / name).is_file()), path)
    if file.is_dir():
        raise UsageError(
            f"{path} has neither {' nor '.join(names)}. Give a folder of ngrpo compare, diagnose or train."
        )
    data = read_json(file)
    if data is None and not file.exists():
        raise UsageError(f"{file}: there is no such file or folder. Give a folder, {' or '.join(names)}.")
    if not isinstance(data, dict):
        raise UsageError(f"{file}: a JSON object was expected, found {type(data).__name__}.")
    name = _kind(data)
    kind = _KINDS[name]
    version = data.get("format")
    if type(version) is not int or version < 1:
        raise UsageError(
            f"{file}: not a {name} of ngrpo: format is {version!r}, must be {FORMAT}. Give a file that"
            f" `{kind.command}` wrote."
        )
    if version > FORMAT:
        raise UsageError(
            f"{file}: format {version} is newer than {FORMAT}, the newest that this ngrpo reads. Update it."
        )
    for key in kind.lists:
        if not isinstance(data.get(key), list):
            raise UsageError(
                f"{file}: not a {name} of ngrpo: {key!r} must be a list, found {type(data.get(key)).__name__}. Give a"
                f" file that `{kind.command}` wrote."
            )
    return data, file


def _kind(data: Mapping[str, Any]) -> str:
    if "runs" in data:
        return "comparison"
    return "training run" if "steps" in data else "diagnosis"


def write_report(data: Mapping[str, Any], path: Path) -> None:
    """Writes the report of a comparison, a diagnosis or a training run.

    Args:
        data: the content of ``results.json``, ``diagnosis.json`` or ``summary.json``. Numbers that are missing, null or
            not finite are shown as ``–``.
        path: the HTML file; its folder must exist. A report already there is replaced whole or left as it is.

    Raises:
        UsageError: where the file cannot be written.
    """
    kind = _kind(data)
    if kind == "training run":
        data = _as_comparison(data)
    series = all_series(data)
    runs = values.rows(data, "runs")
    diagnosis = data if kind == "diagnosis" else data.get("diagnosis") or {}
    head = _KINDS[kind].headline(data, series)
    table = head.get("table")
    # Name to link to, heading, content; None leaves the section out.
    sections = [
        ("results", "Results", table),
        ("learning", "Learning curves", None if kind == "diagnosis" else charts.learning(data, series)),
        ("pass-at-k", "Pass@k", charts.pass_at_k(data, series)),
        ("cost", "Cost", table if kind == "comparison" and table and table["listed"] else None),
        ("diversity", "Diversity and validity", diagnosis_charts.diversity_validity(diagnosis, series)),
        ("samples", "Sample responses", responses.samples(diagnosis, series)),
        ("groups", "Groups", responses.groups(runs, series)),
        ("map", "Embedding map", diagnosis_charts.embedding_map(diagnosis, series)),
        ("runs", "Runs", {"runs": runs} if kind == "comparison" else None),
        ("made", "How it was made", _provenance(data)),
    ]
    style = Path(__file__).with_name("style.css").read_text("utf-8")
    script = Path(__file__).with_name("script.js").read_text("utf-8")
    page = TEMPLATES.get_template("page.html").render(
        kind=kind.capitalize(),
        headline=head,
        sections=[section for section in sections if section[2] is not None],
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    write_text(path, page)


def _as_comparison(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A training run's summary as a comparison of one arm with one run, for the charts."""
    name = str(values.dig(summary, "perturbation", "name") or "none")
    arm = {"id": name, "perturbation": summary.get("perturbation")}
    run = {**summary, "strategy": name, "status": "done", "evaluations": charts.evaluations(summary)}
    return {**summary, "strategies": [arm], "runs": [run]}


def _provenance(source: Mapping[str, Any]) -> dict[str, Any]:
    """Command, machine, versions, seeds and specs: enough to make the result again."""

    def plain(value: object) -> str:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else values.shown(value)

    facts = []
    for key in ("versions", "machine", "sampling"):
        section = source.get(key)
        if section:
            facts.append((key.capitalize(), {name: plain(value) for name, value in section.items()}))
    arms = {}
    for row in values.rows(source, "strategies"):
        arm = str(row.get("id", row.get("name")))
        arms[arm] = {key: row[key] for key in _PROVENANCE if key in row}
    seeds = dict.fromkeys(str(run.get("seed")) for run in values.rows(source, "runs"))
    texts = {
        "Command": shlex.join(map(str, source.get("command") or ())),
        "Arms: perturbation and settings": arms and json.dumps(arms, indent=1, ensure_ascii=False),
        "Seeds": shlex.join(seeds),
        "Flags of OpenRLHF shared by all": shlex.join(map(str, source.get("openrlhf_args") or ())),
    }
    return {"facts": facts, "quoted": {title: text for title, text in texts.items() if text}}
