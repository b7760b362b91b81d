# SPDX-License-Identifier: Apache-2.0
"""Whole runs of verl's main_ppo on a CPU: real Ray, real vLLM server, real FSDP, two steps, in float32.

Needs an environment with verl: `make test-verl`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl: make test-verl")

from ngrpo.config.verl_lines import of_perturbation
from tests.support.tiny_folder import tiny_folder

NEIGHBOR = {"name": "neighbor", "rate": 0.5, "mix_temperature": 3.0}
GAUSSIAN = {"name": "gaussian", "rate": 0.5}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(len(solution_str) % 3)
"""
ROLES = ("actor", "ref")
# Sizes of a test, and what a machine without a GPU needs (docs/integrations.md).
SETTINGS = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "data.dataloader_num_workers=0",
    *(f"actor_rollout_ref.{role}.fsdp_config.use_torch_compile=False" for role in ROLES),
    *(f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision.param_dtype=fp32" for role in ROLES),
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.free_cache_engine=False",
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.max_model_len=128",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.max_num_batched_tokens=512",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=256",
    "reward.num_workers=1",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.total_training_steps=2",
    "trainer.total_epochs=1",
    "trainer.logger=[console,file]",
    "trainer.save_freq=-1",
    "trainer.test_freq=2",
    "trainer.val_before_train=False",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "+ray_kwargs.ray_init.num_gpus=1",
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "+ray_kwargs.ray_init.object_store_memory=536870912",
]
FIXED = [
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
]
PACKED = [
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
]


def run(folder: Path, smollm2: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """main_ppo on a small model and sums, with these further overrides of its configuration."""
    import pandas

    folder.mkdir(exist_ok=True)
    model = tiny_folder(folder / "model", smollm2, "llama", tie_word_embeddings=False, initializer_range=0.2)
    rows = []
    for number in range(2, 18):
        row = {
            "prompt": [{"role": "user", "content": f"What is {number} + 7?"}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": str(number + 7)},
        }
        rows.append(row)
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:4]).to_parquet(folder / "eval.parquet")
    (folder / "reward.py").write_text(REWARD)
    files = [
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/eval.parquet",
        f"reward.custom_reward_function.path={folder}/reward.py",
        f"actor_rollout_ref.model.path={model}",
        f"hydra.run.dir={folder}/hydra",
    ]
    environment = {
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *SETTINGS, *files, *overrides],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def finished_steps(folder: Path, result: subprocess.CompletedProcess[str]) -> list[dict[str, float]]:
    """The two steps of a run; the last one was evaluated."""
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines]
    trained = [step for step in steps if "actor/grad_norm" in step]
    assert len(trained) == 2
    for step in trained:
        assert step["perturbation/gap_plain_max"] <= 1e-4, step
        assert step["actor/grad_norm"] > 0.0
    assert any(name.startswith("val-") for name in trained[-1])
    return trained


def trained_steps(folder: Path, result: subprocess.CompletedProcess[str]) -> list[dict[str, float]]:
    """The two steps of a perturbed run, in which rollout and replay agree."""
    trained = finished_steps(folder, result)
    for step in trained:
        assert step["perturbation/gap_perturbed_max"] <= 1e-4, step
        assert 0.3 < step["perturbation/rate"] < 0.7
        assert step["perturbation/shift"] > 0.05
    return trained


@pytest.mark.parametrize(
    ("layout", "perturbation"),
    [
        pytest.param(FIXED, NEIGHBOR, id="padded-mixture"),
        pytest.param(PACKED, GAUSSIAN, id="packed-noise"),
    ],
)
def test_two_steps(tmp_path: Path, smollm2: str, layout: list[str], perturbation: dict[str, Any]) -> None:
    """Rollout and replay agree before the first update and after it.

    The reference replays too. An evaluation is not perturbed.
    """
    result = run(tmp_path, smollm2, *layout, *of_perturbation(perturbation))
    first, second = trained_steps(tmp_path, result)
    for step in (first, second):
        assert step["training/rollout_probs_diff_max"] <= 1e-4
    if layout is FIXED:
        assert abs(first["actor/kl_loss"]) <= 1e-6, "the reference did not replay"
        assert second["actor/kl_loss"] > 1e-6


def test_two_steps_without_a_perturbation(tmp_path: Path, smollm2: str) -> None:
    """The baseline is trained like the others."""
    result = run(tmp_path, smollm2, *FIXED, *of_perturbation({"name": "none"}))
    for step in finished_steps(tmp_path, result):
        assert step["perturbation/rate"] == 0.0
        assert step["training/rollout_probs_diff_max"] <= 1e-4


def test_a_density_and_an_advantage(tmp_path: Path, smollm2: str) -> None:
    """The token's log-probability is measured, and the density trained: before an update its ratio is 1."""
    density = of_perturbation({"name": "multiplex", "density": "joint", "rate": 0.5})
    advantage = ["algorithm.adv_estimator=rs_grpo", "+advantage.beta=2"]
    result = run(tmp_path, smollm2, *FIXED, *density, *advantage)
    first, second = trained_steps(tmp_path, result)
    for step in (first, second):
        assert abs(step["actor/ppo_kl"]) <= 1e-5
        assert step["perturbation/lost_responses"] == 0.0
        comparisons = ("rollout_corr/", "training/rollout_probs_diff", "training/rollout_actor_probs")
        assert not [name for name in step if name.startswith(comparisons)], "of densities with tokens"
    assert abs(first["actor/kl_loss"]) <= 1e-6


def test_a_run_that_would_not_perturb_does_not_start(tmp_path: Path, smollm2: str) -> None:
    result = run(tmp_path, smollm2, *FIXED, "+perturbation.name=neighbor")
    assert result.returncode != 0
    assert "Add trainer.v1.trainer_mode=perturbed" in result.stderr
