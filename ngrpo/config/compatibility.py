# SPDX-License-Identifier: Apache-2.0
"""What does not go with what: one table for a start, a dry run, a comparison, vLLM's engine, verl and TRL.

`ngrpo list compatibility` prints it; docs/compatibility.md is the same (``python -m ngrpo.config.compatibility``).
"""

from __future__ import annotations

from collections.abc import Iterable

from ngrpo.config import features
from ngrpo.config.features import (
    ASYNC,
    BOUNDS,
    CORRECTION,
    DENSITY,
    GSPO,
    KL,
    NOISE,
    SCHEDULE,
    SCORE_ONLY,
    SECOND_ROUND,
    WEIGHTS,
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

_ONE = "leave one of them out"
_OUT = "leave it out"
_TOKEN = ", or add --perturbation.density token"
_PENALTY = "its penalty makes rewards that are not in [0, 1]"
_NO_PENALTY = "leave it (or --preset dapo, which adds it) out, or use --advantage group_norm or ngrpo"
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
_NEEDS_LOG_PROBS = "it follows the rollouts' log-probabilities, which need the weights"
_GROWS = "the warm-up lets the loss's weight of each token, min(π / π_rollout, HIGH), grow from 1"
_WARMUP = sampling("correction_warmup")
_PICTURES = "packing would break the alignment between picture tokens and pixels"
_OTHER_PROMPT = "the records are of another prompt than the one that is trained"


TRAINING = (
    *rows(
        features.REPLAYED,
        (
            flag("pipeline_parallel", off=("1",)),
            "the rollout edits the input on one stage only",
            "use --vllm.tensor_parallel_size",
        ),
        (flag("speculative", off=("0", "false", "none")), _DRAFTED),
        (flag("draft_model", off=("0", "false", "none")), _DRAFTED),
        (
            flag("--ds.ring_attn_size", off=("1",)),
            "the replay does not split records over a ring",
            "use --ds.ring_attn_size 1",
        ),
        (
            flag("--ds.lora.rank", off=("0",)),
            "OpenRLHF syncs its weights under names that vLLM does not know",
            "train without LoRA",
        ),
        (flag("partial_rollout"), "records would be cut at the weight sync", "leave it out (not --train.async_enable)"),
    ),
    Row(
        flag("--train.enable_ema"),
        flag("--ds.zero_stage", only=("3",)),
        "the average is not kept there, and the model that the training began with would be saved as its result",
        "use --ds.zero_stage 2, or leave it out",
    ),
    Row(
        flag("--actor.gradient_checkpointing_reentrant"),
        features.FROZEN_INPUT,
        "reentrant checkpointing gives no gradient to layers whose input has none",
        "leave it out, or add --perturbation.freeze none",
    ),
    *rows(
        flag("--data.max_images_per_prompt", off=("0",)),
        (flag("--ds.packing_samples"), _PICTURES),
        (flag("--train.dynamic_batch_enable"), f"dynamic batches are packed, and {_PICTURES}"),
    ),
    *rows(
        DENSITY,
        (
            WEIGHTS,
            "the weights compare with the rollout's log-probabilities, which are the tokens'",
            f"give {CORRECTION} off{_TOKEN}",
        ),
        (
            SCHEDULE,
            "rollouts at another temperature than the trainer's are weighted by the tokens' log-probabilities, which"
            " the density replaces",
            "leave the schedule out" + _TOKEN,
        ),
    ),
    *rows(
        features.DRAWING,
        (flag("--rollout.top_p", off=("1",)), _NARROW, _OUT + _TOKEN),
        (sampling("top_k"), _NARROW, _OUT + _TOKEN),
        (sampling("min_p"), _NARROW, _OUT + _TOKEN),
    ),
    *rows(
        SCORE_ONLY,
        (flag(ASYNC), _ONE_UPDATE, _OUT + _TOKEN),
        (other_than("--train.max_epochs", "1"), _ONE_UPDATE, "set --train.max_epochs 1" + _TOKEN),
        (features.SMALL_BATCH, _ONE_UPDATE, "set --train.batch_size to these samples" + _TOKEN),
        (NOISE, f"{_ONE_UPDATE}, not at weights without the noise", _ONE + _TOKEN),
    ),
    *rows(
        features.TOKENLESS,
        (
            features.CREDIT_IN_LOSS,
            "no token is drawn at its positions, so none of the likeliest ones can share in the credit",
            _ONE + _TOKEN,
        ),
        (features.KL_TERM, "no token is drawn at its positions, so none has a KL term", f"set {KL} 0" + _TOKEN),
    ),
    *rows(
        features.CREDIT,
        (
            GSPO,
            "the ratio is of the whole answer, so that each of its tokens is trained by the mean of their advantages",
            f"{_ONE}; --preset grpo has the ratio of each token",
        ),
    ),
    *rows(
        features.CREDIT_IN_LOSS,
        (flag("--ds.ring_attn_size", off=("1",)), "it needs all logits of an answer in one place", "set it to 1"),
    ),
    *rows(
        NOISE,
        (flag(ASYNC), "an evaluation that runs beside the training would see noisy weights"),
        (flag("--ds.zero_stage", only=("3",)), "under ZeRO-3 no process has a whole parameter to add noise to"),
        (flag("--ds.tensor_parallel_size", off=("1",)), "no process has a whole parameter to add noise to"),
        (both(GSPO, WEIGHTS), _GSPO, f"{_ONE}, or add {CORRECTION} off where the noise does not need the weights"),
    ),
    Row(features.NO_WEIGHTS, features.NOISE_BY_WEIGHTS, _NEEDS_LOG_PROBS, f"leave {CORRECTION} at token"),
    Row(features.NO_WEIGHTS, features.SCHEDULE_BY_WEIGHTS, _NEEDS_LOG_PROBS, f"leave {CORRECTION} at token"),
    *rows(
        SCHEDULE,
        (both(GSPO, WEIGHTS), _GSPO, f"{_ONE}, or add {CORRECTION} off where the schedule does not need the weights"),
    ),
    Row(
        both(SCHEDULE, WEIGHTS),
        features.UNSAMPLED,
        "its text is not drawn from the policy at the schedule's temperature, so that the importance weights"
        " π / π_rollout would be those of another distribution",
        f"{_ONE}, sample the text, or add {CORRECTION} off where the schedule does not need the weights",
    ),
    Row(
        features.EVALUATED_SCHEDULE,
        flag("--eval.temperature", only=("0",)),
        "which token is the likeliest does not depend on the temperature",
    ),
    Row(
        flag(ASYNC),
        features.SCHEDULE_BY_WEIGHTS,
        "rollouts are drawn before the step that their temperature follows from",
    ),
    *(
        Row(_WARMUP, other_than(name, needed), _GROWS, f"give {name} {needed}, or leave the warm-up out")
        for name, needed in features.TOKEN_WEIGHTS.items()
    ),
    Row(_WARMUP, features.BOUNDS_WITHOUT_ONE, "its weights begin at 1, which is outside", f"give {BOUNDS} 0 10"),
    Row(
        _WARMUP,
        SECOND_ROUND,
        "its answers have a ratio to their own prompt's policy, which a changed weight would change",
    ),
    *rows(
        SECOND_ROUND,
        (features.PERTURBATION, _OTHER_PROMPT),
        (sampling("correct_mask"), _OTHER_PROMPT),
        (flag("--train.agent_func_path"), "an agent's first prompt is not all that it is told"),
        (flag("--data.max_images_per_prompt", off=("0",)), "pictures stand in the prompt that would be changed"),
        (
            features.NO_REWARD_IN_ROLLOUT,
            "it needs to know in the rollout which answers are right",
            "give --reward.remote_url FILE.py, or a --task",
        ),
        (GSPO, "its ratio is of a whole answer, the method's of each token"),
        (features.CREDIT_IN_LOSS, "both change the ratio of the same tokens"),
        (features.ONE_ANSWER, "one answer of a group stays, and right ones take the place of others", "set it to 8"),
    ),
    *rows(
        features.FULL_GROUPS,
        (
            features.NO_ADVANTAGE,
            "advantages of the answers of both rounds are none that OpenRLHF's own estimators compute",
            "add --advantage group_norm, or --second_round.group kept, which takes the rewards of the answers that are"
            " trained alone",
        ),
        (
            features.BEYOND_REWARDS,
            "it looks at more of an answer than its reward, which is all that is kept of answers that are not trained",
            "choose another advantage, or --second_round.group kept, which takes the rewards of the answers that are"
            " trained alone",
        ),
    ),
    Row(
        features.OTHER_ESTIMATOR,
        features.ADVANTAGE,
        "the advantage takes the place of the estimator",
        "give one of the two",
    ),
    *rows(
        features.VERIFIED,
        (flag("--reward.overlong_buffer_len"), _PENALTY, _NO_PENALTY),
        (flag("--reward.stop_properly_penalty_coef"), _PENALTY, _NO_PENALTY),
    ),
    Row(
        features.EVAL_AT_START,
        flag(ASYNC),
        "an asynchronous run evaluates beside the training",
        "leave it out, and run `ngrpo eval` on the untrained model",
    ),
)

_FLASH = "install flash-attn, for which docs/install.md names prebuilt wheels"
_RING = flag("--ds.ring_attn_size", off=("1",))

HARDWARE = (
    *rows(
        features.hardware("cpu"),
        (flag("--vllm.sync_backend", only=("nccl",)), "NCCL needs CUDA", "leave it out; gloo is set"),
        (
            flag("--vllm.gpu_memory_utilization"),
            "the KV cache has a fixed size on a CPU",
            "use VLLM_CPU_KVCACHE_SPACE (GiB, 1 if unset)",
        ),
        (
            flag("--ds.lora.rank", off=("0",)),
            "OpenRLHF 0.11.2 syncs the adapter's parameters under PEFT's names, which vLLM does not know",
        ),
        (flag("--vllm.enable_sleep"), "vLLM has no sleep mode on a CPU"),
        (flag("--ds.load_in_4bit"), "4-bit loading needs CUDA"),
        (flag("--ds.use_liger_kernel"), "Liger kernels need CUDA"),
        (flag("--ds.param_dtype", only=("fp16",)), "DeepSpeed has no float16 on a CPU", "leave it out for float32"),
        (
            both(flag("--ds.tensor_parallel_size", off=("1",)), flag("--ds.param_dtype", only=("fp32",))),
            "OpenRLHF's tensor parallelism needs bfloat16, and float32 is used where no dtype is given",
            "add --ds.param_dtype bf16, or leave tensor parallelism out",
        ),
        (_RING, "flash-attn computes it, and that needs CUDA"),
        (features.FLASH_ATTENTION, "flash-attn computes it, and that needs CUDA", "use sdpa or eager"),
    ),
    Row(
        flag("--ds.param_dtype", only=("fp32",)),
        features.hardware("cuda"),
        "OpenRLHF's engines compute in bfloat16 there",
        "use bf16, or leave it out",
    ),
    *rows(
        features.WITHOUT_FLASH_ATTN,
        (_RING, "flash-attn computes it, and that is not installed where the run starts", f"{_OUT}, or {_FLASH}"),
        (
            features.FLASH_ATTENTION_2,
            "flash-attn computes it, and that is not installed where the run starts",
            f"use sdpa or eager, or {_FLASH}",
        ),
    ),
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
    parts = [_PAGE]
    for title, listed in TABLE.items():
        parts.append(
            f"\n## {title[0].upper()}{title[1:]}\n\n| | does not go with | why | instead |\n| --- | --- | --- | --- |\n"
        )
        for row in listed:
            cells = (row.what.name, row.other.name, row.why, row.fix)
            parts.append("| " + " | ".join(cells) + " |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
