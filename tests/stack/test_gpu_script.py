# SPDX-License-Identifier: Apache-2.0
"""The script for a GPU in miniature: each stage runs on a CPU as it stands, and its figures are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exactness import in_tree
from benchmarks.gpu.stages import stage

pytestmark = pytest.mark.stack
ROOT = Path(__file__).resolve().parents[2]


def rehearse(path: Path, stages: str) -> dict[str, Any]:
    """Runs stages, one process for each case, and returns the result file; all cases must end well."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--stage", stages, "--out", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    parts = json.loads(path.read_text())
    for letter, part in parts.items():
        assert set(part["cases"]) == {case.name for case in stage(letter).cases(True)}
        for case in part["cases"].values():
            assert case["state"] == "done", case
    assert done.returncode == 0, done.stdout + done.stderr
    return parts


def rows(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for case in part["cases"].values() for row in case["rows"]]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return rehearse(tmp_path_factory.mktemp("figures") / "gpu.json", "a,b,c,d,f")


def test_exactness_in_both_runners(figures: dict[str, Any]) -> None:
    found = rows(figures["a"])
    assert {(row["runner"], row["async"]) for row in found} == {("V1", False), ("V2", True)}
    for row in found:
        assert row["max"] <= 1e-4, row
        if row["perturbation"] != "(off)":
            # A few tokens of a small random model: what a perturbation does to them may be little, but it shows.
            # CUTS feeds the token that stands in the text, so that it needs no replay.
            shows = row["perturbation"] == "cuts" or row["unreplayed"] >= max(1e-3, 100 * row["max"])
            assert row["edits"] > 0 and shows, row
    assert {"(off)", *in_tree()} == {row["perturbation"] for row in found}


def test_throughput_is_of_two_engines_side_by_side(figures: dict[str, Any]) -> None:
    (row,) = rows(figures["b"])
    assert row["stock"] > 0 and row["lowest"] <= row["ratio"] <= row["highest"]


def test_the_packed_step_is_the_padded_one(figures: dict[str, Any]) -> None:
    losses = {row["layout"]: row["loss"] for row in rows(figures["d"])}
    assert losses["padded"] == pytest.approx(losses["packed"], abs=1e-5)


def test_the_neighbor_table_is_timed(figures: dict[str, Any]) -> None:
    assert [row["metric"] for row in rows(figures["c"])] == ["cosine", "l2", "dot"]


def test_counts_are_of_stock_and_of_perturbed_steps(figures: dict[str, Any]) -> None:
    alone, stock, perturbed = rows(figures["f"])
    assert alone["runner"] == "no engine"
    assert alone["waits"] == 0
    assert alone["loops"] == 0
    assert alone["launches"] > 0
    assert stock["perturbation"] == "stock"
    assert stock["rate"] is None
    assert perturbed["rate"] == 1.0
    assert all(count >= 0 for count in (stock["items"], stock["nonzero"], perturbed["items"], perturbed["nonzero"]))


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    (row,) = rows(rehearse(tmp_path / "gpu.json", "e")["e"])
    assert row["steps"] == 2 and len(row["rewards"]) == 2
    assert row["gap_perturbed"] <= 1e-4 and row["step_s"] > 0
