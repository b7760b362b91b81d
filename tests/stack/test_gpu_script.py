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

Rows = list[dict[str, Any]]


def rehearse(folder: Path, names: list[str], env: Mapping[str, str] = UNCOMPILED) -> dict[str, Rows]:
    """The rows of each stage, all of which ended well."""
    file = folder / "gpu.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu", "--rehearse"),
            *("--limit", "1500"),
            *("--stage", ",".join(names)),
            *("--out", str(file)),
        ],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr + file.read_text()
    stages_by_name = json.loads(file.read_text())
    states = {name: stage["state"] for name, stage in stages_by_name.items()}
    assert states == dict.fromkeys(names, "done")
    for name, stage in stages_by_name.items():
        assert stage["good"], name
    return {name: stage["rows"] for name, stage in stages_by_name.items()}


def test_the_first_steps_without_vllm(tmp_path: Path) -> None:
    """OpenRLHF's actor under DeepSpeed trains, and its checkpoint has all that the next update needs."""
    # A module that shadows vLLM, as on a machine without it.
    (tmp_path / "vllm.py").write_text("raise ImportError('this machine has no vLLM')\n")
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    figures = rehearse(tmp_path, FIRST_STEPS, {**UNCOMPILED, "PYTHONPATH": python_path})
    gradient_norms = []
    for name in FIRST_STEPS:
        rows = figures[name]
        for row in rows:
            assert row["offload"] is name.endswith("offload")
        start, first, saved, second, loaded, again = rows
        assert start["milliseconds"] > 0
        assert start["host_gib"] > 0
        for update in (first, second, again):
            assert 0 < update["gradient_norm"] < float("inf")
            assert update["shift"] > 0
            assert update["moved"] > 0.5, "only rows of the embeddings without a gradient stay"
        assert saved["checkpoint_gib"] > 0
        assert loaded["not_restored"] == 0.0
        assert again["gradient_norm"] == second["gradient_norm"]
        assert again["repetition"] == 0.0
        gradient_norms.append(first["gradient_norm"])
    plain, offloaded = gradient_norms
    assert plain == pytest.approx(offloaded, rel=1e-5)


def test_the_quick_stages(tmp_path: Path) -> None:
    """Two engines side by side, a packed step beside the padded one, and the counts of stock and perturbed steps."""
    names = [stage.name for stage in stages(rehearse=True)]
    quick = [name for name in names if name not in [*FIRST_STEPS, *LONG]]
    figures = rehearse(tmp_path, quick)

    (speed,) = figures["throughput"]
    assert speed["stock"] > 0
    assert speed["lowest"] <= speed["ratio"] <= speed["highest"]

    losses = {row["layout"]: row["loss"] for row in figures["trainer"]}
    assert losses["padded"] == pytest.approx(losses["packed"], abs=1e-5)

    assert [row["metric"] for row in figures["neighbor-table"]] == ["cosine", "l2", "dot"]

    (alone,) = figures["perturber"]
    assert alone["runner"] == "no engine"
    assert alone["waits"] == 0
    assert alone["loops"] == 0
    assert alone["launches"] > 0

    stock, perturbed = figures["decode-steps"]
    assert stock["perturbation"] == "stock"
    assert stock["rate"] is None
    assert perturbed["rate"] == 1.0


@pytest.mark.slow
def test_the_long_stages(tmp_path: Path) -> None:
    figures = rehearse(tmp_path, LONG)
    for name, runner in {"exact": "V1", "exact-v2": "V2", "two-ranks": "V1"}.items():
        assert {row["runner"] for row in figures[name]} == {runner}
    assert {row["perturbation"] for row in figures["exact"]} == {"(off)", *in_tree()}
    first, second = figures["training"]
    assert first["shift"] > 0
    assert second["gap_perturbed_mean"] <= 1e-4
    assert second["checkpoint_gib"] > 0
