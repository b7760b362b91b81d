# SPDX-License-Identifier: Apache-2.0
"""Memory of one GPU by component, from formulas that are printed beside the numbers.

P is the number of parameters, T the tensor parallelism, D the GPUs that share the optimizer's states of one of its T
parts. DeepSpeed 0.19.6 with bfloat16 or float16 parameters keeps 12 bytes of float32 for each parameter: a
master copy and Adam's two moments.
"""

from __future__ import annotations

from dataclasses import dataclass

from ngrpo.machine.models import model_size
from ngrpo.machine.models.model_size import ModelSize
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.placement import Args, Group

# Bytes of one logit: in the parameters' type and in float32 (models/actor.py), and its float32 gradient.
_LOGIT, _LOGIT_WITH_GRADIENT = 2 + 4, 2 + 4 + 4
GIB = 2**30
# What a GPU has to keep free, and what a sleeping engine keeps of it: CUDA contexts, graphs, buffers of NCCL.
_FREE, _FREE_HYBRID, _ASLEEP = 2 * GIB, 4 * GIB, 2 * GIB
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


def models(args: Args) -> dict[str, str | None]:
    """The name of the model in each role of :mod:`ngrpo.machine.upstream.placement`."""
    actor = args["actor.model_name_or_path"]
    return {
        **dict.fromkeys((placement.ACTOR, placement.REFERENCE, placement.ENGINES), actor),
        placement.CRITIC: args["critic.model_name_or_path"],
        placement.REWARD: args["reward.model_name_or_path"],
    }


def of_group(group: Group, args: Args, gpu: float) -> list[Part]:
    """All that one GPU of a group holds, but for models of unknown size.

    Args:
        group: GPUs that hold the same models.
        args: OpenRLHF's arguments.
        gpu: memory of one GPU, in bytes.
    """
    parts: list[Part] = []
    for model in group.models:
        name = models(args)[model]
        size = model_size.find(name) if name else None
        if size is None:
            continue
        if model in (placement.ACTOR, placement.CRITIC):
            parts += trained(model, size, args, group.gpus)
        elif model == placement.ENGINES:
            parts.append(engine(size, args, gpu))
        else:
            offloaded = args["ref.offload" if model == placement.REFERENCE else "reward.offload"]
            parts.append(frozen(model, size, args, group.gpus, offloaded=offloaded))
        if model in (placement.ACTOR, placement.REFERENCE) and model == group.models[0]:
            parts.append(scored(size, args))
    free = _FREE_HYBRID if placement.is_hybrid(args) else _FREE
    return [*parts, Part("kept free", "CUDA contexts, NCCL, fragmentation", _always(free))] if parts else []


def peak(args: Args, gpu: float) -> float | None:
    """Bytes of the fullest GPU in its fullest phase; None where a model's size is unknown, or not estimated."""
    groups, names = placement.groups(args), models(args)
    known = all(names[model] and model_size.find(names[model] or "") for group in groups for model in group.models)
    if not known or args["ds.lora.rank"] or args["ds.load_in_4bit"]:
        return None
    return max(sum(column) for group in groups for column in zip(*(p.phases for p in of_group(group, args, gpu))))


def fits(args: Args, gpu: float) -> bool:
    """Whether nothing speaks against a placement: it fits, and an engine has room for an answer of full length."""
    most, size = peak(args, gpu), model_size.find(args["actor.model_name_or_path"] or "")
    return most is None or size is None or (most <= gpu and kv_cache_tokens(size, args, gpu) >= args["data.max_len"])


def _always(size: float) -> tuple[float, float, float, float]:
    return (size, size, size, size)


def trained(role: str, size: ModelSize, args: Args, world: int) -> list[Part]:
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


def _activations(role: str, size: ModelSize, args: Args) -> Part:
    """What the backward pass needs of the forward pass, at the longest that samples can be."""
    tokens, layer = _tokens("train", args), size.saved_bytes_per_token
    if args["actor.gradient_checkpointing_enable"]:
        terms, of_layers = f"{size.layers} × 2h + {layer}", size.layers * 2 * size.hidden + layer
    else:
        terms, of_layers = f"{size.layers} × {layer}", size.layers * layer
    logits = 0 if role == "critic" else _LOGIT_WITH_GRADIENT * size.vocabulary
    formula = f"{tokens} tokens × ({terms}{f' + {_LOGIT_WITH_GRADIENT}V' if logits else ''}), roughly"
    return Part(f"{role}: activations", formula, (0, 0, tokens * (of_layers + logits), 0))


def _tokens(kind: str, args: Args) -> int:
    """Tokens of a micro-batch of the longest samples, on one GPU; ``kind``: ``train`` or ``rollout``."""
    if args["train.dynamic_batch_enable"]:
        return args[f"{kind}.max_tokens_per_gpu"]
    return args[f"{kind}.micro_batch_size"] * args["data.max_len"] // args["ds.ring_attn_size"]


def scored(size: ModelSize, args: Args) -> Part:
    """The logits of one micro-batch, without gradients; models that share GPUs are asked one after the other."""
    tokens = _tokens("rollout", args)
    formula = f"{tokens} tokens × {_LOGIT}V, roughly"
    return Part("logits to score", formula, (0, tokens * _LOGIT * size.vocabulary, 0, 0))


def frozen(role: str, size: ModelSize, args: Args, world: int, *, offloaded: bool = False) -> Part:
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


def engine(size: ModelSize, args: Args, gpu: float) -> Part:
    """A vLLM engine's share of a GPU: weights, KV cache and what its graphs take.

    Args:
        size: of the model.
        args: OpenRLHF's arguments.
        gpu: memory of one GPU, in bytes.
    """
    gib = args["vllm.gpu_memory_utilization"] * gpu
    weights = 2 * size.parameters / args["vllm.tensor_parallel_size"]
    formula = f"{args['vllm.gpu_memory_utilization']:g} of the GPU, of which weights {weights / GIB:.1f} GiB"
    if args["vllm.enable_sleep"]:
        asleep = (gib, _ASLEEP, _ASLEEP, _ASLEEP)
        return Part("vLLM engine", f"{formula}; asleep from then on", asleep, host=weights)
    return Part("vLLM engine", formula, _always(gib))


def kv_cache_tokens(size: ModelSize, args: Args, gpu: float) -> int:
    """Tokens that an engine's KV cache holds at most: what its share leaves beside the weights."""
    tensor = args["vllm.tensor_parallel_size"]
    free = args["vllm.gpu_memory_utilization"] * gpu - 2 * size.parameters / tensor
    per_token = size.layers * 2 * max(size.kv_heads // tensor, 1) * size.head_dim * 2
    return max(0, int(free // per_token))
