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
    here = {"gpu": gpu["name"], "sources": _sources()}
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    good, left = True, []

    def state(stage: Stage) -> str:
        outcome = found.get(stage.name, {})
        return outcome["state"] if here.items() <= outcome.items() else "open"

    def say(stage: Stage, text: str) -> None:
        report(f"{here['gpu']}  {stage.name}: {text}")

    for stage in sorted(stages, key=lambda stage: state(stage) == "failed"):
        if state(stage) == "done" and not force:
            say(stage, f"done before: {found[stage.name]['verdict']}")
        elif lacks := stage.lacks(gpu["count"]):
            say(stage, f"skipped: {lacks}")
            continue
        elif (seconds := end - time.monotonic()) < stage.seconds:
            left.append(stage.name)
            say(stage, f"not started: it takes about {stage.seconds:.0f} s, {max(seconds, 0):.0f} s are left")
            continue
        else:
            outcome: dict[str, Any] = {"about": stage.about, **here, "commit": commit(), "machine": _line(machine)}
            found[stage.name] = outcome | {"state": "cut off", "verdict": "cut off", "rows": []}

            def keep(**parts: Any) -> None:
                found[stage.name] |= parts  # noqa: B023 -- called within this turn of the loop alone
                _write(path, found)

            slack = _SLACK if machine["gpu"] else 10.0
            _run(stage, min(seconds, slack * stage.seconds), seconds, keep)
            outcome = found[stage.name]
            say(stage, f"{outcome['verdict']} ({outcome['seconds']:.0f} s)")
            left += [stage.name] * (outcome["state"] == "cut off")
        good &= found[stage.name].get("good", True)
    if left:
        report(f"left for the next call: {', '.join(left)}")
    return good


def _run(stage: Stage, timeout: float, left: float, keep: Callable[..., None]) -> None:
    began = time.monotonic()
    _LOGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, (_LOGS / f"{stage.name}.log").open("w+", errors="replace") as log:
        file = Path(folder) / "rows"
        file.touch()
        module = stage.module if "." in stage.module else f"benchmarks.gpu.{stage.module}"
        words = [module, str(file), json.dumps(dict(stage.arguments))]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.run", *words],
            cwd=ROOT,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **stage.env},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        seen = 0
        try:
            while process.poll() is None and time.monotonic() - began < timeout:
                time.sleep(0.2)
                if (size := file.stat().st_size) > seen:
                    seen = size
                    keep(rows=_rows(file))
            status = process.poll()
        finally:
            _end(process)
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
        rows, seconds = _rows(file), time.monotonic() - began
    outcome: dict[str, Any] = {"state": "failed", "good": False, "rows": rows, "seconds": round(seconds, 1)}
    errors = [row["error"] for row in rows if "error" in row]
    if status is None:
        outcome |= {"state": "cut off" if timeout == left else "failed", "verdict": f"cut off after {timeout:.0f} s"}
        outcome["good"] = timeout == left
    elif status or errors or not rows:
        ended = f"exit status {status}, " if status not in (0, 1) else ""
        outcome["verdict"] = f"failed: {ended}{(errors or lines or ['it gave no figures'])[-1][:300]}"
        outcome["log"] = lines[-12:]
    else:
        good, verdict = import_module(module).judge(rows)
        outcome |= {"state": "done", "good": good, "verdict": verdict}
    keep(**outcome, date=datetime.now(timezone.utc).isoformat(timespec="seconds"))


def _rows(file: Path) -> list[dict[str, Any]]:
    """The lines that are complete."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def _write(path: Path, found: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    draft.replace(path)


def _sources() -> str:
    """A name for the code that is measured, also outside of a git checkout."""
    files = [file for part in ("ngrpo", "perturbations", "benchmarks") for file in (ROOT / part).rglob("*.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:12]


def _line(machine: dict[str, Any]) -> str:
    gpu, versions = machine["gpu"], ", ".join(f"{name} {release}" for name, release in machine["versions"].items())
    device = "{name}, {memory_gib} GiB, driver {driver}, CUDA {cuda}".format(**gpu) if gpu else "no GPU"
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
