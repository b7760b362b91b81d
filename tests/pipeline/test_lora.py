# SPDX-License-Identifier: Apache-2.0
"""LoRA in whole trainings: exact after several syncs, on one rank and two; resumed; evaluated from its folder."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.pipeline.harness import GAP, completed, summary_of
from tests.pipeline.test_faults import killed_and_resumed, later_steps

LETTERS = ["--reward.remote_url", str(ROOT / "tests/pipeline/user_files/first_letters.py")]
# The learning rate moves B so far in a step that an engine which kept the previous step's adapter shows in the gap.
LORA = ["--ds.lora.rank", "8", "--ds.lora.alpha", "16", "--actor.adam.lr", "1e-2", "--actor.lr_warmup_ratio", "0"]
LORA += [*LETTERS, "--algo.kl.init_coef", "0", "--data.max_samples", "16"]
BF16_GAP = 0.25
"""The mean gap that bfloat16 alone may have on the random model; it is about 0.1."""
NEIGHBOR = ["--perturbation", "neighbor", "--perturbation.rate", "0.5"]
TWO_RANKS = ["--actor.num_gpus_per_node", "2", "--rollout.micro_batch_size", "4", "--train.micro_batch_size", "4"]
ZERO_3 = ["--ds.zero_stage", "3", "--actor.gradient_checkpointing_enable"]


def steps_of(folder: Path, model: str, *flags: str) -> list[dict[str, Any]]:
    """The steps of a training with LoRA, which must succeed."""
    return summary_of(folder, model, *LORA, *flags)["steps"]


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    """The saved adapter, whose matrices B have been trained."""
    from safetensors.torch import load_file

    names = {file.name for file in folder.iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert not names & {"config.json", "model.safetensors", "adapter_model.bin"}
    adapter = load_file(folder / "adapter_model.safetensors")
    for name, matrix in adapter.items():
        if "lora_B" in name:
            assert matrix.abs().max() > 1e-3, name
    return adapter


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([], id="one"),
        pytest.param([*TWO_RANKS, "--ds.zero_stage", "2"], id="zero_2", marks=pytest.mark.slow),
        pytest.param([*TWO_RANKS, *ZERO_3], id="zero_3", marks=pytest.mark.slow),
    ],
)
def test_exact_after_several_syncs(tmp_path: Path, random_model: str, ranks: list[str]) -> None:
    """HRPO's gate is trained whole beside the adapters, and saved in its own file."""
    steps = steps_of(tmp_path, random_model, "--perturbation", "hrpo", "--perturbation.gate_lr", "0.02", *ranks)
    assert len(steps) == 4
    for step in steps:
        assert step["gap_perturbed_max"] <= GAP, step
        assert step.get("gap_plain_max", 0.0) <= GAP, step
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
        assert step["shift"] > 0.0
    adapter = adapter_of(tmp_path / "model")
    assert len(adapter) == 2 * 7 * 2, "A and B of seven linear layers in two blocks"
    assert (tmp_path / "model" / "perturbation" / "module.safetensors").is_file()


def test_resumed_as_if_never_killed(tmp_path: Path, random_model: str) -> None:
    flags = [*LORA, *NEIGHBOR, "--ckpt.save_steps", "1", "--ckpt.max_num", "1", "--reproducible"]
    whole = summary_of(tmp_path / "whole", random_model, *flags)
    resumed = killed_and_resumed(tmp_path / "killed", random_model, *flags)
    assert resumed == later_steps(whole)
    expected = adapter_of(tmp_path / "whole" / "model")
    continued = adapter_of(tmp_path / "killed" / "model")
    for name, matrix in expected.items():
        assert torch.equal(matrix, continued[name]), name


def test_unperturbed_and_evaluated_from_its_folder(tmp_path: Path, random_model: str) -> None:
    """LoRA without a perturbation, and the evaluation of the folder that it leaves."""
    steps = steps_of(tmp_path / "run", random_model, "--perturbation", "none", "--reproducible")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    adapter_of(tmp_path / "run" / "model")
    command = ["ngrpo", "eval", "--hardware", "cpu", "--out", str(tmp_path / "eval")]
    command += ["--model", random_model, "--adapter", str(tmp_path / "run" / "model")]
    command += ["--task", "arithmetic", "--limit", "2", "--n", "1", "--k", "1", "--max-tokens", "4"]
    result = completed(command)
    assert result.returncode == 0, result.stdout[-4000:]


def test_four_bit_weights(tmp_path: Path, random_model: str) -> None:
    """QLoRA: engines have the dequantized weights from the first rollout on; a run resumes from its checkpoint."""
    pytest.importorskip("bitsandbytes")
    four_bit = ["--ds.load_in_4bit", "--ds.param_dtype", "bf16", "--reproducible", "--algo.kl.init_coef", "1e-3"]
    flags = [*LORA, *NEIGHBOR, *four_bit, "--ckpt.save_steps", "1", "--ckpt.max_num", "1"]
    whole = summary_of(tmp_path / "whole", random_model, *flags)
    for step in whole["steps"]:
        assert step["gap_perturbed_mean"] <= BF16_GAP, step
        assert step["gap_plain_mean"] <= BF16_GAP, step
    adapter_of(tmp_path / "whole" / "model")
    assert (tmp_path / "whole" / "model" / "quantization_config.json").is_file()
    resumed = killed_and_resumed(tmp_path / "killed", random_model, *flags)
    assert resumed == later_steps(whole)


@pytest.mark.parametrize(
    "perturbation",
    [
        pytest.param(NEIGHBOR, id="neighbor"),
        pytest.param(["--perturbation", "none"], id="none", marks=pytest.mark.slow),
    ],
)
def test_experts_are_replayed_through_adapters_of_attention(
    tmp_path: Path, tied_experts: Path, perturbation: list[str]
) -> None:
    """Also with packed samples, and a reference model that replays the same experts."""
    flags = ["--replay.routing", "--ds.packing_samples", "--actor.gradient_checkpointing_enable"]
    flags += ["--ds.lora.target_modules", "q_proj", "k_proj", "v_proj", "o_proj"]
    flags += ["--algo.kl.init_coef", "1e-3"]
    steps = steps_of(tmp_path, str(tied_experts), *perturbation, *flags)
    assert len(steps) == 4
    for step in steps:
        assert step["gap_plain_max"] <= GAP, step
        assert step.get("gap_perturbed_max", 0.0) <= GAP, step
        assert step.get("ratio_mean", 1.0) == pytest.approx(1.0, abs=1e-3)
    adapted_modules = {name.split(".")[-4] for name in adapter_of(tmp_path / "model")}
    assert adapted_modules == {"self_attn"}, "neither experts nor routers have adapters"
