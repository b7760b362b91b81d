# SPDX-License-Identifier: Apache-2.0
"""docs/models.json, and the table of docs/models.md that is made from it."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.models import cases
from benchmarks.models.case import TOLERANCE, Case

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_MEASURED = _DOCS.parent / "ngrpo" / "machine" / "models" / "measured_models.json"
RESULT, PAGE = _DOCS / "models.json", _DOCS / "models.md"
_PLAIN = {cases.key(vars(Case(name))) for names in cases.TYPES.values() for name in names}
_BEGIN, _END = "<!-- models: python -m benchmarks.models writes this -->", "<!-- /models -->"


def put(row: Mapping[str, Any]) -> None:
    """Adds a row, with its machine and commit, to the file, in the place of an older one of the same case."""
    result = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"rows": []}
    others = [old for old in result["rows"] if cases.key(old) != cases.key(row)]
    order = {cases.key(vars(case)): number for number, case in enumerate(cases.ALL)}
    rows = sorted([*others, dict(row)], key=lambda each: order.get(cases.key(each), len(order)))
    lines = ",\n".join("  " + json.dumps(each) for each in rows)
    _MEASURED.write_text(json.dumps(verdicts(rows), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    RESULT.write_text(f'{{\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def verdicts(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What `ngrpo doctor` and a dry run say of a type: of all its cases the worst, and of those without a verdict one.

    Returns:
        By type, "right", "doubtful", "wrong" or "unknown", and the words for it.
    """
    worst: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if _badness(row) > _badness(worst.get(row["type"], {"verdict": ""})):
            worst[row["type"]] = row
    return {name: _entry(row) for name, row in worst.items()}


def _entry(row: Mapping[str, Any]) -> list[str]:
    how = " ".join(filter(None, [f"in {row['dtype']}", row["under"] and f"with {row['under']}"]))
    badness = _badness(row)
    if badness == _BADNESS["right"]:
        return ["right", "the replay is exact"]
    if row["verdict"] == "wrong" and "unperturbed" not in row:
        return ["wrong", f"nothing runs {how}: {row['message']}"]
    if row["verdict"] == "wrong":
        plain, perturbed, largest = (f"{v:.2g}" for v in (*row["means"][:2], max(row["perturbed"].values())))
        gaps = f"largest gap {largest}, without a perturbation {row['unperturbed']:.2g}; means {perturbed} and {plain}"
        if badness == _BADNESS["wrong"]:
            return ["wrong", f"the replay is wrong {how}: {gaps}"]
        return ["doubtful", f"wrong by the rule on largest gaps {how}: {gaps}"]
    reasons = {
        "refused": "its engine on a CPU fails the proof at its start",
        "insensitive": "engine and trainer differ too much without any perturbation, by one token at least",
        "not replayed": "the class of transformers failed in the trainer's forward",
    }
    return ["unknown", reasons.get(row["verdict"], "vLLM 0.29 did not run a tiny model of it on a CPU")]


_BADNESS = {"": 0, "unknown": 1, "right": 2, "doubtful": 3, "wrong": 4}


def _badness(row: Mapping[str, Any]) -> int:
    if row["verdict"] == "wrong" and row["dtype"] != "float32" and row.get("means"):
        # A single token of a few hundred may be sensitive to rounding; inputs not the rollout's move the mean.
        plain, perturbed = row["means"][:2]
        return _BADNESS["doubtful" if perturbed <= 1.5 * plain else "wrong"]
    return _BADNESS.get(row["verdict"], _BADNESS["unknown"])


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: a row for each case, under the heading of its form."""
    lines = ["| type | engine class | how | unperturbed | perturbed | without replay | verdict |", "| --- " * 7 + "|"]
    heading = ""
    for row in rows:
        form = cases.form(row["type"])
        if form != heading:
            heading = form
            lines.append(f"| **{heading}** | | | | | | |")
        how = [row["dtype"]] if row["dtype"] != "float32" else []
        how += ["compiled"] if row["compiled"] else []
        how += ["V2"] if row["runner"] == "V2" else []
        how += [row["under"]] if row["under"] else []
        how += [f"model_impl={row['impl']}"] if row["impl"] != "auto" else []
        if "unperturbed" in row:
            figures = [row["unperturbed"], max(row["perturbed"].values()), row["unreplayed"]]
            cells = [f"{figure:.1e}" for figure in figures]
            outcome = row["verdict"] if row["verdict"] == "right" else f"**{row['verdict']}**{_means(row)}"
        else:
            cells = ["–"] * 3
            half = f"; in bfloat16: {row['bfloat16']}" if row.get("bfloat16") else ""
            outcome = f"{row['verdict']}: {row['message']}{half}".replace("|", "\\|").replace("<", "&lt;")
        engine = row.get("engine_class", "–")
        lines.append(f"| {row['type']} | {engine} | {', '.join(how)} | " + " | ".join(cells) + f" | {outcome} |")
    return "\n".join(lines)


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """The types counted by the verdict of their plain case; "right" apart by whether the gap is below 1e-4."""
    plain = [row for row in rows if cases.key(row) in _PLAIN]
    right = [row for row in plain if row["verdict"] == "right"]
    above = [row for row in right if max(row["perturbed"].values()) > TOLERANCE]
    half = sum(row["dtype"] != "float32" for row in above)
    parts = [
        f"{len(plain)} types in their plain case: {len(right) - len(above)} replay to {TOLERANCE:g}",
        f"{len(above)} are above it, as their unperturbed gap is ({half} of them ran in bfloat16 alone)",
    ]
    others = Counter(row["verdict"] for row in plain if row["verdict"] != "right")
    return "; ".join([*parts, *(f"{count} {verdict}" for verdict, count in others.most_common())]) + "."


def _means(row: Mapping[str, Any]) -> str:
    """A largest gap is one token's; the means tell whether the others agree."""
    return " (means " + ", ".join(f"{value:.1e}" for value in row["means"]) + ")" if row.get("means") else ""


def write_page() -> None:
    """Puts the table into the page, between its two marks."""
    result, text = json.loads(RESULT.read_text(encoding="utf-8")), PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    made = "; or ".join(dict.fromkeys(row["machine"] for row in result["rows"]))
    made += ". The commit of each row is in docs/models.json."
    made += f"\n\n{summary(result['rows'])}\n\n{table(result['rows'])}\n"
    PAGE.write_text(f"{before}{_BEGIN}\n{made}{_END}{after}", encoding="utf-8")
