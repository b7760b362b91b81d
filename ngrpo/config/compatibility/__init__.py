# SPDX-License-Identifier: Apache-2.0
"""Refused pairs of features: one table for a start, a dry run, a comparison, vLLM's engine, verl and TRL.

Each place that is checked has a file with its rows: training_rows.py (with one_update_rows.py, centering_rows.py and
openrlhf_rows.py), hardware_rows.py, engine_rows.py (of vLLM), verl_rows.py and trl_rows.py. `ngrpo list compatibility`
prints all of them, and ``python -m ngrpo.config.compatibility`` writes docs/compatibility.md.
"""

from collections.abc import Iterable

from ngrpo.config.compatibility.engine_rows import ENGINE
from ngrpo.config.compatibility.hardware_rows import CPU_MODEL, HARDWARE
from ngrpo.config.compatibility.row import Row
from ngrpo.config.compatibility.training_rows import TRAINING
from ngrpo.config.compatibility.trl_rows import TRL
from ngrpo.config.compatibility.verl_rows import VERL, VERL_ADVANTAGE
from ngrpo.config.feature_kinds import MODEL, Combination
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

__all__ = ["CPU_MODEL", "ENGINE", "HARDWARE", "TABLE", "TRAINING", "TRL", "VERL", "VERL_ADVANTAGE", "Row"]

TABLE: dict[str, tuple[Row, ...]] = {
    "A training": TRAINING,
    "The hardware": HARDWARE,
    "A perturbed engine of vLLM": ENGINE,
    "Verl": (*VERL_ADVANTAGE, *VERL),
    "TRL": TRL,
}
"""All rows, by the heading of their section on the page."""


def check(rows: Iterable[Row], combination: Combination) -> None:
    """Raises ``UsageError`` with a line for each row of which ``combination`` has both features."""
    problems = []
    for row in rows:
        what = row.what.shown(combination)
        conflict = row.conflicts_with.shown(combination)
        if what and conflict:
            problems.append(f"{what} cannot be used with {conflict}: {row.why}. Fix: {row.fix}.")
    if problems:
        raise UsageError("\n".join(problems))


def check_model(model: str, hardware: str) -> None:
    """Raises ``UsageError`` for a model that vLLM cannot run on a hardware."""
    check(CPU_MODEL, Combination(flags=Flags((MODEL, model)), hardware=hardware))


_INTRODUCTION = """\
# Refused combinations

`ngrpo train`, its `--dry-run`, `ngrpo compare` (each arm), vLLM's engine, verl and TRL look at this table before
anything starts. `ngrpo list compatibility` prints it. Every pair that is not here may be combined.
`--…WORD…` is any flag with this word in its name.
"""


def page() -> str:
    """The table in Markdown."""
    lines = [_INTRODUCTION]
    for heading, rows in TABLE.items():
        lines += [f"## {heading}", "", "| | cannot be used with | why | instead |", "| --- | --- | --- | --- |"]
        lines += [f"| {row.what.name} | {row.conflicts_with.name} | {row.why} | {row.fix} |" for row in rows]
        lines.append("")
    return "\n".join(lines)
