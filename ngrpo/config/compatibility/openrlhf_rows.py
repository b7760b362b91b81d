# SPDX-License-Identifier: Apache-2.0
"""Pairs of OpenRLHF's own flags of which one would be ignored, or that end in a wrong training."""

from ngrpo.config import features
from ngrpo.config.compatibility.row import Row
from ngrpo.config.feature_kinds import both, flag, when

OPENRLHF = (
    Row(
        what=both(flag("--train.async_enable"), flag("--ckpt.save_steps", off="-1")),
        conflicts_with=features.DRAWN_AHEAD,
        why="a checkpoint has no prompts that were drawn ahead, so a resumed run would never train them",
        fix="set --rollout.vllm_generate_batch_size to --rollout.batch_size, or save no checkpoints",
    ),
    Row(
        what=flag("partial_rollout"),
        conflicts_with=features.REPRODUCIBLE,
        why="a weight sync comes between two tokens of a response, at other ones in each run",
        fix="leave one of them out (ngrpo compare adds --reproducible unless it has --stock)",
    ),
    Row(
        what=flag("--critic.freezing_steps", off="-1"),
        conflicts_with=features.NO_CRITIC,
        why="the policy waits in these steps for a critic, and gae alone has one",
        fix="leave it out",
    ),
    Row(
        what=flag("--actor.eps_clip"),
        conflicts_with=flag("--actor.eps_clip_low_high"),
        why="OpenRLHF ignores it where the pair is given",
    ),
    Row(
        what=flag("--data.input_template"),
        conflicts_with=flag("--data.apply_chat_template"),
        why="OpenRLHF ignores it where the chat template is applied",
        fix="leave one of them out: --data.apply_chat_template false, where a --task adds it",
    ),
    Row(
        what=both(flag("--ckpt.save_steps", off="-1"), flag("--ckpt.disable_ds")),
        conflicts_with=when("no --ckpt.save_hf", lambda combination: not combination.flags.has("--ckpt.save_hf")),
        why="no checkpoint would be saved",
        fix="add --ckpt.save_hf",
    ),
    Row(
        what=flag("--algo.advantage.is_correction_level", only="seq"),
        conflicts_with=flag("--algo.advantage.is_correction_mode", only="clip"),
        why="OpenRLHF clips weights of tokens",
        fix="give --algo.advantage.is_correction_level token",
    ),
    Row(
        what=features.DIVERGENCE,
        conflicts_with=flag("--algo.advantage.is_correction_mode", only="clip"),
        why="OpenRLHF clips ratios",
        fix="give --algo.advantage.is_correction_mode mask",
    ),
    Row(
        what=both(features.WEIGHTS, features.DIVERGENCE),
        conflicts_with=features.LOWER_BOUND,
        why="a divergence has an upper bound only",
        fix="give one number, --algo.advantage.is_correction_threshold 0.1",
    ),
    Row(
        what=flag("--eval.dataset"),
        conflicts_with=features.REWARD_MODEL,
        why="OpenRLHF evaluates by a function, a server or an agent alone",
        fix="leave the dataset out and run `ngrpo eval` on the trained model, or serve the reward model (python -m"
        " openrlhf.cli.serve_rm) and give --reward.remote_url http://HOST:PORT/get_reward",
    ),
    Row(
        what=flag("--algo.dynamic_filtering_enable"),
        conflicts_with=features.REWARD_MODEL,
        why="groups are filtered by scores as they are drawn, and a reward model scores them later",
        fix="leave the filter out, or serve the reward model (python -m openrlhf.cli.serve_rm) and give"
        " --reward.remote_url http://HOST:PORT/get_reward",
    ),
    Row(
        what=flag("--algo.dynamic_filtering_enable"),
        conflicts_with=features.ONE_ANSWER,
        why="it compares the responses to a prompt",
        fix="give --rollout.n_samples_per_prompt 2 or more",
    ),
    Row(
        what=flag("--data.max_images_per_prompt", off="0"),
        conflicts_with=features.CRITIC,
        why="OpenRLHF gives a critic no pictures",
        fix="give --algo.advantage.estimator group_norm, rloo or reinforce_baseline",
    ),
)
