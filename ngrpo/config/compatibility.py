# SPDX-License-Identifier: Apache-2.0
"""What does not go with what: one table for a start, a dry run, a comparison, vLLM's engine, verl and TRL.

`ngrpo list compatibility` prints it; docs/compatibility.md is the same (``python -m ngrpo.config.compatibility``).
"""

from __future__ import annotations

from collections.abc import Iterable

from ngrpo.config import features as given
from ngrpo.config.features import (
    ASYNC,
    BOUNDS,
    CORRECTION,
    KL,
    Combination,
    Row,
    both,
    flag,
    other_than,
    rows,
    sampling,
)
from ngrpo.config.integration_rows import ENGINE, TRL, VERL, VERL_ADVANTAGE
from perturbations.errors import UsageError

_PICTURES, _RING, _ZERO_3 = (
    flag("--data.max_images_per_prompt", off="0"),
    flag("--ds.ring_attn_size", off="1"),
    flag("--ds.zero_stage", only="3"),
)
_WARMUP = sampling("correction_warmup")
_TOKEN = "or add --perturbation.density token"
_DRAFTED = "drafted tokens are accepted without ever being fed as mixtures"
_NARROW = "a position whose token the filter cuts stays unperturbed, so its token has another distribution"
_ONE_UPDATE = (
    "the density's noise is too narrow, or of too many dimensions, for a policy ratio, so each rollout is used for one"
    " update at the policy that drew it"
)
_GSPO = (
    "GSPO puts the rollout's policy in the place of the old one, and its narrow clip would leave out nearly all answers"
    " with a negative advantage"
)
_NO_WEIGHTS = f"leave one of them out, or add {CORRECTION} off where the method does not need the weights"
_NEEDS_WEIGHTS = "it follows the rollouts' log-probabilities, which need the weights", f"leave {CORRECTION} at token"
_WHOLE = "no process has a whole parameter to add noise to"
_OTHER_PROMPT = "the records are of another prompt than the one that is trained"
_KEPT = "or --second_round.group kept, which takes the rewards of the trained answers alone"
_PENALTY = "its penalty makes rewards outside [0, 1]"
_NO_PENALTY = "leave it (or --preset dapo, which adds it) out, or use --advantage group_norm or ngrpo"
_PACKED = "packing would break the alignment between picture tokens and pixels"
_NO_FLASH_ATTN = "flash-attn computes it, and that is not installed where the run starts"
_INSTALL = "install flash-attn, for which docs/install.md names prebuilt wheels"

