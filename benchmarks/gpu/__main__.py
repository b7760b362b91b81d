# SPDX-License-Identifier: Apache-2.0
"""Runs stages of benchmarks.gpu and prints their verdicts: python -m benchmarks.gpu --help"""

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import alone, run
from benchmarks.gpu.stages import stages
from benchmarks.machine import ROOT, details
from benchmarks.markdown import table_lines
from perturbations.errors import UsageError

FULL = ROOT / "docs" / "gpu.json"
MINIATURE = ROOT / "runs" / "gpu-rehearsal.json"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Stages of figures of one GPU, the most valuable first. A call continues where the last one ended.",
    )
    parser.add_argument("--list", action="store_true", help="the stages, with their estimated seconds")
    parser.add_argument("--stage", help="names, separated by commas [all]")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for the whole call [600]")
    parser.add_argument("--rehearse", action="store_true", help="everything in miniature, on a CPU, into another file")
    parser.add_argument("--force", action="store_true", help="run stages again that are done")
    parser.add_argument("--out", type=Path, help="the file of figures [docs/gpu.json; runs/gpu-rehearsal.json]")
    parser.add_argument("--print", action="store_true", dest="show", help="print the file as Markdown and end")
    options = parser.parse_args(argv)
    path = options.out or (MINIATURE if options.rehearse else FULL)
    by_name = {stage.name: stage for stage in stages(options.rehearse)}
    if options.list:
        for name, stage in by_name.items():
            print(f"{stage.seconds:4.0f} s  {name:24s}  {stage.about}")
        return 0
    if options.show:
        if not path.exists():
            parser.error(f"{path} does not exist: run the stages first")
        print(markdown(json.loads(path.read_text())))
        return 0
    names = options.stage.split(",") if options.stage else list(by_name)
    for name in names:
        if name not in by_name:
            parser.error(f"--stage {options.stage}: {name!r} is none of {', '.join(by_name)}")
    machine = details()
    if machine["gpu"] is None and not options.rehearse:
        parser.error("torch sees no CUDA device: --rehearse runs everything in miniature on a CPU")
    if machine["gpu"] is not None and options.rehearse:
        parser.error("--rehearse is for a machine without CUDA; here run the stages themselves")
    try:
        # A rehearsal measures no speed, so that several may run at once.
        lock = contextlib.nullcontext() if options.rehearse else alone()
        with lock:
            good = run(
                [by_name[name] for name in names],
                path,
                machine,
                limit=options.limit,
                force=options.force,
                report=lambda line: print(line, flush=True),
            )
    except UsageError as error:
        parser.error(str(error))
    print(f"figures: {path}; as Markdown: python -m benchmarks.gpu --print --out {path}")
    return 0 if good else 1


def markdown(outcomes: dict[str, Any]) -> str:
    """All figures, for a page: a heading for each stage, its verdict, a table of its rows, the machine."""
    return "\n\n".join(_section(name, outcome) for name, outcome in outcomes.items())


def _section(name: str, outcome: dict[str, Any]) -> str:
    columns = list(dict.fromkeys(column for row in outcome["rows"] for column in row))
    table = "No figures."
    if columns:
        body = [[_cell(row.get(column)) for column in columns] for row in outcome["rows"]]
        table = "\n".join(table_lines(columns, body))
    machine = f"{outcome['machine']}; commit {outcome['commit']}"
    return f"### {name}: {outcome['about']}\n\n{outcome['verdict']}\n\n{table}\n\n{machine}"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return format(value, ".3g") if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
