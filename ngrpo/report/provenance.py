"""Every run with what went wrong, and how the result was made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from ngrpo.report.tables import facts, table
from ngrpo.report.values import MISSING, dig, duration, escape, plural, rows, size


def all_runs(results: Mapping[str, Any]) -> str:
    """Failed runs with error and log, then every run in a table."""
    runs = rows(results, "runs")
    failed = [run for run in runs if run.get("status") == "failed"]
    blocks = "".join(
        f'<article class="failed"><h3><bdi>{escape(run.get("strategy"))}</bdi>, seed {escape(run.get("seed"))}</h3>'
        f'<pre dir="auto">{escape(run.get("error"))}</pre><p>Log: <code>{escape(run.get("log"))}</code></p></article>'
        for run in failed
    )
    body = [
        f'<th scope="row"><bdi>{escape(run.get("strategy"))}</bdi></th><td>{escape(run.get("seed"))}</td>'
        f"<td>{escape(run.get('status'))}</td><td>{len(rows(run, 'steps')) or MISSING}</td>"
        f"<td>{duration(run.get('seconds'))}</td><td>{size(run.get('peak_memory_bytes'))}</td>"
        f"<td><code>{escape(run.get('log'))}</code></td>"
        for run in runs
    ]
    headings = ["Strategy", "Seed", "Status", "Steps", "Time", "Peak memory", "Log"]
    opening = blocks or f"<p>{'No run failed' if runs else 'There are no runs'}.</p>"
    listed = table("All runs", headings, body, classes="dense")
    return f"{opening}<details><summary>All {plural(len(runs), 'run')}</summary>{listed}</details>"


def made(source: Mapping[str, Any]) -> str:
    """Command, machine, versions, seeds and specs; enough to do it again."""
    parts = []
    for title, key in (("Versions", "versions"), ("Machine", "machine"), ("Sampling", "sampling")):
        found = dig(source, key)
        if isinstance(found, Mapping) and found:
            plain = {str(name): _plain(value) for name, value in found.items()}
            parts.append(f"<h3>{title}</h3>{facts(plain)}")
    keys = ("perturbation", "base", "settings", "paper")
    strategies = {
        str(row.get("id", row.get("name"))): {key: row[key] for key in keys if key in row}
        for row in rows(source, "strategies")
    }
    for title, value in (
        ("Command", source.get("command")),
        ("Strategies: perturbation and settings", strategies),
        ("Seeds", list(dict.fromkeys(str(run.get("seed")) for run in rows(source, "runs")))),
        ("Flags of OpenRLHF shared by all", source.get("openrlhf_args")),
    ):
        if value:
            is_words = isinstance(value, list)
            shown = shlex.join(map(str, value)) if is_words else json.dumps(value, indent=1, ensure_ascii=False)
            opened = " open" if title == "Command" else ""
            parts.append(f"<details{opened}><summary>{title}</summary><pre>{escape(shown)}</pre></details>")
    return "".join(parts) or "<p>Nothing was recorded about how this was made.</p>"


def _plain(value: Any) -> Any:
    if value is None:
        return MISSING
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
