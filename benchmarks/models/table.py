# SPDX-License-Identifier: Apache-2.0
"""docs/models.json, and the table of docs/models.md that is made from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.models import cases

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_MEASURED = _DOCS.parent / "ngrpo" / "models" / "measured_models.json"
RESULT, PAGE = _DOCS / "models.json", _DOCS / "models.md"
_BEGIN, _END = "<!-- models: python -m benchmarks.models writes this -->", "<!-- /models -->"


def put(row: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Adds a row to the file, in the place of an older one of the same case."""
    result = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"rows": []}
    kept = [old for old in result["rows"] if cases.key(old) != cases.key(row)]
    order = {cases.key(vars(case)): number for number, case in enumerate(cases.ALL)}
    rows = sorted([*kept, dict(row)], key=lambda each: order.get(cases.key(each), len(order)))
    lines = ",\n".join("  " + json.dumps(each) for each in rows)
    _MEASURED.write_text(json.dumps(verdicts(rows), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    RESULT.write_text(f'{{\n "made": {json.dumps(made)},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


_WORST = (
    "the replay is exact",
    "the replay is exact on average; in bfloat16 the largest gap is above the unperturbed one (docs/models.md)",
    "wrong",
)


def verdicts(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What `ngrpo doctor` and a dry run say of a type: of all its cases the worst verdict that has figures."""
    found: dict[str, int] = {}
    for row in rows:
        if row["verdict"] in ("right", "wrong"):
            found[row["type"]] = max(found.get(row["type"], 0), _badness(row))
    return {name: _WORST[badness] for name, badness in found.items()}


def _badness(row: Mapping[str, Any]) -> int:
    if row["verdict"] == "right":
        return 0
    # A single token of a few hundred may be sensitive to rounding; inputs that are not the rollout's move the mean.
    plain, perturbed = row.get("means") or (0.0, 1.0)
    return 1 if row["dtype"] != "float32" and perturbed <= 1.5 * plain else 2


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: a row for each case, under the heading of its form."""
    lines = ["| type | engine class | how | unperturbed | perturbed | without replay | verdict |", "| --- " * 7 + "|"]
    heading = ""
    for row in rows:
        found = cases.form(row["type"])
        if found != heading:
            heading = found
            lines.append(f"| **{heading}** | | | | | | |")
        how = [row["dtype"]] if row["dtype"] != "float32" else []
        how += ["compiled"] if row["compiled"] else []
        how += ["V2"] if row["runner"] == "V2" else []
        how += [row["under"]] if row["under"] else []
        how += [f"model_impl={row['impl']}"] if row["impl"] != "auto" else []
        if "unperturbed" in row:
            figures = [row["unperturbed"], max(row["perturbed"].values()), row["unreplayed"]]
            cells = [f"{figure:.1e}" for figure in figures]
            told = row["verdict"] if row["verdict"] == "right" else f"**{row['verdict']}**"
        else:
            cells = ["–"] * 3
            told = f"{row['verdict']}: {row['message']}".replace("|", "\\|").replace("<", "&lt;")
        engine = row.get("engine_class", "–")
        lines.append(f"| {row['type']} | {engine} | {', '.join(how)} | " + " | ".join(cells) + f" | {told} |")
    return "\n".join(lines)


def write_page() -> None:
    """Puts the table into the page, between its two marks."""
    result, text = json.loads(RESULT.read_text(encoding="utf-8")), PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    made = f"{result['made']['machine']}; commit {result['made']['commit']}."
    PAGE.write_text(f"{before}{_BEGIN}\n{made}\n\n{table(result['rows'])}\n{_END}{after}", encoding="utf-8")
