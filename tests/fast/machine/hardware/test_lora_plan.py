# SPDX-License-Identifier: Apache-2.0
"""The memory of a training with LoRA: gradients and optimizer states of the adapters alone."""

from dataclasses import replace
from typing import Any

import pytest

from ngrpo.machine.hardware import gpu_plan, lora_plan
from ngrpo.machine.models.architecture import ModelSize
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Flags

# Width 8, MLP 20, 2 heads and 1 of keys of size 4: q 8 → 8, k and v 8 → 4, o 8 → 8, gate and up 8 → 20, down 20 → 8.
SIZE = ModelSize(10_000, 3, 8, 20, 2, 1, 4, 50, head_norms=False, source="by hand")
BASE = "--actor.model_name_or_path m --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 4"
BASE += " --reward.remote_url r.py --vllm.num_engines 1 --actor.num_gpus_per_node 2 --train.batch_size 2"
BASE += " --train.micro_batch_size 1"


def args_of(more: str) -> placement.Args:
    pytest.importorskip("openrlhf")
    return Flags([*BASE.split(), *more.split()]).args


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--ds.lora.rank 2", 3 * 2 * (16 + 12 + 12 + 16 + 28 + 28 + 28)),
        ("--ds.lora.rank 4 --ds.lora.target_modules q_proj v_proj", 3 * 4 * (16 + 12)),
        ("--ds.lora.rank 2 --ds.lora.target_modules q_proj of_another_model", 3 * 2 * 140),
    ],
)
def test_parameters_of_adapters_by_hand(more: str, expected: int) -> None:
    assert lora_plan.adapter_parameters(SIZE, args_of(more)) == expected
    assert lora_plan.trained_parameters(SIZE, args_of(more)) == expected
    assert lora_plan.trained_parameters(SIZE, args_of("")) == SIZE.parameters


@pytest.mark.parametrize(("stage", "held"), [(2, 20_000), (3, 10_000)])
def test_states_are_of_the_adapters(stage: int, held: int) -> None:
    """A = 840 on D = 2 ranks: weights 2P (ZeRO-3: 2P/D) + 2A, states 12A/D, gradients in float32 6A/D."""
    args = args_of(f"--ds.lora.rank 2 --ds.zero_stage {stage}")
    parts: dict[str, Any] = {part.name: part for part in gpu_plan.trained("actor", SIZE, args, 2)}
    assert parts["actor: weights"].phases == (held + 2 * 840,) * 4
    assert parts["actor: weights"].formula == ("2P + 2A" if stage == 2 else "2P/D + 2A")
    assert parts["actor: optimizer states"].phases == (12 * 420,) * 4
    assert parts["actor: gradients, float32 and scaled"].phases[-1] == 6 * 420


def test_four_bit_weights_by_hand() -> None:
    """Q = 3 · (8·8 + 8·4 + 8·4 + 8·8 + 3 · 8·20) = 2,016 weights of 0.5 + 1/64 + 1/4096 bytes; the others have two."""
    args = args_of("--ds.lora.rank 2 --ds.load_in_4bit")
    expected = 2016 * (0.5 + 1 / 64 + 1 / 4096) + 2 * (10_000 - 2016)
    assert lora_plan.four_bit_parameters(SIZE) == 2016
    assert lora_plan.weight_bytes(SIZE, args) == pytest.approx(expected)
    assert lora_plan.weight_bytes(SIZE, args_of("--ds.lora.rank 2")) == 20_000
    actor = gpu_plan.trained("actor", SIZE, args, 2)[0]
    assert actor.phases[0] == pytest.approx(expected + 2 * 840)
    assert actor.formula == "0.52Q + 2(P - Q), of which Q in 4 bits + 2A"
    assert gpu_plan.frozen("reference", SIZE, args, 2).phases[0] == pytest.approx(expected)
    mixture = replace(SIZE, has_experts=True)
    assert lora_plan.four_bit_parameters(mixture) == 3 * (64 + 32 + 32 + 64), "experts stay in bfloat16"


def test_a_model_that_does_not_fit_whole_fits_with_adapters() -> None:
    common = "--model m --data.max_len 2048 --train.colocate_all --vllm.enable_sleep --ds.enable_sleep"
    common += " --actor.gradient_checkpointing_enable --vllm.gpu_memory_utilization 0.5 --actor.num_gpus_per_node 1"
    common = common.replace("--model m", "--actor.model_name_or_path Qwen/Qwen3-1.7B --ref.num_gpus_per_node 1")
    gpu = placement.planned("1x24", "--dry-run").memory
    assert not gpu_plan.fits(args_of(common), gpu)
    assert gpu_plan.fits(args_of(f"{common} --ds.lora.rank 16"), gpu)
