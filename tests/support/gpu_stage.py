# SPDX-License-Identifier: Apache-2.0
"""A stage of test_gpu_script.py: little is imported, since each runs in a process of its own."""

import os
import time
from collections.abc import Iterator
from typing import Any


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs in a process of its own."""
    kind = arguments["kind"]
    yield {"perturbation": kind, "environment": os.environ.get("SEEN"), "pid": os.getpid(), "rate": None}
    if kind == "error":
        raise RuntimeError("something is wrong\nwith the device")
    if kind == "bad row":
        yield {"error": "this engine did not start"}
    if kind == "killed":
        os.kill(os.getpid(), 9)
    if kind == "slow":
        time.sleep(600)


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    return rows[0]["perturbation"] != "wrong", f"{len(rows)} rows"
