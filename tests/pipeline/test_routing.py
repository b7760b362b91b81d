# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts trains on its rollouts' experts, where engine and trainer alone would choose different ones.

One of the runs has an advantage, masks and a credit too.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.pipeline.harness import GAP, LOUD, ROOT, steps_of

LETTERS = ["--reward.remote_url", str(ROOT / "tests/pipeline/user_files/first_letters.py")]
SHARDED = "--ds.zero_stage 3 --actor.num_gpus_per_node 2 --rollout.micro_batch_size 4 --train.micro_batch_size 4"
WITH_REFERENCE = (
    "--algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 --actor.gradient_checkpointing_enable"
)
MASKED = "--advantage ngrpo --credit top_entropy --sampling.top_k 20 --sampling.min_p 0.1 --ds.packing_samples"


def trained_on_its_experts(folder: Path, tied_experts: Path, *words: str) -> list[dict[str, Any]]:
    """The steps of a run whose replay was exact, and whose routers learned."""
    steps = steps_of(folder, str(tied_experts), *LOUD, "--replay.routing", *words)
    for step in steps:
        assert step.get("ratio_mean", 1.0) == pytest.approx(1.0, abs=1e-3)
        assert step["gap_plain_max"] <= GAP, step
        assert step.get("gap_perturbed_max", 0.0) <= GAP, step
    assert steps[0]["gap_unperturbed_mean"] <= GAP, "the alarm's scale is of replayed experts too"
    before = load_file(tied_experts / "model.safetensors")
    after = load_file(folder / "model" / "model.safetensors")
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    moved = [name for name in routers if not before[name].equal(after[name])]
    assert len(moved) == 2
    return steps


def test_with_ngrpo_masks_and_packed_samples(tmp_path: Path, tied_experts: Path) -> None:
    """Both near-equal names at once, N-GRPO's neighbor mixing and NGRPO.

    No answer is right. With n = 1 and four answers, all-wrong groups get -0.2/√0.2, which is -√0.2 (tests/fast).
    Log-probabilities are those before the masks, on both sides.
    """
    words = f"--perturbation neighbor {MASKED} {WITH_REFERENCE}"
    steps = trained_on_its_experts(tmp_path, tied_experts, *words.split())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["advantage"] == {"name": "ngrpo", "n": 1, "max_reward": 1.0}
    assert summary["sampling"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 20,
        "min_p": 0.1,
        "correct_mask": False,
        "score_centering": False,
    }
    assert "--actor.eps_clip_low_high 0.16 0.24" in " ".join(summary["openrlhf_args"])
    for number, step in enumerate(steps, start=1):
        assert step["advantage_uniform_mean"] == pytest.approx(-(0.2**0.5), abs=1e-5)
        # OpenRLHF's "return" is the mean over the samples that the trainer received.
        assert summary["scalars"]["train/return"][str(number)] == pytest.approx(step["advantage_mean"], abs=1e-5)
        # A fifth of all tokens is trained, more in some groups and less in others.
        assert 0.0 < step["credit_trained"] < 0.6
        assert step["credit_entropy"] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--perturbation none", f"--perturbation neighbor --algo.kl.init_coef 0 {SHARDED}"])
def test_ties_are_replayed_and_the_router_learns(words: str, tmp_path: Path, tied_experts: Path) -> None:
    trained_on_its_experts(tmp_path, tied_experts, *LETTERS, *words.split())
