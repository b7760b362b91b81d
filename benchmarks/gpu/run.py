# SPDX-License-Identifier: Apache-2.0
"""Runs stages in processes of their own, within a limit; each writes its figures as soon as they are there.

``python -m benchmarks.gpu.run MODULE FILE ARGUMENTS`` is such a process: a row of figures is a line of JSON in FILE.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import Stage
from benchmarks.machine import ROOT, commit
from perturbations.errors import UsageError

_LOGS = ROOT / "runs" / "gpu"
_GRACE = 15.0  # seconds for a stage to end after an interrupt: a training ends its Ray
_SLACK = 3.0  # a stage may take that many times its estimate
_SLACK_OF_REHEARSAL = 10.0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keeps a second call from running beside this one: stages that share a GPU slow each other down.

    Raises ``UsageError`` where another call has begun.
    """
    _LOGS.mkdir(parents=True, exist_ok=True)
    with (_LOGS / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another call of benchmarks.gpu is running in {ROOT}, and stages beside each other would slow each"
                " other down. Wait until it has ended, or end it: a later call goes on where it stopped."
            ) from None
        yield


def run(
    stages: Iterable[Stage],
    path: Path,
    machine: dict[str, Any],
    *,
    limit: float,
    force: bool = False,
    report: Callable[[str], None] = print,
) -> bool:
    """Runs what is not done with these sources on this GPU; what has failed comes last.

    Args:
        stages: in their order.
        path: the file of figures. What a stage printed stays in runs/gpu.
        machine: of `benchmarks.machine.details`.
        limit: seconds for all.
        force: also what is done.
        report: is called with a line for the user.

    Returns:
        Whether nothing failed or was found wrong.
    """
    end = time.monotonic() + limit - _GRACE
    gpu = machine["gpu"] or {"name": f"no GPU, {machine['processor']}", "count": 1}
    figures = _Figures(path, {"gpu": gpu["name"], "sources": _sources()})
    good = True
    left = []
    for stage in sorted(stages, key=lambda stage: figures.state(stage) == "failed"):
        line = f"{gpu['name']}  {stage.name}: "
        seconds_left = end - time.monotonic()
        reason = stage.lacks(gpu["count"])
        if figures.state(stage) == "done" and not force:
            report(f"{line}done before: {figures.outcome(stage)['verdict']}")
        elif reason:
            report(f"{line}skipped: {reason}")
            continue
        elif seconds_left < stage.seconds:
            left.append(stage.name)
            estimate = f"it takes about {stage.seconds:.0f} s, {max(seconds_left, 0):.0f} s are left"
            report(f"{line}not started: {estimate}")
            continue
        else:
            figures.begin(stage, commit=commit(), machine=_line(machine))
            slack = _SLACK if machine["gpu"] else _SLACK_OF_REHEARSAL
            _run(stage, min(seconds_left, slack * stage.seconds), seconds_left, figures)
            outcome = figures.outcome(stage)
            report(f"{line}{outcome['verdict']} ({outcome['seconds']:.0f} s)")
            if outcome["state"] == "cut off":
                left.append(stage.name)
        good &= figures.outcome(stage).get("good", True)
    if left:
        report(f"left for the next call: {', '.join(left)}")
    return good


class _Figures:
    """The file of figures, which is written at each change: an outcome for each stage, by its name."""

    def __init__(self, path: Path, conditions: dict[str, str]) -> None:
        """
        Args:
            path: of the file.
            conditions: the GPU and the sources; outcomes of others count as not there.
        """
        self._path = path
        self._conditions = conditions
        self._outcomes: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def outcome(self, stage: Stage) -> dict[str, Any]:
        return self._outcomes[stage.name]

    def state(self, stage: Stage) -> str:
        """ "open", "cut off", "failed" or "done"."""
        outcome = self._outcomes.get(stage.name, {})
        has_conditions = self._conditions.items() <= outcome.items()
        return outcome["state"] if has_conditions else "open"

    def begin(self, stage: Stage, **origin: str) -> None:
        """Puts an outcome that holds should this program be killed in the place of an older one."""
        self._outcomes[stage.name] = {
            "about": stage.about,
            **self._conditions,
            **origin,
            "state": "cut off",
            "verdict": "cut off",
            "rows": [],
        }

    def update(self, stage: Stage, **fields: Any) -> None:
        """Writes fields of a stage's outcome, whole or not at all."""
        self._outcomes[stage.name] |= fields
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(self._outcomes, indent=1, ensure_ascii=False) + "\n")
        draft.replace(self._path)


