# SPDX-License-Identifier: Apache-2.0
"""Where a run with CUDA places its models: OpenRLHF's flags that are added, and the rules on the result.

Without any flag of a placement it is hybrid on all GPUs: trainer and engines share them and take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from math import gcd

from ngrpo.machine.hardware import memory_estimate
from ngrpo.machine.models import model_size
from ngrpo.machine.upstream import openrlhf_parser, placement
from ngrpo.machine.upstream.machine import Machine
from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.machine.upstream.placement import Args
from perturbations.errors import UsageError

_CHECKPOINT_STEPS = "20"
_ALL, _ACTOR, _ENGINES, _TENSOR = (
    "--train.colocate_all",
    "--actor.num_gpus_per_node",
    "--vllm.num_engines",
    "--vllm.tensor_parallel_size",
)
_SHARE = "--vllm.gpu_memory_utilization"
# With these, engines or further models have GPUs of their own.
_APART = ("--train.colocate_actor_ref", "--train.async_enable", "--train.colocate_critic_reward")
# What a GPU shared with the trainer leaves it, where the engine does not sleep.
_MOST_AWAKE = 0.8
_DOCS = "docs/clusters.md"


def completed(flags: Flags, machine: Machine, *, whole: bool = False) -> Flags:
    """The flags with a placement on a machine.

    Args:
        flags: all others of OpenRLHF's.
        machine: the GPUs.
        whole: whether every rank has to hold whole parameters, which ZeRO-3 does not.

    Raises:
        UsageError: for a placement that is given by half.
    """
    values = {name: _number(flags, name) for name in ("--actor.num_nodes", _ACTOR, _ENGINES, _TENSOR)}
    apart = [name for name in _APART if flags.has(name)]
    if not flags.has(_ALL) and values[_ACTOR] and values[_ENGINES]:
        apart = apart or [_ENGINES]
    if apart:
        missing = [name for name in (_ACTOR, _ENGINES) if not values[name]]
        if missing:
            half = max(machine.total // 2, 1)
            raise UsageError(
                f"{apart[0]} gives half a placement: {' and '.join(missing)} missing. Fix: add"
                f" {' '.join(f'{name} {half}' for name in missing)}, or leave {apart[0]} out, which places"
                f" trainer and engines on the same GPUs ({_DOCS})."
            )
        return flags.with_defaults(_ranks(flags, values["--actor.num_nodes"] or 1, values[_ACTOR] or 1))
    gpus = _gpus(values, machine)
    per_node = values[_ACTOR] or gcd(gpus, max(machine.per_node, default=1))
    defaults: dict[str, Default] = {
        _ALL: None,
        **_ranks(flags, values["--actor.num_nodes"] or gpus // per_node, per_node),
    }
    if flags.has(_ALL) and (flags.has(_SHARE) or flags.has("--vllm.enable_sleep")):
        sleep: dict[str, Default] = {}
    else:
        sleep = {"--vllm.enable_sleep": None, "--ds.enable_sleep": None}
    fresh: dict[str, Default] = {
        "--actor.gradient_checkpointing_enable": None,
        "--ckpt.save_steps": _CHECKPOINT_STEPS,
    }
    given = flags.has(_ALL)
    flags = flags.with_defaults(defaults | sleep | ({} if given else fresh))
    tried = flags
    for choice in _choices(flags, gpus, machine, stages=("2",) if whole or given else ("2", "3"), offload=not given):
        tried = flags.with_defaults(choice)
        if _fits(tried, machine):
            return tried
    return tried


def _number(flags: Flags, name: str) -> int | None:
    value = flags.value(name)
    return int(value) if value else None


def _gpus(values: Mapping[str, int | None], machine: Machine) -> int:
    """GPUs of a hybrid placement: as the trainer's ranks say, else as the engines say, else all."""
    nodes, per_node, engines, tensor = values.values()
    if per_node:
        return (nodes or 1) * per_node
    if engines and tensor:
        return engines * tensor
    return nodes * max(machine.per_node, default=1) if nodes else machine.total or 1


def _ranks(flags: Flags, nodes: int, per_node: int) -> dict[str, Default]:
    """As many ranks for each model that is trained or asked as for the actor."""
    roles = ["actor", "ref"]
    roles += ["critic"] * (openrlhf_parser.value_of(flags, "--algo.advantage.estimator") == "gae")
    roles += ["reward"] * (not (flags.has("--reward.remote_url") or flags.has("--train.agent_func_path")))
    sizes = {"num_gpus_per_node": str(per_node)} | ({"num_nodes": str(nodes)} if nodes > 1 else {})
    return {f"--{role}.{name}": size for role in roles for name, size in sizes.items()}


