# SPDX-License-Identifier: Apache-2.0
"""The settings with which the sandbox's tasks are what they are meant to be: OpenRLHF's flags where none are given."""

from __future__ import annotations

_PROMPTS, _ANSWERS, _STEPS = 8, 8, 150
_BATCH = str(_PROMPTS * _ANSWERS)

# At this learning rate GRPO settles on the shortcut, and learns the task without it (docs/studies/study2.md).
FLAGS: dict[str, str] = {
    "--algo.advantage.estimator": "group_norm",
    "--algo.kl.init_coef": "0",
    "--data.max_len": "64",
    "--data.max_samples": str(_PROMPTS * _STEPS),
    "--rollout.batch_size": str(_PROMPTS),
    "--rollout.n_samples_per_prompt": str(_ANSWERS),
    "--rollout.max_new_tokens": "12",
    "--rollout.micro_batch_size": _BATCH,
    "--train.batch_size": _BATCH,
    "--train.micro_batch_size": _BATCH,
    "--actor.adam.lr": "6e-4",
    "--actor.lr_scheduler": "constant",
    "--actor.lr_warmup_ratio": "0",
    "--ds.attn_implementation": "eager",
}

# `ngrpo compare` evaluates its trained models with these: on the policy that was trained, and as long as its answers.
EVALUATION: dict[str, str] = {"--max-tokens": "12", "--temperature": "1", "--top-p": "1"}
