# SPDX-License-Identifier: Apache-2.0
"""Pairs that verl refuses: VERL_ADVANTAGE with an advantage, VERL with a perturbation."""

from ngrpo.config import features, trainer_features
from ngrpo.config.compatibility.row import Row, rows
from ngrpo.config.feature_kinds import above_one, both, none_of, verl

VERL_ADVANTAGE = (
    Row(
        what=features.BEYOND_REWARDS,
        conflicts_with=trainer_features.IN_VERL,
        why="it looks at more than rewards, which verl does not give it",
        fix="use another",
    ),
    Row(
        what=features.CHANGING,
        conflicts_with=trainer_features.IN_VERL,
        why="it changes over the run, and verl does not tell it the training step",
        fix="leave out its option k_end, or what else changes it, or train with OpenRLHF",
    ),
    Row(
        what=features.ROUTING,
        conflicts_with=trainer_features.IN_VERL,
        why="verl has a routing replay of its own",
        fix="leave it out, and set verl's own",
    ),
    Row(
        what=features.KL_IN_REWARD,
        conflicts_with=features.ADVANTAGE,
        why="verl subtracts the KL term from the rewards that an advantage compares; OpenRLHF does not",
        fix="set it to 0 or False, or have the term in the loss: --algo.kl.use_loss, in verl"
        " actor_rollout_ref.actor.use_kl_loss=True",
    ),
)

VERL = (
    Row(
        what=verl("actor_rollout_ref.rollout.name", none_of("vllm")),
        conflicts_with=features.IN_ENGINE,
        why="rollouts are perturbed inside vLLM",
        fix="use vllm",
    ),
    *rows(
        [
            verl("actor_rollout_ref.actor.strategy", none_of("fsdp", "fsdp2")),
            verl("actor_rollout_ref.ref.strategy", none_of("fsdp", "fsdp2")),
        ],
        conflicts_with=features.IN_ENGINE,
        why="only fsdp and fsdp2 replay",
        fix="use one of these",
    ),
    *rows(
        [verl(f"{engine}.pad_to_length") for engine in trainer_features.VERL_ENGINES],
        conflicts_with=features.IN_ENGINE,
        why="a packed batch must be its samples alone",
    ),
    *rows(
        [verl(f"{engine}.ulysses_sequence_parallel_size", above_one) for engine in trainer_features.VERL_ENGINES],
        conflicts_with=features.IN_ENGINE,
        why="it splits a sequence",
        fix="set it to 1",
    ),
    Row(
        what=verl("actor_rollout_ref.rollout.agent.default_agent_loop", none_of(None, "single_turn_agent")),
        conflicts_with=features.IN_ENGINE,
        why="records cover one turn",
    ),
    Row(
        what=verl("actor_rollout_ref.rollout.agent.agent_loop_manager_class"),
        conflicts_with=features.IN_ENGINE,
        why="it takes the place of the manager that attaches the records",
    ),
    Row(
        what=verl("actor_rollout_ref.rollout.multi_turn.enable"),
        conflicts_with=features.IN_ENGINE,
        why="records cover one turn",
    ),
    Row(
        what=verl("actor_rollout_ref.rollout.disaggregation.enabled"),
        conflicts_with=features.IN_ENGINE,
        why="one engine must feed prompt and response",
    ),
    Row(
        what=verl("actor_rollout_ref.actor.use_prefix_grouper"),
        conflicts_with=features.IN_ENGINE,
        why="it shares prompts among samples",
    ),
    Row(
        what=verl("distillation.enabled"),
        conflicts_with=features.IN_ENGINE,
        why="the teacher's log-probabilities are not replayed",
    ),
    Row(
        what=verl("algorithm.rollout_correction.bypass_mode"),
        conflicts_with=features.IN_ENGINE,
        why="the replay would not be measured",
    ),
    Row(
        what=trainer_features.VERL_ADAPTERS,
        conflicts_with=features.IN_ENGINE,
        why="verl gives the engine adapters that may change the input embedding, after inputs are replaced",
        fix="add actor_rollout_ref.model.lora.merge=True, which sends merged weights",
    ),
    Row(
        what=trainer_features.VERL_CRITIC,
        conflicts_with=features.IN_ENGINE,
        why="its values are not replayed",
        fix="leave critic.enable=True out, and use an estimator without a critic, such as grpo",
    ),
    Row(
        what=features.PARAMETERS,
        conflicts_with=trainer_features.IN_VERL,
        why="verl would neither train nor send its parameters",
        fix="use the variant without them, or OpenRLHF",
    ),
    Row(
        what=verl("actor_rollout_ref.model.use_fused_kernels"),
        conflicts_with=features.DENSITY,
        why="a density needs the logits",
        fix="leave it out, or set +perturbation.density=token",
    ),
    Row(
        what=verl("actor_rollout_ref.model.use_fused_kernels"),
        conflicts_with=trainer_features.VERL_MASK,
        why="the correction needs the logits",
    ),
    *rows(
        [
            both(correction, verl("actor_rollout_ref.rollout.logprobs_mode", none_of("processed_logprobs")))
            for correction in trainer_features.VERL_CORRECTIONS
        ],
        conflicts_with=trainer_features.VERL_MASK,
        why="verl would compare with log-probabilities of the whole distribution",
        fix="set logprobs_mode=processed_logprobs, which is verl's default",
    ),
    *rows(
        [
            both(correction, filtered)
            for correction in trainer_features.VERL_CORRECTIONS
            for filtered in trainer_features.VERL_FILTERS
        ],
        conflicts_with=trainer_features.VERL_UNCORRECTED,
        why="verl would compare the filtered distribution with the whole one",
        fix="add +perturbation.correct_mask=true, or leave one of them out",
    ),
    *rows(
        trainer_features.VERL_CORRECTIONS,
        conflicts_with=features.DENSITY,
        why="its ratio is the token's",
        fix="leave it out, or set +perturbation.density=token",
    ),
    Row(
        what=verl("actor_rollout_ref.actor.use_kl_loss"),
        conflicts_with=features.SCORE_ONLY,
        why="verl's losses share one log-probability",
        fix="leave it out, or set +perturbation.density=token",
    ),
    *rows(
        trainer_features.VERL_FILTERS,
        conflicts_with=features.DRAWING,
        why="a position stays unperturbed if the filter cuts its token, so its token has another distribution",
        fix="leave it out, or set +perturbation.density=token",
    ),
    Row(
        what=verl("algorithm.use_kl_in_reward"),
        conflicts_with=features.TOKENLESS_SCORE,
        why="no token is drawn at the density's positions, so none has a KL term",
        fix="leave it out, or set +perturbation.density=token",
    ),
    Row(
        what=verl("actor_rollout_ref.actor.ppo_epochs", above_one),
        conflicts_with=features.SCORE_ONLY,
        why="the density's gradient is that of the first update",
        fix="leave it out, or set +perturbation.density=token",
    ),
    Row(
        what=trainer_features.VERL_SEVERAL_UPDATES,
        conflicts_with=features.SCORE_ONLY,
        why="the density's gradient is that of the first update",
        fix="set ppo_mini_batch_size to train_batch_size, or set +perturbation.density=token",
    ),
)