def _run(stage: Stage, timeout: float, seconds_left: float, figures: _Figures) -> None:
    """Runs a stage in a process of its own, and writes its rows as they come, and then its outcome.

    Args:
        stage: which one.
        timeout: seconds after which its process is ended.
        seconds_left: of the call; a stage that is ended with them is no failure.
        figures: are written.
    """
    began = time.monotonic()
    _LOGS.mkdir(parents=True, exist_ok=True)
    module = stage.module if "." in stage.module else f"benchmarks.gpu.{stage.module}"
    with tempfile.TemporaryDirectory() as folder, (_LOGS / f"{stage.name}.log").open("w+", errors="replace") as log:
        file = Path(folder) / "rows"
        file.touch()
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.run", module, str(file), json.dumps(dict(stage.arguments))],
            cwd=ROOT,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **stage.env},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        written = 0
        try:
            while process.poll() is None and time.monotonic() - began < timeout:
                time.sleep(0.2)
                size = file.stat().st_size
                if size > written:
                    written = size
                    figures.update(stage, rows=_rows(file))
            status = process.poll()
        finally:
            _end(process)
        log.seek(0)
        log_lines = [line for line in log.read().splitlines() if line.strip()]
        rows = _rows(file)
        seconds = time.monotonic() - began
    if status is None:
        was_last = timeout == seconds_left
        state = "cut off" if was_last else "failed"
        outcome = {"state": state, "good": was_last, "verdict": f"cut off after {timeout:.0f} s"}
    else:
        outcome = _outcome(module, status, rows, log_lines)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    figures.update(stage, **outcome, rows=rows, seconds=round(seconds, 1), date=date)


def _outcome(module: str, status: int, rows: list[dict[str, Any]], log_lines: list[str]) -> dict[str, Any]:
    """The outcome of a stage whose process has ended by itself."""
    errors = [row["error"] for row in rows if "error" in row]
    if status == 0 and rows and not errors:
        good, verdict = import_module(module).judge(rows)
        return {"state": "done", "good": good, "verdict": verdict}
    reasons = errors or log_lines or ["it gave no figures"]
    ended = "" if status in (0, 1) else f"exit status {status}, "
    verdict = f"failed: {ended}{reasons[-1][:300]}"
    return {"state": "failed", "good": False, "verdict": verdict, "log": log_lines[-12:]}


def _rows(file: Path) -> list[dict[str, Any]]:
    """The lines that are complete."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def _sources() -> str:
    """A name for the code that is measured, also outside of a git checkout."""
    files: list[Path] = []
    for folder in ("ngrpo", "perturbations", "benchmarks"):
        files += (ROOT / folder).rglob("*.py")
    content = b"".join(file.read_bytes() for file in sorted(files))
    return hashlib.sha256(content).hexdigest()[:12]


def _line(machine: dict[str, Any]) -> str:
    gpu = machine["gpu"]
    device = "no GPU"
    if gpu:
        device = f"{gpu['name']}, {gpu['memory_gib']} GiB, driver {gpu['driver']}, CUDA {gpu['cuda']}"
    versions = ", ".join(f"{name} {release}" for name, release in machine["versions"].items())
    return f"{device}; {machine['processor']}, {machine['cores']} cores; {versions}"


def _end(process: subprocess.Popen) -> None:
    """Ends whatever a stage has started: it has a session of its own."""
    for kind in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, kind)
            process.wait(_GRACE)


def _outlive_nobody(parent: int) -> None:
    """Ends the whole stage soon after the program that started it, which may have been killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGINT)
    time.sleep(_GRACE)
    os.killpg(0, signal.SIGKILL)


def main(module: str, file: str, arguments: str) -> None:
    """Measures."""
    threading.Thread(target=_outlive_nobody, args=(os.getppid(),), daemon=True).start()
    with Path(file).open("a", encoding="utf-8") as rows:
        for row in import_module(module).measure(json.loads(arguments)):
            print(json.dumps(row), file=rows, flush=True)


if __name__ == "__main__":
    status = 0
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        status = 1
    # vLLM's engines and Triton's interpreter do not end well together with the interpreter of Python.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
