# SPDX-License-Identifier: Apache-2.0
"""Ray clusters on this machine: a job with a user's own file; nodes without the project, its plugin, GPUs or life.

Slow: `make test-all`. Each node has one declared GPU, so trainer and engine are on different nodes.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.pipeline.harness import (
    GAP,
    ROOT,
    SMALL,
    assert_nothing_runs,
    environment_with_scripts,
    train,
    words_of,
)

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Ray's note of the newest cluster's address on this machine."""
NEIGHBOR = ["--perturbation", "neighbor", "--algo.kl.init_coef", "0"]


@contextmanager
def node(*flags: str, gpus: int = 1, within: Sequence[str] = ()) -> Iterator[None]:
    """A node as `ray start` makes it. At the end it is killed, so Ray's note says that it still runs.

    Args:
        flags: of `ray start`.
        gpus: how many GPUs the node declares.
        within: words before the command, which start it elsewhere or with other variables.
    """
    resources = ["--num-cpus", str(2 + gpus), "--num-gpus", str(gpus)]
    with subprocess.Popen(
        [*within, str(BIN / "ray"), "start", "--block", *resources, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment_with_scripts(), "RAY_DISABLE_IMPORT_WARNING": "1"},
    ) as process:
        assert process.stdout is not None
        assert any("Ray runtime started" in line for line in process.stdout)
        processes = [process, *psutil.Process(process.pid).children(recursive=True)]
        try:
            yield
        finally:
            for running in processes:
                running.send_signal(signal.SIGKILL)


@contextmanager
def head(gpus: int = 1) -> Iterator[str]:
    """The first node, as its address. Ray's note of the cluster is removed at the end."""
    flags = ["--head", "--port", "0", "--dashboard-port", "0", "--include-dashboard", "true"]
    flags += ["--object-store-memory", str(1 << 28)]
    try:
        with node(*flags, gpus=gpus):
            yield address_of_head()
    finally:
        CURRENT_CLUSTER.unlink(missing_ok=True)


