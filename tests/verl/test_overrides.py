# SPDX-License-Identifier: Apache-2.0
"""verl's configuration with a perturbation: what is entered, what is refused, and the recipe. Nothing starts.

Needs an environment with verl: `make test-verl`.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="needs verl: make test-verl")
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from ngrpo import patches
from ngrpo.config.verl_lines import of_perturbation
from ngrpo.methods import advantages
from ngrpo.trainers.verl import overrides
from perturbations import registry
from perturbations.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm"]
NEIGHBOR = {"name": "neighbor", "rate": 0.1}


def configuration(*words: str) -> Any:
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=list(words))


def words_of(command: str) -> list[str]:
    """The overrides of a shell command."""
    return [word for word in shlex.split(command.replace("\\\n", " ")) if "=" in word]


def test_every_row_of_the_table_is_that_of_the_installed_verl() -> None:
    patches.check(patches.VERL)


@pytest.mark.parametrize("spec", [{**NEIGHBOR, "until": "a, 'b' {c}"}, {"name": "gumbel", "protect": None}])
def test_what_is_entered(spec: dict[str, Any]) -> None:
    """The engine gets every option; all else of verl is its synchronous trainer's."""
    config = configuration(*GRPO, *of_perturbation({**spec, "strict": True, "gap_limit": 3.5, "correct_mask": True}))
    made, limit, strict, correct_mask = overrides.prepare(config)
    rollout = config.actor_rollout_ref.rollout
    entered = OmegaConf.to_container(rollout.engine_kwargs.vllm.additional_config)
    assert made == registry.create(**spec) and (limit, strict) == (3.5, True)
    assert registry.create(**entered["perturbation"]) == made and entered["deferred_check"] is True
    assert correct_mask and entered["sampling_masks"] is True
    assert config.trainer.v1.trainer_mode == "sync" and rollout.agent.agent_loop_manager_class == overrides.MANAGER


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm.adv_estimator=gae"], "a critic"),
        (["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], "it splits a sequence"),
        (["actor_rollout_ref.actor.pad_to_length=True"], "pad_to_length"),
        (["algorithm.rollout_correction.bypass_mode=True"], "bypass_mode"),
        (["actor_rollout_ref.rollout.multi_turn.enable=True"], "records cover one turn"),
        (["trainer.use_v1=False"], "trainer.use_v1=False"),
        (["+perturbation.rate=2"], "rate"),
        (["+perturbation.gap_limit=0.5"], "gap_limit"),
        (["+perturbation.correct_mask=1"], "perturbation.correct_mask=1: true or false is needed"),
        (
            ["+perturbation.correct_mask=true", "actor_rollout_ref.model.use_fused_kernels=True"],
            "the correction needs the logits",
        ),
        (
            [
                "+perturbation.correct_mask=true",
                "algorithm.rollout_correction.rollout_is=token",
                "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs",
            ],
            "set logprobs_mode=processed_logprobs",
        ),
        (["+advantage.beta=2"], "advantage.beta"),
        (["algorithm.adv_estimator=copo"], "more than rewards"),
        (["algorithm.adv_estimator=rs_grpo", "algorithm.use_kl_in_reward=True"], "verl subtracts the KL term"),
    ],
)
def test_what_is_refused(words: list[str], said: str) -> None:
    given = [word for word in of_perturbation({"name": "neighbor"}) if word]
    with pytest.raises(UsageError, match=re.escape(said)):
        overrides.prepare(configuration(*GRPO, *given, *words))


def test_a_density_is_refused_what_it_would_not_be_part_of() -> None:
    words = of_perturbation({"name": "gaussian", "density": "gaussian"})
    with pytest.raises(UsageError, match=r"use_kl_loss.*density=token"):
        overrides.prepare(configuration(*GRPO, *words, "actor_rollout_ref.actor.use_kl_loss=True"))
    overrides.prepare(configuration(*GRPO, *words))


def test_the_recipe_is_a_configuration_of_verl() -> None:
    text = (ROOT / "examples" / "verl" / "n_grpo_r1_distill_qwen_1.5b.sh").read_text()
    made, *_ = overrides.prepare(configuration(*words_of(text[text.index("python -m") :])))
    assert made == registry.create("neighbor", rate=0.1)


def test_an_advantage_is_verls_estimator() -> None:
    words = ["algorithm.adv_estimator=rs_grpo", "+advantage.beta=2.0", GRPO[1]]
    overrides.prepare(configuration(*words, *of_perturbation(NEIGHBOR)))
    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0, 1.0, 0.0])
    tokens, mask = torch.zeros(6, 4), torch.ones(6, 4)
    tokens[:, 3], mask[2, 2:], mask[5] = rewards, 0.0, 0.0
    tokens[2] = 0.0
    index = np.array(["a", "b", "a", "b", "a", "pad"], dtype=object)
    found, returns = get_adv_estimator_fn("rs_grpo")(token_level_rewards=tokens, response_mask=mask, index=index)
    advantage = advantages.create("rs_grpo", beta=2.0)
    for rows in ([0, 2, 4], [1, 3]):
        wanted = advantage.compute(rewards[rows][None])[0]
        torch.testing.assert_close(found[rows], wanted[:, None] * mask[rows])
    assert found[5].eq(0.0).all() and returns is found
