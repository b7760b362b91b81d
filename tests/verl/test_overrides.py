# SPDX-License-Identifier: Apache-2.0
"""verl's configuration with a perturbation: what is entered, what is refused, and the recipe. Nothing starts.

Needs an environment with verl: `make test-verl`.
"""

import re
import shlex
from importlib import import_module
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
from ngrpo.machine.upstream import patch_check
from ngrpo.methods import advantages
from ngrpo.trainers.verl import overrides
from perturbations import registry
from perturbations.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
VLLM = "actor_rollout_ref.rollout.name=vllm"
GRPO = ["algorithm.adv_estimator=grpo", VLLM]
NEIGHBOR = {"name": "neighbor", "rate": 0.1}
ONE_UPDATE = ["data.train_batch_size=1024", "actor_rollout_ref.actor.ppo_mini_batch_size=1024"]
# Sizes with which verl's own check of a configuration passes.
SIZES = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
]


def configuration(*words: str) -> Any:
    """verl's configuration with these overrides."""
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=list(words))


def words_of(command: str) -> list[str]:
    """The overrides of a shell command."""
    return [word for word in shlex.split(command.replace("\\\n", " ")) if "=" in word]


def test_every_row_of_the_table_is_that_of_the_installed_verl() -> None:
    patch_check.check(patches.VERL)


@pytest.mark.parametrize("spec", [{**NEIGHBOR, "until": "a, 'b' {c}"}, {"name": "gumbel", "protect": None}])
def test_what_is_entered(spec: dict[str, Any]) -> None:
    """The engine gets every option; all else of verl is its synchronous trainer's."""
    config = configuration(*GRPO, *of_perturbation({**spec, "strict": True, "gap_limit": 3.5, "correct_mask": True}))
    perturbation, gap_limit, strict, correct_mask = overrides.prepare(config)
    assert perturbation == registry.create(**spec)
    assert gap_limit == 3.5
    assert strict is True
    assert correct_mask
    rollout = config.actor_rollout_ref.rollout
    entered = OmegaConf.to_container(rollout.engine_kwargs.vllm.additional_config)
    assert registry.create(**entered["perturbation"]) == perturbation
    assert entered["deferred_check"] is True
    assert entered["seeded_draws"] is True
    assert entered["sampling_masks"] is True
    assert rollout.load_format == "auto", "verl's default is dummy"
    assert config.trainer.v1.trainer_mode == "sync"
    assert rollout.agent.agent_loop_manager_class == overrides.MANAGER


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.adv_estimator=gae"], "a critic"),
        (["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], "it splits a sequence"),
        (["actor_rollout_ref.actor.pad_to_length=True"], "pad_to_length"),
        (["algorithm.rollout_correction.bypass_mode=True"], "bypass_mode"),
        (["actor_rollout_ref.rollout.multi_turn.enable=True"], "records cover one turn"),
        (["+perturbation.rate=2"], "rate"),
        (["+perturbation.gap_limit=0.5"], "gap_limit"),
        (["+perturbation.gap_limit=true"], "gap_limit"),
        (["perturbation.name=null"], "needs a perturbation"),
        ([f"+{overrides._ADDITIONAL}.sampling_schedule.name=ead"], "additional_config.sampling_schedule"),
        ([f"+{overrides._ADDITIONAL}.perturbation.name=gaussian"], "additional_config.perturbation"),
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
        (
            [
                "+perturbation.correct_mask=true",
                "algorithm.rollout_correction.rollout_rs=token_k1",
                "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs",
            ],
            "set logprobs_mode=processed_logprobs",
        ),
        (
            ["actor_rollout_ref.rollout.top_p=0.9", "algorithm.rollout_correction.rollout_is=token"],
            "rollout_is=token with actor_rollout_ref.rollout.top_p=0.9 cannot be used with no",
        ),
        (
            ["actor_rollout_ref.rollout.top_k=20", "algorithm.rollout_correction.rollout_rs=token_k1"],
            "rollout_rs=token_k1 with actor_rollout_ref.rollout.top_k=20 cannot be used with no",
        ),
        (["actor_rollout_ref.model.lora_rank=16"], "add actor_rollout_ref.model.lora.merge=True"),
        (["+advantage.beta=2"], "advantage.beta"),
        (["algorithm.adv_estimator=copo"], "more than rewards"),
        (["algorithm.adv_estimator=rs_grpo", "algorithm.use_kl_in_reward=True"], "verl subtracts the KL term"),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    config = [*GRPO, *of_perturbation({"name": "neighbor"}), *words]
    with pytest.raises(UsageError, match=re.escape(message)):
        overrides.prepare(configuration(*config))


@pytest.mark.parametrize(
    "setting", ["actor_rollout_ref.actor.use_kl_loss=True", "algorithm.rollout_correction.rollout_rs=token_k1"]
)
def test_a_density_is_refused_what_it_would_not_be_part_of(setting: str) -> None:
    words = [*GRPO, *of_perturbation({"name": "gaussian", "density": "gaussian"}), *ONE_UPDATE]
    with pytest.raises(UsageError, match=re.escape(setting) + r".*density=token"):
        overrides.prepare(configuration(*words, setting))
    overrides.prepare(configuration(*words))


@pytest.mark.parametrize(
    ("density", "setting", "message"),
    [
        (
            {"name": "gumbel", "density": "gumbel"},
            "actor_rollout_ref.rollout.top_p=0.9",
            "if the filter cuts its token",
        ),
        ({"name": "gumbel", "density": "gumbel"}, "actor_rollout_ref.rollout.top_k=20", "if the filter cuts its token"),
        (
            {"name": "normal", "density": "normal"},
            "algorithm.use_kl_in_reward=True",
            "none has a KL term",
        ),
        (
            {"name": "gaussian", "density": "gaussian"},
            "actor_rollout_ref.actor.ppo_mini_batch_size=256",
            "set ppo_mini_batch_size to train_batch_size",
        ),
    ],
)
def test_a_density_is_refused_what_would_bias_it(density: dict[str, Any], setting: str, message: str) -> None:
    words = [*GRPO, *of_perturbation(density), *ONE_UPDATE]
    with pytest.raises(UsageError, match=message):
        overrides.prepare(configuration(*words, setting))
    overrides.prepare(configuration(*words))


def test_merged_adapters_are_no_adapters_of_the_engine() -> None:
    words = ["actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.model.lora.merge=True"]
    overrides.prepare(configuration(*GRPO, *of_perturbation(NEIGHBOR), *words))


MODE = "trainer.v1.trainer_mode=perturbed"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Add trainer.v1.trainer_mode=perturbed"),
        ([MODE, "trainer.use_v1=False"], "trainer.use_v1=True"),
    ],
)
def test_a_start_that_would_not_perturb(words: list[str], message: str) -> None:
    """verl checks the composed configuration in every start, so it does not matter which file names the mode."""
    from verl.utils.config import validate_config

    config = configuration(*GRPO, "+perturbation.name=neighbor", *words)
    with pytest.raises(UsageError, match=re.escape(message)):
        validate_config(config=config, use_reference_policy=False, use_critic=False)
    unperturbed = configuration(*GRPO, *words, *SIZES)
    validate_config(config=unperturbed, use_reference_policy=False, use_critic=False)
    perturbed = configuration(*GRPO, "+perturbation.name=neighbor", MODE, *SIZES)
    validate_config(config=perturbed, use_reference_policy=False, use_critic=False)


