# SPDX-License-Identifier: Apache-2.0
"""Pairs that a training refuses on any hardware."""

from ngrpo.config import features
from ngrpo.config.compatibility.centering_rows import SCORE_CENTERING
from ngrpo.config.compatibility.one_update_rows import one_update_rows
from ngrpo.config.compatibility.openrlhf_rows import OPENRLHF
from ngrpo.config.compatibility.row import Row, rows
from ngrpo.config.feature_kinds import both, flag, other_than, sampling

_REPLAY = (
    Row(
        what=flag("--ds.ring_attn_size", off="1"),
        conflicts_with=features.REPLAYED,
        why="the replay does not split records over a ring",
        fix="use --ds.ring_attn_size 1",
    ),
    Row(
        what=flag("partial_rollout"),
        conflicts_with=features.REPLAYED,
        why="a weight sync comes between two tokens of a response, and an exact record needs the version of the weights"
        " for each token, which vLLM does not report (vllm#54443)",
        fix="leave it out (--train.async_enable may stay)",
    ),
    *rows(
        [features.PERTURBATION, features.BY_HIDDEN],
        conflicts_with=flag("--ds.deepcompile"),
        why="a compiled model does not call hooks that come after its first forward, such as those of a replay",
        fix="leave --ds.deepcompile out",
    ),
    Row(
        what=features.DENSE,
        conflicts_with=features.ROUTING,
        why="it has no routing to replay",
        fix="leave --replay.routing out",
    ),
    Row(
        what=flag("--ds.tensor_parallel_size", off="1"),
        conflicts_with=features.ROUTING,
        why="replaying the routers of a split model is untested",
    ),
)

_LORA = (
    Row(
        what=flag("--train.enable_ema"),
        conflicts_with=features.LORA,
        why="OpenRLHF's average is of a model without adapters",
    ),
    Row(
        what=flag("--ds.tensor_parallel_size", off="1"),
        conflicts_with=features.LORA,
        why="DeepSpeed splits the layers that adapters are on",
        fix="use --ds.zero_stage 3",
    ),
    Row(
        what=features.LORA_ON_EMBEDDING,
        conflicts_with=features.PERTURBATION,
        why="a perturbation mixes rows of one table, and PEFT adds the adapter's part of a row beside it",
        fix="leave the embedding out of the modules",
    ),
)

_FOUR_BIT = (
    Row(
        what=flag("--ds.load_in_4bit"),
        conflicts_with=features.WITHOUT_LORA,
        why="4-bit weights are frozen, and adapters are trained beside them",
        fix="add --ds.lora.rank 16",
    ),
    Row(
        what=flag("--ds.load_in_4bit"),
        conflicts_with=flag("--ds.param_dtype", only="fp16"),
        why="OpenRLHF 0.11.2 computes 4-bit layers in bfloat16",
        fix="use bf16, or leave it out",
    ),
    Row(
        what=flag("--ds.load_in_4bit"),
        conflicts_with=flag("--ds.zero_stage", only="3"),
        why="ZeRO-3 splits floating-point weights, and 4-bit codes are bytes",
        fix="use --ds.zero_stage 2",
    ),
    Row(
        what=flag("--ds.load_in_4bit"),
        conflicts_with=features.NOISE,
        why="noise is added to weights, and 4-bit codes have no room for it",
        fix="leave one of them out",
    ),
    Row(
        what=flag("--ds.load_in_4bit"),
        conflicts_with=features.CRITIC,
        why="a critic of 4-bit weights cannot resume from its checkpoint",
        fix="use another --algo.advantage.estimator, such as group_norm",
    ),
)

