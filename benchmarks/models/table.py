# SPDX-License-Identifier: Apache-2.0
"""docs/models.json, and the table of docs/models.md that is made from it."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.markdown import table_lines, write_between
from benchmarks.models import cases
from benchmarks.models.case import TOLERANCE, Case

RESULT = ROOT / "docs" / "models.json"
PAGE = ROOT / "docs" / "models.md"
_VERDICTS = ROOT / "ngrpo" / "machine" / "models" / "measured_models.json"
_PLAIN = {cases.key(vars(Case(name))) for names in cases.TYPES.values() for name in names}
_BEGIN = "<!-- models: python -m benchmarks.models writes this -->"
_END = "<!-- /models -->"
_HEADINGS = ["type", "engine class", "how", "unperturbed", "perturbed", "without replay", "verdict"]
_BADNESS = {"": 0, "unknown": 1, "right": 2, "doubtful": 3, "wrong": 4}
_REASONS = {
    "refused": "its engine on a CPU fails the proof at its start",
    "insensitive": "engine and trainer differ too much without any perturbation, by one token at least",
    "not replayed": "the class of transformers failed in the trainer's forward",
}


def put(row: Mapping[str, Any]) -> None:
    """Adds a row, with its machine and commit, to the file, in the place of an older one of the same case."""
    rows = [old for old in published() if cases.key(old) != cases.key(row)]
    rows.append(dict(row))
    order = {cases.key(vars(case)): number for number, case in enumerate(cases.ALL)}
    rows.sort(key=lambda old_or_new: order.get(cases.key(old_or_new), len(order)))
    lines = ",\n".join("  " + json.dumps(old_or_new) for old_or_new in rows)
    _VERDICTS.write_text(json.dumps(verdicts(rows), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    RESULT.write_text(f'{{\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def published() -> list[dict[str, Any]]:
    """The rows of docs/models.json."""
    return json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []


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
    """The verdict of a type's worst row, and the words for it."""
    if row["verdict"] == "right":
        return ["right", "the replay is exact"]
    if row["verdict"] != "wrong":
        return ["unknown", _REASONS.get(row["verdict"], "vLLM 0.29 did not run a tiny model of it on a CPU")]
    how = f"in {row['dtype']}"
    if row["under"]:
        how += f" with {row['under']}"
    if "unperturbed" not in row:
        return ["wrong", f"nothing runs {how}: {row['message']}"]
    unperturbed_mean, perturbed_mean = row["means"][:2]
    largest = max(row["perturbed"].values())
    gaps = f"largest gap {largest:.2g}, without a perturbation {row['unperturbed']:.2g}"
    means = f"means {perturbed_mean:.2g} and {unperturbed_mean:.2g}"
    if _badness(row) == _BADNESS["wrong"]:
        return ["wrong", f"the replay is wrong {how}: {gaps}; {means}"]
    return ["doubtful", f"wrong by the rule on largest gaps {how}: {gaps}; {means}"]


def _badness(row: Mapping[str, Any]) -> int:
    if row["verdict"] == "wrong" and row["dtype"] != "float32" and row.get("means"):
        # A single token of a few hundred may be sensitive to rounding; inputs not the rollout's move the mean.
        unperturbed_mean, perturbed_mean = row["means"][:2]
        return _BADNESS["doubtful" if perturbed_mean <= 1.5 * unperturbed_mean else "wrong"]
    return _BADNESS.get(row["verdict"], _BADNESS["unknown"])


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: a row for each case, under the heading of its form."""
    lines = table_lines(_HEADINGS, [])
    heading = ""
    for row in rows:
        form = cases.form(row["type"])
        if form != heading:
            heading = form
            lines.append(f"| **{heading}** | | | | | | |")
        engine = row.get("engine_class", "–")
        cells = [row["type"], engine, ", ".join(_how(row)), *_figures(row), _outcome(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _how(row: Mapping[str, Any]) -> list[str]:
    """In what a case differs from the plain case of its type."""
    differences = []
    if row["dtype"] != "float32":
        differences.append(row["dtype"])
    if row["compiled"]:
        differences.append("compiled")
    if row["runner"] == "V2":
        differences.append("V2")
    if row["under"]:
        differences.append(row["under"])
    if row["impl"] != "auto":
        differences.append(f"model_impl={row['impl']}")
    return differences


def _figures(row: Mapping[str, Any]) -> list[str]:
    """The cells of the largest gaps."""
    if "unperturbed" not in row:
        return ["–"] * 3
    gaps = [row["unperturbed"], max(row["perturbed"].values()), row["unreplayed"]]
    return [f"{gap:.1e}" for gap in gaps]


def _outcome(row: Mapping[str, Any]) -> str:
    """The cell of the verdict."""
    if row["verdict"] == "right" and "unperturbed" in row:
        return "right"
    if "unperturbed" in row:
        return f"**{row['verdict']}**{_means(row)}"
    in_bfloat16 = f"; in bfloat16: {row['bfloat16']}" if row.get("bfloat16") else ""
    return f"{row['verdict']}: {row['message']}{in_bfloat16}".replace("|", "\\|").replace("<", "&lt;")


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """The types counted by the verdict of their plain case; "right" apart by whether the gap is below 1e-4."""
    plain_rows = [row for row in rows if cases.key(row) in _PLAIN]
    right = [row for row in plain_rows if row["verdict"] == "right"]
    above = [row for row in right if max(row["perturbed"].values()) > TOLERANCE]
    in_bfloat16 = sum(row["dtype"] != "float32" for row in above)
    phrases = [
        f"{len(plain_rows)} types in their plain case: {len(right) - len(above)} replay to {TOLERANCE:g}",
        f"{len(above)} are above it, as their unperturbed mismatch is ({in_bfloat16} of them ran in bfloat16 alone)",
    ]
    other_verdicts = Counter(row["verdict"] for row in plain_rows if row["verdict"] != "right")
    phrases += [f"{count} {verdict}" for verdict, count in other_verdicts.most_common()]
    return "; ".join(phrases) + "."


def _means(row: Mapping[str, Any]) -> str:
    """A largest gap is one token's; the means tell whether the others agree."""
    if not row.get("means"):
        return ""
    return " (means " + ", ".join(f"{mean:.1e}" for mean in row["means"]) + ")"


def write_page() -> None:
    """Puts the table into the page, between its two marks."""
    rows = published()
    machines = "; or ".join(dict.fromkeys(row["machine"] for row in rows))
    origin = f"{machines}. The commit of each row is in docs/models.json."
    write_between(PAGE, _BEGIN, _END, f"{origin}\n\n{summary(rows)}\n\n{table(rows)}")
