# SPDX-License-Identifier: Apache-2.0
"""Memory of one GPU by component, from formulas that are printed beside the numbers.

P is the number of parameters, T the tensor parallelism, D the GPUs that share the optimizer's states of one of its T
parts. DeepSpeed 0.19.6 with bfloat16 or float16 parameters keeps 12 bytes of float32 for each parameter: a
master copy and Adam's two moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ngrpo.models.model_size import ModelSize

# Bytes of one logit: in the parameters' type and in float32 (models/actor.py), and its float32 gradient.
_LOGIT, _LOGIT_WITH_GRADIENT = 2 + 4, 2 + 4 + 4
PHASES = ("rollout", "scoring", "backward", "update")
"""A step's phases: answers are drawn; old and reference log-probabilities; backward passes; the optimizer's step."""


@dataclass(frozen=True)
class Part:
    """One component on one GPU.

    Attributes:
        name: what it is.
        formula: where the numbers come from.
        phases: its bytes in each of :data:`PHASES`.
        host: bytes of the host's memory, for each GPU.
    """

    name: str
    formula: str
    phases: tuple[float, float, float, float]
    host: float = 0.0


def _always(size: float) -> tuple[float, float, float, float]:
    return (size, size, size, size)


def trained(role: str, size: ModelSize, args: Mapping[str, Any], world: int) -> list[Part]:
    """A model that is trained: the actor or the critic.

    Args:
        role: its name, for the parts' names.
        size: of the model.
        args: OpenRLHF's arguments.
        world: GPUs of the model.
    """
    stage, tensor, offloaded = args["ds.zero_stage"], args["ds.tensor_parallel_size"], args["ds.adam_offload"]
    shares = world // tensor if stage else 1
    whole = size.parameters / tensor
    split = whole / shares
    of_whole, of_split = ("P", "P/D") if tensor == 1 else ("P/T", "P/DT")
    weights, of_weights = (split, of_split) if stage == 3 else (whole, of_whole)
    parts = [Part(f"{role}: weights", f"2{of_weights}", _always(2 * weights))]
    if offloaded:
        note = f"states 12{of_split}, float32 gradients 4{of_split} and bfloat16 copies 2{of_split} on the host"
        parts.append(Part(f"{role}: optimizer, offloaded", note, _always(0), host=18 * split))
    else:
        gradients, of_gradients = (2 * split, of_split) if stage >= 2 else (2 * whole, of_whole)
        parts.append(Part(f"{role}: gradients", f"2{of_gradients}", (0, 0, gradients, gradients)))
        parts.append(Part(f"{role}: gradients, float32", f"4{of_split}", (0, 0, 0, 4 * split)))
        # OpenRLHF loads the states for its training alone and takes them off again after it.
        asleep, states = args["ds.enable_sleep"], 12 * split
        phases = (0, 0, states, states) if asleep else _always(states)
        note = f"12{of_split}" + (", on the host meanwhile" if asleep else "")
        parts.append(Part(f"{role}: optimizer states", note, phases, host=states if asleep else 0))
    parts.append(_activations(role, size, args))
    return parts


def _activations(role: str, size: ModelSize, args: Mapping[str, Any]) -> Part:
    """What the backward pass needs of the forward pass, at the longest that samples can be."""
    tokens, layer = _tokens("train", args), size.saved_bytes_per_token
    if args["actor.gradient_checkpointing_enable"]:
        terms, of_layers = f"{size.layers} × 2h + {layer}", size.layers * 2 * size.hidden + layer
    else:
        terms, of_layers = f"{size.layers} × {layer}", size.layers * layer
    logits = 0 if role == "critic" else _LOGIT_WITH_GRADIENT * size.vocabulary
    formula = f"{tokens} tokens × ({terms}{f' + {_LOGIT_WITH_GRADIENT}V' if logits else ''}), roughly"
    return Part(f"{role}: activations", formula, (0, 0, tokens * (of_layers + logits), 0))


def _tokens(kind: str, args: Mapping[str, Any]) -> int:
    """Tokens of a micro-batch of the longest samples, on one GPU; ``kind``: ``train`` or ``rollout``."""
    if args["train.dynamic_batch_enable"]:
        return args[f"{kind}.max_tokens_per_gpu"]
    return args[f"{kind}.micro_batch_size"] * args["data.max_len"] // args["ds.ring_attn_size"]


def scored(size: ModelSize, args: Mapping[str, Any]) -> Part:
    """The logits of one micro-batch, without gradients; models that share GPUs are asked one after the other."""
    tokens = _tokens("rollout", args)
    formula = f"{tokens} tokens × {_LOGIT}V, roughly"
    return Part("logits to score", formula, (0, tokens * _LOGIT * size.vocabulary, 0, 0))


def frozen(role: str, size: ModelSize, args: Mapping[str, Any], world: int, *, offloaded: bool = False) -> Part:
    """A model that is only asked: the reference or the reward model.

    DeepSpeed offloads it under ZeRO-3 alone, the one stage that OpenRLHF gives to such models.
    """
    tensor = args["ds.tensor_parallel_size"]
    if args["ds.zero_stage"] != 3:
        return Part(f"{role}: weights", "2P" if tensor == 1 else "2P/T", _always(2 * size.parameters / tensor))
    share, formula = 2 * size.parameters / world, "2P/D" if tensor == 1 else "2P/DT"
    if offloaded:
        return Part(f"{role}: weights, offloaded", f"{formula} on the host", _always(0), host=share)
    return Part(f"{role}: weights", formula, _always(share))


def engine(size: ModelSize, args: Mapping[str, Any], gpu: float) -> Part:
    """A vLLM engine's share of a GPU: weights, KV cache and what its graphs take.

    Args:
        size: of the model.
        args: OpenRLHF's arguments.
        gpu: memory of one GPU, in bytes.
    """
    gib = args["vllm.gpu_memory_utilization"] * gpu
    weights = 2 * size.parameters / args["vllm.tensor_parallel_size"]
    formula = f"{args['vllm.gpu_memory_utilization']:g} of the GPU, of which weights {weights / 2**30:.1f} GiB"
    if args["vllm.enable_sleep"]:
        return Part("vLLM engine", f"{formula}; asleep from then on", (gib, 0, 0, 0), host=weights)
    return Part("vLLM engine", formula, _always(gib))


def kv_cache_tokens(size: ModelSize, args: Mapping[str, Any], gpu: float) -> int:
    """Tokens that an engine's KV cache holds at most: what its share leaves beside the weights."""
    tensor = args["vllm.tensor_parallel_size"]
    free = args["vllm.gpu_memory_utilization"] * gpu - 2 * size.parameters / tensor
    per_token = size.layers * 2 * max(size.kv_heads // tensor, 1) * size.head_dim * 2
    return max(0, int(free // per_token))
