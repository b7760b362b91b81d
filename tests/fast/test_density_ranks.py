"""Two ranks gather and reduce alike for every density, also where one of them has no perturbed position."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.conftest import ROOT
from tests.fast.test_density_loss import EVERY, name_of


def test_two_ranks_call_alike() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.fast.two_ranks", str(rank), port],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    for output in outputs:
        assert output.split() == [name_of(perturbation) for perturbation in EVERY]
