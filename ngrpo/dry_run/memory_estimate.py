# SPDX-License-Identifier: Apache-2.0
"""Memory of one GPU by component, from formulas that are printed beside the numbers.

P is the number of parameters, D the GPUs that share the optimizer's states (those of the model, less its tensor
parallelism T). DeepSpeed 0.19.6 with bfloat16 or float16 parameters keeps 12 bytes of float32 for each parameter: a
master copy and Adam's two moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ngrpo.dry_run.model_size import ModelSize

# Bytes of one logit: in the parameters' type, in float32 (models/actor.py), and its float32 gradient.
_BYTES_OF_A_LOGIT = 2 + 4 + 4


@dataclass(frozen=True)
class Part:
    """One component on one GPU.

    Attributes:
        name: what it is.
        rollout: bytes while answers are generated.
        training: bytes while the policy is updated.
        host: bytes of the host's memory, for each GPU.
        formula: where the numbers come from.
    """

    name: str
    rollout: float
    training: float
    formula: str
    host: float = 0.0


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
    weights = split if stage == 3 else whole
    of_weights = "2P/D" if stage == 3 else "2P" if tensor == 1 else "2P/T"
    of_gradients, gradients = ("2P/D", 2 * split) if stage >= 2 else ("2P", 2 * whole)
    parts = [Part(f"{role}: weights", 2 * weights, 2 * weights, of_weights)]
    if offloaded:
        note = "states 12P/D, float32 gradients 4P/D and bfloat16 copies 2P/D on the host"
        parts.append(Part(f"{role}: optimizer, offloaded", 0, 0, note, host=18 * split))
    else:
        asleep = args["ds.enable_sleep"]
        parts.append(Part(f"{role}: gradients", 0, gradients, of_gradients))
        parts.append(Part(f"{role}: gradients in float32", 0, 4 * split, "4P/D, at the update"))
        states = "12P/D" + (", on the host meanwhile" if asleep else "")
        at_rollout = 0 if asleep else 12 * split
        parts.append(
            Part(f"{role}: optimizer states", at_rollout, 12 * split, states, host=12 * split if asleep else 0)
        )
    parts.append(_activations(role, size, args))
    return parts


def _activations(role: str, size: ModelSize, args: Mapping[str, Any]) -> Part:
    """What the backward pass needs of the forward pass, at the longest that samples can be."""
    if args["train.dynamic_batch_enable"]:
        tokens = args["train.max_tokens_per_gpu"]
    else:
        tokens = args["train.micro_batch_size"] * args["data.max_len"] // args["ds.ring_attn_size"]
    layer = size.saved_bytes_per_token
    if args["actor.gradient_checkpointing_enable"]:
        kept, of_layers = f"{size.layers} × 2h + {layer}", size.layers * 2 * size.hidden + layer
    else:
        kept, of_layers = f"{size.layers} × {layer}", size.layers * layer
    logits = 0 if role == "critic" else _BYTES_OF_A_LOGIT * size.vocabulary
    formula = f"{tokens} tokens × ({kept}{f' + {_BYTES_OF_A_LOGIT}V' if logits else ''}), roughly"
    return Part(f"{role}: activations", 0, tokens * (of_layers + logits), formula)


def frozen(role: str, size: ModelSize, args: Mapping[str, Any], world: int, *, offloaded: bool = False) -> Part:
    """A model that is only asked: the reference or the reward model.

    DeepSpeed offloads it under ZeRO-3 alone, the one stage that OpenRLHF gives to such models.
    """
    tensor = args["ds.tensor_parallel_size"]
    if args["ds.zero_stage"] != 3:
        weights = 2 * size.parameters / tensor
        return Part(f"{role}: weights", weights, weights, "2P" if tensor == 1 else "2P/T")
    share = 2 * size.parameters / world
    if offloaded:
        return Part(f"{role}: weights, offloaded", 0, 0, "2P/D on the host", host=share)
    return Part(f"{role}: weights", share, share, "2P/D")


def engine(size: ModelSize, args: Mapping[str, Any], gpu: float) -> Part:
    """A vLLM engine's share of a GPU: weights, KV cache and what its graphs take.

    Args:
        size: of the model.
        args: OpenRLHF's arguments.
        gpu: memory of one GPU, in bytes.
    """
    used = args["vllm.gpu_memory_utilization"] * gpu
    weights = 2 * size.parameters / args["vllm.tensor_parallel_size"]
    asleep = args["vllm.enable_sleep"]
    formula = f"{args['vllm.gpu_memory_utilization']:g} of the GPU, of which weights {weights / 2**30:.1f} GiB"
    if asleep:
        formula += "; asleep while training"
    name = "vLLM engine"
    return Part(name, used, 0 if asleep else used, formula, host=weights if asleep else 0)


def kv_cache_tokens(size: ModelSize, args: Mapping[str, Any], gpu: float) -> int:
    """Tokens that an engine's KV cache holds at most: what its share leaves beside the weights."""
    tensor = args["vllm.tensor_parallel_size"]
    left = args["vllm.gpu_memory_utilization"] * gpu - 2 * size.parameters / tensor
    per_token = size.layers * 2 * max(size.kv_heads // tensor, 1) * size.head_dim * 2
    return max(0, int(left // per_token))
