# SPDX-License-Identifier: Apache-2.0
"""A training on a model of vLLM's Transformers backend, with its proofs; and one whose engine fails them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.harness import LOUD, assert_nothing_runs, steps_of, train

pytestmark = pytest.mark.slow
_BROKEN = Path(__file__).parent / "user_files" / "broken_override.py"


@pytest.fixture(scope="module")
def tiny_smollm3(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> str:
    """vLLM has no class of its own for this type: its ids come in the shape (1, N)."""
    import torch
    from transformers import AutoTokenizer, SmolLM3Config, SmolLM3ForCausalLM

    folder = tmp_path_factory.mktemp("smollm3")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    SmolLM3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_model_of_the_transformers_backend(tmp_path: Path, tiny_smollm3: str) -> None:
    """Strict: the engine proves itself before the first request and after each sync, and every gap is judged."""
    flags = ["--perturbation", "neighbor", "--perturbation.variant", "released", "--perturbation.rate", "0.5"]
    for step in steps_of(tmp_path, tiny_smollm3, *LOUD, *flags, "--perturbation.strict"):
        assert step["rate"] == pytest.approx(0.5, abs=0.12)
        assert max(step[f"gap_{kind}_mean"] for kind in ("perturbed", "plain", "before")) < 0.1


def test_an_engine_that_misses_its_rows_starts_nothing(tmp_path: Path, tiny_smollm3: str) -> None:
    result = train(tmp_path, tiny_smollm3, "--perturbation", f"{_BROKEN}:Broken")
    assert result.returncode == 1
    end = result.stdout[-4000:]
    assert "training failed" in end and "vLLM's engine does not feed SmolLM3ForCausalLM" in end and "off by" in end
    assert "Global step" not in result.stdout
    assert_nothing_runs(tmp_path)