def address_of_head(within: float = 30.0) -> str:
    """The newest cluster's address. Ray notes it after its first node has said that it has started."""
    until = time.monotonic() + within
    while not (CURRENT_CLUSTER.exists() and CURRENT_CLUSTER.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    return CURRENT_CLUSTER.read_text().strip()


def second(address: str, within: Sequence[str] = ()) -> AbstractContextManager[None]:
    """A further node of the cluster at the address."""
    return node("--address", address, "--object-store-memory", str(1 << 28), within=within)


def dashboard(address: str) -> str:
    """Where the cluster takes jobs."""
    import ray

    ray.init(address=address, log_to_driver=False)
    try:
        return f"http://{ray._private.worker.global_worker.node.address_info['webui_url']}"
    finally:
        ray.shutdown()


def run(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command that has ended, from a folder, with these further variables."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**environment_with_scripts(), **env},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


def own_perturbation(folder: Path, smollm2: str) -> list[str]:
    """The words of a small run from this folder, to which the file of its perturbation is copied."""
    folder.mkdir()
    shutil.copy(ROOT / "examples" / "custom_perturbation.py", folder)
    options = {
        "--perturbation": "./custom_perturbation.py:RunnerUp",
        "--perturbation.rate": "0.5",
        "--perturbation.share": "0.4",
        "--hardware": "cpu",
        "--model": smollm2,
        **SMALL,
        "--algo.kl.init_coef": "0",
    }
    return [*words_of(options), "--perturbation.strict"]


def assert_trained(folder: Path, result: subprocess.CompletedProcess[str]) -> None:
    """The run with the user's own perturbation was exact."""
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["perturbation"]["share"] == 0.4
    assert len(summary["steps"]) == 2
    for step in summary["steps"]:
        assert 0.3 < step["rate"] < 0.7
        assert step["gap_perturbed_mean"] <= GAP


def test_two_nodes_and_a_file_of_ones_own(tmp_path: Path, smollm2: str) -> None:
    """Plugin, file, configuration and relative paths reach trainer and engine, of which each node has one."""
    folder = tmp_path / "project"
    words = own_perturbation(folder, smollm2)
    with head() as address, second(address):
        result = run(folder, str(BIN / "ngrpo"), "train", *words, "--run-dir", "run", RAY_ADDRESS=address)
        assert_trained(folder, result)


def test_a_job(tmp_path: Path, smollm2: str) -> None:
    """By examples/clusters/ray_job.sh: the folder with the file travels. One node: two would share its copy here."""
    folder = tmp_path / "project"
    words = own_perturbation(folder, smollm2)
    script = ROOT / "examples" / "clusters" / "ray_job.sh"
    with head(gpus=2) as address:
        variables = {"RAY_API_SERVER_ADDRESS": dashboard(address), "RUN_DIR": str(folder / "run")}
        result = run(folder, "bash", str(script), *words, **variables)
    assert_trained(folder, result)
    assert "succeeded" in (result.stdout + result.stderr).lower()


def hiding(*folders: Path) -> list[str]:
    """Words before a node's command: for it alone these folders are empty, by a mount in a namespace of its own."""
    mounts = " && ".join(f"mount -t tmpfs none {folder}" for folder in folders)
    attempt = subprocess.run(["unshare", "--mount", "sh", "-c", mounts], capture_output=True, check=False)
    if attempt.returncode:
        pytest.skip("needs the right to mount in a namespace of its own (unshare --mount)")
    return ["unshare", "--mount", "sh", "-c", mounts + ' && exec "$@"', "sh"]


def test_a_path_that_a_node_lacks(tmp_path: Path, smollm2: str) -> None:
    """Of a reward function, a model and a run, each in turn in a folder that the second node sees empty."""
    folder = tmp_path / "only_here"
    folder.mkdir()
    (folder / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': 0.0}\n")
    shutil.copytree(smollm2, folder / "model")
    paths = {
        "--reward.remote_url": folder / "reward.py",
        "--model": folder / "model",
        "--run-dir": folder / "run",
    }
    with head() as address, second(address, hiding(folder)):
        for flag, path in paths.items():
            options = {
                **SMALL,
                "--hardware": "cpu",
                "--model": smollm2,
                "--run-dir": str(tmp_path / "run"),
                "--perturbation": "neighbor",
                flag: str(path),
            }
            result = run(tmp_path, str(BIN / "ngrpo"), "train", *words_of(options), RAY_ADDRESS=address)
            assert result.returncode == 2, (result.stdout + result.stderr)[-6000:]
            error = result.stderr.strip().splitlines()[-1]
            named_flag = "--actor.model_name_or_path" if flag == "--model" else flag
            assert f"{named_flag} {path}: the cluster's node " in error
            assert "that all nodes share" in error


def test_a_node_without_the_project(tmp_path: Path, smollm2: str) -> None:
    # Also an installed copy of the project, which Python's isolated mode finds, is hidden.
    where = [sys.executable, "-I", "-c", "import ngrpo; print(ngrpo.__file__)"]
    installed = subprocess.run(where, capture_output=True, text=True, check=False)
    roots = {ROOT, *(Path(file).parents[1] for file in installed.stdout.split())}
    packages = [root / name for root in roots for name in ("ngrpo", "perturbations")]
    within = hiding(*packages)
    started = time.monotonic()
    with head() as address, second(address, within):
        result = train(tmp_path, smollm2, *NEIGHBOR, env={"RAY_ADDRESS": address})
    assert result.returncode == 1, result.stdout[-6000:]
    assert time.monotonic() - started < 300, result.stdout[-6000:]
    error = re.search(r"training failed: a node of the cluster is without ngrpo.*", result.stdout)
    assert error is not None, result.stdout[-3000:]
    assert "on every node (docs/install.md)" in error[0], result.stdout[-3000:]
    assert "Traceback" not in result.stdout[error.start() :]


def test_a_plugin_that_is_missing_on_one_of_two_nodes(tmp_path: Path, smollm2: str) -> None:
    """Each node has a rank of the actor and an engine; that one engine of two is perturbed is not enough."""
    flags = [*NEIGHBOR, "--train.colocate_all", "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"]
    with head() as address, second(address, ["env", "VLLM_PLUGINS=some_other_plugin"]):
        result = train(tmp_path / "run", smollm2, *flags, env={"RAY_ADDRESS": address})
    assert result.returncode == 1
    for message in ("training failed", "vLLM worker 0 runs unperturbed", "pip install ngrpo"):
        assert message in result.stdout[-4000:]
    assert "Global step" not in result.stdout
    assert_nothing_runs(tmp_path)


def test_a_cluster_with_too_few_gpus_and_one_that_is_gone(tmp_path: Path, smollm2: str) -> None:
    """OpenRLHF would wait for the first forever, and Ray for the second for minutes."""
    with head(gpus=0):
        result = train(tmp_path / "few", smollm2, *NEIGHBOR)
        note = CURRENT_CLUSTER.read_text()
    assert result.returncode == 1, result.stdout[-3000:]
    assert "has 0 GPUs, and this run places 2" in result.stdout
    assert "ray start --head --num-gpus 2" in result.stdout
    assert "RAY_ADDRESS=local" in result.stdout
    assert "Traceback" not in result.stdout
    try:
        CURRENT_CLUSTER.write_text(note)
        result = train(tmp_path / "gone", smollm2, *NEIGHBOR)
        assert result.returncode == 0
        assert "is gone (`ray stop` forgets it); starting Ray here" in result.stdout
    finally:
        CURRENT_CLUSTER.unlink(missing_ok=True)
