# SPDX-License-Identifier: Apache-2.0
"""Each method takes real training steps in OpenRLHF, with exact replay. Slow: `make test-all`.

What other tests of this folder train is left out: neighbor, gumbel, NGRPO, the density of SofT-GRPO.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ngrpo.machine.storage.parameters_file import FILE
from ngrpo.methods import advantages, credits, policy_noises, sampling_schedules
from ngrpo.methods.sampling_schedules.base import PastStep, Run
from ngrpo.methods.second_rounds.lope import WORDS
from perturbations import registry
from tests.pipeline.harness import GAP, LOUD, steps_of

pytestmark = pytest.mark.slow

TESTED_ELSEWHERE = {"none", "neighbor", "gumbel", "hrpo"}
WITH_DENSITY = [
    "multiplex --perturbation.density joint",
    "tarpo --perturbation.density decision",
    "gaussian --perturbation.density gaussian --perturbation.base soft",
    "dirichlet --perturbation.density dirichlet",
    "normal --perturbation.density normal",
    "lepo --perturbation.density lepo",
    "latent --perturbation.density latent",
]
WITHOUT_DENSITY = set(registry.available()) - TESTED_ELSEWHERE - {words.split()[0] for words in WITH_DENSITY}
WITHOUT_DENSITY.add("gaussian")  # which is trained in both ways
PERTURBATIONS = [*WITH_DENSITY, *sorted(WITHOUT_DENSITY)]
# With refinements of a draft, whose records are of a longer prompt than the data's.
NEIGHBOR = ["--perturbation.variant released --second_round igrpo"]
NEIGHBOR += [f"--credit {name}" for name in sorted(credits.available())]
NEIGHBOR += [f"--advantage {name}" for name in sorted({*advantages.available()} - {"group_norm", "ngrpo"})]
RUNS = [f"--perturbation {words} --algo.kl.init_coef 0" for words in PERTURBATIONS]
RUNS += [f"--perturbation neighbor --preset grpo {words}" for words in NEIGHBOR]


@pytest.mark.parametrize("words", RUNS)
def test_two_steps(words: str, tmp_path: Path, smollm2: str) -> None:
    for step in steps_of(tmp_path, smollm2, *LOUD, *words.split()):
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-2)
        assert step["rate"] > 0.0, "nothing was perturbed"
        assert step["gap_perturbed_mean"] <= GAP
        # With rate 1 every position that has a log-probability may be a perturbed one. OpenRLHF's min_tokens=1 excludes
        # the end from the first token, whose log-probability is then higher by -log(1 - p). What this run of `cuts`
        # learns makes p 0.001, and all of its plain tokens are among the first ones.
        if not words.startswith("--perturbation cuts"):
            assert step.get("gap_plain_mean", 0.0) <= GAP
        if "igrpo" in words:
            assert step["second_round_asked"] == 1.0
            assert step["second_round_trained"] == 1.0
            assert step["second_round_drafts"] <= step["second_round_best_draft"]


STRONG_NOISE = {
    "psn": "--policy_noise.sigma 0.01",
    "aqn": "--policy_noise.start 0.01 --policy_noise.steps 3 --policy_noise.stages 3",
}


@pytest.mark.parametrize("noise", sorted(policy_noises.available()))
def test_policy_noise(noise: str, tmp_path: Path, smollm2: str) -> None:
    """With PSN's importance weights, and a divergence between rollout and trainer where there is noise.

    An evaluation with clean weights is between the steps.
    """
    words = f"--policy_noise {noise} {STRONG_NOISE[noise]} --perturbation neighbor --algo.kl.init_coef 0 --eval.steps 1"
    first, second = steps_of(tmp_path, smollm2, *LOUD, *words.split())
    scales = [first["policy_noise_scale"], second["policy_noise_scale"]]
    if noise == "psn":
        assert scales == pytest.approx([0.01, 0.01])
        assert second["gap_plain_mean"] > 0.2
        assert 0.5 < first["importance_weight"] < 1.5
        assert first["importance_divergence"] > 0.02
        assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-2)
    else:
        assert scales == pytest.approx([0.0, 0.01])
        assert second["gap_plain_mean"] > 100 * first["gap_plain_mean"]


STRONG_SCHEDULES = {
    "ead": "--sampling.schedule.tau_max 1.6 --sampling.schedule.c 2",
    "e3": "--sampling.schedule.share 1",
    # Importance weights need text that was sampled, and by default this perturbation's text is the likeliest token.
    "edt": "--sampling.schedule.theta 1.0 --perturbation neighbor --perturbation.realization sampled",
    "ladder": "--sampling.schedule.most 1.6 --sampling.correction_warmup 2",
}


@pytest.mark.parametrize("schedule", sorted(sampling_schedules.available()))
def test_sampling_schedule(schedule: str, tmp_path: Path, smollm2: str) -> None:
    """With importance weights; alone and with a perturbation; an evaluation, which is at its own temperature."""
    words = f"--sampling.schedule {schedule} {STRONG_SCHEDULES[schedule]} --eval.steps 1 --algo.kl.init_coef 0"
    steps = steps_of(tmp_path, smollm2, *LOUD, *words.split())
    for step in steps:
        assert 0.5 < step["importance_weight"] < 1.5
        assert step["sampling_entropy"] > 0.0
    if schedule == "ladder":
        assert [step["importance_strength"] for step in steps] == [0.0, 0.5]
    if schedule == "e3":
        run = Run(steps=2, temperature=1.0, vocabulary=49152)
        past = [PastStep(factor=1.0, entropy=steps[0]["sampling_entropy"])]
        factor = sampling_schedules.create("e3", share=1).factor_of_step(past, run)
        assert factor == 1.0, "the second step is compared with the first one's own entropy"
        assert [step["sampling_temperature"] for step in steps] == pytest.approx([1.0, factor])
    else:
        assert abs(steps[0]["importance_divergence"]) > 0.01, "drawn at other temperatures than the trainer's"


def test_hrpos_gate_trains_is_synced_and_saved(tmp_path: Path, smollm2: str) -> None:
    """The learning rates are so large that an update which missed the rollout would show in the gap of step 2.

    Adam's first step moves each parameter by its rate: Λ by 4. With the gate of step 1 the rollout of step 2 would be
    off by 0.17 on average.
    """
    rates = ["--perturbation.gate_lr", "0.02", "--perturbation.lambda_lr", "4"]
    kl = ["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.init_coef", "0.001"]
    first, second = steps_of(tmp_path, smollm2, *LOUD, *kl, "--perturbation", "hrpo", *rates)
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert first["rate"] > 0.9
    assert first["shift"] > 0.0
    assert second["shift"] > 1.5 * first["shift"], "the gate has not changed"
    for step in (first, second):
        assert step["gap_perturbed_mean"] <= GAP
    (saved,) = tmp_path.rglob(FILE)
    gate = load_file(saved)
    assert set(gate) == {"w_r", "w_i", "lambda_shift"}
    for name, parameter in gate.items():
        assert parameter.any(), name
    weights = load_file(saved.parents[1] / "model.safetensors")
    assert not [name for name in weights if "perturbation" in name]


def test_a_corrected_mask_scores_what_the_rollout_drew_from(tmp_path: Path, smollm2: str) -> None:
    """A trainer that scored with the whole distribution would show a gap, and a vllm_kl, of 0.56.

    At this temperature the twenty likeliest tokens hold only exp(-0.56) of it, on average in answers to such prompts.
    """
    truncated = ["--sampling.top_k", "20", "--rollout.temperature", "1.5", "--sampling.correct_mask"]
    correction = ["--algo.advantage.is_correction_level", "token", "--algo.advantage.is_correction_mode", "clip"]
    steps = steps_of(tmp_path, smollm2, "--perturbation", "none", *truncated, *correction)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["sampling"] == {
        "temperature": 1.5,
        "top_p": 1.0,
        "top_k": 20,
        "min_p": None,
        "correct_mask": True,
        "score_centering": False,
    }
    for number, step in enumerate(steps, start=1):
        # OpenRLHF's own: the mean of log π_rollout − log π_trainer, with the engine's processed log-probabilities.
        kl = summary["scalars"]["train/vllm_kl"][str(number)]
        assert step["gap_plain_mean"] <= GAP
        assert abs(kl) <= GAP
        assert math.isfinite(summary["scalars"]["train/policy_loss"][str(number)])


CENTERED = {
    # At this temperature twenty tokens hold half of the probability, so the distance of q and p is far from 0.
    "top_k": "--perturbation none --sampling.top_k 20 --rollout.temperature 1.5",
    "cuts": "--perturbation cuts --perturbation.until none --perturbation.burn_in 0 --sampling.top_k 20",
    "ladder": "--perturbation none --sampling.schedule ladder --algo.advantage.is_correction_level off",
    "weights": (
        "--perturbation none --sampling.schedule ladder --sampling.schedule.most 1.6"
        " --algo.advantage.is_correction_threshold 0 1.2"
    ),
}


@pytest.mark.parametrize("name", CENTERED)
def test_score_centering(name: str, tmp_path: Path, smollm2: str) -> None:
    """Two steps with advantages that do not sum to 0; the log-probabilities stay those of the whole vocabulary."""
    words = f"{CENTERED[name]} --sampling.score_centering --advantage nsr --algo.kl.init_coef 0"
    least = 0.001 if name == "weights" else 0.05
    for step in steps_of(tmp_path, smollm2, *LOUD, *words.split()):
        assert least < step["score_centering_removed"] < 1.0
        if "ladder" not in CENTERED[name]:  # The gap contains its temperatures.
            assert step["gap_plain_mean"] <= GAP


# --- second rounds ---------------------------------------------------------------------------------------------------
# The rewards call every answer of the first round wrong, so the method alone decides which answers are right.

AFTER_NONSENSE = f"""
import torch

