# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine: a job with a user's own file, and a node without the project.

Slow: `make test-all`. Each node has one counted GPU, so trainer and engine stand on different ones.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.pipeline.harness import ROOT, SMALL, train

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
DAMP = '''
from dataclasses import dataclass

import torch
from perturbations import InputEdit, Perturbation, Proposal, Step, option, register


@register("damp")
@dataclass(frozen=True, kw_only=True)
class Damp(Perturbation):
    """Mixes the sampled token with the likeliest one."""

    paper = "none"
    share: float = option(0.3, "weight of the likeliest token", low=0.0, high=1.0)

    def propose(self, step: Step) -> Proposal:
        ids = torch.stack([step.sampled, step.logits.argmax(-1)], dim=-1)
        weights = step.logits.new_tensor([1 - self.share, self.share]).expand(ids.shape)
        return Proposal(InputEdit(ids, weights), step.sampled)
'''


@contextmanager
def node(*flags: str, within: Sequence[str] = ()) -> Iterator[str]:
    """A node as `ray start` makes it; its output, up to where it runs."""
    words = [*within, str(BIN / "ray"), "start", "--block", "--num-cpus", "3", "--num-gpus", "1", *flags]
    env = {**os.environ, "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]), "RAY_DISABLE_IMPORT_WARNING": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "Ray runtime started" in line:
                break
        below = [process, *psutil.Process(process.pid).children(recursive=True)]
        try:
            yield said
        finally:
            for one in below:
                one.send_signal(signal.SIGKILL)


@contextmanager
def head() -> Iterator[str]:
    """The first node; its address."""
    known = Path("/tmp/ray/ray_current_cluster")
    try:
        flags = ["--head", "--port", "0", "--dashboard-port", "0", "--include-dashboard", "true"]
        with node(*flags, "--object-store-memory", str(1 << 28)):
            yield known.read_text().strip()
    finally:
        known.unlink(missing_ok=True)


def second(address: str, within: Sequence[str] = ()) -> object:
    return node("--address", address, "--object-store-memory", str(1 << 28), within=within)


def dashboard(address: str) -> str:
    import ray

    ray.init(address=address, log_to_driver=False)
    try:
        return f"http://{ray._private.worker.global_worker.node.address_info['webui_url']}"
    finally:
        ray.shutdown()


def test_a_job_on_two_nodes_with_a_file_of_ones_own(tmp_path: Path, smollm2: str) -> None:
    """Handed over by examples/clusters/ray_job.sh; the file of the perturbation travels, and both nodes take part."""
    folder, run = tmp_path / "project", tmp_path / "run"
    folder.mkdir()
    (folder / "damp.py").write_text(DAMP)
    small = [word for pair in SMALL.items() for word in pair]
    words = ["--perturbation", "./damp.py:Damp", "--perturbation.rate", "0.5", "--perturbation.share", "0.4"]
    words += ["--hardware", "cpu", "--model", smollm2, *small, "--algo.kl.init_coef", "0", "--perturbation.strict"]
    with head() as address, second(address):
        done = subprocess.run(
            ["bash", str(ROOT / "examples" / "clusters" / "ray_job.sh"), *words],
            cwd=folder,
            env={
                **os.environ,
                "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
                "RAY_API_SERVER_ADDRESS": dashboard(address),
                "RUN_DIR": str(run),
            },
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["perturbation"]["share"] == 0.4 and len(summary["steps"]) == 2
    for step in summary["steps"]:
        assert 0.3 < step["rate"] < 0.7 and step["gap_perturbed_mean"] <= 0.1
    assert "succeeded" in output.lower()


def test_a_node_without_the_project(tmp_path: Path, smollm2: str) -> None:
    """On the second node the project's folders are empty, which a mount of its own shows it alone."""
    hide = " && ".join(f"mount -t tmpfs none {ROOT / name}" for name in ("ngrpo", "perturbations"))
    allowed = subprocess.run(["unshare", "--mount", "sh", "-c", hide], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip("needs the right to mount in a namespace of its own (unshare --mount)")
    within = ["unshare", "--mount", "sh", "-c", hide + ' && exec "$@"', "sh"]
    began = time.monotonic()
    with head() as address, second(address, within):
        env = {"RAY_ADDRESS": address}
        result = train(tmp_path, smollm2, "--perturbation", "neighbor", "--algo.kl.init_coef", "0", env=env)
    assert result.returncode == 1 and time.monotonic() - began < 300, result.stdout[-6000:]
    last = result.stdout.strip().splitlines()[-1]
    assert re.search(r"training failed: .*a node .* without ngrpo", last), result.stdout[-3000:]
    assert "install" in last