_MODEL = (
    Row(
        what=flag("--train.enable_ema"),
        conflicts_with=flag("--ds.zero_stage", only="3"),
        why="the initial model would be saved as the average",
        fix="use --ds.zero_stage 2",
    ),
    Row(
        what=features.DENSE,
        conflicts_with=features.AUXILIARY_LOSS,
        why="the coefficient weighs the balance of a model's experts",
        fix="leave --actor.aux_loss_coef out",
    ),
    Row(
        what=features.AUXILIARY_LOSS,
        conflicts_with=features.CRITIC,
        why="the critic takes the same loss, and its model has none",
        fix="leave it out, or use another --algo.advantage.estimator, such as group_norm",
    ),
    Row(
        what=flag("--actor.gradient_checkpointing_reentrant"),
        conflicts_with=features.FROZEN_INPUT,
        why="reentrant checkpointing gives layers no gradient where their input has none",
        fix="leave it out, or freeze none",
    ),
    Row(
        what=flag("--ds.packing_samples"),
        conflicts_with=flag("--data.max_images_per_prompt", off="0"),
        why="packing would break the alignment between picture tokens and pixels",
    ),
    Row(
        what=flag("--train.dynamic_batch_enable"),
        conflicts_with=flag("--data.max_images_per_prompt", off="0"),
        why="dynamic batches are packed, and packing would break the alignment between picture tokens and pixels",
    ),
)

_DENSITY = (
    Row(
        what=features.WEIGHTS,
        conflicts_with=features.DENSITY,
        why="the weights compare with log-probabilities of tokens",
        fix="give --algo.advantage.is_correction_level off, or add --perturbation.density token",
    ),
    Row(
        what=features.SCHEDULE,
        conflicts_with=features.DENSITY,
        why="the importance weights for its temperatures are of tokens",
        fix="leave the schedule out, or add --perturbation.density token",
    ),
    Row(
        what=features.BY_LOG_PROBS,
        conflicts_with=features.DENSITY,
        why="old log-probabilities are the density's, not the tokens'",
        fix="leave it out, or add --perturbation.density token",
    ),
    *rows(
        [flag("--rollout.top_p", off="1"), sampling("top_k"), sampling("min_p")],
        conflicts_with=features.DRAWING,
        why="a position stays unperturbed if the filter cuts its token, so its token has another distribution",
        fix="leave it out, or add --perturbation.density token",
    ),
    *one_update_rows(
        features.SCORE_ONLY,
        why="the density's noise is too narrow for a policy ratio, so each rollout is used for one update at the policy"
        " that drew it",
        otherwise=", or add --perturbation.density token",
    ),
    Row(
        what=features.CREDIT_OF_TOKENS,
        conflicts_with=features.TOKENLESS,
        why="no token is drawn at the density's positions, so none has a probability",
        fix="leave it out, or add --perturbation.density token",
    ),
    Row(
        what=features.KL_TERM,
        conflicts_with=features.TOKENLESS_SCORE,
        why="no token is drawn at the density's positions, so none has a KL term",
        fix="set --algo.kl.init_coef 0",
    ),
)

_CREDIT = (
    Row(
        what=features.GSPO,
        conflicts_with=features.CREDIT,
        why="the ratio is of the whole response, so all its tokens have one advantage",
    ),
    Row(
        what=flag("--ds.ring_attn_size", off="1"),
        conflicts_with=features.CREDIT_IN_LOSS,
        why="the credit needs all logits of a response in one process",
        fix="use --ds.ring_attn_size 1",
    ),
    Row(
        what=flag("--ds.ring_attn_size", off="1"),
        conflicts_with=features.BY_HIDDEN,
        why="the advantage needs all hidden states of a response in one process",
        fix="use --ds.ring_attn_size 1",
    ),
)

