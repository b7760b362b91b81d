# SPDX-License-Identifier: Apache-2.0
"""A run printed as overrides of verl's command line; tests/verl has verl read them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ngrpo import cli
from ngrpo.config.verl_lines import hydra

pytest.importorskip("openrlhf")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPE = "n_grpo_r1_distill_qwen_1.5b"


def lines_of(command: str) -> dict[str, str]:
    words = shlex.split(command[command.index("python -m") :].replace("\\\n", " "))
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_the_recipe_for_verl_is_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """What can be translated has the same values in examples/verl, written by hand."""
    assert cli.main(["train", "--config", str(EXAMPLES / "recipes" / f"{RECIPE}.yaml"), "--print", "verl"]) == 0
    text = capsys.readouterr()
    printed, by_hand = lines_of(text.out), lines_of((EXAMPLES / "verl" / f"{RECIPE}.sh").read_text())
    of_verl = "actor_rollout_ref.actor.ppo_epochs"  # 1 in both, which is verl's own
    different = {key: value for key, value in printed.items() if key != of_verl and by_hand.get(key) != value}
    assert {key: value for key, value in different.items() if by_hand.get(key, "").lower() != value} == {}
    assert printed["trainer.v1.trainer_mode"] == "perturbed" and printed["+perturbation.name"] == "neighbor"
    assert "--reward.remote_url" in text.err


def test_options_and_an_advantage(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model m --task arithmetic --perturbation gumbel --perturbation.tau 0.5 --perturbation.strict"
    assert cli.main(["train", *words.split(), "--advantage", "rs_grpo", "--print", "verl"]) == 0
    printed = lines_of(capsys.readouterr().out)
    assert printed["+perturbation.tau"] == "0.5" and printed["+perturbation.strict"] == "true"
    assert printed["algorithm.adv_estimator"] == "rs_grpo" and printed["+advantage.beta"] == "2.0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--print trl", "--print trl: verl is the one trainer"),
        ("--print verl --credit first_token", "--credit is of OpenRLHF's trainer"),
        ("--print verl --algo.advantage.estimator rloo", "rloo has no counterpart in verl"),
    ],
)
def test_what_verl_has_not(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--model", "m", "--task", "arithmetic", *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (0.1, "0.1"), ("a b", "'a b'"), ("it's", "'it\\'s'"), ([1, "x"], "[1,x]")],
)
def test_values_in_hydras_grammar(value: object, text: str) -> None:
    assert hydra(value) == text
