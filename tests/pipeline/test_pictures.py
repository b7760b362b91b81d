# SPDX-License-Identifier: Apache-2.0
"""A multimodal model is trained on prompts with pictures, and its records are replayed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.harness import GAP, LOUD, ROOT, SMALL, steps_of, train
from tests.support.own_process import NO_VISION, with_vision

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NO_VISION, reason="torchvision is missing: make vision")]
# Writes the model to the first argument, with the tokenizer of the second; its prompts are in a folder inside.
MAKE = """
import sys
from pathlib import Path

from benchmarks.models import pictures

folder = Path(sys.argv[1])
pictures.build(folder, sys.argv[2])
pictures.prompts(folder / "prompts")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    command = [sys.executable, "-c", MAKE, str(folder), smollm2]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **with_vision()}, check=True, capture_output=True)
    return folder


def flags_for(model: Path) -> list[str]:
    return [
        *LOUD,
        *["--data.prompt_dataset", str(model / "prompts" / "prompts.jsonl"), "--data.label_key", "label"],
        *["--data.apply_chat_template", "--data.image_key", "images", "--data.max_images_per_prompt", "1"],
        *["--reward.remote_url", str(ROOT / "tests/pipeline/user_files/first_letters.py")],
        *["--perturbation", "neighbor", "--perturbation.variant", "released", "--perturbation.rate", "0.5"],
        *["--rollout.max_new_tokens", "24", "--perturbation.strict"],
        *["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.init_coef", "0.001"],
    ]


def test_two_steps_of_a_multimodal_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay is exact in both steps, after perturbed inputs and at plain positions."""
    monkeypatch.delitem(SMALL, "--task")
    for step in steps_of(tmp_path / "run", str(model), *flags_for(model), env=with_vision()):
        assert step["rate"] == pytest.approx(0.5, abs=0.12)
        assert step["shift"] > 0.0
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-2)
        assert step["gap_perturbed_mean"] <= GAP
        assert step["gap_plain_mean"] <= GAP


def test_pictures_that_both_sides_read_differently_end_a_strict_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the axes of positions vLLM numbers a picture's tokens as it numbers text; transformers does not."""
    monkeypatch.delitem(SMALL, "--task")
    folder = tmp_path / "without_axes"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["rope_parameters"]["mrope_section"]
    (folder / "config.json").write_text(json.dumps(config))
    result = train(tmp_path / "run", str(folder), *flags_for(model), env=with_vision())
    assert result.returncode != 0
    assert "Engine and trainer read pictures differently" in result.stdout, result.stdout[-6000:]