_NOISE_AND_SCHEDULE = (
    Row(
        what=flag("--train.async_enable"),
        conflicts_with=features.NOISE,
        why="an evaluation that runs during training would see noisy weights",
    ),
    Row(
        what=flag("--ds.zero_stage", only="3"),
        conflicts_with=features.NOISE,
        why="under ZeRO-3 no process has a whole parameter to add noise to",
    ),
    Row(
        what=flag("--ds.tensor_parallel_size", off="1"),
        conflicts_with=features.NOISE,
        why="no process has a whole parameter to add noise to",
    ),
    Row(
        what=both(features.GSPO, features.WEIGHTS),
        conflicts_with=features.NOISE,
        why="GSPO takes the rollout's policy as the old one, and its narrow clip would drop nearly all negative"
        " advantages",
        fix="leave one of them out, or add --algo.advantage.is_correction_level off where the method does not need the"
        " weights",
    ),
    Row(
        what=both(features.GSPO, features.WEIGHTS),
        conflicts_with=features.SCHEDULE,
        why="GSPO takes the rollout's policy as the old one, and its narrow clip would drop nearly all negative"
        " advantages",
        fix="leave one of them out, or add --algo.advantage.is_correction_level off where the method does not need the"
        " weights",
    ),
    Row(
        what=features.NO_WEIGHTS,
        conflicts_with=features.NOISE_BY_DIVERGENCE,
        why="the noise follows the rollouts' log-probabilities, which need the weights",
        fix="leave --algo.advantage.is_correction_level at token",
    ),
    Row(
        what=features.NO_WEIGHTS,
        conflicts_with=features.SCHEDULE_BY_TRAINING,
        why="the schedule follows the rollouts' log-probabilities, which need the weights",
        fix="leave --algo.advantage.is_correction_level at token",
    ),
    Row(
        what=flag("--train.async_enable"),
        conflicts_with=features.SCHEDULE_BY_TRAINING,
        why="rollouts are drawn before the step that their temperature follows from",
    ),
    Row(
        what=both(features.SCHEDULE, features.WEIGHTS),
        conflicts_with=features.UNSAMPLED,
        why="the perturbation's text is not sampled, so the importance weights π / π_rollout would be those of another"
        " distribution",
        fix="sample the text (a class of your own that does so says `samples_text = True`), leave one of them out, or"
        " add --algo.advantage.is_correction_level off where the method does not need the weights",
    ),
    Row(
        what=features.EVALUATED_SCHEDULE,
        conflicts_with=flag("--eval.temperature", only="0"),
        why="greedy decoding ignores the temperature",
    ),
)

_CORRECTION_WARMUP = (
    *(
        Row(
            what=sampling("correction_warmup"),
            conflicts_with=other_than(name, needed_value),
            why="the warm-up lets the loss's weight of each token, min(π / π_rollout, HIGH), grow from 1",
            fix=f"give {name} {needed_value}, or leave the warm-up out",
        )
        for name, needed_value in features.TOKEN_WEIGHTS.items()
    ),
    Row(
        what=sampling("correction_warmup"),
        conflicts_with=features.BOUNDS_WITHOUT_ONE,
        why="its weights begin at 1, which is outside these bounds",
        fix="give --algo.advantage.is_correction_threshold 0 10",
    ),
)

_STALENESS = (
    Row(
        what=sampling("max_staleness"),
        conflicts_with=features.SYNCHRONOUS,
        why="it leaves responses out of the queue of asynchronous training, and a synchronous run has no queue: it"
        " trains on a rollout before the next weight sync",
        fix="add --train.async_enable, or leave it out",
    ),
    Row(
        what=sampling("max_staleness"),
        conflicts_with=flag("partial_rollout"),
        why="a weight sync comes between two tokens of a response, and its age needs the version of the weights for"
        " each token, which vLLM does not report (vllm#54443)",
    ),
)

