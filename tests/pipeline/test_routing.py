# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts trains on its rollouts' experts, where engine and trainer alone would choose different ones."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.models import tiny
from tests.pipeline.harness import GAP, LOUD, ROOT, steps_of
from tests.stack.tiny_models import tie_experts

LETTERS = ["--reward.remote_url", str(ROOT / "tests/pipeline/user_files/first_letters.py")]
SHARDED = "--ds.zero_stage 3 --actor.num_gpus_per_node 2 --rollout.micro_batch_size 4 --train.micro_batch_size 4"
WHOLE = "--algo.kl.init_coef 1e-3 --actor.gradient_checkpointing_enable --ds.packing_samples"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    tiny.build("qwen3_moe", folder, Path(smollm2), torch.float32)
    tie_experts(folder)
    return folder


@pytest.mark.more
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(f"--perturbation neighbor {WHOLE}", id="packed"),
        pytest.param("--perturbation none", marks=pytest.mark.slow, id="unperturbed"),
        pytest.param(f"--perturbation neighbor --algo.kl.init_coef 0 {SHARDED}", marks=pytest.mark.slow, id="zero 3"),
    ],
)
def test_ties_are_replayed_and_the_router_learns(words: str, tmp_path: Path, tied: Path) -> None:
    steps = steps_of(tmp_path, str(tied), *LOUD, *LETTERS, "--replay.routing", *words.split())
    for step in steps:
        assert step.get("ratio_mean", 1.0) == pytest.approx(1.0, abs=1e-3)
        assert max(step["gap_plain_max"], step.get("gap_perturbed_max", 0.0)) <= GAP, step
    assert steps[0]["gap_unperturbed_mean"] <= GAP, "the alarm's scale is of replayed experts too"
    before, after = (load_file(folder / "model.safetensors") for folder in (tied, tmp_path / "model"))
    moved = [name for name in before if name.endswith("mlp.gate.weight") and not before[name].equal(after[name])]
    assert len(moved) == 2