TRAINING = (
    *rows(
        given.REPLAYED,
        (flag("pipeline_parallel", off="1"), "the rollout edits the input of one stage", "use tensor parallelism"),
        (flag("speculative", off="0 false none"), _DRAFTED),
        (flag("draft_model", off="0 false none"), _DRAFTED),
        (_RING, "the replay does not split records over a ring", "use --ds.ring_attn_size 1"),
        (flag("--ds.lora.rank", off="0"), "OpenRLHF syncs its weights under names that vLLM does not know"),
        (flag("partial_rollout"), "records would be cut at the weight sync", "leave it out (not --train.async_enable)"),
    ),
    Row(
        flag("--train.enable_ema"),
        _ZERO_3,
        "the average is not kept there, and the model that the training began with would be saved as its result",
        "use --ds.zero_stage 2, or leave it out",
    ),
    Row(
        flag("--actor.gradient_checkpointing_reentrant"),
        given.FROZEN_INPUT,
        "reentrant checkpointing gives no gradient to layers whose input has none",
        "leave it out, or add --perturbation.freeze none",
    ),
    Row(flag("--ds.packing_samples"), _PICTURES, _PACKED),
    Row(flag("--train.dynamic_batch_enable"), _PICTURES, f"dynamic batches are packed, and {_PACKED}"),
    Row(
        given.WEIGHTS,
        given.DENSITY,
        "the weights compare with the rollout's log-probabilities, which are the tokens'",
        f"give {CORRECTION} off, {_TOKEN}",
    ),
    Row(
        given.SCHEDULE,
        given.DENSITY,
        "rollouts at another temperature than the trainer's are weighted by the tokens' log-probabilities, which the"
        " density replaces",
        f"leave the schedule out, {_TOKEN}",
    ),
    *(
        Row(narrow, given.DRAWING, _NARROW, f"leave it out, {_TOKEN}")
        for narrow in (flag("--rollout.top_p", off="1"), sampling("top_k"), sampling("min_p"))
    ),
    *rows(
        given.SCORE_ONLY,
        (flag(ASYNC), _ONE_UPDATE, f"leave it out, {_TOKEN}"),
        (other_than("--train.max_epochs", "1"), _ONE_UPDATE, f"set --train.max_epochs 1, {_TOKEN}"),
        (given.SMALL_BATCH, _ONE_UPDATE, f"set --train.batch_size to these samples, {_TOKEN}"),
        (given.NOISE, f"{_ONE_UPDATE}, not at weights without the noise", f"leave one of them out, {_TOKEN}"),
    ),
    Row(
        given.CREDIT_IN_LOSS,
        given.TOKENLESS,
        "no token is drawn at its positions, so none of the likeliest ones can share in the credit",
        f"leave one of them out, {_TOKEN}",
    ),
    Row(
        given.KL_TERM,
        given.TOKENLESS_SCORE,
        "no token is drawn at its positions, so none has a KL term",
        f"set {KL} 0, {_TOKEN}",
    ),
    Row(
        given.GSPO,
        given.CREDIT,
        "the ratio is of the whole answer, so that each of its tokens is trained by the mean of their advantages",
        "leave one of them out; --preset grpo has the ratio of each token",
    ),
    Row(_RING, given.CREDIT_IN_LOSS, "it needs all logits of an answer in one place", "use --ds.ring_attn_size 1"),
    *rows(
        given.NOISE,
        (flag(ASYNC), "an evaluation that runs beside the training would see noisy weights"),
        (_ZERO_3, f"under ZeRO-3 {_WHOLE}"),
        (flag("--ds.tensor_parallel_size", off="1"), _WHOLE),
        (both(given.GSPO, given.WEIGHTS), _GSPO, _NO_WEIGHTS),
    ),
    Row(both(given.GSPO, given.WEIGHTS), given.SCHEDULE, _GSPO, _NO_WEIGHTS),
    Row(given.NO_WEIGHTS, given.NOISE_BY_WEIGHTS, *_NEEDS_WEIGHTS),
    Row(given.NO_WEIGHTS, given.SCHEDULE_BY_WEIGHTS, *_NEEDS_WEIGHTS),
    Row(
        both(given.SCHEDULE, given.WEIGHTS),
        given.UNSAMPLED,
        "its text is not drawn from the policy at the schedule's temperature, so that the importance weights"
        " π / π_rollout would be those of another distribution",
        f"sample the text, {_NO_WEIGHTS}",
    ),
    Row(
        given.EVALUATED_SCHEDULE,
        flag("--eval.temperature", only="0"),
        "which token is the likeliest does not depend on the temperature",
    ),
    Row(
        flag(ASYNC),
        given.SCHEDULE_BY_WEIGHTS,
        "rollouts are drawn before the step that their temperature follows from",
    ),
    *(
        Row(
            _WARMUP,
            other_than(name, needed),
            "the warm-up lets the loss's weight of each token, min(π / π_rollout, HIGH), grow from 1",
            f"give {name} {needed}, or leave the warm-up out",
        )
        for name, needed in given.TOKEN_WEIGHTS.items()
    ),
    Row(_WARMUP, given.BOUNDS_WITHOUT_ONE, "its weights begin at 1, which is outside", f"give {BOUNDS} 0 10"),
    *rows(
        given.SECOND_ROUND,
        (_WARMUP, "its answers have a ratio to their own prompt's policy, which a changed weight would change"),
        (given.PERTURBATION, _OTHER_PROMPT),
        (sampling("correct_mask"), _OTHER_PROMPT),
        (flag("--train.agent_func_path"), "an agent's first prompt is not all that it is told"),
        (_PICTURES, "pictures stand in the prompt that would be changed"),
        (
            given.LATE_REWARD,
            "it needs to know in the rollout which answers are right",
            "give --reward.remote_url FILE.py, or a --task",
        ),
        (given.GSPO, "its ratio is of a whole answer, the method's of each token"),
        (given.CREDIT_IN_LOSS, "both change the ratio of the same tokens"),
        (given.ONE_ANSWER, "one answer of a group stays, and right ones take the place of others", "set it to 8"),
    ),
    *rows(
        given.FULL_GROUPS,
        (
            given.NO_ADVANTAGE,
            "OpenRLHF's own estimators do not know the answers of both rounds",
            f"add --advantage group_norm, {_KEPT}",
        ),
        (
            given.BEYOND_REWARDS,
            "it looks at more of an answer than its reward, which is all that is kept of answers that are not trained",
            f"choose another advantage, {_KEPT}",
        ),
    ),
    Row(given.OTHER_ESTIMATOR, given.ADVANTAGE, "the advantage takes the place of the estimator", "give one of them"),
    Row(flag("--reward.overlong_buffer_len"), given.VERIFIED, _PENALTY, _NO_PENALTY),
    Row(flag("--reward.stop_properly_penalty_coef"), given.VERIFIED, _PENALTY, _NO_PENALTY),
    Row(
        given.EVAL_AT_START,
        flag(ASYNC),
        "an asynchronous run evaluates beside the training",
        "leave it out, and run `ngrpo eval` on the untrained model",
    ),
)

