# SPDX-License-Identifier: Apache-2.0
"""LoRA in a whole training: exact after several syncs, and what its folder holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.pipeline.harness import GAP, train

LETTERS = ["--reward.remote_url", str(ROOT / "tests/pipeline/user_files/first_letters.py")]
# The learning rate moves B so far in a step that engines with the adapter of the step before show in the gap.
LORA = ["--ds.lora.rank", "8", "--ds.lora.alpha", "16", "--actor.adam.lr", "1e-2", "--actor.lr_warmup_ratio", "0"]
LORA += [*LETTERS, "--algo.kl.init_coef", "0", "--data.max_samples", "16"]


def steps_of(folder: Path, model: str, *flags: str) -> list[dict[str, Any]]:
    result = train(folder, model, *LORA, *flags)
    assert result.returncode == 0, result.stdout[-6000:]
    return json.loads((folder / "summary.json").read_text())["steps"]


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    """The saved adapter, whose matrices B have been trained."""
    from safetensors.torch import load_file

    names = {file.name for file in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not names & {"config.json", "model.safetensors", "adapter_model.bin"}
    tensors = load_file(folder / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 1e-3 for name, tensor in tensors.items() if "lora_B" in name)
    return tensors


def test_exact_after_several_syncs(tmp_path: Path, random_model: str) -> None:
    """HRPO's gate is trained whole beside the adapters, and saved in its own file."""
    steps = steps_of(tmp_path, random_model, "--perturbation", "hrpo", "--perturbation.gate_lr", "0.02")
    assert len(steps) == 4
    for step in steps:
        assert max(step["gap_perturbed_max"], step.get("gap_plain_max", 0.0)) <= GAP, step
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
        assert step["shift"] > 0.0
    adapter = adapter_of(tmp_path / "model")
    assert len(adapter) == 2 * 7 * 2, "A and B of seven linear layers in two blocks"
    assert (tmp_path / "model" / "perturbation" / "module.safetensors").is_file()
