# SPDX-License-Identifier: Apache-2.0
"""Perturbations and gates of a user in real processes: from a deleted file, and from a package that pip installed."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ngrpo.rollout import set_perturbation
from perturbations import replaying
from tests.stack.harness import Rollout, chat_prompts, gaps, sample
from tests.support.own_process import UNCOMPILED

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
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
    """Runs custom_rollout.py in a folder with the examples' files and an installed package, in a fresh process."""
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
        [sys.executable, "-m", "tests.stack.custom_rollout", model, "result"],
        cwd=folder,
        env={**os.environ, **UNCOMPILED, "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=1500,
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


# --- gates in an engine -----------------------------------------------------------------------------------


@torch.no_grad()
def margins(model: Any, rollout: Rollout) -> np.ndarray:
    """p(likeliest) - p(second) where each generated token was drawn, in a replay of the rollout, (generated,)."""
    tokens = torch.tensor([rollout.sequence])
    with replaying(model, [rollout.record], attention_mask=torch.ones_like(tokens)):
        logits = model(tokens).logits[0, len(rollout.prompt) - 1 : -1].float()
    best = torch.softmax(logits, dim=-1).topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).numpy()


def test_top_margin_opens_exactly_where_the_policy_wavers(engine: Any, hf_model: Any) -> None:
    set_perturbation(engine, "soft", rate=1.0, until=None, gate="top_margin", **{"gate.margin": 0.3})
    rollouts = sample(engine, chat_prompts(engine), max_tokens=40)
    assert gaps(hf_model, rollouts).max() <= 1e-4
    counts = np.zeros(2, dtype=int)
    for rollout in rollouts:
        margin, places = margins(hf_model, rollout), np.arange(len(rollout.prompt), len(rollout.sequence))
        open_ = np.isin(places, rollout.record.positions)
        clear = np.abs(margin - 0.3) > 1e-3  # nearer than this, float rounding may decide
        assert (open_ == (margin <= 0.3))[clear].all()
        counts += [open_.sum(), (~open_).sum()]
    assert counts.min() > 20
