# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer on a mixture of experts. A process with an engine of a dense model cannot build one. Slow."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs TRL: pip install --no-deps trl==1.16.0")

from benchmarks.models import tiny
from tests.stack.test_trl import SPEC, trainer
from tests.stack.tiny_models import tie_experts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("spec", [{"name": "none"}, SPEC], ids=lambda spec: spec["name"])
def test_a_mixture_trains_on_its_rollouts_experts(tmp_path: Path, smollm2: str, spec: dict[str, Any]) -> None:
    tiny.build("qwen3_moe", tmp_path, Path(smollm2), torch.float32)
    tie_experts(tmp_path)
    made = trainer(tmp_path / "run", str(tmp_path), perturbation=spec, replay_routing=True)
    eight = [made.train_dataset[i // 4] for i in range(8)]
    made._replay_routing = False
    made._generate_and_score_completions(eight)
    assert made.perturbation_gap > 1e-2, "the ties must part engine and trainer"
    made._replay_routing = True
    made.train()
    logged = [each["perturbation/gap_max"] for each in made.state.log_history if "perturbation/gap_max" in each]
    assert len(logged) >= 2 and max(logged[-2:]) <= 1e-4, logged
