# SPDX-License-Identifier: Apache-2.0
"""A user's perturbation and gate in real processes: from a deleted file, and from a package that pip installed.

The engine is built by a process of its own, which runs this file in a folder with the user's.
"""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.stack.harness import chat_prompts, gaps, sample

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
OWN = "theirs/custom_perturbation.py"
OPTIONS = {"rate": 0.8, "share": 0.4, "gate": "theirs/custom_gate.py", "gate.half_life": 20.0}
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "their-dist"
version = "1.0"
[project.entry-points."ngrpo.perturbations"]
installed_runner_up = "their_package:RunnerUp"
[tool.setuptools]
py-modules = ["their_package"]
"""


def run(folder: Path, model: str) -> dict[str, Any]:
    """Runs this file in a folder with the examples' files and an installed package, in a fresh process."""
    theirs, project = folder / "theirs", folder / "project"
    for path in (theirs, project):
        path.mkdir()
    for name in ("custom_perturbation.py", "custom_gate.py"):
        shutil.copy(EXAMPLES / name, theirs)
    text = (EXAMPLES / "custom_perturbation.py").read_text().replace('"runner_up"', '"installed_runner_up"')
    (project / "their_package.py").write_text(text)
    (project / "pyproject.toml").write_text(PROJECT)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--target", "site", "./project"], cwd=folder, check=True)
    shutil.rmtree(project)
    done = subprocess.run(
        [sys.executable, "-m", "tests.stack.test_custom", model, "result"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return pickle.loads((folder / "result").read_bytes())


def test_a_deleted_file_and_an_installed_package_reach_vllms_processes(
    tmp_path: Path, model: str, hf_model: Any
) -> None:
    result = run(tmp_path, model)
    assert result["other process"] and result["seen"] == [result["expected"]]
    assert '"custom_perturbation.py:RunnerUp"' in result["expected"] and '"custom_gate.py:Fading"' in result["expected"]
    for way in ("file", "installed"):
        rollouts = result[way]
        assert sum(len(r.record) for r in rollouts) > 20
        assert gaps(hf_model, rollouts).max() <= 1e-4
        assert gaps(hf_model, rollouts, replay=False).max() > 0.1
        assert all(np.allclose(r.record.weights, [0.6, 0.4]) for r in rollouts)


def in_engine(model: str) -> dict[str, Any]:
    """An engine core with its worker in a fresh process; then that of an installed package, in the same one."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    from ngrpo.rollout import set_perturbation
    from perturbations import create

    spec = create(OWN, **OPTIONS).spec()
    shutil.rmtree("theirs")
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8}
    options |= {"kv_cache_memory_bytes": 1 << 26, "disable_log_stats": True, "distributed_executor_backend": "uni"}
    llm = LLM(model, **options, additional_config={"perturbation": spec})
    prompts = chat_prompts(llm)
    result = {
        "other process": type(llm.llm_engine.engine_core).__name__ == "SyncMPClient",
        "expected": create(**spec).fingerprint(),
        "seen": llm.llm_engine.collective_rpc("perturbation_fingerprint"),
        "file": sample(llm, prompts, max_tokens=32),
    }
    set_perturbation(llm, "installed_runner_up", rate=0.5, share=0.4)
    result["installed"] = sample(llm, prompts, max_tokens=32)
    return result


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(pickle.dumps(in_engine(sys.argv[1])))
