# SPDX-License-Identifier: Apache-2.0
"""Flags of the user's that OpenRLHF 0.11.2 accepts and does not read without another setting: a warning for each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.storage.datafiles import ENDINGS
from ngrpo.machine.upstream.openrlhf_flags import Flags, actions

Args = dict[str, Any]


@dataclass(frozen=True)
class Need:
    """What some flags need.

    Attributes:
        flags: names with blanks between them and the shell's patterns.
        needed: completes "FLAG has no effect without …".
        holds: whether OpenRLHF's arguments have it.
    """

    flags: str
    needed: str
    holds: Callable[[Args], Any]


def _estimator(*names: str) -> Callable[[Args], bool]:
    return lambda args: args["algo.advantage.estimator"] in names


def _has_splits(args: Args, dataset: str) -> bool:
    """Whether any of a flag's datasets is no file: our reader takes all rows of a file."""
    return any(Path(name.strip()).suffix not in ENDINGS for name in (args[dataset] or "").split(","))


_WANDB = "--logger.wandb.org --logger.wandb.group --logger.wandb.project"
_CORRECTION = "algo.advantage.is_correction"
NEEDS = (
    Need(
        f"--{_CORRECTION}_mode --{_CORRECTION}_gating --{_CORRECTION}_threshold",
        f"--{_CORRECTION}_level token or seq and --actor.policy_loss_type ppo",
        lambda args: args[f"{_CORRECTION}_level"] != "off" and args["actor.policy_loss_type"] == "ppo",
    ),
    Need(
        "--algo.advantage.no_std_norm",
        "--algo.advantage.estimator gae, reinforce or reinforce_baseline; dr_grpo divides by no deviation",
        _estimator("gae", "reinforce", "reinforce_baseline"),
    ),
    Need(
        "--algo.advantage.gamma",
        "--algo.advantage.estimator gae or reinforce",
        _estimator("gae", "reinforce"),
    ),
    Need("--algo.advantage.lambd --critic.*", "--algo.advantage.estimator gae", _estimator("gae")),
    Need(
        "--algo.kl.target",
        "--algo.kl.init_coef above 0, which it multiplies",
        lambda args: args["algo.kl.init_coef"] > 0.0,
    ),
    Need("--algo.kl.horizon", "--algo.kl.target", lambda args: args["algo.kl.target"]),
    Need("--algo.kl.unbiased_gradient", "--algo.kl.use_loss", lambda args: args["algo.kl.use_loss"]),
    Need(
        "--algo.dynamic_filtering_range",
        "--algo.dynamic_filtering_enable",
        lambda args: args["algo.dynamic_filtering_enable"],
    ),
    Need(
        "--reward.overlong_penalty_factor",
        "--reward.overlong_buffer_len",
        lambda args: args["reward.overlong_buffer_len"] is not None,
    ),
    Need(
        "--reward.normalize_enable --reward.offload",
        "a reward model (--reward.model_name_or_path)",
        lambda args: not args["reward.remote_url"],
    ),
    Need(
        "--train.max_tokens_per_gpu --rollout.max_tokens_per_gpu",
        "--train.dynamic_batch_enable",
        lambda args: args["train.dynamic_batch_enable"],
    ),
    Need("--train.async_queue_size", "--train.async_enable", lambda args: args["train.async_enable"]),
    Need("--train.ema_beta", "--train.enable_ema", lambda args: args["train.enable_ema"]),
    Need("--actor.muon.*", "--actor.optim muon", lambda args: args["actor.optim"] == "muon"),
    Need("--critic.muon.*", "--critic.optim muon", lambda args: args["critic.optim"] == "muon"),
    Need(
        "--actor.min_lr_ratio",
        "--actor.lr_scheduler cosine_with_min_lr or cosine_warmup_with_min_lr",
        lambda args: args["actor.lr_scheduler"].endswith("_with_min_lr"),
    ),
    Need(
        "--critic.min_lr_ratio",
        "--critic.lr_scheduler cosine_with_min_lr or cosine_warmup_with_min_lr",
        lambda args: args["critic.lr_scheduler"].endswith("_with_min_lr"),
    ),
    Need(
        "--actor.gradient_checkpointing_reentrant",
        "--actor.gradient_checkpointing_enable",
        lambda args: args["actor.gradient_checkpointing_enable"],
    ),
    Need("--ds.lora.*", "--ds.lora.rank", lambda args: args["ds.lora.rank"] > 0),
    Need("--ds.zpg", "--ds.zero_stage 3", lambda args: args["ds.zero_stage"] == 3),
    Need("--ds.ring_attn_head_stride", "--ds.ring_attn_size above 1", lambda args: args["ds.ring_attn_size"] > 1),
    Need(
        "--eval.temperature --eval.n_samples_per_prompt --eval.split --ckpt.best_metric_key",
        "--eval.dataset",
        lambda args: args["eval.dataset"],
    ),
    Need(
        "--ckpt.best_metric_key",
        "--ckpt.save_hf: --ckpt.disable_ds leaves out the other checkpoint of the best evaluation",
        lambda args: args["ckpt.save_hf"] or not args["ckpt.disable_ds"],
    ),
    Need(
        "--data.prompt_split",
        "a folder or a dataset of the hub: a file is read whole",
        lambda args: _has_splits(args, "data.prompt_dataset"),
    ),
    Need(
        "--eval.split",
        "a folder or a dataset of the hub: a file is read whole",
        lambda args: _has_splits(args, "eval.dataset"),
    ),
    Need(
        "--ckpt.save_hf --ckpt.max_num --ckpt.max_mem",
        "--ckpt.save_steps, or an evaluation whose best checkpoint is saved",
        lambda args: args["ckpt.save_steps"] > 0 or (args["eval.steps"] > 0 and args["eval.dataset"]),
    ),
    Need(_WANDB, "--logger.wandb.key", lambda args: args["logger.wandb.key"]),
)


def notes(complete: CompleteRun) -> Iterator[str]:
    """A warning for each flag of the user's that has no effect; the flags that ngrpo adds may wait for others."""
    args = complete.args
    by_user = Flags(complete.run.openrlhf).without_false()
    defaults = {action.dest: action.default for action in actions()}
    for name in dict.fromkeys(flag.name for flag in by_user):
        setting = name.removeprefix("--")
        if setting not in defaults:
            continue
        # OpenRLHF itself sets some arguments without effect to None, whatever the user gave.
        if args[setting] is not None and args[setting] == defaults[setting]:  # it says what OpenRLHF does anyway
            continue
        for need in NEEDS:
            if any(fnmatchcase(name, pattern) for pattern in need.flags.split()) and not need.holds(args):
                yield f"{name} has no effect without {need.needed}."
                break
    evaluates = args["eval.steps"] > 0 or complete.run.eval_at_start
    if by_user.has("--eval.dataset") and not evaluates:
        yield "--eval.dataset has no effect without --eval.steps N or --eval.at_start: nothing would be evaluated."
