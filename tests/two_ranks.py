# SPDX-License-Identifier: Apache-2.0
"""Runs a module in two processes at once, as two ranks that talk over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.conftest import ROOT


def run_two_ranks(module: str, *arguments: str, timeout: float = 240.0, ranks: int = 2) -> list[str]:
    """What each rank of ``python -m module RANK PORT *arguments`` printed; all must succeed.

    A rank that makes fewer collective calls than the other hangs until ``timeout``, or aborts.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
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
