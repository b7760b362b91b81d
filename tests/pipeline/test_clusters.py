# SPDX-License-Identifier: Apache-2.0
"""Ray clusters on this machine: a job with a user's own file; nodes without the project, its plugin, GPUs or life.

Slow: `make test-all`. Each node has one counted GPU, so trainer and engine stand on different ones.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.pipeline.harness import GAP, ROOT, SMALL, assert_nothing_runs, train

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
KNOWN = Path("/tmp/ray/ray_current_cluster")
NEIGHBOR = ["--perturbation", "neighbor", "--algo.kl.init_coef", "0"]


@contextmanager
def node(*flags: str, gpus: int = 1, within: Sequence[str] = ()) -> Iterator[None]:
    """A node as `ray start` makes it; killed at the end, so that Ray believes in it."""
    words = [*within, str(BIN / "ray"), *f"start --block --num-cpus {2 + gpus} --num-gpus {gpus}".split(), *flags]
    env = {**os.environ, "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]), "RAY_DISABLE_IMPORT_WARNING": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        assert process.stdout is not None and any("Ray runtime started" in line for line in process.stdout)
        below = [process, *psutil.Process(process.pid).children(recursive=True)]
        try:
            yield
        finally:
            for one in below:
                one.send_signal(signal.SIGKILL)


@contextmanager
def head(gpus: int = 1) -> Iterator[str]:
    """The first node; its address. Ray's note of it is left until the end."""
    try:
        flags = ["--head", "--port", "0", "--dashboard-port", "0", "--include-dashboard", "true"]
        with node(*flags, "--object-store-memory", str(1 << 28), gpus=gpus):
            yield KNOWN.read_text().strip()
    finally:
        KNOWN.unlink(missing_ok=True)


def second(address: str, within: Sequence[str] = ()) -> object:
    return node("--address", address, "--object-store-memory", str(1 << 28), within=within)


def dashboard(address: str) -> str:
    import ray

    ray.init(address=address, log_to_driver=False)
    try:
        return f"http://{ray._private.worker.global_worker.node.address_info['webui_url']}"
    finally:
        ray.shutdown()


def own(folder: Path, smollm2: str) -> list[str]:
    """The words of a small run with a perturbation of one's own, which lies in the folder."""
    folder.mkdir()
    shutil.copy(ROOT / "examples" / "custom_perturbation.py", folder)
    small = [word for pair in SMALL.items() for word in pair]
    words = ["--perturbation", "./custom_perturbation.py:RunnerUp"]
    words += ["--perturbation.rate", "0.5", "--perturbation.share", "0.4"]
    words += ["--hardware", "cpu", "--model", smollm2, *small, "--algo.kl.init_coef", "0"]
    return [*words, "--perturbation.strict", "--run-dir", str(folder / "run")]


