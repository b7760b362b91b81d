# SPDX-License-Identifier: Apache-2.0
"""A training on a model of vLLM's Transformers backend, with its proofs; and one whose engine fails them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.harness import LOUD, assert_nothing_runs, steps_of, train
from tests.tiny_folder import tiny_folder

pytestmark = pytest.mark.slow
_BROKEN = Path(__file__).parent / "user_files" / "broken_override.py"


@pytest.fixture(scope="module")
def tiny_smollm3(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> str:
    """vLLM has no class of its own for this type: its ids come in the shape (1, N)."""
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    return tiny_folder(tmp_path_factory.mktemp("smollm3"), smollm2, "smollm3", initializer_range=0.1, **tokens)


def test_a_model_of_the_transformers_backend(tmp_path: Path, tiny_smollm3: str) -> None:
    """Strict: the engine proves itself before the first request and after each sync, and every gap is judged.

    Reproducible too: the engine is paused when it has to prove itself again.
    """
    flags = ["--perturbation", "neighbor", "--perturbation.variant", "released", "--perturbation.rate", "0.5"]
    for step in steps_of(tmp_path, tiny_smollm3, *LOUD, *flags, "--perturbation.strict", "--reproducible"):
        assert step["rate"] == pytest.approx(0.5, abs=0.12)
        assert max(step[f"gap_{kind}_mean"] for kind in ("perturbed", "plain", "before")) < 0.1


def test_an_engine_that_misses_its_rows_starts_nothing(tmp_path: Path, tiny_smollm3: str) -> None:
    result = train(tmp_path, tiny_smollm3, "--perturbation", f"{_BROKEN}:Broken")
    assert result.returncode == 1
    end = result.stdout[-4000:]
    assert "training failed" in end
    assert "vLLM's engine does not feed SmolLM3ForCausalLM" in end
    assert "off by" in end
    assert "Global step" not in result.stdout
    assert_nothing_runs(tmp_path)
