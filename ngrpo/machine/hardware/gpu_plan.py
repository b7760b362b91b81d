# SPDX-License-Identifier: Apache-2.0
"""Which placement a run with CUDA gets, and the estimate of each GPU's memory behind it.

In the formulas P is the number of parameters, T the tensor parallelism, D the GPUs that share the optimizer's states of
one of its T parts. With LoRA, A is the number of the adapters' parameters, which alone are trained. DeepSpeed 0.19.6
with bfloat16 or float16 parameters keeps 12 bytes of float32 for each trained parameter: a master copy and Adam's two
moments.
"""

import shlex
from dataclasses import dataclass
from itertools import product
from math import ceil, gcd, log2

from ngrpo.machine.hardware.lora_plan import trained_parameters, weight_bytes
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.machine.upstream.placement import GIB, Args, Group, Machine
from perturbations.errors import UsageError

# Bytes of one logit: in the parameters' type and in float32 (models/actor.py). In the backward pass the gradient of the
# log-probabilities joins the float32 ones, and that of a density, a mask correction or score centering. All measured
# (tests/fast/machine/hardware/test_gpu_plan.py).
_LOGIT = 2 + 4
_LOGIT_WITH_GRADIENT = 12
# DeepSpeed 0.19.6's buffer for the gradients that ranks exchange, 5e8 of 2 bytes whatever the model's size.
_BUCKET = 2 * 500_000_000
# Under ZeRO-3 DeepSpeed has a buffer for each group of so many parameters.
_SUB_GROUP = 1_000_000_000
# What a GPU has to keep free, without and with engines on it: CUDA contexts, graphs, buffers of NCCL.
_FREE = 2 * GIB
_FREE_HYBRID = 4 * GIB
# What a sleeping engine keeps of a GPU.
_ASLEEP = 2 * GIB
# An engine counts its graphs and NCCL's buffers in its share of the GPU, so the CUDA context alone is beyond it.
_FREE_ENGINE = GIB / 2
_COLOCATE_ALL = "--train.colocate_all"
_ACTOR_NODES = "--actor.num_nodes"
_ACTOR_GPUS = "--actor.num_gpus_per_node"
_ENGINES = "--vllm.num_engines"
_TENSOR = "--vllm.tensor_parallel_size"
SHARE = "--vllm.gpu_memory_utilization"
# With these, engines or further models have GPUs of their own.
_APART = ("--train.colocate_actor_ref", "--train.async_enable", "--train.colocate_critic_reward")
# What an engine that does not sleep may take of a GPU shared with the trainer.
_MOST_AWAKE = 0.8
DOCS = "docs/clusters.md"
_ENGINE = "vLLM engine"
_FOUR_BIT = "0.52Q + 2(P - Q), of which Q in 4 bits"
PHASES = ("rollout", "scoring", "backward", "update")
"""A step's phases: responses are sampled; old and reference log-probabilities; backward passes; optimizer step."""


@dataclass(frozen=True)
class Part:
    """One component on one GPU: bytes in each of :data:`PHASES`, and bytes of the host's memory for each GPU."""

    name: str
    formula: str
    phases: tuple[float, ...]
    host: float = 0.0


def models(args: Args) -> dict[str, str | None]:
    """The name of the model in each role of a placement."""
    actor = args["actor.model_name_or_path"]
    return {
        **dict.fromkeys((placement.ACTOR, placement.REFERENCE, placement.ENGINES), actor),
        placement.CRITIC: args["critic.model_name_or_path"],
        placement.REWARD: args["reward.model_name_or_path"],
    }


