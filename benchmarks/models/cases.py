# SPDX-License-Identifier: Apache-2.0
"""The cases of docs/models.md: types by the way in which their engine embeds, each in every way that is worth it."""

from collections.abc import Mapping
from typing import Any

from benchmarks.models.case import Case

TYPES: dict[str, tuple[str, ...]] = {
    "scaled": ("gemma", "gemma2", "gemma3_text", "vaultgemma"),
    "multiplied": ("granite", "minicpm3", "granitemoe", "granitemoeshared", "falcon_h1"),
    "Transformers backend": ("olmo", "olmo2", "olmo3", "smollm3", "starcoder2", "hunyuan_v1_dense", "cwm", "xglm"),
    "hybrid or recurrent": (
        *("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "granitemoehybrid", "nemotron_h", "zamba2"),
        *("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "olmo_hybrid"),
    ),
    "per-layer": ("gemma3n_text", "gemma4_text"),
    "multimodal": (
        *("gemma3", "gemma4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "mistral3", "llava"),
        *("internvl", "idefics3", "smolvlm", "lfm2_vl", "llama4", "cohere2_vision", "paligemma"),
    ),
    "plain": (
        *("llama", "qwen2", "qwen3", "mistral", "ministral3", "phi", "phi3", "glm", "glm4", "cohere", "cohere2"),
        *("exaone4", "ernie4_5", "gpt2", "gptj", "gpt_neox", "gpt_bigcode", "bloom", "opt", "falcon", "stablelm"),
        *("apertus", "arcee", "seed_oss", "hyperclovax", "jais2", "nemotron", "persimmon", "helium"),
    ),
    "mixture of experts": (
        *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "ernie4_5_moe", "gpt_oss", "glm4_moe", "dots1"),
        *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minimax_m2", "hunyuan_v1_moe", "flex_olmo", "llama4_text"),
        *("afmoe", "hy_v3"),
    ),
}
# Of these vLLM has a class of its own, and its Transformers backend runs them too.
_WITH_TWO_CLASSES = (
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "glm4", "cohere2", "exaone4", "ernie4_5", "granite", "gemma2"),
    *("gemma3_text", "gpt2", "opt", "gpt_neox", "stablelm", "mixtral", "qwen3_moe", "granitemoe"),
)
_RECURRENT = ("falcon_h1", *TYPES["hybrid or recurrent"])
_V2 = ("llama", "gemma3_text", "granite", "smollm3")
_COMPILED = ("llama", "gemma3_text", "granite", "smollm3", "gemma4_text", "qwen3_moe")

ALL: tuple[Case, ...] = (
    *(Case(name) for names in TYPES.values() for name in names),
    *(Case(name, under=under) for name in _RECURRENT for under in ("preemption", "prefix caching")),
    *(Case(name, impl="transformers") for name in _WITH_TWO_CLASSES),
    *(Case(name, compiled=True) for name in _COMPILED),
    *(Case(name, runner="V2") for name in _V2),
)


# One of each form, and what was seen to go wrong in earlier releases of this project.
_FIRST = (
    *("smollm3", "olmo2", "gemma4_text", "gemma3", "falcon_h1", "granite", "gemma3_text", "qwen3", "hunyuan_v1_dense"),
    *("starcoder2", "gemma2", "gemma3n_text", "qwen3_vl", "lfm2", "qwen3_next", "nemotron_h", "mixtral", "qwen3_moe"),
    *("mamba2", "qwen3_5", "gemma4", "mistral3", "llama", "jamba", "mamba", "qwen2_5_vl", "granitemoehybrid"),
)


def in_order() -> list[Case]:
    """All cases, the most instructive first: a run may be stopped, and continues later."""
    ranks = {name: rank for rank, name in enumerate(_FIRST)}

    def order(case: Case) -> tuple[bool, bool, int]:
        is_plain = case == Case(case.type)
        is_disturbed = bool(case.under)
        return not is_plain, not is_disturbed, ranks.get(case.type, len(ranks))

    return sorted(ALL, key=order)


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells cases apart; of the dtype, the requested one."""
    dtype = "float32" if row.get("float32") else row["dtype"]
    return row["type"], row["impl"], dtype, row["runner"], row["compiled"], row["under"]


def form(model_type: str) -> str:
    """The heading of a type."""
    for heading, types in TYPES.items():
        if model_type in types:
            return heading
    return "other"
