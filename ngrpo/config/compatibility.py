# SPDX-License-Identifier: Apache-2.0
"""Refused pairs of features: one table for a start, a dry run, a comparison, vLLM's engine, verl and TRL.

`ngrpo list compatibility` prints it; docs/compatibility.md is the same (``python -m ngrpo.config.compatibility``).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ngrpo.config import features as given
from ngrpo.config.features import CORRECTION, KL, above_one, both, engine, flag, none_of, sampling, verl, when
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError


@dataclass(frozen=True)
class Row:
    """One pair that is refused: two features, the reason, and what to do instead."""

    what: given.Feature
    other: given.Feature
    why: str
    fix: str = "leave one of them out"


def rows(other: given.Feature, *pairs: tuple[given.Feature, str] | tuple[given.Feature, str, str]) -> Iterator[Row]:
    """Rows of features that do not go with the same one: a feature, the reason and a fix for each."""
    return (Row(what, other, *reasons) for what, *reasons in pairs)


_PICTURES, _RING = flag("--data.max_images_per_prompt", off="0"), flag("--ds.ring_attn_size", off="1")
_TENSOR = flag("--ds.tensor_parallel_size", off="1")
_FLOAT32, _REWARD = flag("--ds.param_dtype", only="fp32"), flag("--reward.remote_url")
_ZERO_3, _ASYNC, _WARMUP = flag("--ds.zero_stage", only="3"), flag(given.ASYNC), sampling("correction_warmup")
_REENTRANT, _SAVES = flag("--actor.gradient_checkpointing_reentrant"), flag("--ckpt.save_steps", off="-1")
_NO_MODEL_SAVED = when("no --ckpt.save_hf", lambda asked: not asked.flags.has("--ckpt.save_hf"))
_TOKEN = "or add --perturbation.density token"
_OUT, _OFF = f"leave it out, {_TOKEN}", "leave it out"
_DRAFTED = "drafted tokens are accepted without ever being fed as mixtures"
_NARROW = "a position stays unperturbed if the filter cuts its token, so its token has another distribution"
_ONE_UPDATE = (
    "its noise is too narrow for a policy ratio, so each rollout is used for one update at the policy that drew it"
)
_GSPO = "GSPO takes the rollout's policy as the old one, and its narrow clip would drop nearly all negative advantages"
_NO_WEIGHTS = f"leave one of them out, or add {CORRECTION} off where the method does not need the weights"
_NEEDS_WEIGHTS = "it follows the rollouts' log-probabilities, which need the weights", f"leave {CORRECTION} at token"
_OTHER_TEXT = "its text is not sampled, so the importance weights π / π_rollout would be those of another distribution"
_NO_TOKEN = "no token is drawn at its positions, so none has a"
_FIRST_AVERAGE = "the initial model would be saved as the average"
_UPPER_ALONE = "a divergence has an upper bound alone"
_LOST = "a checkpoint has no prompts that were drawn ahead, so a resumed run would never train them"
_NONE_AHEAD = "set --rollout.vllm_generate_batch_size to --rollout.batch_size, or save no checkpoints"
_GROWS = "the warm-up lets the loss's weight of each token, min(π / π_rollout, HIGH), grow from 1"
_WHOLE = "no process has a whole parameter to add noise to"
_OTHER_PROMPT = "the records are of another prompt than the one that is trained"
_KEPT = "or --second_round.group kept, which takes the rewards of the trained responses alone"
_ROOM = "give --rollout.max_new_tokens, and more than twice as much as --data.max_len"
_PENALTY = "its penalty makes rewards outside [0, 1]"
_NO_PENALTY = "leave it (or --preset dapo, which adds it) out, or use --advantage group_norm or ngrpo"
_NOT_4_BIT = "leave it out: --ds.zero_stage 3 and --ds.adam_offload save memory too"
_TWO_TABLES = "a perturbation mixes rows of one table, and PEFT adds the adapter's part of a row beside it"
_PACKED = "packing would break the alignment between picture tokens and pixels"
_NO_FLASH_ATTN = "flash-attn computes it, and that is not installed where the run starts"
_INSTALL = "install flash-attn, for which docs/install.md names prebuilt wheels"
_NEEDS_CUDA = "flash-attn computes it, and that needs CUDA"

TRAINING = (
    *rows(
        given.REPLAYED,
        (flag("pipeline_parallel", off="1"), "the rollout edits the input of one stage", "use tensor parallelism"),
        (flag("speculative", off="0 false none"), _DRAFTED),
        (flag("draft_model", off="0 false none"), _DRAFTED),
        (_RING, "the replay does not split records over a ring", "use --ds.ring_attn_size 1"),
        (flag("partial_rollout"), "records would be cut at the weight sync", f"leave it out (not {given.ASYNC})"),
    ),
    *rows(
        given.LORA,
        (
            flag("--ds.load_in_4bit"),
            "engines need merged weights, and those of dequantised 4-bit layers were never compared",
            _NOT_4_BIT,
        ),
        (flag("--train.enable_ema"), "OpenRLHF's average is of a model without adapters"),
        (_TENSOR, "DeepSpeed splits the layers that adapters are on", "use --ds.zero_stage 3"),
    ),
    Row(given.lora_on_embedding, given.PERTURBATION, _TWO_TABLES, "leave the embedding out of the modules"),
    Row(given.dense, given.ROUTING, "it has no routing to replay", "leave --replay.routing out"),
    Row(_TENSOR, given.ROUTING, "the routers of a split model are untested"),
    Row(flag("--train.enable_ema"), _ZERO_3, _FIRST_AVERAGE, "use --ds.zero_stage 2"),
    Row(_REENTRANT, given.FROZEN_INPUT, "its layers get no gradient then", f"{_OFF}, or freeze none"),
    Row(flag("--ds.packing_samples"), _PICTURES, _PACKED),
    Row(flag("--train.dynamic_batch_enable"), _PICTURES, f"dynamic batches are packed, and {_PACKED}"),
    *rows(
        given.DENSITY,
        (given.WEIGHTS, "the weights compare with log-probabilities of tokens", f"give {CORRECTION} off, {_TOKEN}"),
        (given.SCHEDULE, "the weights for its temperatures are of tokens", f"leave the schedule out, {_TOKEN}"),
        (given.BY_LOG_PROBS, "old log-probabilities are the density's, not the tokens'", f"{_OFF}, {_TOKEN}"),
    ),
    *rows(
        given.DRAWING,
        (flag("--rollout.top_p", off="1"), _NARROW, _OUT),
        (sampling("top_k"), _NARROW, _OUT),
        (sampling("min_p"), _NARROW, _OUT),
    ),
    *rows(
        given.SCORE_ONLY,
        (_ASYNC, _ONE_UPDATE, _OUT),
        (given.other_than("--train.max_epochs", "1"), _ONE_UPDATE, f"set --train.max_epochs 1, {_TOKEN}"),
        (given.small_batch, _ONE_UPDATE, f"set --train.batch_size to these samples, {_TOKEN}"),
        (given.NOISE, f"{_ONE_UPDATE}, not at weights without the noise", f"leave one of them out, {_TOKEN}"),
    ),
    Row(given.CREDIT_OF_TOKENS, given.TOKENLESS, f"{_NO_TOKEN} probability", _OUT),
    Row(given.kl_term, given.TOKENLESS_SCORE, f"{_NO_TOKEN} KL term", f"set {KL} 0"),
    Row(given.GSPO, given.CREDIT, "the ratio is of the whole response, so all its tokens have one advantage"),
    Row(_RING, given.CREDIT_IN_LOSS, "it needs all logits of a response in one place", "use --ds.ring_attn_size 1"),
    Row(_RING, given.BY_HIDDEN, "it needs all hidden states of a response in one place", "use --ds.ring_attn_size 1"),
    *rows(
        given.NOISE,
        (_ASYNC, "an evaluation that runs during training would see noisy weights"),
        (_ZERO_3, f"under ZeRO-3 {_WHOLE}"),
        (_TENSOR, _WHOLE),
        (both(given.GSPO, given.WEIGHTS), _GSPO, _NO_WEIGHTS),
    ),
    Row(both(given.GSPO, given.WEIGHTS), given.SCHEDULE, _GSPO, _NO_WEIGHTS),
    Row(given.NO_WEIGHTS, given.NOISE_BY_WEIGHTS, *_NEEDS_WEIGHTS),
    *rows(
        given.SCHEDULE_BY_WEIGHTS,
        (given.NO_WEIGHTS, *_NEEDS_WEIGHTS),
        (_ASYNC, "rollouts are drawn before the step that their temperature follows from"),
    ),
    Row(both(given.SCHEDULE, given.WEIGHTS), given.unsampled, _OTHER_TEXT, f"sample the text, {_NO_WEIGHTS}"),
    Row(given.EVALUATED_SCHEDULE, flag("--eval.temperature", only="0"), "greedy decoding ignores the temperature"),
    *(
        Row(_WARMUP, given.other_than(name, needed), _GROWS, f"give {name} {needed}, or leave the warm-up out")
        for name, needed in given.TOKEN_WEIGHTS.items()
    ),
    Row(_WARMUP, given.BOUNDS_WITHOUT_ONE, "its weights begin at 1, which is outside", f"give {given.BOUNDS} 0 10"),
    *rows(
        given.SECOND_ROUND,
        (flag("--train.agent_func_path"), "an agent reads more than its first prompt"),
        (_PICTURES, "the changed prompt contains the pictures"),
        (given.LATE_REWARD, "its reward comes after the rollout", "give --reward.remote_url FILE.py, or a --task"),
    ),
    *rows(
        given.REPLACED,
        (_WARMUP, "its responses have a ratio to their own prompt's policy, which a changed weight would change"),
        (given.PERTURBATION, _OTHER_PROMPT),
        (given.MASK, _OTHER_PROMPT),
        (given.ROUTING, _OTHER_PROMPT),
        (given.GSPO, "its ratio is of a whole response, the method's of each token"),
        (given.CREDIT_IN_LOSS, "both change the ratio of the same tokens"),
        (
            given.BY_VALUES,
            "a prompt's value would count the right ones of further responses",
            "choose another advantage",
        ),
        (given.ONE_ANSWER, "one response of a group stays, and right ones take the place of others", "set it to 8"),
    ),
    *rows(
        given.REFINED,
        (given.no_room_for_a_draft, "a prompt, a draft and a response share --data.max_len", _ROOM),
        (given.FOLLOWED, "each step has prompts of its own, so none would be seen twice"),
    ),
    *rows(
        given.FULL_GROUPS,
        (given.NO_ADVANTAGE, "OpenRLHF's own estimators see one round", f"add --advantage group_norm, {_KEPT}"),
        (given.BEYOND_REWARDS, "it looks at more of a response than its reward", f"choose another advantage, {_KEPT}"),
    ),
    Row(given.OTHER_ESTIMATOR, given.ADVANTAGE, "the advantage takes the place of the estimator", "give one of them"),
    Row(flag("--reward.overlong_buffer_len"), given.VERIFIED, _PENALTY, _NO_PENALTY),
    Row(flag("--reward.stop_properly_penalty_coef"), given.VERIFIED, _PENALTY, _NO_PENALTY),
    Row(both(_ASYNC, _SAVES), given.DRAWN_AHEAD, _LOST, _NONE_AHEAD),
    Row(flag("--reward.model_name_or_path"), _REWARD, "OpenRLHF 0.11.2 takes the file or address alone"),
    Row(flag("--train.agent_func_path"), _REWARD, "the agent's own reward is taken"),
    Row(flag("--actor.eps_clip"), flag("--actor.eps_clip_low_high"), "the pair is taken"),
    Row(flag("--data.input_template"), flag("--data.apply_chat_template"), "the chat template is taken"),
    Row(both(_SAVES, flag("--ckpt.disable_ds")), _NO_MODEL_SAVED, "no checkpoint would be saved", "add --ckpt.save_hf"),
    *rows(
        flag("--algo.advantage.is_correction_mode", only="clip"),
        (flag(CORRECTION, only="seq"), "OpenRLHF clips weights of tokens", f"give {CORRECTION} token"),
        (given.DIVERGENCE, "OpenRLHF clips ratios", "give --algo.advantage.is_correction_mode mask"),
    ),
    Row(both(given.WEIGHTS, given.DIVERGENCE), given.LOWER_BOUND, _UPPER_ALONE, f"give one number, {given.BOUNDS} 0.1"),
    Row(given.EVAL_AT_START, _ASYNC, "an asynchronous run evaluates during training", "run `ngrpo eval` before it"),
)

_MUON = flag("--actor.optim", only="muon")
_MUON_NEEDS_WHOLE = "DeepSpeed 0.19.6 computes Muon of whole gradients, and the ranks hold slices"

CPU_MODEL = (Row(given.head_size, given.hardware("cpu"), "the engine would not start", "use another model"),)
HARDWARE = (
    *CPU_MODEL,
    *rows(
        given.hardware("cpu"),
        (flag("--vllm.sync_backend", only="nccl"), "NCCL needs CUDA", "leave it out; gloo is set"),
        (flag("--vllm.gpu_memory_utilization"), "the KV cache has a fixed size", "use VLLM_CPU_KVCACHE_SPACE (GiB)"),
        (flag("--vllm.enable_sleep"), "vLLM has no sleep mode on a CPU"),
        (flag("--ds.load_in_4bit"), "4-bit loading needs CUDA"),
        (flag("--ds.use_liger_kernel"), "Liger kernels need CUDA"),
        (flag("--ds.param_dtype", only="fp16"), "DeepSpeed has no float16 on a CPU", "leave it out for float32"),
        (both(_TENSOR, _FLOAT32), "OpenRLHF's tensor parallelism needs bfloat16", "add --ds.param_dtype bf16"),
        (_RING, _NEEDS_CUDA),
        (given.FLASH_ATTENTION, _NEEDS_CUDA, "use sdpa or eager"),
    ),
    *(
        Row(what, given.without(package), "OpenRLHF imports it", f"pip install {package}")
        for what, package in (
            (flag("--use_ms"), "modelscope"),
            (flag("--logger.wandb.key"), "wandb"),
            (given.LORA, "peft"),
            (flag("--ds.use_liger_kernel"), "liger-kernel"),
            (flag("--ds.load_in_4bit"), "bitsandbytes"),
        )
    ),
    Row(_FLOAT32, given.hardware("cuda"), "OpenRLHF's engines compute in bfloat16 there", "use bf16, or leave it out"),
    Row(_MUON, _ZERO_3, _MUON_NEEDS_WHOLE, "use --ds.zero_stage 2"),
    Row(_MUON, flag("--ds.adam_offload"), _MUON_NEEDS_WHOLE, "leave --ds.adam_offload out, or use Adam"),
    Row(_RING, given.WITHOUT_FLASH_ATTN, _NO_FLASH_ATTN, f"leave it out, or {_INSTALL}"),
    Row(given.FLASH_ATTENTION_2, given.WITHOUT_FLASH_ATTN, _NO_FLASH_ATTN, f"use sdpa or eager, or {_INSTALL}"),
)

_RANKS = "the rows of a step are split over ranks"
_OVERLAP = engine("parallel_config.use_ubatching", name="dual-batch overlap")
_HALVES = "each half of a batch would read the override from its first row"
_SPLIT_PASS = engine("compilation_config.pass_config.enable_sp", name="the sequence-parallel pass")
_NO_SPLIT_PASS = "set compilation_config={'pass_config': {'enable_sp': False, 'fuse_gemm_comms': False}}"
_LORA_BELOW = engine("lora_config", given.adapts_embedding, name="LoRA on the input embedding")
_TWO_INPUTS = engine("model_config.is_encoder_decoder", name="an encoder-decoder model")
ENGINE = (
    *rows(
        given.IN_ENGINE,
        (engine("speculative_config", name="speculative decoding"), "the draft model would not see the inputs"),
        (engine("parallel_config.pipeline_parallel_size", above_one), "only the first stage embeds", "set it to 1"),
        (engine("parallel_config.decode_context_parallel_size", above_one), _RANKS, "set it to 1"),
        (engine("parallel_config.prefill_context_parallel_size", above_one), _RANKS, "set it to 1"),
        (given.mixture_in_step, "its ranks run in step, which is untested", "start an engine for each rank"),
        (engine("watermark_config", name="watermarking"), "its draws of tokens would be replaced"),
        (_OVERLAP, _HALVES, "leave out enable_dbo and ubatch_size"),
        (engine("parallel_config.enable_batch_sharded_sampling"), "each rank would draw a part of the batch"),
        (_SPLIT_PASS, "it rewrites what follows the embedding, across the override", _NO_SPLIT_PASS),
        (_LORA_BELOW, "its difference is added after the override", "give --lora-target-modules without embed_tokens"),
        (engine("model_config.enable_prompt_embeds"), "inputs without tokens cannot be replayed"),
        (engine("model_config.enable_trace_replay"), "it replaces tokens after they were drawn and recorded"),
        (engine("model_config.is_diffusion", name="a diffusion model"), "it draws many tokens in a step"),
        (engine("model_config.runner_type", none_of("generate")), "only generation is perturbed", "use 'generate'"),
        (_TWO_INPUTS, "it has no single input embedding"),
        (engine("kv_transfer_config", name="KV transfer between engines"), "perturbed blocks must not be shared"),
    ),
    Row(engine("model_config.enable_return_routed_experts"), given.ROUTED_ENGINE, "a router hands them to one of both"),
    Row(engine("cache_config.prefix_match_unit"), given.ROUTED_ENGINE, "blocks of a prompt are copied without experts"),
)

_WITHOUT, _TURNS = "use the variant without them, or OpenRLHF", "records cover one turn"
_DENSITY_TOKEN = "leave it out, or set +perturbation.density=token"
_NOT_TOLD = "it changes over the run, and verl does not tell it the training step"
_CONSTANT = "leave out its option k_end, or what else changes it, or train with OpenRLHF"
_SUBTRACTED = "verl subtracts the KL term from the rewards that an advantage compares; OpenRLHF does not"
_ACTOR, _ROLLOUT, _TRAINER = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "only fsdp and fsdp2 replay"

_IN_LOSS = f"set it to 0 or False, or have the term in the loss: --algo.kl.use_loss, in verl {_ACTOR}.use_kl_loss=True"
_SPLITS = "it splits a sequence", "set it to 1"

VERL_ADVANTAGE = (
    *rows(
        given.IN_VERL,
        (given.BEYOND_REWARDS, "it looks at more than rewards, which verl does not give it", "use another"),
        (given.CHANGING, _NOT_TOLD, _CONSTANT),
    ),
    Row(given.ROUTING, given.IN_VERL, "verl has a routing replay of its own", "leave it out, and set verl's own"),
    Row(given.kl_in_reward, given.ADVANTAGE, _SUBTRACTED, _IN_LOSS),
)
VERL = (
    *rows(
        given.IN_ENGINE,
        (verl("trainer.use_v1", lambda value: value is False), "its batches carry no records"),
        (verl(f"{_ROLLOUT}.name", none_of("vllm")), "rollouts are perturbed inside vLLM", "use vllm"),
        (verl(f"{_ACTOR}.strategy", none_of("fsdp", "fsdp2")), _TRAINER, "use one of these"),
        (verl("actor_rollout_ref.ref.strategy", none_of("fsdp", "fsdp2")), _TRAINER, "use one of these"),
        *((verl(f"{key}.pad_to_length"), "a packed batch must be its samples alone") for key in given.VERL_ENGINES),
        *((verl(f"{key}.ulysses_sequence_parallel_size", above_one), *_SPLITS) for key in given.VERL_ENGINES),
        (verl(f"{_ROLLOUT}.agent.default_agent_loop", none_of(None, "single_turn_agent")), _TURNS),
        (verl(f"{_ROLLOUT}.agent.agent_loop_manager_class"), "another manager takes its place"),
        (verl(f"{_ROLLOUT}.multi_turn.enable"), _TURNS),
        (verl(f"{_ROLLOUT}.disaggregation.enabled"), "one engine must feed prompt and response"),
        (verl(f"{_ACTOR}.use_prefix_grouper"), "it shares prompts among samples"),
        (verl("distillation.enabled"), "the teacher's log-probabilities are not replayed"),
        (verl("algorithm.rollout_correction.bypass_mode"), "the replay would not be measured"),
        (given.critic, "its values are not replayed", "use an estimator without one, such as grpo"),
    ),
    Row(given.PARAMETERS, given.IN_VERL, "verl would neither train nor send its parameters", _WITHOUT),
    *rows(
        given.DENSITY,
        (verl("actor_rollout_ref.model.use_fused_kernels"), "a density needs the logits", _DENSITY_TOKEN),
        (verl("algorithm.rollout_correction.rollout_is"), "its ratio is the token's", _DENSITY_TOKEN),
    ),
    *rows(
        given.SCORE_ONLY,
        (verl(f"{_ACTOR}.use_kl_loss"), "verl's losses share one log-probability", _DENSITY_TOKEN),
        (verl(f"{_ACTOR}.ppo_epochs", above_one), "its gradient is that of the first update", _DENSITY_TOKEN),
    ),
)

_UNFILTERED = "leave them out, or set vllm_importance_sampling_correction=False"
TRL = (
    *rows(
        given.IN_ENGINE,
        (given.WITHOUT_VLLM, "rollouts are perturbed inside vLLM", "set use_vllm=True"),
        (given.VLLM_SERVER, "its records stay there", "set vllm_mode='colocate'"),
        (when("tools", lambda asked: asked.arguments.get("tools")), _TURNS),
        (when("environments", lambda asked: asked.arguments.get("environment_factory")), _TURNS),
        (when("rollout_func", lambda asked: asked.arguments.get("rollout_func")), "it has no records"),
        (given.LIGER, "its loss bypasses the log-probabilities"),
        (given.filtered_weights, "its weights would compare the changed distribution with the model's", _UNFILTERED),
    ),
    Row(given.PARAMETERS, given.IN_TRL, "TRL would neither train nor send its parameters", _WITHOUT),
    Row(given.DENSITY, given.IN_TRL, "TRL's loss takes the token's log-probability", "set density='token'"),
)

TABLE = {
    "a training": TRAINING,
    "the hardware": HARDWARE,
    "a perturbed engine of vLLM": ENGINE,
    "verl": (*VERL_ADVANTAGE, *VERL),
    "TRL": TRL,
}
"""All rows, by what they are about."""


def check(table: Iterable[Row], asked: given.Combination) -> None:
    """Raises ``UsageError`` with a line for each row of which the run has both sides."""
    problems = [
        f"{what} cannot be used with {other}: {row.why}. Fix: {row.fix}."
        for row in table
        if (what := row.what.given(asked)) and (other := row.other.given(asked))
    ]
    if problems:
        raise UsageError("\n".join(problems))


def check_model(model: str, hardware: str) -> None:
    """Raises ``UsageError`` for a model that vLLM cannot run on a hardware."""
    check(CPU_MODEL, given.Combination(flags=Flags((given.MODEL, model)), hardware=hardware))


_PAGE = """\
# Refused combinations

`ngrpo train`, its `--dry-run`, `ngrpo compare` (each arm), vLLM's engine, verl and TRL look at this table before
anything starts. `ngrpo list compatibility` prints it. Every pair that is not here may be combined.
"""


def page() -> str:
    """The table in Markdown."""
    lines = [_PAGE]
    for title, listed in TABLE.items():
        lines += [f"## {title[0].upper()}{title[1:]}", "", "| | cannot be used with | why | instead |"]
        lines += ["| --- | --- | --- | --- |"]
        lines += [f"| {row.what.name} | {row.other.name} | {row.why} | {row.fix} |" for row in listed]
        lines += [""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