def check(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["perturbation"]["share"] == 0.4 and len(summary["steps"]) == 2
    for step in summary["steps"]:
        assert 0.3 < step["rate"] < 0.7 and step["gap_perturbed_mean"] <= GAP


def run(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    whole = {**os.environ, "PATH": path, **env}
    return subprocess.run(words, cwd=folder, env=whole, capture_output=True, text=True, timeout=1500, check=False)


def test_two_nodes_and_a_file_of_ones_own(tmp_path: Path, smollm2: str) -> None:
    """Plugin, file, configuration and relative paths reach trainer and engine, of which each node has one."""
    folder = tmp_path / "project"
    words = [*own(folder, smollm2)[:-1], "run"]
    with head() as address, second(address):
        check(folder, run(folder, str(BIN / "ngrpo"), "train", *words, RAY_ADDRESS=address))


def test_a_job(tmp_path: Path, smollm2: str) -> None:
    """By examples/clusters/ray_job.sh: the folder with the file travels. One node: two would share its copy here."""
    folder = tmp_path / "project"
    words = own(folder, smollm2)
    with head(gpus=2) as address:
        script = str(ROOT / "examples" / "clusters" / "ray_job.sh")
        place = {"RAY_API_SERVER_ADDRESS": dashboard(address), "RUN_DIR": words.pop()}
        done = run(folder, "bash", script, *words[:-1], **place)
    check(folder, done)
    assert "succeeded" in (done.stdout + done.stderr).lower()


def hiding(*folders: Path) -> list[str]:
    """Words before a node's command: for it alone these folders are empty, by a mount in a namespace of its own."""
    hide = " && ".join(f"mount -t tmpfs none {folder}" for folder in folders)
    if subprocess.run(["unshare", "--mount", "sh", "-c", hide], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount in a namespace of its own (unshare --mount)")
    return ["unshare", "--mount", "sh", "-c", hide + ' && exec "$@"', "sh"]


def test_a_path_that_a_node_lacks(tmp_path: Path, smollm2: str) -> None:
    folder = tmp_path / "only_here"
    folder.mkdir()
    (folder / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': 0.0}\n")
    shutil.copytree(smollm2, folder / "model")
    small = [word for pair in SMALL.items() for word in pair]
    with head() as address, second(address, hiding(folder)):
        for flag, name in (("--reward.remote_url", "reward.py"), ("--model", "model"), ("--run-dir", "run")):
            given = {"--model": smollm2, "--run-dir": str(tmp_path / "run"), flag: str(folder / name)}
            words = [*small, "--hardware", "cpu", *(word for pair in given.items() for word in pair)]
            words += ["--perturbation", "neighbor"]
            done = run(tmp_path, str(BIN / "ngrpo"), "train", *words, RAY_ADDRESS=address)
            assert done.returncode == 2, (done.stdout + done.stderr)[-6000:]
            said, flag = done.stderr.strip().splitlines()[-1], flag.replace("--model", "--actor.model_name_or_path")
            assert f"{flag} {folder / name}: the cluster's node " in said and "that all nodes share" in said


def test_a_node_without_the_project(tmp_path: Path, smollm2: str) -> None:
    found = "import ngrpo; print(ngrpo.__file__)"
    installed = subprocess.run([sys.executable, "-I", "-c", found], capture_output=True, text=True, check=False)
    folders = {ROOT, *(Path(line).parents[1] for line in installed.stdout.split())}
    within = hiding(*(folder / name for folder in folders for name in ("ngrpo", "perturbations")))
    began = time.monotonic()
    with head() as address, second(address, within):
        env = {"RAY_ADDRESS": address}
        result = train(tmp_path, smollm2, *NEIGHBOR, env=env)
    assert result.returncode == 1 and time.monotonic() - began < 300, result.stdout[-6000:]
    said = re.search(r"training failed: a node of the cluster is without ngrpo.*", result.stdout)
    assert said is not None and "on every node (docs/install.md)" in said[0], result.stdout[-3000:]
    assert "Traceback" not in result.stdout[said.start() :]


def test_a_plugin_that_is_missing_on_one_of_two_nodes(tmp_path: Path, smollm2: str) -> None:
    """Each node has a rank of the actor and an engine; that one engine of two is perturbed is not enough."""
    flags = [*NEIGHBOR, "--train.colocate_all", "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"]
    with head() as address, second(address, ["env", "VLLM_PLUGINS=some_other_plugin"]):
        result = train(tmp_path / "run", smollm2, *flags, env={"RAY_ADDRESS": address})
    assert result.returncode == 1
    for told in ("training failed", "vLLM worker 0 runs unperturbed", "pip install ngrpo"):
        assert told in result.stdout[-4000:]
    assert "Global step" not in result.stdout
    assert_nothing_runs(tmp_path)


def test_a_cluster_with_too_few_gpus_and_one_that_is_gone(tmp_path: Path, smollm2: str) -> None:
    """OpenRLHF would wait for the first forever, and Ray for the second for minutes."""
    with head(gpus=0):
        result = train(tmp_path / "few", smollm2, *NEIGHBOR)
        note = KNOWN.read_text()
    assert result.returncode == 1, result.stdout[-3000:]
    assert "has 0 GPUs, and this run places 2" in result.stdout and "Traceback" not in result.stdout
    assert "ray start --head --num-gpus 2" in result.stdout and "RAY_ADDRESS=local" in result.stdout
    try:
        KNOWN.write_text(note)
        result = train(tmp_path / "gone", smollm2, *NEIGHBOR)
        assert result.returncode == 0 and "is gone (`ray stop` forgets it); starting Ray here" in result.stdout
    finally:
        KNOWN.unlink(missing_ok=True)