HARDWARE = (
    *rows(
        given.hardware("cpu"),
        (flag("--vllm.sync_backend", only="nccl"), "NCCL needs CUDA", "leave it out; gloo is set"),
        (
            flag("--vllm.gpu_memory_utilization"),
            "the KV cache has a fixed size on a CPU",
            "use VLLM_CPU_KVCACHE_SPACE (GiB, 1 if unset)",
        ),
        (flag("--ds.lora.rank", off="0"), "OpenRLHF 0.11.2 syncs adapters under PEFT's names, unknown to vLLM"),
        (flag("--vllm.enable_sleep"), "vLLM has no sleep mode on a CPU"),
        (flag("--ds.load_in_4bit"), "4-bit loading needs CUDA"),
        (flag("--ds.use_liger_kernel"), "Liger kernels need CUDA"),
        (flag("--ds.param_dtype", only="fp16"), "DeepSpeed has no float16 on a CPU", "leave it out for float32"),
        (
            both(flag("--ds.tensor_parallel_size", off="1"), flag("--ds.param_dtype", only="fp32")),
            "OpenRLHF's tensor parallelism needs bfloat16, and float32 is used where no dtype is given",
            "add --ds.param_dtype bf16, or leave tensor parallelism out",
        ),
        (_RING, "flash-attn computes it, and that needs CUDA"),
        (given.FLASH_ATTENTION, "flash-attn computes it, and that needs CUDA", "use sdpa or eager"),
    ),
    Row(
        flag("--ds.param_dtype", only="fp32"),
        given.hardware("cuda"),
        "OpenRLHF's engines compute in bfloat16 there",
        "use bf16, or leave it out",
    ),
    Row(_RING, given.WITHOUT_FLASH_ATTN, _NO_FLASH_ATTN, f"leave it out, or {_INSTALL}"),
    Row(given.FLASH_ATTENTION_2, given.WITHOUT_FLASH_ATTN, _NO_FLASH_ATTN, f"use sdpa or eager, or {_INSTALL}"),
)

TABLE = {
    "a training": TRAINING,
    "the hardware": HARDWARE,
    "a perturbed engine of vLLM": ENGINE,
    "verl": (*VERL_ADVANTAGE, *VERL),
    "TRL": TRL,
}
"""All rows, by what they are about."""


def check(table: Iterable[Row], asked: Combination) -> None:
    """Raises ``UsageError`` with a line for each row of which both sides are asked for."""
    problems = [problem for row in table if (problem := row.problem(asked)) is not None]
    if problems:
        raise UsageError("\n".join(problems))


_PAGE = """\
# What does not go with what

`ngrpo train`, its `--dry-run`, `ngrpo compare` (each arm), vLLM's engine, verl and TRL look at this table before
anything starts. `ngrpo list compatibility` prints it. Every pair that is not here may be combined.
"""


def page() -> str:
    """The table in Markdown."""
    lines = [_PAGE]
    for title, listed in TABLE.items():
        lines += [f"## {title[0].upper()}{title[1:]}", "", "| | does not go with | why | instead |"]
        lines += ["| --- | --- | --- | --- |"]
        lines += [f"| {row.what.name} | {row.other.name} | {row.why} | {row.fix} |" for row in listed]
        lines += [""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