def parts_of(group: Group, args: Args, gpu: float) -> list[Part]:
    """What one GPU of ``gpu`` bytes holds in a group, without models of unknown size."""
    parts: list[Part] = []
    for model in group.models:
        size = architecture.size_of(models(args)[model])
        if size is None:
            continue
        if model in (placement.ACTOR, placement.CRITIC):
            parts += trained(model, size, args, group.gpus)
            if model == placement.ACTOR and args["train.enable_ema"]:
                parts.append(averaged(size))
        elif model == placement.ENGINES:
            parts.append(engine(size, args, gpu))
        else:
            offloaded = args["ref.offload" if model == placement.REFERENCE else "reward.offload"]
            parts.append(frozen(model, size, args, group.gpus, offloaded=offloaded))
        if model in (placement.ACTOR, placement.REFERENCE) and model == group.models[0]:
            parts.append(scored(size, args))
    if not parts:
        return []
    if group.models == (placement.ENGINES,):
        return [*parts, Part("kept free", "CUDA context", (_FREE_ENGINE,) * 4)]
    free = _FREE_HYBRID if placement.is_hybrid(args) else _FREE
    return [*parts, Part("kept free", "CUDA contexts, NCCL, fragmentation", (free,) * 4)]


def fits(args: Args, gpu: float) -> bool:
    """Whether a placement fits in its fullest phase, and an engine has room for a response of full length.

    True where it is not estimated: for models of unknown size.
    """
    groups = placement.groups(args)
    names = models(args)
    actor = architecture.size_of(names[placement.ACTOR])
    others = {names[model] for group in groups for model in group.models} - {names[placement.ACTOR]}
    if actor is None or not all(map(architecture.size_of, others)):
        return True
    held = [zip(*(part.phases for part in parts_of(group, args, gpu))) for group in groups]
    peak = max(sum(phase) for phases in held for phase in phases)
    return peak <= gpu and kv_cache_tokens(actor, args, gpu) >= args["data.max_len"]


