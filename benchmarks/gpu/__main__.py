# SPDX-License-Identifier: Apache-2.0
"""Runs stages of benchmarks.gpu and prints their figures: python -m benchmarks.gpu --help"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.gpu.run import Results, run_stage
from benchmarks.gpu.stages import MINUTES, STAGES, stage
from benchmarks.gpu.tables import markdown
from benchmarks.machine import ROOT, details

FULL, MINIATURE = ROOT / "docs" / "gpu.json", ROOT / "runs" / "gpu-rehearsal.json"


def main(argv: list[str] | None = None) -> int:
    titles = "\n".join(f"  {letter}  {stage(letter).TITLE}" for letter in STAGES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=f"Figures of one GPU, in stages of at most {MINUTES:g} minutes:\n{titles}",
        epilog="A case that is done is not run again; one that has failed, or had no time, is.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stage", default=",".join(STAGES), help="letters, separated by commas [all]")
    parser.add_argument("--rehearse", action="store_true", help="everything in miniature, on a CPU, into another file")
    parser.add_argument("--force", action="store_true", help="run cases again that are done")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"limit of each stage [{MINUTES:g}]")
    parser.add_argument("--out", type=Path, help="the file of figures [docs/gpu.json; runs/gpu-rehearsal.json]")
    parser.add_argument("--print", action="store_true", dest="show", help="print the file as Markdown and end")
    options = parser.parse_args(argv)
    path = options.out or (MINIATURE if options.rehearse else FULL)
    if options.show:
        if not path.exists():
            parser.error(f"{path} does not exist: run the stages first")
        print(markdown(json.loads(path.read_text())))
        return 0
    letters = options.stage.split(",")
    unknown = [letter for letter in letters if letter not in STAGES]
    if unknown:
        parser.error(f"--stage {options.stage}: {unknown[0]!r} is none of {', '.join(STAGES)}")
    machine = details()
    if machine["gpu"] is None and not options.rehearse:
        parser.error("torch sees no CUDA device: --rehearse runs everything in miniature on a CPU")
    if machine["gpu"] is not None and options.rehearse:
        parser.error("--rehearse is for a machine without CUDA; here run the stages themselves")
    results, good = Results(path, machine), True
    for letter in letters:
        good &= run_stage(
            letter,
            stage(letter),
            results,
            rehearse=options.rehearse,
            force=options.force,
            minutes=options.minutes,
            report=lambda line: print(line, flush=True),
        )
    print(f"figures: {path}; as Markdown: python -m benchmarks.gpu --print --out {path}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