WORDS = {set(WORDS)!r}


def reward_func(queries, prompts, labels, **kwargs):
    rewards = torch.tensor([float(len(WORDS & set(prompt.split())) > 5) for prompt in prompts])
    return {{"rewards": rewards, "scores": rewards}}
"""
# Calls are counted by their prompt, in the engine's process, which rewards. Answers after a prompt's fourth are right.
AFTER_FOUR = """
from collections import Counter

import torch

answers = Counter()


def reward_func(queries, prompts, labels, **kwargs):
    right = []
    for prompt in prompts:
        answers[prompt] += 1
        right.append(answers[prompt] > 4)
    rewards = torch.tensor(right).float()
    return {"rewards": rewards, "scores": rewards}
"""


def second_rounds(folder: Path, model: str, reward: str, words: str) -> list[dict[str, Any]]:
    """The steps of a run with this reward function and these flags."""
    reward_file = folder / "rewards.py"
    reward_file.write_text(reward)
    flags = [*LOUD, "--advantage", "group_norm", "--reward.remote_url", str(reward_file)]
    return steps_of(folder / "run", model, *flags, *words.split())


def test_answers_after_nonsense_are_trained(tmp_path: Path, smollm2: str) -> None:
    """In a run with an evaluation, which has no second round: its score is 0."""
    words = "--second_round lope --second_round.prompts 2 --second_round.answers 2 --eval.steps 1"
    words += " --second_round.least 20 --second_round.most 40"
    steps = second_rounds(tmp_path, smollm2, AFTER_NONSENSE, words)
    for step in steps:
        assert step["second_round_asked"] == 1.0
        assert step["second_round_right"] == 1.0
        assert step["second_round_solved"] == 1.0
        assert step["second_round_trained"] == 0.75, "of four answers a wrong one stays"
        assert step["reward"] == pytest.approx(0.75)
        assert 0.3 < step["second_round_ratio"] < 3.0
        assert abs(step["second_round_ratio"] - 1.0) > 0.02
        # Four of eight answers are right: deviation √(2/7), so ±0.935414.
        assert step["advantage_mean"] == pytest.approx(0.935414 * 0.5, abs=1e-5)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["second_round"]["name"] == "lope"
    assert summary["evaluation"]["eval/eval_default_pass1"] == {"1": 0.0, "2": 0.0}


def test_answers_to_the_same_prompt_have_a_ratio_of_one(tmp_path: Path, smollm2: str) -> None:
    """So the engine's log-probabilities stand at their own tokens, and contain the temperature."""
    words = "--second_round repeat --second_round.answers 4 --second_round.group kept"
    words += " --rollout.temperature 0.7 --reproducible --report.groups 1"
    steps = second_rounds(tmp_path, smollm2, AFTER_FOUR, words)
    for step in steps:
        assert step["second_round_asked"] == 1.0
        assert step["second_round_trained"] == 0.75
        assert step["second_round_ratio"] == pytest.approx(1.0, abs=0.03)
        assert step["advantage_max"] == pytest.approx(0.5, abs=1e-4), "of the four that are trained"
