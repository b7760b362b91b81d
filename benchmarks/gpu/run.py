# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of a stage in processes of their own, and keeps their figures in one file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.gpu.stages import MINUTES, Case
from benchmarks.machine import ROOT, commit

DONE, FAILED, SKIPPED, LEFT = "done", "failed", "skipped", "not run"
_ERROR_LINES, _ERROR_CHARACTERS = 12, 1500


class Results:
    """The result file: one part for each stage, with the machine and the figures of each case."""

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self._path, self._machine = path, machine
        self.parts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def part(self, letter: str, title: str, report: Callable[[str], None]) -> dict[str, Any]:
        """A stage's cases; those of another machine, or of other versions, are not kept beside this one's."""
        part = self.parts.get(letter)
        if part is not None and part["machine"] != self._machine:
            report(f"{letter}  figures of another machine, or of other versions, are replaced")
            part = None
        self.parts[letter] = part or {"title": title, "machine": self._machine, "cases": {}}
        return self.parts[letter]["cases"]

    def write(self) -> None:
        """Writes the file, whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(dict(sorted(self.parts.items())), indent=1) + "\n")
        draft.replace(self._path)


def run_stage(
    letter: str,
    module: ModuleType,
    results: Results,
    *,
    rehearse: bool,
    force: bool = False,
    minutes: float = MINUTES,
    report: Callable[[str], None] = print,
) -> bool:
    """Runs the cases that are not done yet.

    Args:
        letter: the stage's key in the results.
        module: the stage: ``TITLE``, ``cases(rehearse)``, ``measure(arguments)``, and ``AT_ONCE`` where cases may run
            beside each other.
        results: where figures go, after each case.
        rehearse: the miniature for a CPU.
        force: run cases again that are done.
        minutes: a case that runs at that time is ended, and none begins after it.
        report: is called with a line for the user.

    Returns:
        Whether no case has failed.
    """
    cases = results.part(letter, module.TITLE, report)
    deadline = time.monotonic() + 60.0 * minutes

    waiting: list[Case] = []
    for case in module.cases(rehearse):
        if cases.get(case.name, {}).get("state") == DONE and not force:
            report(f"{letter}  {case.name}: done before (--force runs it again)")
        elif case.missing():
            cases[case.name] = {"state": SKIPPED, "reason": case.missing()}
            report(f"{letter}  {case.name}: skipped: {case.missing()}")
        else:
            waiting.append(case)
    results.write()
    with ThreadPoolExecutor(1 if rehearse else getattr(module, "AT_ONCE", 1)) as pool:
        running = {pool.submit(_run, module.__name__, case, deadline): case for case in waiting}
        for future in as_completed(running):
            name = running[future].name
            cases[name] = future.result()
            results.write()
            report(f"{letter}  {name}: {_line(cases[name])}")
    return not any(outcome["state"] == FAILED for outcome in cases.values())


def _line(outcome: dict[str, Any]) -> str:
    if outcome["state"] == LEFT:
        return f"{LEFT}: {outcome['reason']}"
    text = f"{outcome['state']} after {outcome['seconds']:.0f} s, {len(outcome['rows'])} rows"
    return text if outcome["state"] == DONE else f"{text}: {outcome['error'].splitlines()[-1]}"


def _run(module: str, case: Case, deadline: float) -> dict[str, Any]:
    """Runs one case until it ends, or until the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        return {"state": LEFT, "reason": "the stage's time was over; run the stage again"}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows", Path(folder) / "log"
        rows.touch()
        command = [sys.executable, "-m", "benchmarks.gpu.case", module, str(rows), json.dumps(dict(case.arguments))]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **case.env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(timeout=left)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
        records = [json.loads(line) for line in rows.read_text().splitlines()]
        outcome: dict[str, Any] = {
            "state": DONE,
            "seconds": round(time.monotonic() - began, 1),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": commit(),
        }
        broken = [row for row in records if "error" in row]
        if status is None:
            outcome |= {"state": FAILED, "error": f"ended after {time.monotonic() - began:.0f} s, its stage's time"}
        elif status != 0:
            outcome |= {"state": FAILED, "error": _last_lines(log.read_text(errors="replace"), status)}
        elif broken or not records:
            outcome |= {"state": FAILED, "error": broken[0]["error"] if broken else "it gave no figures"}
        return {**outcome, "rows": records}


def _end(process: subprocess.Popen) -> None:
    """Ends what a case has started, which is in a session of its own; an interrupted training ends its Ray itself."""
    for kind, seconds in ((signal.SIGINT, 20.0), (signal.SIGKILL, 20.0)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, kind)
            process.wait(seconds)


def _last_lines(log: str, status: int) -> str:
    """The end of what a case printed: a traceback, or whatever stood there when a signal ended it."""
    lines: Sequence[str] = [line for line in log.splitlines() if line.strip()][-_ERROR_LINES:]
    text = "\n".join(lines)[-_ERROR_CHARACTERS:]
    return text if text and status == 1 else f"{text}\nexit status {status}".lstrip()
