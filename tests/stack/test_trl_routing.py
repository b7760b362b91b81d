# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer on a mixture of experts: a process that has built a dense model's engine cannot build one. Slow."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs TRL: pip install --no-deps trl==1.16.0")

from benchmarks.models import tiny
from tests.stack.test_trl import SPEC, logged_steps, roll_out, trainer
from tests.stack.tiny_models import tie_experts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("spec", [{"name": "none"}, SPEC], ids=lambda spec: spec["name"])
def test_a_mixture_trains_on_its_rollouts_experts(tmp_path: Path, smollm2: str, spec: dict[str, Any]) -> None:
    tiny.build("qwen3_moe", tmp_path, Path(smollm2), torch.float32)
    tie_experts(tmp_path)
    trained = trainer(tmp_path / "run", str(tmp_path), perturbation=spec, replay_routing=True)
    trained._replay_routing = False
    roll_out(trained)
    assert trained.perturbation_gap > 1e-2, "the ties must part engine and trainer"

    trained._replay_routing = True
    trained.train()
    gaps = [step["perturbation/gap_max"] for step in logged_steps(trained)]
    assert len(gaps) >= 2
    assert max(gaps[-2:]) <= 1e-4, gaps
