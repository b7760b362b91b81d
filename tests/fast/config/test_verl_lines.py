# SPDX-License-Identifier: Apache-2.0
"""A run printed as overrides of verl's command line; tests/verl has verl read them."""

import shlex
from pathlib import Path

import pytest

from ngrpo import cli
from ngrpo.config.verl_lines import hydra
from tests.support.run import refused

pytest.importorskip("openrlhf")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RECIPE = "n_grpo_r1_distill_qwen_1.5b"


def lines_of(command: str) -> dict[str, str]:
    words = shlex.split(command[command.index("python -m") :].replace("\\\n", " "))
    return dict(word.split("=", 1) for word in words if "=" in word)


def printed_for(capsys: pytest.CaptureFixture[str], words: str) -> tuple[dict[str, str], str]:
    """The overrides of a run, and what is said beside them."""
    assert cli.main(["train", *words.split(), "--print", "verl"]) == 0
    text = capsys.readouterr()
    return lines_of(text.out), text.err


def test_the_recipe_for_verl_is_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """What can be translated has the same values in examples/verl, written by hand."""
    printed, said = printed_for(capsys, f"--config {EXAMPLES / 'recipes' / RECIPE}.yaml")
    by_hand = lines_of((EXAMPLES / "verl" / f"{RECIPE}.sh").read_text())
    of_verl = "actor_rollout_ref.actor.ppo_epochs"  # 1 in both, which is verl's own
    different = {key: value for key, value in printed.items() if key != of_verl and by_hand.get(key) != value}
    assert {key: value for key, value in different.items() if by_hand.get(key, "").lower() != value} == {}
    assert printed["trainer.v1.trainer_mode"] == "perturbed"
    assert printed["actor_rollout_ref.actor.strategy"] == "fsdp2", "verl's default is fsdp, which is untested"
    assert printed["+perturbation.name"] == "neighbor"
    assert "--reward.remote_url" in said


def test_options_and_an_advantage(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model m --task arithmetic --perturbation gumbel --perturbation.tau 0.5 --perturbation.strict"
    printed, _ = printed_for(capsys, f"{words} --advantage rs_grpo --algo.kl.init_coef 0")
    assert printed["+perturbation.tau"] == "0.5"
    assert printed["+perturbation.strict"] == "true"
    assert printed["algorithm.adv_estimator"] == "rs_grpo"
    assert printed["+advantage.beta"] == "2.0"


def test_defaults_of_openrlhf_that_verl_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    """A KL term that no flag names is OpenRLHF's default; what verl cannot do is named."""
    words = "--model m --task arithmetic --algo.advantage.estimator group_norm --sampling.top_k 20 --reproducible"
    printed, said = printed_for(capsys, f"{words} --report.groups 2")
    assert printed["algorithm.use_kl_in_reward"] == "true"
    assert printed["algorithm.kl_ctrl.kl_coef"] == "0.01"
    assert printed["actor_rollout_ref.rollout.top_k"] == "20"
    assert said.rstrip().endswith("--reproducible, --report.groups, --task")


def test_the_last_clip_counts(capsys: pytest.CaptureFixture[str]) -> None:
    clips = "--actor.eps_clip_low_high 0.1 0.1 --actor.eps_clip_low_high 0.2 0.28"
    printed, _ = printed_for(capsys, f"--model m --preset grpo {clips}")
    clip = {key.rpartition("_")[2]: value for key, value in printed.items() if "clip_ratio" in key}
    assert clip == {"low": "0.2", "high": "0.28"}


@pytest.mark.parametrize(("words", "said"), refused("verl"))
def test_what_verl_has_not(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--model", "m", "--task", "arithmetic", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_what_an_advantage_can_go_with(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model m --task arithmetic --advantage pass_at_k --advantage.k 1 --algo.kl.use_loss"
    printed, _ = printed_for(capsys, words)
    assert printed["algorithm.adv_estimator"] == "pass_at_k"
    assert printed["actor_rollout_ref.actor.use_kl_loss"] == "true"
    assert "algorithm.use_kl_in_reward" not in printed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (0.1, "0.1"),
        ("a b", "'a b'"),
        ("it's", "'it\\'s'"),
        ([1, "x"], "[1,x]"),
        # A text that Hydra would read as another value, a letter that it takes in quotes only, and backslashes.
        ("true", "'true'"),
        ("modèle", "'modèle'"),
        ("a\\b", "'a\\b'"),
        ("end\\", "'end\\\\'"),
    ],
)
def test_values_in_hydras_grammar(value: object, text: str) -> None:
    assert hydra(value) == text
