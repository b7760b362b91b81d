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


def copy_own_files(folder: Path) -> None:
    """The example perturbation and gate, as files of a user in ``folder``."""
    folder.mkdir()
    for name in ("custom_perturbation.py", "custom_gate.py"):
        shutil.copy(EXAMPLES / name, folder)


def install_package(folder: Path) -> None:
    """Installs the example perturbation, under another name, as a package of a user into ``folder``/site."""
    project = folder / "project"
    project.mkdir()
    source = (EXAMPLES / "custom_perturbation.py").read_text()
    (project / "their_package.py").write_text(source.replace('"runner_up"', '"installed_runner_up"'))
    (project / "pyproject.toml").write_text(PROJECT)
    pip_install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip_install, *offline, "--target", "site", "./project"], cwd=folder, check=True)
    shutil.rmtree(project)


def run(folder: Path, model: str) -> dict[str, Any]:
    """Runs custom_rollout.py in a folder with the examples' files and an installed package, in a fresh process."""
    copy_own_files(folder / "theirs")
    install_package(folder)
    python_path = os.pathsep.join([str(folder / "site"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.stack.custom_rollout", model, "result"],
        cwd=folder,
        env={**os.environ, **UNCOMPILED, "PYTHONPATH": python_path},
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
    assert result["other process"]
    fingerprint = result["expected"]
    assert '"custom_perturbation.py:RunnerUp"' in fingerprint
    assert '"custom_gate.py:Fading"' in fingerprint
    assert result["seen"] == [fingerprint]
    for way in ("file", "installed"):
        rollouts = result[way]
        assert sum(len(rollout.record) for rollout in rollouts) > 20
        assert gaps(hf_model, rollouts).max() <= 1e-4
        assert gaps(hf_model, rollouts, replay=False).max() > 0.1
        for rollout in rollouts:
            assert np.allclose(rollout.record.weights, [0.6, 0.4])


# --- gates in an engine -----------------------------------------------------------------------------------


@torch.no_grad()
def margins(model: Any, rollout: Rollout) -> np.ndarray:
    """p(likeliest) - p(second) where each generated token was drawn, in a replay of the rollout, (generated,)."""
    tokens = torch.tensor([rollout.sequence])
    with replaying(model, [rollout.record], attention_mask=torch.ones_like(tokens)):
        logits = model(tokens).logits[0, len(rollout.prompt) - 1 : -1].float()
    p = torch.softmax(logits, dim=-1)
    likeliest, second = p.topk(2, dim=-1).values.unbind(dim=-1)
    return (likeliest - second).numpy()


def test_top_margin_opens_exactly_where_the_policy_wavers(engine: Any, hf_model: Any) -> None:
    set_perturbation(engine, "soft", rate=1.0, until=None, gate="top_margin", **{"gate.margin": 0.3})
    rollouts = sample(engine, chat_prompts(engine), max_tokens=40)
    assert gaps(hf_model, rollouts).max() <= 1e-4
    opened = 0
    closed = 0
    for rollout in rollouts:
        generated_positions = np.arange(len(rollout.prompt), len(rollout.sequence))
        is_open = np.isin(generated_positions, rollout.record.positions)
        margin = margins(hf_model, rollout)
        is_clear = np.abs(margin - 0.3) > 1e-3  # nearer than this, float rounding may decide
        np.testing.assert_array_equal(is_open[is_clear], (margin <= 0.3)[is_clear])
        opened += is_open.sum()
        closed += (~is_open).sum()
    assert opened > 20
    assert closed > 20