def test_a_start_of_another_trainer() -> None:
    """verl's other commands start their own runners with ``run_ppo``."""
    from verl.trainer.main_ppo import run_ppo

    config = configuration(*GRPO, "+perturbation.name=neighbor", MODE)
    with pytest.raises(UsageError, match=r"Start python -m verl\.trainer\.main_ppo"):
        run_ppo(config, task_runner_class=object)


def test_rows_with_another_agent_loop_are_refused() -> None:
    from datasets import Dataset

    import_module("verl.trainer.ppo.v1")  # its trainer registers ours, so in every start it is imported first
    from ngrpo.trainers.verl.perturbed_trainer import check_agents

    check_agents(None, "train_files")
    check_agents(Dataset.from_dict({"prompt": ["a"]}), "train_files")
    check_agents(Dataset.from_dict({"agent_name": ["single_turn_agent", None]}), "train_files")
    with pytest.raises(UsageError, match=r"data\.val_files: the column agent_name has 'tool_agent'"):
        check_agents(Dataset.from_dict({"agent_name": ["single_turn_agent", "tool_agent"]}), "val_files")


def test_filtered_rollouts_may_be_weighed_by_corrected_log_probabilities() -> None:
    words = ["actor_rollout_ref.rollout.top_p=0.9", "algorithm.rollout_correction.rollout_is=token"]
    overrides.prepare(configuration(*GRPO, *of_perturbation({**NEIGHBOR, "correct_mask": True}), *words))
    overrides.prepare(configuration(*GRPO, *of_perturbation(NEIGHBOR), words[0]))


def test_the_recipe_is_a_configuration_of_verl() -> None:
    script = (ROOT / "examples" / "verl" / "n_grpo_r1_distill_qwen_1.5b.sh").read_text()
    command = script[script.index("python -m") :]
    perturbation, *_ = overrides.prepare(configuration(*words_of(command)))
    assert perturbation == registry.create("neighbor", rate=0.1)


def test_an_advantage_is_verls_estimator() -> None:
    """Responses of prompts a and b are mixed, the third one is shorter, and the last one is verl's padding."""
    words = ["algorithm.adv_estimator=rs_grpo", "+advantage.beta=2.0", VLLM]
    overrides.prepare(configuration(*words, *of_perturbation(NEIGHBOR)))
    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0, 1.0, 0.0])
    token_rewards = torch.zeros(6, 4)
    token_rewards[:, 3] = rewards
    mask = torch.ones(6, 4)
    mask[2, 2:] = 0.0
    mask[5] = 0.0
    index = np.array(["a", "b", "a", "b", "a", "pad"], dtype=object)
    estimator = get_adv_estimator_fn("rs_grpo")
    token_advantages, returns = estimator(token_level_rewards=token_rewards, response_mask=mask, index=index)

    advantage = advantages.create("rs_grpo", beta=2.0)
    for rows in ([0, 2, 4], [1, 3]):
        expected = advantage.compute(rewards[rows][None])[0]
        torch.testing.assert_close(token_advantages[rows], expected[:, None] * mask[rows])
    assert token_advantages[5].eq(0.0).all()
    assert returns is token_advantages
