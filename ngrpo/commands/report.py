# SPDX-License-Identifier: Apache-2.0
"""Writes the report of a result again, byte for byte.

A result is a folder of ngrpo compare, diagnose or train, or the results.json,
diagnosis.json or summary.json in it. The report is written next to it, as
report.html, unless --out says otherwise. For a training without summary.json,
as after a full disk, that file is written too.

Several folders of ngrpo eval, or their samples.jsonl, are compared with the
first one, problem by problem, in a table on the screen. NAME=FILE names one.

examples
  ngrpo report runs/compare
  ngrpo report runs/compare/results.json --out report.html
  ngrpo report base=runs/eval-base trained=runs/eval-trained --tau 0.5
"""

from pathlib import Path

from ngrpo.commands.command_parser import CommandParser
from ngrpo.machine.console import Report
from perturbations.errors import UsageError


def parser() -> CommandParser:
    """The command's flags and its help."""
    parser = CommandParser("report")
    parser.add_argument("results", nargs="*", metavar="FOLDER|FILE", help="one result, or several files of samples")
    parser.add_argument("--out", metavar="FILE", help="the page [report.html next to the result]")
    parser.add_argument("--k", metavar="K,…", help="of Pass@k [1, 4, 8, 16, 32 up to the number of responses]")
    parser.add_argument("--tau", metavar="T,…", help="of Cover@τ [0.25, 0.5, 0.75, where there are several responses]")
    return parser


def run(argv: list[str], report: Report) -> int:
    """Runs the command."""
    args = parser().read(argv)
    if not args.results:
        raise UsageError(
            "ngrpo report: no result is given. Give one folder or file of ngrpo compare, diagnose or train, or files of"
            " samples of ngrpo eval. See ngrpo report --help."
        )
    sample_options = {name: getattr(args, name) for name in ("k", "tau") if getattr(args, name)}
    first = Path(args.results[0]).expanduser()
    if len(args.results) > 1 or first.suffix == ".jsonl" or (first / "evaluation.json").is_file():
        from ngrpo.workbench.evaluate import sample_comparison

        if args.out:
            raise UsageError(
                "--out is for the page of one result; files of samples give a table on the screen. Leave it out."
            )
        print("\n".join(sample_comparison.lines(args.results, report=report, **sample_options)))
        return 0
    if sample_options:
        option = next(iter(sample_options))
        raise UsageError(f"--{option} is for files of samples, and {args.results[0]} is none. Leave --{option} out.")
    _write_report(first, args.out, report)
    return 0


def _write_report(result: Path, out: str | None, report: Report) -> None:
    """Writes the page of one result; for a training without summary.json, that file too."""
    from ngrpo.config.run import FILE
    from ngrpo.workbench.report import load, summary, write_report

    if (result / FILE).is_file() and not (result / "summary.json").exists():
        summary.write_again(result)
        report(f"summary of the logged steps: {result / 'summary.json'}")
    data, file = load(result)
    target = Path(out).expanduser() if out else file.parent / "report.html"
    if target.is_dir():
        target = target / "report.html"
    if target.resolve() == file.resolve():
        raise UsageError(f"--out {out} is the result itself. Name another file.")
    write_report(data, target)
    report(f"report of {file}: {target}")
