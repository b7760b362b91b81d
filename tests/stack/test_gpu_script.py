# SPDX-License-Identifier: Apache-2.0
"""The script for a GPU in miniature: each stage runs on a CPU as it stands, and its figures are right."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exactness import in_tree
from benchmarks.gpu.stages import stages

pytestmark = pytest.mark.stack
ROOT = Path(__file__).resolve().parents[2]
# Further engines of a module that exact-v2 has too, and a training.
LONG = ["exact", "two-ranks", "training"]
QUICK = [stage.name for stage in stages(True) if stage.name not in LONG]


def start(path: Path, names: list[str]) -> subprocess.Popen[str]:
    words = ["--rehearse", "--limit", "1500", "--stage", ",".join(names), "--out", str(path)]
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rehearse(path: Path, names: list[str]) -> tuple[dict[str, Any], str]:
    """The file of figures, in which every stage ended well, and what was printed."""
    with start(path, names) as process:
        printed, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, printed + path.read_text()
    found = json.loads(path.read_text())
    assert {name: stage["state"] for name, stage in found.items()} == dict.fromkeys(names, "done")
    assert all(stage["good"] for stage in found.values())
    return found, printed


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Killed in its second stage, then resumed."""
    path = tmp_path_factory.mktemp("figures") / "gpu.json"
    first, second, *_ = order = ["neighbor-table", *(name for name in QUICK if name != "neighbor-table")]
    with start(path, order) as process:
        for line in process.stdout or ():
            if f"  {first}: " in line:
                process.send_signal(signal.SIGKILL)
    kept = json.loads(path.read_text())
    assert second not in kept or kept[second]["state"] == "cut off"
    time.sleep(2.0)  # its stage ends itself
    found, printed = rehearse(path, order)
    assert f"  {first}: done before: " in printed and found[first] == kept[first]
    return {name: stage["rows"] for name, stage in found.items()}


def assert_exact(rows: list[dict[str, Any]], kind: tuple[str, bool, int]) -> None:
    for row in rows:
        assert (row["runner"], row["async"], row["ranks"]) == kind
        assert row["max"] <= 1e-4, row
        if row["perturbation"] != "(off)":
            # A few tokens of a small random model: what a perturbation does to them may be little, but it shows.
            # CUTS feeds the token that stands in the text, so that it needs no replay.
            shows = row["perturbation"] == "cuts" or row["unreplayed"] >= max(1e-3, 100 * row["max"])
            assert row["edits"] > 0 and shows, row


def test_exactness_in_the_v2_runner(figures: dict[str, Any]) -> None:
    assert_exact(figures["exact-v2"], ("V2", True, 1))
    assert {"(off)", "gumbel", "hrpo"} == {row["perturbation"] for row in figures["exact-v2"]}


def test_throughput_is_of_two_engines_side_by_side(figures: dict[str, Any]) -> None:
    (row,) = figures["throughput"]
    assert row["stock"] > 0 and row["lowest"] <= row["ratio"] <= row["highest"]


def test_the_packed_step_is_the_padded_one(figures: dict[str, Any]) -> None:
    losses = {row["layout"]: row["loss"] for row in figures["trainer"]}
    assert losses["padded"] == pytest.approx(losses["packed"], abs=1e-5)


def test_the_neighbor_table_is_timed(figures: dict[str, Any]) -> None:
    assert [row["metric"] for row in figures["neighbor-table"]] == ["cosine", "l2", "dot"]


def test_counts_are_of_stock_and_of_perturbed_steps(figures: dict[str, Any]) -> None:
    (alone,), (stock, perturbed) = figures["perturber"], figures["decode-steps"]
    assert alone["runner"] == "no engine"
    assert alone["waits"] == 0
    assert alone["loops"] == 0
    assert alone["launches"] > 0
    assert stock["perturbation"] == "stock"
    assert stock["rate"] is None
    assert perturbed["rate"] == 1.0
    assert all(count >= 0 for count in (stock["items"], stock["nonzero"], perturbed["items"], perturbed["nonzero"]))


@pytest.mark.slow
def test_the_long_stages(tmp_path: Path) -> None:
    found, _ = rehearse(tmp_path / "gpu.json", LONG)
    assert_exact(found["exact"]["rows"], ("V1", False, 1))
    assert_exact(found["two-ranks"]["rows"], ("V1", False, 2))
    assert {"(off)", *in_tree()} == {row["perturbation"] for row in found["exact"]["rows"]}
    first, second = found["training"]["rows"]
    assert first["rate"] == pytest.approx(0.5, abs=0.12) and first["shift"] > 0
    assert second["gap_perturbed_mean"] <= 1e-4 and second["step_seconds"] > 0
