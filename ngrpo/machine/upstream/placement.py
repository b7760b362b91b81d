# SPDX-License-Identifier: Apache-2.0
"""The GPUs that a run is planned for, and which model OpenRLHF 0.11.2 places on which of them.

The placement follows ``cli/train_ppo_ray.py`` and ``trainer/ray/vllm_engine.py``.
"""

import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from ngrpo.machine.upstream.versions import of_visible_gpus
from perturbations.errors import UsageError

GIB = 2**30
CARD = 80
"""GB of a card of which nothing is known."""
# GB of the cards that Ray 2.55 names (ray.util.accelerators); of two sizes under one name the smaller one.
_CARDS = {
    "A100": 40,
    "A100-40G": 40,
    "A10G": 24,
    "B200": 180,
    "H200": 141,
    "L4": 24,
    "L40S": 48,
    "T4": 16,
    "V100": 16,
}
_SHAPE = re.compile(r"(?:(?:(\d+)x)?(\d+)x)?(\d+(?:\.\d+)?)")  # nodes, GPUs, GB


@dataclass(frozen=True)
class Machine:
    """GPUs of one machine or of a cluster.

    Attributes:
        per_node: GPUs of each node that has any.
        memory: bytes of the smallest GPU.
        source: where the values come from.
        assumed: whether nothing is known of the run's GPUs.
        cpus: CPUs that Ray counts; None if unknown.
        free: bytes that no process holds on the fullest GPU, which differ from call to call; None if unknown.
    """

    per_node: tuple[int, ...]
    memory: float
    source: str
    assumed: bool = False
    cpus: int | None = None
    free: float | None = field(default=None, compare=False)

    @property
    def total(self) -> int:
        return sum(self.per_node)

    def __str__(self) -> str:
        """``2 × 8 GPUs of 79.2 GiB``."""
        nodes = f"{len(self.per_node)} × " if len(self.per_node) > 1 else ""
        gpus = self.per_node[0] if len(set(self.per_node)) == 1 else self.per_node
        unit = "GPU" if self.total == 1 else "GPUs"
        return f"{nodes}{gpus} {unit} of {self.memory / GIB:.3g} GiB ({self.source})"


def card(gigabytes: float) -> float:
    """Bytes that a card of this many GB has for a process: 79 GiB of 80."""
    return 0.99 * gigabytes * GIB


def planned(text: str, flag: str) -> Machine:
    """The machine of ``--dry-run``: ``80``, ``8x80`` or ``2x8x80``, GB of a GPU last; ``true`` for the current one."""
    current = here()
    if text.lower() == "true":
        if current is not None:
            return current
        return Machine(
            per_node=(8,),
            memory=card(CARD),
            source=f"assumed; {flag} 1x{CARD} plans for one GPU",
            assumed=True,
        )
    match = _SHAPE.fullmatch(text)
    numbers = [float(number or 1) for number in match.groups()] if match else [0.0]
    if min(numbers) <= 0:
        raise UsageError(
            f"{flag} {text}: must be GB of one GPU, GPUs x GB, or nodes x GPUs x GB, as in {CARD}, 8x{CARD} or"
            f" 2x8x{CARD}."
        )
    nodes, gpus, gigabytes = numbers
    source = f"as {flag} says"
    if "x" in text:
        return Machine(per_node=(int(gpus),) * int(nodes), memory=card(gigabytes), source=source)
    if current is None:
        return Machine(per_node=(8,), memory=card(gigabytes), source=source, assumed=True)
    return Machine(per_node=current.per_node, memory=card(gigabytes), source=source)


def here() -> Machine | None:
    """The GPUs of the cluster that a run would join, else those of this machine; None where there are none."""
    joined = cluster()
    if joined is not None:
        return joined.machine if joined.machine.total else None
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        return None
    memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(gpus))
    return Machine(
        per_node=(gpus,),
        memory=float(memory),
        source="this machine's",
        cpus=os.cpu_count(),
        free=_free_memory(),
    )


def _free_memory() -> float | None:
    """Free bytes of the fullest visible GPU, as ``nvidia-smi`` tells them; None where it does not."""
    try:
        return min(float(mebibytes) for mebibytes in of_visible_gpus("memory.free")) * 2**20
    except ValueError:  # it tells nothing, or another text than a number
        return None


class Cluster(NamedTuple):
    """A Ray cluster.

    Attributes:
        machine: its GPUs.
        names_gpus: whether a node with GPUs says of which type they are.
    """

    machine: Machine
    names_gpus: bool


def cluster() -> Cluster | None:
    """The Ray cluster of ``RAY_ADDRESS``, or of `ray start` here; None without one.

    Raises ``UsageError`` where ``RAY_ADDRESS`` names a cluster out of reach.
    """
    address = os.environ.get("RAY_ADDRESS") or started_here()
    return None if address in (None, "local") else _nodes(address)


