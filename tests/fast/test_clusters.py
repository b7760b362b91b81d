# SPDX-License-Identifier: Apache-2.0
"""examples/clusters: what each script starts, without a cluster; nothing loads or starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ngrpo import flags
from ngrpo.openrlhf_flags import Flags
from ngrpo.train import checked_flags

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "clusters"
STUB = "#!/usr/bin/env python3\nimport json, sys\nprint(json.dumps(sys.argv))\n"


def called(tmp_path: Path, script: str, program: str, *words: str, **env: str) -> list[str]:
    """The words with which a script starts a program, which a stub stands for."""
    stub = tmp_path / "bin" / program
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(STUB)
    stub.chmod(0o755)
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': 1.0}\n")
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"input": "What is 2 + 2?", "label": "4"}\n' * 8)
    given = {"MODEL": "smollm2-135m", "DATA": str(data), "REWARD": str(reward), **env}
    path = os.pathsep.join([str(stub.parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(FOLDER / script), *words],
        env={**os.environ, "PATH": path, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)[1:]


@pytest.mark.parametrize(
    ("script", "env", "gpus"),
    [
        ("hybrid.sh", {}, 8),
        ("hybrid.sh", {"NODES": "2", "GPUS_PER_NODE": "4"}, 8),
        ("disaggregated.sh", {"TRAINER_GPUS": "2", "ENGINES": "6"}, 8),
        ("asynchronous.sh", {}, 8),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_placement_is_accepted(
    tmp_path: Path, script: str, env: dict[str, str], gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "first-node:6379")  # so that nothing is asked of this machine's CUDA
    words = called(tmp_path, script, "ngrpo", **env)[1:]
    command = flags.parse([*words, "--data.input_key", "input", "--hardware", "cuda"])
    asked = Flags(checked_flags(command, tmp_path / "run").words)
    assert command.spec is not None and command.spec["name"] == "neighbor"

    def number(flag: str) -> int:
        return int(asked.value(flag) or 0)

    trainer = number("--actor.num_nodes") * number("--actor.num_gpus_per_node")
    engines = number("--vllm.num_engines") * number("--vllm.tensor_parallel_size")
    assert number("--ref.num_nodes") * number("--ref.num_gpus_per_node") == trainer, "they share their GPUs"
    if asked.has("--train.colocate_all"):
        assert trainer == engines == gpus
    else:
        assert trainer + engines == gpus and asked.has("--train.colocate_actor_ref")
    assert asked.has("--train.async_enable") is (script == "asynchronous.sh")


def test_a_job_takes_the_placement_along(tmp_path: Path) -> None:
    words = called(tmp_path, "ray_job.sh", "ray", "examples/clusters/hybrid.sh", "--train.seed", "7", RUN_DIR="/r")
    assert words[:4] == ["job", "submit", "--address", "http://127.0.0.1:8265"]
    environment = json.loads(words[words.index("--runtime-env-json") + 1])
    assert environment["env_vars"]["MODEL"] == "smollm2-135m" and ".venv" in environment["excludes"]
    assert words[words.index("--") + 1 :] == [
        *["bash", "examples/clusters/hybrid.sh", "--run-dir", "/r"],
        *["--train.seed", "7"],
    ]


def test_the_rayjob_is_whole() -> None:
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    assert job["kind"] == "RayJob" and "examples/clusters/hybrid.sh" in job["spec"]["entrypoint"]
    assert set(yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]) == {"MODEL", "DATA", "REWARD"}
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {group["template"]["spec"]["containers"][0]["image"] for group in groups}
    assert len(images) == 1
    for group in groups:
        pod = group["template"]["spec"]
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    from ngrpo.versions import versions

    assert cluster["rayVersion"] == versions(None)["ray"]


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.s*")))
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity", "warning", str(FOLDER / script)], check=True)
