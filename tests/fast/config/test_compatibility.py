# SPDX-License-Identifier: Apache-2.0
"""The table of what does not go with what: each pair of features makes a run, or is refused by a row of the table."""

import warnings
from contextlib import nullcontext
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo import cli
from ngrpo.config import compatibility, parse, rules
from ngrpo.config.feature_kinds import Combination
from ngrpo.machine.upstream import versions
from perturbations import create
from perturbations.errors import UsageError
from tests.conftest import ROOT
from tests.support.run import refused

pytestmark = pytest.mark.skipif(versions.installed("openrlhf") is None, reason="needs OpenRLHF")

RUN = "--model m --task arithmetic --hardware cpu --rollout.n_samples_per_prompt 4 --rollout.batch_size 8"
RUN += " --train.batch_size 32 --run-dir r --algo.kl.init_coef 0 --algo.advantage.estimator group_norm"
WEIGHTS = "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip"
FEATURES = {
    "perturbation": "--perturbation soft",
    "unsampled": "--perturbation neighbor",
    "density": "--perturbation gumbel --perturbation.density gumbel",
    "score": "--perturbation gaussian --perturbation.base soft --perturbation.density gaussian",
    "parameters": "--perturbation hrpo",
    "advantage": "--advantage nsr",
    "counted": "--advantage copo",
    "lens": "--advantage lens",
    "hidden": "--advantage rep_exp",
    "credit": "--credit top_entropy",
    "simko": "--credit simko",
    "noise": "--policy_noise aqn",
    "adaptive": "--policy_noise psn --policy_noise.adaptive",
    "schedule": "--sampling.schedule ead",
    "e3": "--sampling.schedule e3",
    "second": "--second_round repeat --second_round.group kept",
    "mask": "--sampling.top_k 20 --sampling.correct_mask",
    "centering": "--sampling.top_k 30 --sampling.score_centering",
    "cuts": "--perturbation cuts",
    "top_p": "--rollout.top_p 0.9",
    "reproducible": "--reproducible",
    "async": "--train.async_enable",
    "correction": WEIGHTS,
    "warm-up": f"{WEIGHTS} --sampling.correction_warmup 10",
    "gspo": "--actor.policy_loss_type gspo",
    "dynamic": "--train.dynamic_batch_enable",
    "packing": "--ds.packing_samples",
    "ema": "--train.enable_ema",
    "zero3": "--ds.zero_stage 3",
    "vision": "--data.max_images_per_prompt 2",
    "evaluation": "--eval.at_start",
    "epochs": "--train.max_epochs 2",
    "lora": "--ds.lora.rank 8",
}
# The pairs that a row refuses; every other pair makes a run.
REFUSED = {
    "second": "perturbation unsampled density score parameters cuts simko mask centering warm-up gspo vision",
    "centering": "unsampled density score cuts simko noise adaptive async warm-up epochs",
    "density": "lens simko adaptive schedule e3 mask top_p correction warm-up",
    "score": "lens noise adaptive schedule e3 async correction warm-up epochs",
    "async": "noise adaptive e3",
    "gspo": "credit simko adaptive schedule e3 warm-up",
    "zero3": "noise adaptive ema",
    "unsampled": "schedule e3",
    "cuts": "schedule e3",
    "vision": "packing dynamic",
    "lora": "ema",
}


