# SPDX-License-Identifier: Apache-2.0
"""Two recipes of the papers, rehearsed on a CPU as their index says: the packaged model in place of the large one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pipeline.harness import GAP, LOUD, PROGRAM, completed


@pytest.mark.parametrize(
    ("name", "perturbation"),
    [("n_grpo_r1_distill_qwen_1.5b", "neighbor"), ("soft_grpo_r1_distill_qwen_1.5b", "gumbel")],
)
def test_rehearsal(name: str, perturbation: str, tmp_path: Path) -> None:
    """SofT-GRPO's loss has a density: the ratio is 1 before an update, and the gap is of the tokens' own
    log-probabilities, in which a density of draws would be off by a nat or more."""
    files = [f"examples/recipes/{name}.yaml", "examples/recipes/placements/rehearsal_cpu.yaml"]
    words = [*(word for file in files for word in ("--config", file)), "--actor.gradient_checkpointing_enable", *LOUD]
    done = completed([*PROGRAM, str(tmp_path / "run"), *words])
    assert done.returncode == 0, done.stdout[-6000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["perturbation"]["name"] == perturbation
    first, second = summary["steps"]
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert first["rate"] == pytest.approx(summary["perturbation"]["rate"], abs=0.12)
    for step in (first, second):
        assert step["rate"] > 0.0 and 0.0 < step["gap_perturbed_mean"] <= GAP, step
