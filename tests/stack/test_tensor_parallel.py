"""Two tensor-parallel ranks: both draw the same tokens and edits, and the replay is exact.

SmolLM2 has nine heads, so a small random model stands in for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> str:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_two_ranks(tiny: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.stack.tensor_parallel_rollout", tiny],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("RESULT "))
    seen = json.loads(line.removeprefix("RESULT "))
    assert (seen["ranks"], seen["specs"]) == (2, 1)
    assert seen["edits"] > 30
    assert seen["same_neighbors"], "each rank looks among its own rows, and they share what they find"
    assert seen["gap"] <= 1e-4
    assert seen["without"] > 1e-2
