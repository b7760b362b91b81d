# SPDX-License-Identifier: Apache-2.0
"""examples/clusters: what each script starts, without a cluster; nothing loads or starts."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ngrpo.config import parse
from ngrpo.upstream.openrlhf_flags import Flags

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "clusters"
STUB = "#!/usr/bin/env python3\nimport json, sys\nprint(json.dumps(sys.argv))\n"


def called(tmp_path: Path, script: str, program: str, *words: str, **env: str) -> list[str]:
    """The words with which a script starts a program, which a stub stands for."""
    stub = tmp_path / "bin" / program
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(STUB)
    stub.chmod(0o755)
    path = os.pathsep.join([str(stub.parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(FOLDER / script), *words],
        env={**os.environ, "PATH": path, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)[1:]


def test_a_job_takes_the_words_along(tmp_path: Path) -> None:
    words = called(tmp_path, "ray_job.sh", "ray", "--config", "recipe.yaml", "--train.seed", "7", RUN_DIR="/r")
    assert words[:4] == ["job", "submit", "--address", "http://127.0.0.1:8265"]
    assert ".venv" in json.loads(words[words.index("--runtime-env-json") + 1])["excludes"]
    expected = ["ngrpo", "train", "--run-dir", "/r", "--config", "recipe.yaml", "--train.seed", "7"]
    assert words[words.index("--") + 1 :] == expected


def test_the_rayjob_is_whole() -> None:
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    assert job["kind"] == "RayJob"
    program, command, *words = shlex.split(job["spec"]["entrypoint"])
    assert (program, command) == ("ngrpo", "train")
    copied = [word.replace("/workspace/examples", str(FOLDER.parent)) for word in words]
    parsed = parse.run_config(parse.with_files(copied))
    assert parsed.spec is not None and parsed.spec["name"] == "neighbor"
    assert Flags(parsed.openrlhf).has("--train.colocate_all")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {group["template"]["spec"]["containers"][0]["image"] for group in groups}
    assert len(images) == 1
    for group in groups:
        pod = group["template"]["spec"]
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    from ngrpo.upstream.versions import versions

    assert cluster["rayVersion"] == versions(None)["ray"]


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.s*")))
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity", "warning", str(FOLDER / script)], check=True)