def _choices(
    flags: Flags, gpus: int, machine: Machine, *, stages: Sequence[str], offload: bool
) -> Iterator[dict[str, Default]]:
    """What may be added, the fastest first; all of it fits where the first does."""
    engines = _number(flags, _ENGINES)
    size = model_size.find(flags.value("--actor.model_name_or_path") or "")
    node = gcd(gpus, max(machine.per_node, default=1))
    tensors = [n for n in (1, 2, 4, 8) if node % n == 0 and (size is None or size.heads % n == 0)]
    if engines:
        tensors = [max(gpus // engines, 1)]
    for offloaded, tensor, stage, share in product((False, True)[: 1 + offload], tensors, stages, ("0.6", "0.5")):
        parallel = _number(flags, _TENSOR) or tensor
        choice: dict[str, Default] = {
            _ENGINES: str(max(gpus // parallel, 1)),
            _TENSOR: str(parallel),
            _SHARE: share,
            "--ds.zero_stage": stage,
        }
        yield choice | ({"--ds.adam_offload": None} if offloaded else {})


def _fits(flags: Flags, machine: Machine) -> bool:
    with suppress(UsageError):  # which a rule then says
        openrlhf_parser.check(flags.argv)
        return bool(memory_estimate.fits(openrlhf_parser.resolved(flags.argv), machine.memory))
    return True


def notes(args: Args, machine: Machine) -> list[str]:
    """What to know of a placement that by its estimate does not fit."""
    if memory_estimate.fits(args, machine.memory):
        return []
    return [
        f"{args['actor.model_name_or_path']} does not fit on {machine}, by the estimate that --dry-run prints. Fix:"
        " more GPUs, a smaller --data.max_len, --ds.adam_offload, or a smaller model."
    ]


def check(args: Args) -> None:
    """Raises ``UsageError`` for a placement that OpenRLHF would refuse, or fail over, once processes have started.

    Args:
        args: OpenRLHF's arguments.
    """
    engines, tensor = args["vllm.num_engines"], args["vllm.tensor_parallel_size"]
    if not engines:
        raise UsageError(f"{_ENGINES} is missing: nothing draws answers without an engine. Fix: {_ENGINES} 1 or more.")
    size = model_size.find(args["actor.model_name_or_path"] or "")
    if size is not None and size.heads % tensor:
        raise UsageError(
            f"{_TENSOR} {tensor} must divide the {size.heads} attention heads of {args['actor.model_name_or_path']}."
        )
    ranks = placement.world_size(args, "actor")
    held = [model for group in placement.groups(args) for model in group.models]
    if placement.is_hybrid(args) and ranks != engines * tensor:
        raise UsageError(
            f"{_ENGINES} {engines} × {_TENSOR} {tensor} is {engines * tensor} GPUs, and the actor has {ranks}: with"
            f" {_ALL} they share the same GPUs. Fix: {_ENGINES} {max(ranks // tensor, 1)}, or leave both out."
        )
    if args["train.colocate_all"] or args["train.colocate_actor_ref"]:
        _check_equal(args, "actor", "ref", needed=placement.REFERENCE in held)
    pair = args["train.colocate_critic_reward"]
    if pair:
        _check_equal(args, "critic", "reward", needed=placement.CRITIC in held)
    elif args["train.colocate_all"]:
        _check_equal(args, "actor", "critic", needed=placement.CRITIC in held)
        _check_equal(args, "actor", "reward", needed=placement.REWARD in held)


def _check_equal(args: Args, one: str, other: str, *, needed: bool) -> None:
    shapes = [(args[f"{role}.num_nodes"], args[f"{role}.num_gpus_per_node"]) for role in (one, other)]
    if needed and shapes[0] != shapes[1]:
        (nodes, gpus), (others, other_gpus) = shapes
        raise UsageError(
            f"--{other}.num_nodes {others} and --{other}.num_gpus_per_node {other_gpus} must be those of --{one}"
            f" ({nodes} and {gpus}), since the two models share GPUs."
        )


def check_machine(args: Args, machine: Machine) -> str | None:
    """Raises ``UsageError`` for a placement that a machine cannot hold; returns why it could not look, or None.

    Args:
        args: OpenRLHF's arguments.
        machine: the GPUs.
    """
    share = args["vllm.gpu_memory_utilization"]
    if placement.is_hybrid(args) and not args["vllm.enable_sleep"] and share > _MOST_AWAKE:
        raise UsageError(
            f"{_SHARE} {share:g} without --vllm.enable_sleep leaves the trainer too little of the GPUs that it shares"
            f" with the engines ({_ALL}). Fix: add --vllm.enable_sleep --ds.enable_sleep {_SHARE} 0.5."
        )
    groups = placement.groups(args)
    needed = sum(group.gpus for group in groups)
    if machine.assumed:
        return f"not checked: whether there are {needed} GPUs; {machine.source}."
    # OpenRLHF asks for a CPU with each GPU, and for one of its own, or three where rollouts are asynchronous.
    cpus = needed + (3 if args["train.async_enable"] else 1)
    for count, kind, there in ((needed, "GPU", machine.total), (cpus, "CPU of Ray", machine.cpus)):
        if there is not None and count > there:
            held = ", ".join(f"{group.gpus} for {' and '.join(group.models)}" for group in groups)
            fix = "Fix: fewer ranks and engines" if there else "Fix: start it where GPUs are"
            raise UsageError(
                f"this run needs {count} {kind}s and {there} {'is' if there == 1 else 'are'} there"
                f" ({machine.source}): {held}. {fix}, or leave the placement out ({_DOCS})."
            )
    return None
