# SPDX-License-Identifier: Apache-2.0
"""Runs a module of the tests in a process of its own, for what would change this one; or in two at once, as ranks."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import psutil

from ngrpo.machine.hardware.processes import free_port
from tests.conftest import ROOT

RESULT = "RESULT "
"""How the line of a result begins, among all that engines print."""


VISION = ROOT / ".venv" / "vision"
NO_VISION = not VISION.is_dir() and find_spec("torchvision") is None


UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""Of a process whose engine decodes little: it would compile its draws for eight seconds. Other engines' tests do."""


def with_vision() -> dict[str, str]:
    """For an uncompiled process that finds the project, and torchvision where `make vision` put it."""
    paths = [str(ROOT)]
    if VISION.is_dir():
        paths.append(str(VISION))
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return {"PYTHONPATH": os.pathsep.join(paths), **UNCOMPILED}


def run_module(module: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m module *arguments``, which must succeed; its time limit is for a hang."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done


def result_of(module: str, *arguments: str, env: dict[str, str] | None = None) -> Any:
    """The JSON on the line of the result that ``python -m module *arguments`` printed."""
    return printed_result(run_module(module, *arguments, env=env))


def printed_result(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON on the line of the result that a process printed."""
    result = next(line for line in done.stdout.splitlines() if line.startswith(RESULT))
    return json.loads(result.removeprefix(RESULT))


def run_two_ranks(module: str, *arguments: str, timeout: float = 240.0, ranks: int = 2) -> list[str]:
    """What each rank of ``python -m module RANK PORT *arguments`` printed; all must succeed.

    A rank that makes fewer collective calls than the other hangs until ``timeout``, or aborts.
    """
    port = str(free_port())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), port, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout)[0] for rank in processes]
    finally:
        for rank in processes:
            rank.kill()
    assert [rank.returncode for rank in processes] == [0] * ranks, "".join(output[-3000:] for output in outputs)
    return outputs


def become_rank(rank: int, port: str, ranks: int) -> None:
    """Gives this process the environment of one of several ranks on a CPU; it precedes the import of DeepSpeed."""
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }


def alive(process: int) -> bool:
    """Whether there is such a process that has not ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def ends(process: int, within: float = 30.0) -> bool:
    """Whether a process is gone within some seconds."""
    until = time.monotonic() + within
    while alive(process) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(process)
