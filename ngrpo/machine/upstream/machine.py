# SPDX-License-Identifier: Apache-2.0
"""The GPUs that a run is planned for: this machine's, those of a Ray cluster, or those that ``--dry-run`` names."""

from __future__ import annotations

import logging
import os
import re
import socket
from dataclasses import dataclass
from functools import lru_cache

from perturbations.errors import UsageError

GIB = 2**30
CARD = 80
"""GB of a card of which nothing is known."""
_ACCELERATOR = "accelerator_type:"
# GB of the cards that Ray 2.55 names (ray.util.accelerators); of two sizes under one name the smaller one.
_CARDS = {"A100": 40, "A100-40G": 40, "A10G": 24, "B200": 180, "H200": 141, "L4": 24, "L40S": 48, "T4": 16, "V100": 16}
_SHAPE = re.compile(r"(?:(?:(?P<nodes>\d+)x)?(?P<gpus>\d+)x)?(?P<gb>\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Machine:
    """GPUs of one machine or of a cluster.

    Attributes:
        per_node: GPUs of each node that has any.
        memory: bytes of the smallest GPU.
        source: where the values come from.
        assumed: whether nothing is known of the GPUs that the run will have.
        cpus: CPUs that Ray counts; None where they are not known.
    """

    per_node: tuple[int, ...]
    memory: float
    source: str
    assumed: bool = False
    cpus: int | None = None

    @property
    def total(self) -> int:
        """All GPUs."""
        return sum(self.per_node)

    def __str__(self) -> str:
        """``2 × 8 GPUs of 79.2 GiB``."""
        nodes = f"{len(self.per_node)} × " if len(self.per_node) > 1 else ""
        gpus = self.per_node[0] if len(set(self.per_node)) == 1 else self.per_node
        return f"{nodes}{gpus} GPU{'s' * (self.total != 1)} of {self.memory / GIB:.3g} GiB ({self.source})"


def card(gigabytes: float) -> float:
    """Bytes that a card of so many GB has for a process: 79 GiB of 80."""
    return 0.99 * gigabytes * GIB


def planned(text: str, flag: str) -> Machine:
    """The machine of ``--dry-run``: ``80``, ``8x80`` or ``2x8x80``, GB of a GPU last; ``true`` for the one at hand.

    Raises:
        UsageError: for any other value.
    """
    known = here()
    if text.lower() == "true":
        return known or Machine((8,), card(CARD), f"assumed; {flag} 1x{CARD} plans for one GPU", assumed=True)
    match = _SHAPE.fullmatch(text)
    numbers = {name: float(number) for name, number in match.groupdict(1).items()} if match else {}
    if match is None or min(numbers.values()) <= 0:
        raise UsageError(
            f"{flag} {text}: must be GB of one GPU, GPUs x GB, or nodes x GPUs x GB, as in {CARD}, 8x{CARD} or"
            f" 2x8x{CARD}."
        )
    source = f"as {flag} says"
    if match["gpus"] is None:
        nodes = known.per_node if known else (8,)
        return Machine(nodes, card(numbers["gb"]), source, assumed=known is None)
    return Machine((int(numbers["gpus"]),) * int(numbers["nodes"]), card(numbers["gb"]), source)


def here() -> Machine | None:
    """The GPUs of the cluster that a run would join, else those of this machine; None where there are none."""
    joined = cluster()
    if joined is not None:
        return joined[0] if joined[0].total else None
    import torch

    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number == 0:
        return None
    memory = min(torch.cuda.get_device_properties(each).total_memory for each in range(number))
    return Machine((number,), float(memory), "this machine's", cpus=os.cpu_count())


def cluster() -> tuple[Machine, bool] | None:
    """The Ray cluster that a run would join, and whether its nodes name their GPUs; None where there is none.

    Raises:
        UsageError: where ``RAY_ADDRESS`` names a cluster that does not answer.
    """
    address = address_to_join()
    return None if address is None else _nodes(address)


@lru_cache
def _nodes(address: str) -> tuple[Machine, bool]:
    import ray

    joined = not ray.is_initialized()
    try:
        if joined:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"RAY_ADDRESS {address}: no Ray cluster answers there ({str(error).splitlines()[0]}). Start one with"
            " `ray start --head`, or set RAY_ADDRESS=local for a Ray of this run's own."
        ) from None
    finally:
        if joined:
            ray.shutdown()
    with_gpus = [node for node in nodes if node.get("GPU", 0) >= 1]
    cards = [name.removeprefix(_ACCELERATOR) for node in with_gpus for name in node if name.startswith(_ACCELERATOR)]
    size = min((_CARDS.get(name, CARD) for name in cards), default=CARD)
    source = f"of the Ray cluster at {address}, {', '.join(sorted(set(cards))) or 'of an unnamed type'}"
    per_node = tuple(int(node["GPU"]) for node in with_gpus)
    return Machine(per_node, card(size), source, cpus=int(sum(node.get("CPU", 0) for node in nodes))), bool(cards)


def address_to_join() -> str | None:
    """The address of the cluster that a run joins: that of ``RAY_ADDRESS``, or of `ray start` on this machine."""
    address = os.environ.get("RAY_ADDRESS") or started_here()
    return None if address == "local" else address


@lru_cache
def started_here() -> str | None:
    """The address of the cluster that `ray start` began on this machine; None where there is none any more.

    Ray 2.55 asks the same file, but waits minutes for a cluster that is gone.
    """
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
