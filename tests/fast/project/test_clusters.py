# SPDX-License-Identifier: Apache-2.0
"""examples/clusters: what each script starts, without a cluster; nothing loads or starts."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from ngrpo.config import parse
from ngrpo.machine.upstream.openrlhf_flags import Flags

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "clusters"
# In one call of the system, since a script starts several at once.
STUB = "#!/usr/bin/env python3\nimport json, os, sys\nos.write(1, (json.dumps(sys.argv) + '\\n').encode())\n"


def called(tmp_path: Path, script: str, programs: dict[str, str], *words: str, **env: str) -> list[list[str]]:
    """The words with which a script starts programs, for which stubs stand."""
    for program, text in programs.items():
        stub = tmp_path / "bin" / program
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(text)
        stub.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(FOLDER / script), *words],
        env={**os.environ, "PATH": path, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line)[1:] for line in done.stdout.splitlines()]


def test_a_job_takes_the_words_along(tmp_path: Path) -> None:
    flags = ("--config", "recipe.yaml", "--train.seed", "7")
    (words,) = called(tmp_path, "ray_job.sh", {"ray": STUB}, *flags, RUN_DIR="/r")
    assert words[:4] == ["job", "submit", "--address", "http://127.0.0.1:8265"]
    assert ".venv" in json.loads(words[words.index("--runtime-env-json") + 1])["excludes"]
    expected = ["ngrpo", "train", "--run-dir", "/r", "--config", "recipe.yaml", "--train.seed", "7"]
    assert words[words.index("--") + 1 :] == expected


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_slurm_job(tmp_path: Path, nodes: int) -> None:
    """Each step says how many CPUs it has, which it does not inherit; one node needs no second step."""
    programs = {"srun": STUB, "scontrol": "#!/bin/sh\necho first\necho second\n", "sleep": "#!/bin/sh\n"}
    env = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "8"}
    env |= {"SLURM_CPUS_PER_TASK": "32", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_ID": "1234567", "RUN_DIR": ""}
    steps = called(tmp_path, "slurm.sbatch", programs, "--train.seed", "7", **env)
    assert len(steps) == nodes + 1
    assert all(step[1:3] == ["--cpus-per-task", "32"] for step in steps)
    training = next(step[step.index("ngrpo") :] for step in steps if "ngrpo" in step)
    run_dir = ["--ckpt.load_enable", "--run-dir", "runs/slurm-1234567"]
    assert training == ["ngrpo", "train", *run_dir, "--train.seed", "7"]
    port = next(step[step.index("--port") + 1] for step in steps if "--port" in step)
    other = called(tmp_path, "slurm.sbatch", programs, **{**env, "SLURM_JOB_ID": "1234568", "RUN_DIR": "runs/first"})
    assert port not in [step[step.index("--port") + 1] for step in other if "--port" in step], "jobs share a node"
    assert any("runs/first" in step for step in other), "a job goes on in the folder of the one before"
    assert 20000 <= int(port) < 32768


def test_the_image_has_what_is_called_and_compiled_in_it() -> None:
    """KubeRay's default probes are wget commands; DeepSpeed's fused Adam includes the headers of `cuda.HEADERS`."""
    text = (FOLDER.parents[1] / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    installed = re.search(r"apt-get install ([^&]*)", text)
    assert installed is not None
    libraries = ("cuda-cudart", "libcublas", "libcusparse", "libcusolver")
    packages = {"wget", *(f"{name}-dev-$release" for name in libraries)}
    assert packages <= set(installed[1].split())


def test_the_rayjob_is_whole() -> None:
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    assert job["kind"] == "RayJob"
    program, command, *words = shlex.split(job["spec"]["entrypoint"])
    assert program == "ngrpo"
    assert command == "train"
    copied = [word.replace("/workspace/examples", str(FOLDER.parent)) for word in words]
    parsed = parse.run_config(parse.with_files(copied))
    assert parsed.spec is not None
    assert parsed.spec["name"] == "neighbor"
    assert Flags(parsed.openrlhf).has("--train.colocate_all")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {group["template"]["spec"]["containers"][0]["image"] for group in groups}
    assert len(images) == 1
    for group in groups:
        pod = group["template"]["spec"]
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    from ngrpo.machine.upstream.versions import versions

    assert cluster["rayVersion"] == versions(None)["ray"]
