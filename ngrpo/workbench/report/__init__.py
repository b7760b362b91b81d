# SPDX-License-Identifier: Apache-2.0
"""Reports: one HTML file that opens offline, made from ``results.json``, ``diagnosis.json`` or ``summary.json`` alone.

The page is rendered from templates, charts as SVG; a little JavaScript adds reading values, neighbor sets and hiding
strategies. The same result gives the same bytes.
"""

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from ngrpo.machine.storage.result_folder import read_json, write_text
from ngrpo.workbench.report import charts, headline, responses, values
from ngrpo.workbench.report.drawing import all_series
from perturbations.errors import UsageError

FORMAT = 1
# Kind of result: its file, the command that writes it, the lists that it must hold, and what its page begins with.
_KINDS = {
    "comparison": ("results.json", "ngrpo compare", ("strategies", "runs"), headline.comparison),
    "diagnosis": ("diagnosis.json", "ngrpo diagnose", ("strategies",), headline.diagnosis),
    "training run": ("summary.json", "ngrpo train", ("steps",), headline.training),
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
TEMPLATES.globals |= {name: each for name, each in vars(values).items() if callable(each)}


def load(path: Path) -> tuple[dict[str, Any], Path]:
    """Reads ``results.json``, ``diagnosis.json``, ``summary.json``, or the first one of these in a folder.

    Returns:
        The content, and the file it was read from.

    Raises:
        UsageError: for a file that is missing, cannot be read, is not JSON, is something else, or is of a newer format.
    """
    names = [name for name, *_ in _KINDS.values()]
    file = next((path / name for name in names if (path / name).is_file()), path)
    if file.is_dir():
        raise UsageError(f"{path} has neither {' nor '.join(names)}. Give a folder that one of our commands wrote.")
    data = read_json(file)
    if data is None and not file.exists():
        raise UsageError(f"{file}: there is no such file or folder. Give a folder, {' or '.join(names)}.")
    if not isinstance(data, dict):
        raise UsageError(f"{file}: a JSON object was expected, found {type(data).__name__}.")
    kind = _kind(data)
    _, made_by, needed, _ = _KINDS[kind]
    what, advice = f"{file}: not a {kind} of ngrpo", f"Give a file that `{made_by}` wrote."
    version = data.get("format")
    if type(version) is not int or version < 1:
        raise UsageError(f"{what}: format is {version!r}, must be {FORMAT}. {advice}")
    if version > FORMAT:
        raise UsageError(f"{file}: format {version} is newer than this ngrpo knows ({FORMAT}). Update ngrpo.")
    for key in needed:
        if not isinstance(data.get(key), list):
            raise UsageError(f"{what}: {key!r} must be a list, found {type(data.get(key)).__name__}. {advice}")
    return data, file


def _kind(data: Mapping[str, Any]) -> str:
    return "comparison" if "runs" in data else "training run" if "steps" in data else "diagnosis"


def write_report(data: Mapping[str, Any], path: Path) -> None:
    """Writes the report of a comparison, a diagnosis or a training run.

    Args:
        data: the content of ``results.json``, ``diagnosis.json`` or ``summary.json``. Numbers that are missing, null or
            not finite are shown as ``–``.
        path: the HTML file; its folder must exist. A report already there is replaced whole or left as it is.

    Raises:
        UsageError: where the file cannot be written.
    """
    kind, name = _kind(data), str(values.dig(data, "perturbation", "name") or "none")
    if kind == "training run":
        strategy = {"id": name, "perturbation": data.get("perturbation")}
        data = {**data, "strategies": [strategy], "runs": [{**data, "strategy": name, "status": "done"}]}
    series, runs = all_series(data), values.rows(data, "runs")
    diagnosis = data if kind == "diagnosis" else data.get("diagnosis") or {}
    head = _KINDS[kind][-1](data, series)
    table = head.get("table")
    # Name to link to, heading, content; None leaves the section out.
    sections = [
        ("results", "Results", table),
        ("learning", "Learning curves", None if kind == "diagnosis" else charts.learning(data, series)),
        ("pass-at-k", "Pass@k", charts.pass_at_k(data, series)),
        ("cost", "Cost", table if kind == "comparison" and table and table["listed"] else None),
        ("diversity", "Diversity and validity", charts.diversity_validity(diagnosis, series)),
        ("samples", "Sample responses", responses.samples(diagnosis, series)),
        ("groups", "Groups", responses.groups(runs, series)),
        ("map", "Embedding map", charts.embedding_map(diagnosis, series)),
        ("runs", "Runs", {"runs": runs} if kind == "comparison" else None),
        ("made", "How it was made", _provenance(data)),
    ]
    style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("style.css", "script.js"))
    page = TEMPLATES.get_template("page.html").render(
        kind=kind.capitalize(),
        headline=head,
        sections=[section for section in sections if section[2] is not None],
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    write_text(path, page)


def _provenance(source: Mapping[str, Any]) -> dict[str, Any]:
    """Command, machine, versions, seeds and specs: enough to make the result again."""

    def plain(value: object) -> str:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else values.shown(value)

    facts = [
        (key.capitalize(), {name: plain(value) for name, value in section.items()})
        for key in ("versions", "machine", "sampling")
        if (section := source.get(key))
    ]
    strategies = {
        str(row.get("id", row.get("name"))): {key: row[key] for key in _PROVENANCE if key in row}
        for row in values.rows(source, "strategies")
    }
    texts = {
        "Command": shlex.join(map(str, source.get("command") or ())),
        "Strategies: perturbation and settings": strategies and json.dumps(strategies, indent=1, ensure_ascii=False),
        "Seeds": shlex.join(dict.fromkeys(str(run.get("seed")) for run in values.rows(source, "runs"))),
        "Flags of OpenRLHF shared by all": shlex.join(map(str, source.get("openrlhf_args") or ())),
    }
    return {"facts": facts, "quoted": {title: text for title, text in texts.items() if text}}