def trained(role: str, size: architecture.ModelSize, args: Args, world: int) -> list[Part]:
    """A model on ``world`` GPUs that is trained: the actor or the critic."""
    stage = args["ds.zero_stage"]
    tensor = args["ds.tensor_parallel_size"]
    asleep = args["ds.enable_sleep"]
    has_lora = args["ds.lora.rank"] > 0
    sharing = max(world // tensor, 1) if stage else 1  # fewer ranks than that are refused later

    # `whole` and `split` count parameters: those of one tensor-parallel part, and a rank's share of it. With LoRA the
    # adapters alone have gradients and optimizer states.
    letter = "A" if has_lora else "P"
    whole = trained_parameters(size, args) / tensor
    split = whole / sharing
    whole_formula = letter if tensor == 1 else f"{letter}/T"
    split_formula = f"{letter}/D" if tensor == 1 else f"{letter}/DT"

    # ZeRO-3 shards the weights themselves.
    weights = weight_bytes(size, args) / tensor
    weights_formula = "2P" if tensor == 1 else "2P/T"
    if stage == 3:
        weights /= sharing
        weights_formula = "2P/D" if tensor == 1 else "2P/DT"
    if args["ds.load_in_4bit"]:
        weights_formula = _FOUR_BIT
    if has_lora:
        weights += 2 * whole
        weights_formula += " + 2A"

    # ZeRO-2 and ZeRO-3 shard the gradients.
    gradient_count = whole
    gradients_formula = whole_formula
    if stage >= 2:
        gradient_count = split
        gradients_formula = split_formula

    # What the backward pass needs of the forward pass, for the longest samples; `…_per_token` are bytes of one token.
    # Logits come first and are gone before the layers' gradients are made, so that the larger of both peaks counts.
    tokens = _tokens("train", args)
    layer_per_token = size.saved_bytes_per_token
    logits_per_token = 0 if role == placement.CRITIC else _LOGIT_WITH_GRADIENT * size.vocabulary
    if args["actor.gradient_checkpointing_enable"]:
        saved_per_token = size.layers * 2 * size.hidden
        saved_formula = f"{size.layers} × 2h"
        recomputed_per_token = layer_per_token
    else:
        saved_per_token = size.layers * layer_per_token
        saved_formula = f"{size.layers} × {layer_per_token}"
        recomputed_per_token = 0
    new_gradients = 0 if args["ds.adam_offload"] else 2 * gradient_count  # bytes
    if tokens * logits_per_token > tokens * recomputed_per_token + new_gradients:
        new_gradients = 0  # not made yet when the logits are there
        peak_per_token = logits_per_token
        peak_formula = f" + {_LOGIT_WITH_GRADIENT}V"
    else:
        peak_per_token = recomputed_per_token
        peak_formula = f" + {recomputed_per_token}" if recomputed_per_token else ""
    activations = (0, 0, tokens * (saved_per_token + peak_per_token), 0)
    kept = _BUCKET if stage == 3 else 0  # ZeRO-3 makes its buffer once
    parts = [
        Part(f"{role}: weights", weights_formula, (weights,) * 4),
        Part(f"{role}: activations", f"{tokens} tokens × ({saved_formula}{peak_formula}), roughly", activations),
        Part(f"{role}: gradients, in exchange", "1 GB for any model", (kept, kept, _BUCKET, kept)),
    ]
    # From the second micro-batch on, ZeRO-1 and 2 hold the sum and the new gradients before they add them.
    sums = 0.0
    sums_formula = ""
    if stage < 3 and _accumulates(args):
        sums = 2 * split
        sums_formula = f" + 2{split_formula} of earlier micro-batches"
    if args["ds.adam_offload"]:
        note = (
            f"states 12{split_formula}, float32 gradients 4{split_formula} and bfloat16 copies 2{split_formula}"
            f"{sums_formula} on the host"
        )
        master = 4 * split if stage == 3 else _page_locked(split, 4, stage)
        on_host = 8 * split + master + _page_locked(split, 4, stage) + _page_locked(split, 2, stage) + sums
        return [*parts, Part(f"{role}: optimizer, offloaded", note, (0,) * 4, host=on_host)]
    # OpenRLHF loads the states for its training alone and takes them off again after it.
    states = 12 * split
    note = f"12{split_formula}"
    at_rest = states
    on_host = 0.0
    if asleep:
        note += ", on the host meanwhile"
        at_rest = 0
        on_host = 3 * _page_locked(split, 4, stage)
    return [
        *parts,
        Part(
            f"{role}: gradients",
            f"2{gradients_formula}{sums_formula}",
            (0, 0, new_gradients + sums, 2 * gradient_count),
        ),
        Part(f"{role}: gradients, float32 and scaled", f"6{split_formula}", (0, 0, 0, 6 * split)),
        Part(f"{role}: optimizer states", note, (at_rest, at_rest, states, states), host=on_host),
    ]


def _page_locked(parameters: float, size: int, stage: int) -> float:
    """Bytes of the page-locked buffers for so many parameters, of ``size`` bytes each, under a stage of ZeRO.

    PyTorch 2.13 rounds each buffer up to a power of two.
    """
    at_once = min(parameters, _SUB_GROUP) if stage == 3 else parameters
    whole, rest = divmod(parameters, at_once)
    return whole * _power_of_two(at_once * size) + _power_of_two(rest * size)


def _power_of_two(needed: float) -> float:
    return 2.0 ** ceil(log2(needed)) if needed > 0 else 0.0


def averaged(size: architecture.ModelSize) -> Part:
    """``--train.enable_ema``: a copy of the actor, and its moving average in float32 (`moving_average.py`)."""
    formula = "2P, and 4P of the average on the host"
    return Part("actor: moving average", formula, (2.0 * size.parameters,) * 4, host=4.0 * size.parameters)


def _accumulates(args: Args) -> bool:
    """Whether an update has several micro-batches."""
    per_group = args["train.batch_size"] // placement.rank_groups(args)["actor"]
    return args["train.dynamic_batch_enable"] or per_group > args["train.micro_batch_size"]


def _tokens(kind: str, args: Args) -> int:
    """Tokens of a micro-batch of the longest samples, on one GPU; ``kind``: ``train`` or ``rollout``."""
    if args["train.dynamic_batch_enable"]:
        return args[f"{kind}.max_tokens_per_gpu"]
    return args[f"{kind}.micro_batch_size"] * args["data.max_len"] // args["ds.ring_attn_size"]


def scored(size: architecture.ModelSize, args: Args) -> Part:
    """The logits of one micro-batch, without gradients; models that share GPUs score one after the other."""
    tokens = _tokens("rollout", args)
    return Part(
        "logits to score", f"{tokens} tokens × {_LOGIT}V, roughly", (0, tokens * _LOGIT * size.vocabulary, 0, 0)
    )


def frozen(role: str, size: architecture.ModelSize, args: Args, world: int, *, offloaded: bool = False) -> Part:
    """The reference or the reward model; DeepSpeed offloads it under ZeRO-3 only."""
    tensor = args["ds.tensor_parallel_size"]
    stage3 = args["ds.zero_stage"] == 3
    held = weight_bytes(size, args) / (world if stage3 else tensor)
    divisor = ""
    if stage3:
        divisor += "D"
    if tensor > 1:
        divisor += "T"
    formula = f"2P/{divisor}" if divisor else "2P"
    if args["ds.load_in_4bit"]:
        formula = _FOUR_BIT
    if stage3 and offloaded:
        return Part(f"{role}: weights, offloaded", f"{formula} on the host", (0,) * 4, host=held)
    return Part(f"{role}: weights", formula, (held,) * 4)


def engine(size: architecture.ModelSize, args: Args, gpu: float) -> Part:
    """A vLLM engine's fraction of a GPU: weights, KV cache and graphs."""
    share = args["vllm.gpu_memory_utilization"]
    weights = 2 * size.parameters / args["vllm.tensor_parallel_size"]
    formula = f"{share:g} of the GPU, of which weights {weights / GIB:.1f} GiB"
    if args["vllm.enable_sleep"]:
        asleep = (share * gpu, _ASLEEP, _ASLEEP, _ASLEEP)
        return Part(_ENGINE, f"{formula}; asleep from then on", asleep, host=weights)
    return Part(_ENGINE, formula, (share * gpu,) * 4)


def kv_cache_tokens(size: architecture.ModelSize, args: Args, gpu: float) -> int:
    """Tokens that an engine's KV cache holds at most: its fraction of the GPU without the weights."""
    free = args["vllm.gpu_memory_utilization"] * gpu - 2 * size.parameters / args["vllm.tensor_parallel_size"]
    return max(0, int(free // _token_bytes(size, args)))


def _token_bytes(size: architecture.ModelSize, args: Args) -> int:
    """Bytes of a token in the KV cache of one GPU."""
    heads = max(size.kv_heads // args["vllm.tensor_parallel_size"], 1)
    return size.layers * 2 * heads * size.head_dim * 2


def needed(group: Group, args: Args, gpu: float) -> float:
    """Bytes that one GPU of a group must have: its fullest phase, with a KV cache for one response of full length.

    An engine takes its share of any GPU, and so more of a larger one.
    """
    size = architecture.size_of(models(args)[placement.ENGINES])
    phases = [list(part.phases) for part in parts_of(group, args, gpu) if part.name != _ENGINE]
    if placement.ENGINES in group.models and size is not None:
        weights = 2 * size.parameters / args["vllm.tensor_parallel_size"]
        least = weights + _token_bytes(size, args) * args["data.max_len"] + _ASLEEP
        phases.append([least, *[_ASLEEP if args["vllm.enable_sleep"] else least] * 3])
    return max(sum(phase) for phase in zip(*phases))


def default_flags(
    flags: Flags, machine: Machine, *, whole: bool = False, may_offload: bool = True
) -> dict[str, Default]:
    """A placement on a machine for these flags; by default hybrid: trainer and engines take turns on all GPUs.

    With ``whole`` every rank holds whole parameters, which excludes ZeRO-3; without ``may_offload`` the optimizer stays
    on the GPU. Raises ``UsageError`` for half a placement.
    """
    nodes, ranks, engines, tensor = (
        int(flags.value(name) or 0) for name in (_ACTOR_NODES, _ACTOR_GPUS, _ENGINES, _TENSOR)
    )
    has_hybrid_flag = flags.has(_COLOCATE_ALL)
    largest = max(machine.per_node, default=1)
    apart = [name for name in _APART if flags.has(name)]
    if ranks and engines and not has_hybrid_flag:
        apart.append(_ENGINES)
    if apart:
        missing = [name for name, value in ((_ACTOR_GPUS, ranks), (_ENGINES, engines)) if not value]
        if missing:
            raise UsageError(
                f"{apart[0]} gives half a placement: {' and '.join(missing)} missing. Fix: add"
                f" {shlex.join(_other_half(flags, machine))}, or leave {' and '.join(apart)} out, which places"
                f" trainer and engines on the same GPUs ({DOCS})."
            )
        return _ranks(flags, nodes or 1, ranks)
    # The number of GPUs follows from the first that is given: the actor's ranks, the engines, the nodes.
    if ranks:
        gpus = (nodes or 1) * ranks
    elif engines and tensor:
        gpus = engines * tensor
    elif nodes and largest:
        gpus = nodes * largest
    else:
        gpus = machine.total or 1
    ranks = ranks or gcd(gpus, largest)
    defaults: dict[str, Default] = {_COLOCATE_ALL: None, **_ranks(flags, nodes or gpus // ranks, ranks)}
    if not (has_hybrid_flag and flags.has(SHARE, "--vllm.enable_sleep")):
        defaults |= {"--vllm.enable_sleep": None, "--ds.enable_sleep": None}
    if not has_hybrid_flag:
        defaults["--actor.gradient_checkpointing_enable"] = None
        if flags.has("--ckpt.save_hf") or not flags.has("--ckpt.disable_ds"):  # else OpenRLHF saves nothing
            defaults["--ckpt.save_steps"] = "20"
    size = architecture.size_of(flags.value("--actor.model_name_or_path"))
    if engines or tensor:
        parallels = [tensor or max(gpus // engines, 1)]
    else:
        divided = gcd(gpus, largest) if size is None else gcd(gpus, largest, size.heads)
        parallels = [parallel for parallel in (1, 2, 4, 8) if divided % parallel == 0]
    offloads = (False, True) if may_offload and not has_hybrid_flag else (False,)
    stages = ("2",) if whole or has_hybrid_flag else ("2", "3")
    choice: dict[str, Default] = {}
    # Tried from the fastest on. Where none fits, the last one stays, and a check reports it.
    for offload, parallel, stage, share in product(offloads, parallels, stages, ("0.6", "0.5")):
        choice = {_ENGINES: str(max(gpus // parallel, 1)), _TENSOR: str(parallel), SHARE: share}
        choice |= {"--ds.zero_stage": stage, **({"--ds.adam_offload": None} if offload else {})}
        try:
            if fits(flags.with_defaults(defaults | choice).args, machine.memory):
                break
        except UsageError:  # the flags are wrong in another way, which a check reports
            break
    return defaults | choice


def _other_half(flags: Flags, machine: Machine) -> list[str]:
    """The missing flags of a placement on which trainer and engines have GPUs of their own."""
    nodes, ranks, engines, tensor = (
        int(flags.value(name) or 0) for name in (_ACTOR_NODES, _ACTOR_GPUS, _ENGINES, _TENSOR)
    )
    tensor = tensor or 1
    words = []
    has_reference = float(flags.or_default("--algo.kl.init_coef")) > 0.0
    if has_reference and not flags.has("--train.colocate_actor_ref"):
        words.append("--train.colocate_actor_ref")  # else the reference would have as many GPUs again
    if not ranks:
        ranks = max((machine.total - engines * tensor if engines else machine.total // 2) // (nodes or 1), 1)
        words += [_ACTOR_GPUS, str(ranks)]
    if not engines:
        engines = max((machine.total - ranks * (nodes or 1)) // tensor, 1)
        words += [_ENGINES, str(engines)]
    return words


def _ranks(flags: Flags, nodes: int, per_node: int) -> dict[str, Default]:
    """The actor's number of ranks for each of the run's models."""
    roles = ["actor", "ref"]
    if flags.or_default("--algo.advantage.estimator") == "gae":
        roles.append("critic")
    if not flags.has("--reward.remote_url", "--train.agent_func_path"):
        roles.append("reward")
    sizes = {"num_gpus_per_node": str(per_node)}
    if nodes > 1:
        sizes["num_nodes"] = str(nodes)
    return {f"--{role}.{name}": size for role in roles for name, size in sizes.items()}


def check(args: Args) -> None:
    """Raises ``UsageError`` for a placement that OpenRLHF would refuse, or fail over, once processes have started."""
    engines = args["vllm.num_engines"]
    tensor = args["vllm.tensor_parallel_size"]
    if not engines:
        raise UsageError(f"{_ENGINES} is missing: responses need an engine. Fix: {_ENGINES} 1 or more.")
    name = args["actor.model_name_or_path"]
    ranks = placement.world_size(args, "actor")
    size = architecture.size_of(name)
    if size is not None and size.heads % tensor:
        raise UsageError(f"{_TENSOR} {tensor} must divide the {size.heads} attention heads of {name}.")
    stride = args["ds.ring_attn_head_stride"]
    if args["ds.ring_attn_size"] > 1 and size is not None and size.kv_heads % stride:
        raise UsageError(f"--ds.ring_attn_head_stride {stride} must divide the model's {size.kv_heads} heads of keys.")
    if placement.is_hybrid(args) and ranks != engines * tensor:
        raise UsageError(
            f"{_ENGINES} {engines} × {_TENSOR} {tensor} is {engines * tensor} GPUs, and the actor has {ranks}: with"
            f" {_COLOCATE_ALL} they share the same GPUs. Fix: {_ENGINES} {max(ranks // tensor, 1)}, or leave both out."
        )
    everything = args["train.colocate_all"]
    pair = args["train.colocate_critic_reward"]
    placed_models = [model for group in placement.groups(args) for model in group.models]
    for shared, first, second, model in (
        (everything or args["train.colocate_actor_ref"], "actor", "ref", placement.REFERENCE),
        (pair, "critic", "reward", placement.CRITIC),
        (everything and not pair, "actor", "critic", placement.CRITIC),
        (everything and not pair, "actor", "reward", placement.REWARD),
    ):
        nodes = args[f"{first}.num_nodes"]
        gpus = args[f"{first}.num_gpus_per_node"]
        second_nodes = args[f"{second}.num_nodes"]
        second_gpus = args[f"{second}.num_gpus_per_node"]
        if shared and model in placed_models and (nodes, gpus) != (second_nodes, second_gpus):
            raise UsageError(
                f"--{second}.num_nodes {second_nodes} and --{second}.num_gpus_per_node {second_gpus} must be those of"
                f" --{first} ({nodes} and {gpus}), since the two models share GPUs."
            )


def check_machine(args: Args, machine: Machine | None) -> str | None:
    """Raises ``UsageError`` for a placement that a machine cannot hold; returns why it could not look, or None."""
    if machine is None:
        return None
    share = args["vllm.gpu_memory_utilization"]
    if placement.is_hybrid(args) and not args["vllm.enable_sleep"] and share > _MOST_AWAKE:
        raise UsageError(
            f"{SHARE} {share:g} without --vllm.enable_sleep leaves the trainer too little of the GPUs that it shares"
            f" with the engines ({_COLOCATE_ALL}). Fix: add --vllm.enable_sleep --ds.enable_sleep {SHARE} 0.5."
        )
    if machine.free is not None and args["vllm.num_engines"] and share * machine.memory > machine.free:
        raise UsageError(
            f"{SHARE} {share:g} is {share * machine.memory / GIB:.1f} GiB of a GPU, and other processes leave"
            f" {machine.free / GIB:.1f} GiB of one. Fix: end them (`nvidia-smi` lists them), choose GPUs by"
            " CUDA_VISIBLE_DEVICES, or lower the share."
        )
    groups = placement.groups(args)
    needed = sum(group.gpus for group in groups)
    if machine.assumed:
        return f"not checked: whether there are {needed} GPUs; {machine.source}."
    # OpenRLHF asks for a CPU with each GPU, and for one of its own, or three where rollouts are asynchronous.
    cpus = needed + (3 if args["train.async_enable"] else 1)
    for count, kind, available in ((needed, "GPUs", machine.total), (cpus, "CPUs of Ray", machine.cpus)):
        if available is not None and count > available:
            placements = ", ".join(f"{group.gpus} for {' and '.join(group.models)}" for group in groups)
            fix = "Fix: fewer ranks and engines" if available else "Fix: start it where GPUs are"
            raise UsageError(
                f"this run needs {count} {kind} and {available} {'is' if available == 1 else 'are'} there"
                f" ({machine.source}): {placements}. {fix}, or leave the placement out ({DOCS})."
            )
    return None
