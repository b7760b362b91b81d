# SPDX-License-Identifier: Apache-2.0
"""Two recipes of the papers, rehearsed on a CPU as their index says: the packaged model in place of the large one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.harness import GAP, ROOT


@pytest.mark.parametrize(
    ("name", "perturbation"),
    [("n_grpo_r1_distill_qwen_1.5b", "neighbor"), ("soft_grpo_r1_distill_qwen_1.5b", "gumbel")],
)
def test_rehearsal(name: str, perturbation: str, tmp_path: Path, smollm2: str) -> None:
    files = [f"examples/recipes/{name}.yaml", "examples/recipes/placements/rehearsal_cpu.yaml"]
    command = [sys.executable, "-m", "ngrpo.cli", "train", *(word for file in files for word in ("--config", file))]
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "PATH": scripts},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["perturbation"]["name"] == perturbation
    assert len(summary["steps"]) == 2
    for step in summary["steps"]:
        assert step["rate"] > 0.0 and step["gap_perturbed_mean"] <= GAP, step
