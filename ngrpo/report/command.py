# SPDX-License-Identifier: Apache-2.0
"""``ngrpo report``: makes the report of a result file again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ngrpo.command_parser import CommandParser
from perturbations.errors import UsageError

_HELP = """\
A result is a folder of ngrpo compare, diagnose or train, or the results.json,
diagnosis.json or summary.json in it. The report is written beside it, as
report.html, unless --out says otherwise.

examples
  ngrpo report runs/compare
  ngrpo report runs/compare/results.json --out report.html
"""


def run(words: list[str], report: Callable[[str], None]) -> int:
    """Runs the command.

    Args:
        words: what follows ``ngrpo report``.
        report: takes lines for the screen.

    Returns:
        The exit code.

    Raises:
        UsageError: for bad input, or a report that cannot be written.
    """
    parser = CommandParser("report", "Makes the report of a result again, the same to the byte.", _HELP)
    parser.add_argument("results", nargs="*", metavar="FOLDER|FILE", help="one result")
    parser.add_argument("--out", metavar="FILE", help="the page [report.html beside the result]")
    if words in (["-h"], ["--help"]):
        print(parser.format_help(), end="")
        return 0
    given = parser.read(words)
    if len(given.results) != 1:
        raise UsageError(f"ngrpo report takes one folder or file, got {len(given.results)}. See ngrpo report --help.")
    from ngrpo.report.load import load
    from ngrpo.report.page import write_diagnosis, write_report, write_training

    kind, data, file = load(Path(given.results[0]).expanduser())
    target = Path(given.out).expanduser() if given.out else file.parent / "report.html"
    if target.is_dir():
        target = target / "report.html"
    if target.resolve() == file.resolve():
        raise UsageError(f"--out {given.out} is the result itself. Name another file.")
    {"comparison": write_report, "diagnosis": write_diagnosis, "training run": write_training}[kind](data, target)
    report(f"report of {file}: {target}")
    return 0
