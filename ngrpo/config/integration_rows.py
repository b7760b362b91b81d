# SPDX-License-Identifier: Apache-2.0
"""Rows of `ngrpo.config.compatibility` about vLLM's engine, verl and TRL."""

from __future__ import annotations

from ngrpo.config import features as given
from ngrpo.config.features import IN_ENGINE, IN_TRL, IN_VERL, Row, above_one, engine, rows, trl, verl

_RANKS = "the rows of a step are split over ranks"
ENGINE = tuple(
    rows(
        IN_ENGINE,
        (engine("speculative_config", name="speculative decoding"), "the draft model would not see the inputs"),
        (
            engine("parallel_config.pipeline_parallel_size", above_one),
            "only the first stage embeds",
            "set it to 1 and use tensor parallelism",
        ),
        (engine("parallel_config.decode_context_parallel_size", above_one), _RANKS, "set it to 1"),
        (engine("parallel_config.prefill_context_parallel_size", above_one), _RANKS, "set it to 1"),
        (given.MIXTURE_IN_STEP, "its ranks run in step, which is untested", "start an engine for each rank"),
        (engine("watermark_config", name="watermarking"), "its draws of tokens would be replaced"),
        (
            engine("parallel_config.use_ubatching", name="dual-batch overlap"),
            "each half of a batch would read the override from its first row",
            "leave out enable_dbo and ubatch_size",
        ),
        (engine("parallel_config.enable_batch_sharded_sampling"), "each rank would draw a part of the batch"),
        (
            engine("compilation_config.pass_config.enable_sp", name="the sequence-parallel pass"),
            "it rewrites what follows the embedding, across the override",
            "set compilation_config={'pass_config': {'enable_sp': False, 'fuse_gemm_comms': False}}",
        ),
        (
            engine("lora_config", given.adapts_embedding, name="LoRA on the input embedding"),
            "its difference is added after the override",
            "give --lora-target-modules without embed_tokens",
        ),
        (engine("model_config.enable_prompt_embeds"), "inputs without tokens cannot be replayed"),
        (engine("model_config.enable_trace_replay"), "it replaces tokens after they were drawn and recorded"),
        (engine("model_config.is_diffusion", name="a diffusion model"), "it draws many tokens in a step"),
        (
            engine("model_config.runner_type", lambda runner: runner != "generate"),
            "only generation is perturbed",
            "use runner='generate'",
        ),
        (
            engine("model_config.is_encoder_decoder", name="an encoder-decoder model"),
            "generated tokens do not pass one input embedding",
            "use a decoder-only model",
        ),
        (engine("kv_transfer_config", name="KV transfer between engines"), "perturbed blocks must not be shared"),
    )
)

_WITHOUT = "use the variant without them, or OpenRLHF"
_TURNS = "records cover one turn"
_TOKEN = "leave it out, or set +perturbation.density=token"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

VERL_ADVANTAGE = (
    Row(given.BEYOND_REWARDS, IN_VERL, "it looks at more than rewards, which verl does not give it", "use another"),
    Row(
        given.CHANGING,
        IN_VERL,
        "it changes over the run, and verl does not tell it the training step, so that it would stay as it is at the"
        " start",
        "leave out its option k_end, or what else changes it, or train with OpenRLHF",
    ),
    Row(
        given.KL_IN_REWARD,
        given.ADVANTAGE,
        "verl subtracts the KL term from the rewards that an advantage is made of, so that a group would compare these"
        " terms as well; OpenRLHF does not",
        "set it to 0 or False, or have the term in the loss: --algo.kl.use_loss, which is"
        f" {_ACTOR}.use_kl_loss=True in verl",
    ),
)
VERL = (
    *rows(
        IN_ENGINE,
        (verl("trainer.use_v1", lambda value: value is False), "its batches carry no records"),
        (verl(f"{_ROLLOUT}.name", lambda name: name != "vllm"), "rollouts are perturbed inside vLLM", "use vllm"),
        (verl("actor_rollout_ref.actor.strategy", given.no_fsdp), "only fsdp and fsdp2 replay", "use one of these"),
        (verl("actor_rollout_ref.ref.strategy", given.no_fsdp), "only fsdp and fsdp2 replay", "use one of these"),
        *((verl(f"{key}.pad_to_length"), "a packed batch must be its samples alone") for key in given.VERL_ENGINES),
        *(
            (verl(f"{key}.ulysses_sequence_parallel_size", above_one), "it splits a sequence", "set it to 1")
            for key in given.VERL_ENGINES
        ),
        (verl(f"{_ROLLOUT}.agent.default_agent_loop", lambda loop: loop not in (None, "single_turn_agent")), _TURNS),
        (verl(f"{_ROLLOUT}.agent.agent_loop_manager_class"), "another manager takes its place"),
        (verl(f"{_ROLLOUT}.multi_turn.enable"), _TURNS),
        (verl(f"{_ROLLOUT}.disaggregation.enabled"), "one engine must feed prompt and answer"),
        (verl(f"{_ACTOR}.use_prefix_grouper"), "it shares prompts among samples"),
        (verl("distillation.enabled"), "the teacher's log-probabilities are not replayed"),
        (verl("algorithm.rollout_correction.bypass_mode"), "the replay would not be measured"),
        (given.CRITIC, "its values are not replayed", "use an estimator without one, such as grpo"),
    ),
    Row(given.PARAMETERS, IN_VERL, "verl would neither train nor send them", _WITHOUT),
    *rows(
        given.DENSITY,
        (verl("actor_rollout_ref.model.use_fused_kernels"), "a density needs the logits", _TOKEN),
        (verl("algorithm.rollout_correction.rollout_is"), "its ratio is the token's", _TOKEN),
    ),
    Row(
        verl(f"{_ACTOR}.use_kl_loss"),
        given.SCORE_ONLY,
        "the density counts in the policy loss alone, and verl's losses share one log-probability",
        _TOKEN,
    ),
    Row(verl(f"{_ACTOR}.ppo_epochs", above_one), given.SCORE_ONLY, "its gradient is that of the first update", _TOKEN),
)

TRL = (
    *rows(
        IN_ENGINE,
        (
            trl("use_vllm=False", lambda config, _: config is None or not config.use_vllm),
            "rollouts are perturbed inside vLLM",
            "set use_vllm=True",
        ),
        (
            trl("a vLLM server", lambda config, _: config is not None and config.vllm_mode != "colocate"),
            "its records stay there",
            "set vllm_mode='colocate'",
        ),
        (trl("tools", lambda _, arguments: arguments.get("tools")), _TURNS),
        (trl("environments", lambda _, arguments: arguments.get("environment_factory")), _TURNS),
        (trl("rollout_func", lambda _, arguments: arguments.get("rollout_func")), "it has no records"),
        (
            trl("use_liger_kernel", lambda config, _: getattr(config, "use_liger_kernel", False)),
            "its loss bypasses the log-probabilities",
        ),
    ),
    Row(given.PARAMETERS, IN_TRL, "TRL would neither train nor send them", _WITHOUT),
    Row(given.DENSITY, IN_TRL, "TRL's loss takes the token's log-probability", "set density='token'"),
)
