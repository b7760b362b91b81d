# SPDX-License-Identifier: Apache-2.0
"""A cluster of several nodes: what the command names on this machine must be there on all others too.

OpenRLHF's processes open models, datasets and reward functions wherever Ray places them, and write the run's folder
from there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

OPENED = ("path", "_url", "_dir", "dataset")
"""How the names of OpenRLHF's flags end whose value may be a path that another node opens."""


def opened(flags: Flags, run_dir: str | None) -> dict[str, str]:
    """The files and folders of this machine that a run's flags name, each with its flag."""
    given = {"--run-dir": run_dir or ""} | {f.name: f.values[0] for f in flags if f.name.endswith(OPENED) and f.values}
    found = {os.path.expanduser(part.strip()): name for name, value in given.items() for part in value.split(",")}
    return {path: name for path, name in found.items() if path and os.path.exists(path)}


def check_paths(paths: Mapping[str, str]) -> None:
    """Asks each other node of the cluster that this process has joined.

    Args:
        paths: from :func:`opened`.

    Raises:
        UsageError: For the first path that a node does not have.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0)
    class Node:  # an actor, whose end says why where a node is without this project; that of a task does not
        def missing(self) -> list[str]:
            return [path for path in paths if not os.path.exists(path)]

    here = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    others = [node for node in nodes if node != here]
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in others]
    actors = [Node.options(scheduling_strategy=place).remote() for place in places]  # type: ignore[missing-attribute]
    for node, absent in zip(others, ray.get([actor.missing.remote() for actor in actors])):
        for path in absent:
            raise UsageError(
                f"{paths[path]} {path}: the cluster's node {nodes[node]} does not have it, and a process there may open"
                " it. Put it into a folder that all nodes share, or where it is under the same path on each of them."
            )
