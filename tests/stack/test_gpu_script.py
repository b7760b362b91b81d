# SPDX-License-Identifier: Apache-2.0
"""The script for a GPU in miniature: each stage runs on a CPU as it stands, and its figures are right."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command_line import in_tree
from benchmarks.gpu.stages import stages
from tests.conftest import ROOT
from tests.support.own_process import UNCOMPILED

# A training, and engines whose exactness test_v2.py and test_tensor_parallel.py show.
LONG = ["exact", "exact-v2", "two-ranks", "training"]


FIRST_STEPS = ["first-step", "first-step-offload"]


def rehearse(folder: Path, names: list[str], env: Mapping[str, str] = UNCOMPILED) -> dict[str, list[dict[str, Any]]]:
    """The rows of each stage, all of which ended well."""
    file = folder / "gpu.json"
    words = ["--rehearse", "--limit", "1500", "--stage", ",".join(names), "--out", str(file)]
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + file.read_text()
    found = json.loads(file.read_text())
    assert {name: stage["state"] for name, stage in found.items()} == dict.fromkeys(names, "done")
    assert all(stage["good"] for stage in found.values())
    return {name: stage["rows"] for name, stage in found.items()}


def test_the_first_steps_without_vllm(tmp_path: Path) -> None:
    """OpenRLHF's actor under DeepSpeed trains, and its checkpoint has all that the next update needs."""
    # A module that shadows vLLM, as on a machine without it.
    (tmp_path / "vllm.py").write_text("raise ImportError('this machine has no vLLM')\n")
    paths = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    figures = rehearse(tmp_path, FIRST_STEPS, {**UNCOMPILED, "PYTHONPATH": paths})
    for name, rows in figures.items():
        assert {row["offload"] for row in rows} == {name.endswith("offload")}
        start, first, saved, second, loaded, again = rows
        assert start["milliseconds"] > 0 and start["host_gib"] > 0
        for update in (first, second, again):
            assert 0 < update["gradient_norm"] < float("inf") and update["shift"] > 0
            assert update["moved"] > 0.5, "only rows of the embeddings without a gradient stay"
        assert saved["checkpoint_gib"] > 0 and loaded["not_restored"] == 0.0
        assert (again["gradient_norm"], again["repetition"]) == (second["gradient_norm"], 0.0)
    plain, offloaded = (figures[name][1] for name in FIRST_STEPS)
    assert plain["gradient_norm"] == pytest.approx(offloaded["gradient_norm"], rel=1e-5)


def test_the_quick_stages(tmp_path: Path) -> None:
    """Two engines side by side, a packed step beside the padded one, and the counts of stock and perturbed steps."""
    figures = rehearse(tmp_path, [stage.name for stage in stages(True) if stage.name not in [*FIRST_STEPS, *LONG]])
    (speed,) = figures["throughput"]
    assert speed["stock"] > 0 and speed["lowest"] <= speed["ratio"] <= speed["highest"]
    losses = {row["layout"]: row["loss"] for row in figures["trainer"]}
    assert losses["padded"] == pytest.approx(losses["packed"], abs=1e-5)
    assert [row["metric"] for row in figures["neighbor-table"]] == ["cosine", "l2", "dot"]
    (alone,), (stock, perturbed) = figures["perturber"], figures["decode-steps"]
    assert (alone["runner"], alone["waits"], alone["loops"]) == ("no engine", 0, 0) and alone["launches"] > 0
    assert (stock["perturbation"], stock["rate"], perturbed["rate"]) == ("stock", None, 1.0)


@pytest.mark.slow
def test_the_long_stages(tmp_path: Path) -> None:
    figures = rehearse(tmp_path, LONG)
    for name, runner in {"exact": "V1", "exact-v2": "V2", "two-ranks": "V1"}.items():
        assert {row["runner"] for row in figures[name]} == {runner}
    assert {"(off)", *in_tree()} == {row["perturbation"] for row in figures["exact"]}
    first, second = figures["training"]
    assert first["shift"] > 0 and second["gap_perturbed_mean"] <= 1e-4
    assert second["checkpoint_gib"] > 0
