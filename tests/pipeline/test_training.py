# SPDX-License-Identifier: Apache-2.0
"""`ngrpo train` on the real stack: Ray, DeepSpeed ZeRO-2, vLLM, OpenRLHF's GRPO and GSPO, weight sync."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.harness import EXAMPLE, GAP, LOUD, PROGRAM, completed, steps_of


def check_first_step(step: dict[str, Any], rate: float) -> None:
    assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert step["rate"] == pytest.approx(rate, abs=0.12)
    # `until` and protected tokens are rare here.
    assert step["rate"] <= step["planned_rate"] <= step["rate"] + 0.02
    assert step["shift"] > 0.0
    assert 0.0 <= step["left_anchor"] <= 1.0


def test_grpo_with_reference_checkpointing_and_evaluation(tmp_path: Path, random_model: str) -> None:
    """KL loss to a replaying reference, gradient checkpointing, prefix caching, an evaluation that is not perturbed.

    The example's script runs, whose perturbation is neighbor, with later flags that make it smaller. The pretrained
    model trains in a recipe below and is replayed in tests/stack/test_exactness.py.
    """
    steps = steps_of(
        tmp_path,
        random_model,
        *LOUD,
        *["--perturbation.rate", "0.5", "--perturbation.mix_temperature", "3"],
        *["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.init_coef", "0.001"],
        *["--actor.gradient_checkpointing_enable", "--eval.steps", "1"],
        program=EXAMPLE,
    )
    check_first_step(steps[0], rate=0.5)
    for step in steps:
        assert step["gap_perturbed_max"] <= GAP
        assert step["gap_plain_max"] <= GAP
        assert step.get("gap_unperturbed_mean", 0.0) <= GAP
    assert "gap_unperturbed_mean" in steps[0], "no control was drawn"
    # Three of a group's four responses find the first 32 of a prompt's 41 tokens, which is a block on a CPU.
    assert steps[0]["prefix_hit_rate"] == pytest.approx(3 / 4 * 32 / 41)
    summary = json.loads((tmp_path / "summary.json").read_text())
    score_by_step = summary["evaluation"]["eval/eval_default_pass1"]
    assert list(score_by_step) == ["0", "1", "2"], "the example evaluates before its first step too"


@pytest.mark.slow
def test_gspo_with_gumbel_in_bfloat16(tmp_path: Path, smollm2: str) -> None:
    """With the attention that is the default of a run.

    Rounding at 2^-9 gives this model a gap of 0.03 to 0.04; the mean over a hundred tokens scatters
    by about a third. Without the replay the gap is more than 0.3.
    """
    flags = ["--perturbation", "gumbel", "--actor.policy_loss_type", "gspo", "--algo.kl.init_coef", "0"]
    flags += ["--ds.attn_implementation", "sdpa", "--ds.param_dtype", "bf16"]
    steps = steps_of(tmp_path, smollm2, *LOUD, *flags)
    check_first_step(steps[0], rate=1.0)
    for step in steps:
        assert step["gap_perturbed_mean"] <= 0.07
        assert step["gap_perturbed_mean"] > 10 * GAP, "so small a gap is not that of bfloat16"


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "perturbation"),
    [
        pytest.param("n_grpo_r1_distill_qwen_1.5b", "neighbor", marks=pytest.mark.slow),
        ("soft_grpo_r1_distill_qwen_1.5b", "gumbel"),
    ],
)
def test_a_recipe_rehearsed_on_a_cpu(name: str, perturbation: str, tmp_path: Path) -> None:
    """The command that the recipes' index gives, with the packaged model in place of the large one.

    SofT-GRPO's loss has a density: the ratio is 1 before an update, and the gap is that of the tokens' own
    log-probabilities, in which a density of draws would be off by a nat or more.
    """
    flags = ["--config", f"examples/recipes/{name}.yaml"]
    flags += ["--config", "examples/recipes/placements/rehearsal_cpu.yaml"]
    flags += ["--actor.gradient_checkpointing_enable", *LOUD]
    result = completed([*PROGRAM, str(tmp_path / "run"), *flags])
    assert result.returncode == 0, result.stdout[-6000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["perturbation"]["name"] == perturbation
    assert len(summary["steps"]) == 2
    first = summary["steps"][0]
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert first["rate"] == pytest.approx(summary["perturbation"]["rate"], abs=0.12)
    for step in summary["steps"]:
        assert step["rate"] > 0.0, step
        assert 0.0 < step["gap_perturbed_mean"] <= GAP, step
