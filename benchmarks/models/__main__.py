# SPDX-License-Identifier: Apache-2.0
"""Is the replay exact on a model type? ``make models``, or for types of one's own

    python -m benchmarks.models TYPE … [--impl auto transformers] [--runner V1 V2] [--compiled] [--dtype bfloat16]

A tiny random model is built for each type (transformers' ``model_type``), stock vLLM rolls out with it,
unperturbed and with three perturbations, and a forward of transformers replays: |Δ log p| at worst. Without types, all
that docs/models.md lists, or with --again the given ones: each row is written to docs/models.json as soon as it is
there, and the page's table with it.
"""

import argparse
import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.command_line import parser_of
from benchmarks.machine import commit, describe
from benchmarks.models import cases
from benchmarks.models.case import Case, Engines, measure
from benchmarks.models.table import published, put, write_page


def main() -> int:
    options = _options()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    is_written = options.again or not options.types
    if options.log:
        options.log.mkdir(parents=True, exist_ok=True)
    any_wrong = False
    end = time.monotonic() + options.seconds
    with Engines() as engines:
        for case in _selected(options):
            if time.monotonic() > end:
                break
            row = measure(case, engines, options.limit, _log_file(options.log, case))
            print(line(row), flush=True)
            any_wrong = any_wrong or row["verdict"] == "wrong"
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    print(json.dumps(row), file=file)
            if is_written:
                put({**row, "machine": describe(), "commit": commit()})
                write_page()
    return int(any_wrong)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--impl", nargs="+", choices=["auto", "vllm", "transformers"], default=["auto"])
    parser.add_argument("--runner", nargs="+", choices=["V1", "V2"], default=["V1"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--under", choices=["preemption", "prefix caching"], default="")
    parser.add_argument("--json", type=Path, help="a file to which the rows of the given types are added as lines")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for an engine")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after these; continue later")
    parser.add_argument("--again", action="store_true", help="replace all rows of docs/models.json, or the TYPEs")
    parser.add_argument("--log", type=Path, help="folder for what the engines print")
    return parser.parse_args()


def _selected(options: argparse.Namespace) -> list[Case]:
    """The cases of the given types; or of all types those that are not measured, with ``--again`` all."""
    if not options.types:
        measured = set() if options.again else {cases.key(row) for row in published()}
        return [case for case in cases.in_order() if cases.key(vars(case)) not in measured]
    selection = []
    for name in options.types:
        for impl in options.impl:
            for runner in options.runner:
                selection.append(Case(name, impl, options.dtype, runner, options.compiled, options.under))
    return selection


def _log_file(folder: Path | None, case: Case) -> Path | None:
    if folder is None:
        return None
    name = "-".join(map(str, cases.key(vars(case))))
    return folder / f"{name}.log"


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    compiled = "compiled" if row["compiled"] else ""
    how = f"{compiled}{row['under']}"
    case = f"{row['type']:20s} {row['impl']:12s} {row['runner']} {row['dtype']:8s} {how:14s}"
    if "unperturbed" not in row:
        return f"{case} {row['verdict']}: {row.get('message', '')}"
    perturbed = max(row["perturbed"].values())
    gaps = f"{row['unperturbed']:.1e} {perturbed:.1e} {row['unreplayed']:.2f}"
    return f"{case} {row['engine_class']:34s} {gaps} {row['verdict']} ({row['seconds']:.0f} s)"


if __name__ == "__main__":
    raise SystemExit(main())