_SECOND_ROUND = (
    Row(
        what=flag("--train.agent_func_path"),
        conflicts_with=features.SECOND_ROUND,
        why="an agent reads more than its first prompt",
    ),
    Row(
        what=flag("--data.max_images_per_prompt", off="0"),
        conflicts_with=features.SECOND_ROUND,
        why="the changed prompt contains the pictures",
    ),
    Row(
        what=features.LATE_REWARD,
        conflicts_with=features.SECOND_ROUND,
        why="its reward comes after the rollout, and a second round needs it before",
        fix="give --reward.remote_url FILE.py, or a --task",
    ),
    Row(
        what=sampling("correction_warmup"),
        conflicts_with=features.REPLACED,
        why="the method's responses have a ratio to their own prompt's policy, which a changed weight would change",
    ),
    *rows(
        [features.PERTURBATION, features.MASK, features.CENTERING, features.ROUTING],
        conflicts_with=features.REPLACED,
        why="the records are of another prompt than the one that is trained",
    ),
    Row(
        what=features.GSPO,
        conflicts_with=features.REPLACED,
        why="its ratio is of a whole response, the method's of each token",
    ),
    Row(
        what=features.CREDIT_IN_LOSS,
        conflicts_with=features.REPLACED,
        why="both change the ratio of the same tokens",
    ),
    Row(
        what=features.BY_VALUES,
        conflicts_with=features.REPLACED,
        why="a prompt's value would count right responses to another prompt",
        fix="choose another advantage",
    ),
    Row(
        what=features.ONE_ANSWER,
        conflicts_with=features.REPLACED,
        why="one response of a group stays, and right ones take the place of others",
        fix="set it to 8",
    ),
    Row(
        what=features.NO_ROOM_FOR_A_DRAFT,
        conflicts_with=features.REFINED,
        why="a prompt, a draft and a response share --data.max_len",
        fix="give --rollout.max_new_tokens, and more than twice as much as --data.max_len",
    ),
    Row(
        what=features.FOLLOWED,
        conflicts_with=features.REFINED,
        why="each step has prompts of its own, so none would be seen twice",
    ),
    Row(
        what=features.NO_ADVANTAGE,
        conflicts_with=features.FULL_GROUPS,
        why="OpenRLHF's own estimators see one round",
        fix="add --advantage group_norm, or --second_round.group kept, which takes the rewards of the trained responses"
        " alone",
    ),
    Row(
        what=features.BEYOND_REWARDS,
        conflicts_with=features.FULL_GROUPS,
        why="it looks at more of a response than its reward",
        fix="choose another advantage, or --second_round.group kept, which takes the rewards of the trained responses"
        " alone",
    ),
    *rows(
        [flag("--reward.overlong_buffer_len"), flag("--reward.stop_properly_penalty_coef")],
        conflicts_with=features.FULL_GROUPS,
        why="OpenRLHF's penalty is for the trained responses alone, so that the others of both rounds would be compared"
        " without it",
        fix="leave it (or --preset dapo, which adds it) out, or add --second_round.group kept, which takes the rewards"
        " of the trained responses alone",
    ),
)

_REWARD_AND_ADVANTAGE = (
    Row(
        what=features.OTHER_ESTIMATOR,
        conflicts_with=features.ADVANTAGE,
        why="the advantage takes the place of the estimator",
        fix="give one of them",
    ),
    *rows(
        [flag("--reward.overlong_buffer_len"), flag("--reward.stop_properly_penalty_coef")],
        conflicts_with=features.VERIFIED,
        why="its penalty makes rewards outside [0, 1]",
        fix="leave it (or --preset dapo, which adds it) out, or use --advantage group_norm or ngrpo",
    ),
    Row(
        what=flag("--reward.model_name_or_path"),
        conflicts_with=flag("--reward.remote_url"),
        why="OpenRLHF 0.11.2 takes the file or address alone",
    ),
    Row(
        what=flag("--train.agent_func_path"),
        conflicts_with=flag("--reward.remote_url"),
        why="OpenRLHF takes the agent's own reward",
    ),
)

TRAINING = (
    *_REPLAY,
    *_LORA,
    *_FOUR_BIT,
    *_MODEL,
    *_DENSITY,
    *_CREDIT,
    *_NOISE_AND_SCHEDULE,
    *_CORRECTION_WARMUP,
    *SCORE_CENTERING,
    *_STALENESS,
    *_SECOND_ROUND,
    *_REWARD_AND_ADVANTAGE,
    *OPENRLHF,
)
