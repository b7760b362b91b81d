# SPDX-License-Identifier: Apache-2.0
"""The result file as Markdown, for docs/figures.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu.stages import STAGES

# Heading, key of a row, format.
_Column = tuple[str, str, str]
_PAIRS: tuple[_Column, ...] = (("ratio", "ratio", ".3f"), ("from", "lowest", ".3f"), ("to", "highest", ".3f"))
_COLUMNS: dict[str, tuple[_Column, ...]] = {
    "a": (
        ("model", "model", ""),
        ("runner", "runner", ""),
        ("precision", "dtype", ""),
        ("graphs", "graphs", ""),
        ("async", "async", ""),
        ("perturbation", "perturbation", ""),
        ("rate", "rate", "g"),
        ("tokens", "tokens", "d"),
        ("max", "max", ".1e"),
        ("mean", "mean", ".1e"),
        ("unreplayed", "unreplayed", ".2f"),
    ),
    "b": (
        ("model", "model", ""),
        ("runner", "runner", ""),
        ("perturbation", "perturbation", ""),
        ("rate", "rate", "g"),
        ("sequences", "sequences", "d"),
        ("stock tok/s", "stock", ".0f"),
        *_PAIRS,
    ),
    "c": (
        ("table", "table", ""),
        ("metric", "metric", ""),
        ("first s", "first_s", ".2f"),
        ("then s", "then_s", ".2f"),
        ("peak MiB", "peak_mib", ".0f"),
        ("kept MiB", "kept_mib", ".0f"),
    ),
    "d": (
        ("model", "model", ""),
        ("attention", "attention", ""),
        ("layout", "layout", ""),
        ("record", "record", ""),
        ("plain s", "plain_s", ".3f"),
        *_PAIRS,
    ),
    "e": (
        ("perturbation", "perturbation", ""),
        ("steps", "steps", "d"),
        ("reward, first 5", "reward_first", ".3f"),
        ("last 5", "reward_last", ".3f"),
        ("gap plain", "gap_plain", ".5f"),
        ("gap perturbed", "gap_perturbed", ".5f"),
        ("s/step", "step_s", ".2f"),
    ),
    "f": (
        ("runner", "runner", ""),
        ("perturbation", "perturbation", ""),
        ("rate", "rate", "g"),
        ("sequences", "sequences", "d"),
        ("launches", "launches", ".1f"),
        ("copies to device", "to_device", ".1f"),
        ("to host", "to_host", ".1f"),
        ("waits", "waits", ".1f"),
        ("item()", "items", ".1f"),
        ("nonzero", "nonzero", ".1f"),
        ("Python lines a request", "loops", ".1f"),
        ("µs", "microseconds", ".0f"),
    ),
}


def markdown(parts: dict[str, Any]) -> str:
    """All stages: a heading, the machine, the table, and what failed or was skipped."""
    missing = [letter for letter in STAGES if letter not in parts]
    texts = ["\n".join(_part(letter, parts[letter])) for letter in STAGES if letter in parts]
    return "\n\n".join([*texts, f"Not run: {', '.join(missing)}."] if missing else texts)


def _part(letter: str, part: dict[str, Any]) -> list[str]:
    cases = part["cases"]
    lines = [f"### ({letter}) {part['title']}", "", _machine(part["machine"]), ""]
    rows = [row for case in cases.values() for row in case.get("rows", ()) if "error" not in row]
    if rows:
        lines += _table([_cells(row, _COLUMNS[letter]) for row in rows], [title for title, _, _ in _COLUMNS[letter]])
    for name, case in cases.items():
        reason = case.get("error") or case.get("reason")
        if reason:
            lines += ["", f"{name}: {case['state']}: {reason.splitlines()[-1]}"]
    commits = sorted({case["commit"] for case in cases.values() if "commit" in case})
    return [*lines, "", f"Commit: {', '.join(commits) or 'none'}."]


def _machine(machine: dict[str, Any]) -> str:
    gpu, versions = machine["gpu"], ", ".join(f"{name} {release}" for name, release in machine["versions"].items())
    host = f"{machine['processor']}, {machine['cores']} cores"
    if gpu is None:
        return f"No GPU: {host}; {versions}."
    return f"{gpu['name']}, {gpu['memory_gib']} GiB, driver {gpu['driver']}, CUDA {gpu['cuda']}; {host}; {versions}."


def _cells(row: dict[str, Any], columns: Iterable[_Column]) -> list[str]:
    return ["–" if row.get(key) is None else format(row[key], form) for _, key, form in columns]


def _table(rows: Sequence[Sequence[str]], headings: Sequence[str]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
