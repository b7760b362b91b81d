"""``ngrpo report``: makes the report of a result file again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from perturbations.options import nearest

_USAGE = """\
usage: ngrpo report FOLDER|results.json|diagnosis.json [--out FILE]

Makes the report again, the same to the byte. It is written beside the file, as report.html, unless --out says
otherwise."""


def run(words: list[str], report: Callable[[str], None]) -> int:
    """Runs the command.

    Args:
        words: what follows ``ngrpo report``.
        report: takes lines for the screen.

    Returns:
        The exit code.

    Raises:
        ValueError: for bad input, or a report that cannot be written.
    """
    if words in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    places, out = _parse(words)
    if len(places) != 1:
        raise ValueError(f"ngrpo report takes one folder or file, got {len(places)}.\n{_USAGE}")
    from ngrpo.report.load import load
    from ngrpo.report.page import write_diagnosis, write_report

    kind, data, file = load(Path(places[0]).expanduser())
    target = Path(out).expanduser() if out else file.parent / "report.html"
    if target.is_dir():
        target = target / "report.html"
    if target.resolve() == file.resolve():
        raise ValueError(f"--out {out} is the result itself. Name another file.")
    (write_report if kind == "comparison" else write_diagnosis)(data, target)
    report(f"report of {file}: {target}")
    return 0


def _parse(words: list[str]) -> tuple[list[str], str | None]:
    places: list[str] = []
    out: str | None = None
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            places.append(word)
        elif name != "--out":
            raise ValueError(f"unknown flag {name!r} of ngrpo report.{nearest(name, ['--out', '--help'])}\n{_USAGE}")
        else:
            out = value if equals else next(rest, "")
            if not out:
                raise ValueError("--out needs a file, for example --out report.html.")
    return places, out
