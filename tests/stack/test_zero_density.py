"""Densities on two ranks under ZeRO-3, one of which may have no perturbed position."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fast.test_density_loss import EVERY

pytestmark = pytest.mark.stack
ROOT = Path(__file__).resolve().parents[2]


def test_two_ranks_gather_alike_for_every_density() -> None:
    """In processes of their own; a rank that made fewer calls than the other would hang or abort."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "tests.stack.zero_density"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    for rank, output in enumerate(outputs):
        assert output.count(f"rank {rank}: ") == len(EVERY)
