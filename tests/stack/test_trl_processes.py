# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer with perturbed rollouts in two processes, each with an engine; the processes run this file."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_process import RESULT, become_rank, run_two_ranks
from tests.support.tiny_folder import tiny_folder

pytest.importorskip("trl", reason="needs TRL: pip install --no-deps trl==1.16.0")
pytestmark = pytest.mark.slow

ZERO_3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


@pytest.mark.parametrize("kind", ["ddp", "zero_3", "zero_3_and_adapters"])
def test_two_steps_in_two_processes(kind: str, tmp_path: Path, smollm2: str) -> None:
    """Each process replays its own rollouts, drawn apart, and engines have the weights of all processes' updates."""
    model = tmp_path / "model"
    model.mkdir()
    tiny_folder(model, smollm2, "llama", initializer_range=0.2)
    outputs = run_two_ranks("tests.stack.test_trl_processes", kind, str(model), str(tmp_path), timeout=300)
    results = []
    for output in outputs:
        line = next(line for line in output.splitlines() if line.startswith(RESULT))
        results.append(json.loads(line.removeprefix(RESULT)))
    first, second = results
    for result in results:
        assert result["sharded"] == (kind != "ddp")
        assert result["perturbed"] > 10
        assert len(result["gaps"]) == 2
        assert max(result["gaps"]) <= 1e-4
        assert result["gradient_norms"] == first["gradient_norms"], "one model, one update"
    assert not set(first["seeds"]) & set(second["seeds"])


def main(rank: str, port: str, kind: str, model: str, folder: str) -> None:
    """Trains two steps as one of two processes, and prints what they were."""
    become_rank(int(rank), port, ranks=2)
    import deepspeed
    from peft import LoraConfig

    from tests.stack.test_trl import logged_steps, trainer

    config: dict[str, Any] = {"learning_rate": 1e-3, "ddp_backend": "gloo"}
    options: dict[str, Any] = {}
    if kind != "ddp":
        deepspeed.init_distributed(dist_backend="gloo")
        config["deepspeed"] = ZERO_3
    if kind == "zero_3_and_adapters":
        options["peft_config"] = LoraConfig(r=4, target_modules="all-linear")
    trained = trainer(Path(folder) / f"rank{rank}", model, config, **options)
    trained.train()
    steps = logged_steps(trained)
    recorded = [rollout.record for rollout in trained._rollouts[True]]
    result = {
        "sharded": any(hasattr(parameter, "ds_id") for parameter in trained.model.parameters()),
        "gaps": [step["perturbation/gap_max"] for step in steps],
        "gradient_norms": [step["grad_norm"] for step in steps],
        "seeds": [record.seed for record in recorded],
        "perturbed": sum(len(record) for record in recorded),
    }
    print(f"\n{RESULT}{json.dumps(result)}")  # on a line of its own, after a progress bar


if __name__ == "__main__":
    main(*sys.argv[1:])