def outcome(words: str) -> str:
    """Why the rules of a start and of `--dry-run` refuse a command line; empty where they do not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            rules.checked(parse.run_config([*RUN.split(), *words.split()]))
        except UsageError as error:
            return str(error)
    return ""


def pairs() -> list[tuple[str, str]]:
    """All pairs of features whose flags are of different settings."""
    named = {name: {word for word in words.split() if word.startswith("--")} for name, words in FEATURES.items()}
    return [(one, other) for one, other in combinations(FEATURES, 2) if not named[one] & named[other]]


def test_each_pair_makes_a_run_or_is_refused_by_a_row() -> None:
    told = {frozenset(pair): outcome(" ".join(FEATURES[name] for name in pair)) for pair in pairs()}
    expected = {frozenset((one, other)) for one, others in REFUSED.items() for other in others.split()}
    assert {pair for pair, error in told.items() if error} == expected
    for pair in expected:
        lines = told[pair].splitlines()
        assert all(" cannot be used with " in line and "Fix: " in line for line in lines), (pair, lines)


def test_prompts_that_were_drawn_ahead_are_lost_by_a_resume() -> None:
    ahead = "--train.async_enable --rollout.vllm_generate_batch_size 24"
    assert "would never train them" in outcome(f"{ahead} --ckpt.save_steps 1")
    for fine in (ahead, ahead.replace("24", "8") + " --ckpt.save_steps 1"):
        assert not outcome(fine)


CORRECTION = "vllm_importance_sampling_correction"
PENALTY = "repetition_penalty"


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"top_p": 0.9}, True),
        ({"top_k": 20}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"repetition_penalty": 1.0}, False),
        ({}, False),
        ({"top_p": 0.9, CORRECTION: False}, False),
        ({"top_p": 0.9, CORRECTION: False, "off_policy_mask_threshold": 0.5}, True),
        ({"generation_kwargs": {"top_p": 0.9}}, True),
        ({"generation_kwargs": {"top_p": 1.0, "stop": ["x"]}, "top_p": 0.9}, False),
        ({"generation_kwargs": {"logit_bias": {5: 2.0}}}, True),
        ({"generation_kwargs": {"thinking_token_budget": 0}}, True),
        ({"generation_kwargs": {"temperature": 0.7}}, True),
        ({"generation_kwargs": {"temperature": 1.0}}, False),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, True),
    ],
)
def test_trl_s_weights_are_of_the_whole_distribution(settings: dict[str, Any], refused: bool) -> None:
    base = {"use_vllm": True, "vllm_mode": "colocate", "top_p": 1.0, "top_k": 0, "min_p": None, CORRECTION: True}
    config = SimpleNamespace(**{**base, **settings})
    asked = Combination(parts={"perturbation": create("neighbor")}, settings=config, arguments={})
    with pytest.raises(UsageError, match="the changed distribution") if refused else nullcontext():
        compatibility.check(compatibility.TRL, asked)


@pytest.mark.parametrize(("settings", "refused"), [({"top_p": 0.9, "top_k": 20}, False), ({PENALTY: 1.1}, True)])
def test_trl_s_weights_are_right_with_a_corrected_mask_but_for_a_penalty(
    settings: dict[str, Any], refused: bool
) -> None:
    config = SimpleNamespace(**{"use_vllm": True, "vllm_mode": "colocate", CORRECTION: True, **settings})
    parts = {"perturbation": create("none")}
    combination = Combination(parts=parts, settings=config, arguments={"correct_mask": True})
    with pytest.raises(UsageError, match="the changed distribution") if refused else nullcontext():
        compatibility.check(compatibility.TRL, combination)


def test_trl_s_tensor_parallel_engine_is_refused() -> None:
    config = SimpleNamespace(use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=2)
    combination = Combination(parts={"perturbation": create("none")}, settings=config, arguments={})
    with pytest.raises(UsageError, match="vllm_tensor_parallel_size above 1 cannot be used with"):
        compatibility.check(compatibility.TRL, combination)


@pytest.mark.parametrize(("words", "told"), refused("pairs"))
def test_a_refusal_names_value_reason_and_fix(words: str, told: str) -> None:
    error = outcome(words)
    assert told in error
    assert all(" cannot be used with " in line and ". Fix: " in line for line in error.splitlines())


@pytest.mark.parametrize("words", refused("but_not"))
def test_what_goes_together(words: str) -> None:
    assert outcome(words) == ""


def test_the_page_is_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8") == compatibility.page(), (
        "python -m ngrpo.config.compatibility > docs/compatibility.md"
    )
    assert cli.main(["list", "compatibility"]) == 0
    assert capsys.readouterr().out.strip() == compatibility.page().strip()