@lru_cache
def _nodes(address: str) -> Cluster:
    """As :func:`cluster`, for an address; asked once, since joining a cluster takes seconds."""
    import ray

    joined = not ray.is_initialized()
    try:
        if joined:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"RAY_ADDRESS {address}: no Ray cluster runs there ({str(error).splitlines()[0]}). Start one with"
            " `ray start --head`, or set RAY_ADDRESS=local for a Ray of this run's own."
        ) from None
    finally:
        if joined:
            ray.shutdown()
    nodes_with_gpus = [node for node in nodes if node.get("GPU", 0) >= 1]
    card_names = set()
    for node in nodes_with_gpus:
        for resource in node:
            kind, _, card_name = resource.partition(":")  # accelerator_type:A100
            if kind == "accelerator_type":
                card_names.add(card_name)
    gigabytes = min((_CARDS.get(name, CARD) for name in card_names), default=CARD)
    machine = Machine(
        per_node=tuple(int(node["GPU"]) for node in nodes_with_gpus),
        memory=card(gigabytes),
        source=f"of the Ray cluster at {address}, {', '.join(sorted(card_names)) or 'of an unnamed type'}",
        cpus=int(sum(node.get("CPU", 0) for node in nodes)),
    )
    return Cluster(machine=machine, names_gpus=bool(card_names))


@lru_cache
def started_here() -> str | None:
    """The address of the cluster that `ray start` began here, or None; Ray 2.55 waits minutes for one that is gone."""
    from ray._private.services import find_bootstrap_address

    address = find_bootstrap_address(None)
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError:
        print(f"the Ray cluster at {address} is gone (`ray stop` forgets it); starting Ray here", flush=True)
        return None
    return address


Args = Mapping[str, Any]
"""OpenRLHF's arguments after its own conditions, by their names without dashes."""
ACTOR = "actor"
REFERENCE = "reference"
CRITIC = "critic"
REWARD = "reward model"
ENGINES = "vLLM engines"
_ROLES = {ACTOR: "actor", REFERENCE: "ref", CRITIC: "critic", REWARD: "reward"}


@dataclass(frozen=True)
class Group:
    """GPUs that hold the same models; ``first`` is the number of the first one, as OpenRLHF asks Ray for them."""

    first: int
    gpus: int
    models: tuple[str, ...]

    @property
    def name(self) -> str:
        """``GPU 0`` or ``GPU 0-7``."""
        last = self.first + self.gpus - 1
        return f"GPU {self.first}" if self.gpus == 1 else f"GPU {self.first}-{last}"


def world_size(args: Args, role: str) -> int:
    """Processes, and GPUs, of a role: ``actor``, ``ref``, ``critic`` or ``reward``."""
    return args[f"{role}.num_nodes"] * args[f"{role}.num_gpus_per_node"]


def is_hybrid(args: Args) -> bool:
    """Whether the engines share the GPUs of the trainer: OpenRLHF's hybrid engine."""
    return bool(args["train.colocate_all"] and not args["train.async_enable"])


def groups(args: Args) -> list[Group]:
    """All GPUs of a run, in the order in which OpenRLHF asks Ray for them."""
    engines = (args["vllm.num_engines"] or 0) * args["vllm.tensor_parallel_size"]
    has_reference = args["algo.kl.init_coef"] > 0
    has_critic = bool(args["critic.model_name_or_path"])
    has_reward_model = not args["reward.remote_url"]
    colocate_all = args["train.colocate_all"]
    # Critic and reward model then share GPUs of their own, even with --train.colocate_all.
    pair = has_critic and args["train.colocate_critic_reward"]

    together = []
    if colocate_all or args["train.colocate_actor_ref"]:
        together.append(ACTOR)
        if has_reference:
            together.append(REFERENCE)
    if colocate_all and not pair:
        if has_critic:
            together.append(CRITIC)
        if has_reward_model:
            together.append(REWARD)
    if is_hybrid(args) and engines:
        together.append(ENGINES)

    requests: list[tuple[int, tuple[str, ...]]] = []
    if together:
        requests.append((world_size(args, "actor"), tuple(together)))
    if engines and ENGINES not in together:
        requests.append((engines, (ENGINES,)))
    if ACTOR not in together:
        requests.append((world_size(args, "actor"), (ACTOR,)))
    if has_reference and REFERENCE not in together:
        requests.append((world_size(args, "ref"), (REFERENCE,)))
    if pair:
        requests.append((world_size(args, "critic"), (CRITIC, REWARD) if has_reward_model else (CRITIC,)))
    elif has_critic and CRITIC not in together:
        requests.append((world_size(args, "critic"), (CRITIC,)))
    if has_reward_model and not pair and REWARD not in together:
        requests.append((world_size(args, "reward"), (REWARD,)))

    placed = []
    first = 0
    for gpus, models in requests:
        placed.append(Group(first=first, gpus=gpus, models=models))
        first += gpus
    return placed


def rank_groups(args: Args) -> dict[str, int]:
    """For each role of the trainer, how many groups of its ranks train, or are asked, with responses of their own."""
    placed_models: set[str] = set()
    for group in groups(args):
        placed_models |= set(group.models)
    split = args["ds.ring_attn_size"] * args["ds.tensor_parallel_size"]
    groups_by_role = {}
    for model, role in _ROLES.items():
        if model in placed_models:
            groups_by_role[role] = max(world_size(args, role) // split, 1)
    return groups_by_role
