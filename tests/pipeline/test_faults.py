# SPDX-License-Identifier: Apache-2.0
"""Faults in the middle of a real run: each ends it with a message that says what happened (docs/troubleshooting.md)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.pipeline.harness import assert_nothing_runs, begun, small, train

pytestmark = pytest.mark.slow

FLAGS = ["--perturbation", "gumbel", "--ckpt.save_steps", "1"]
REWARD = """
def reward_func(queries, prompts, labels, **_):
    raise KeyError("no such label")
"""


def test_a_reward_function_that_fails(tmp_path: Path, smollm2: str) -> None:
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    result = train(tmp_path / "run", smollm2, *FLAGS, "--reward.remote_url", str(file))
    assert result.returncode == 1
    for told in ("raised KeyError: 'no such label'", "prompt:", "answer:"):
        assert told in result.stdout[-3000:]
    assert_nothing_runs(tmp_path)


def test_an_engine_that_is_killed(tmp_path: Path, smollm2: str) -> None:
    log = tmp_path / "log"
    with begun(small(tmp_path / "run", smollm2, *FLAGS, "--log-file", str(log))) as process:
        until = time.monotonic() + 300
        while "Global step 1" not in (log.read_text(errors="replace") if log.is_file() else ""):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        engines = [p for p in psutil.process_iter(["cmdline"]) if "ray::RolloutRayActor" in " ".join(p.info["cmdline"])]
        assert engines
        for engine in engines:
            engine.send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "training failed" in output and "died" in output
    assert (tmp_path / "run" / "checkpoints" / "_actor" / "latest").is_file(), "what was saved is still there"
    assert_nothing_runs(tmp_path)


@pytest.fixture
def two_nodes() -> Iterator[str]:
    """The address of a Ray cluster of two nodes on this machine; vLLM loads no plugin of ours on the second."""
    from ray.cluster_utils import Cluster

    node = {"num_gpus": 1, "object_store_memory": 128 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 2})
    cluster.add_node(**node, num_cpus=1, env_vars={"VLLM_PLUGINS": "some_other_plugin"})
    yield cluster.address
    cluster.shutdown()


def test_a_plugin_that_is_missing_on_one_of_two_nodes(tmp_path: Path, smollm2: str, two_nodes: str) -> None:
    """Each node has a rank of the actor and an engine; that one engine of two is perturbed is not enough."""
    flags = ["--train.colocate_all", "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"]
    flags += ["--algo.kl.init_coef", "0"]
    result = train(tmp_path / "run", smollm2, *FLAGS, *flags, env={"RAY_ADDRESS": two_nodes})
    assert result.returncode == 1
    for told in ("training failed", "vLLM worker 0 runs unperturbed", "pip install ngrpo"):
        assert told in result.stdout[-4000:]
    assert "Global step" not in result.stdout
    assert_nothing_runs(tmp_path)


def test_a_full_disk_at_the_checkpoint(tmp_path: Path, smollm2: str, small_disk: Callable[[str], Path]) -> None:
    result = train(tmp_path / "run", smollm2, *FLAGS, "--ckpt.path", str(small_disk("200m")))
    assert result.returncode == 1
    assert "training failed" in result.stdout[-3000:]
    assert "disk" in result.stdout[-3000:].lower() or "space" in result.stdout[-3000:].lower()
    assert_nothing_runs(tmp_path)


@contextmanager
def cluster() -> Iterator[None]:
    """A Ray cluster without GPUs, as `ray start` begins it here; killed at the end, so that Ray believes in it."""
    ray = str(Path(sys.executable).with_name("ray"))
    flags = ["--head", "--block", "--port", "0", "--num-cpus", "2", "--num-gpus", "0", "--include-dashboard", "false"]
    with subprocess.Popen([ray, "start", *flags], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and any("Ray runtime started" in line for line in process.stdout)
        below = psutil.Process(process.pid).children(recursive=True)
        try:
            yield
        finally:
            for one in (process, *below):
                one.kill()


def test_a_cluster_with_too_few_gpus_and_one_that_is_gone(tmp_path: Path, smollm2: str) -> None:
    """OpenRLHF would wait for the first forever, and Ray for the second for minutes."""
    flags = ["--perturbation", "neighbor", "--algo.kl.init_coef", "0"]
    known = Path("/tmp/ray/ray_current_cluster")
    try:
        with cluster():
            result = train(tmp_path / "few", smollm2, *flags)
            assert result.returncode == 1, result.stdout[-3000:]
            assert "has 0 GPUs, and this run places 2" in result.stdout and "Traceback" not in result.stdout
            assert "ray start --head --num-gpus 2" in result.stdout and "RAY_ADDRESS=local" in result.stdout
        assert known.is_file()
        result = train(tmp_path / "gone", smollm2, *flags)
        assert result.returncode == 0 and "is gone (`ray stop` forgets it); starting Ray here" in result.stdout
    finally:
        known.unlink(missing_ok=True)


@pytest.mark.parametrize(("sent", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGKILL, -9, "")])
def test_a_training_that_is_ended(tmp_path: Path, smollm2: str, sent: signal.Signals, code: int, word: str) -> None:
    """SIGTERM, as Slurm and Kubernetes send it, leaves the summary and the report; no process outlives even SIGKILL."""
    log, run = tmp_path / "log", tmp_path / "run"
    log.write_text("of an earlier run\n")
    flags = [*FLAGS, "--vllm.num_engines", "2", "--data.max_samples", "64", "--log-file", str(log)]
    with begun(small(run, smollm2, *flags)) as process:
        until = time.monotonic() + 300
        while "Global step 1" not in log.read_text(errors="replace"):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        time.sleep(3.0)
        process.send_signal(sent)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert_nothing_runs(tmp_path)
    assert log.read_text(errors="replace").startswith("of an earlier run\n")
    assert (run / "checkpoints" / "_actor" / "latest").is_file()
    if word:
        assert word in output and "--ckpt.load_enable continues from the last checkpoint" in output
        assert json.loads((run / "summary.json").read_text())["steps"][0]["step"] == 1
        assert (run / "report.html").is_file()
