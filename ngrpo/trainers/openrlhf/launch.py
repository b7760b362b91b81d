# SPDX-License-Identifier: Apache-2.0
"""Runs OpenRLHF's own training program in this process, on the Ray and the hardware at hand.

`openrlhf.cli.train_ppo_ray` runs as ``__main__`` with its own argument parser; what is ours is in place
before it starts: the upstream patches in this process, and in every Ray worker through `worker_process_setup_hook`.
Without a perturbation, on CUDA and with flash-attn there is nothing of ours at all: that is stock OpenRLHF.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from ngrpo import patches
from ngrpo.config.run import RunConfig, begin
from ngrpo.machine.hardware import Profile, processes, profile_for, stand_ins
from ngrpo.machine.upstream import openrlhf_parser, placement
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.trainers.openrlhf import nodes
from ngrpo.trainers.openrlhf.failure import RUN_ID, end_processes, explanation, root_cause
from ngrpo.trainers.openrlhf.worker import setup_hook

_PROGRAM = "openrlhf.cli.train_ppo_ray"

# What OpenRLHF 0.11.2 gives its own ray.init (cli/train_ppo_ray.py); ours takes its place.
_OPENRLHF_ENV = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
}

# Beginnings of the variables that docs name, which every worker gets as they are here; these alone differ by node.
_TRAVELS = ("DS_", "HF_", "HUGGING_FACE_", "NCCL_", "NGRPO_", "TRANSFORMERS_", "VLLM_", "WANDB_")
_OF_A_NODE = (processes.OWNER, "VLLM_HOST_IP")


class TrainingFailed(RuntimeError):
    """OpenRLHF, or one of its Ray actors, ended with an error; the message names the root cause."""


def launch(run: RunConfig) -> None:
    """Trains until OpenRLHF's program ends.

    Args:
        run: with OpenRLHF's flags complete, and all of ngrpo/config/rules.py looked at.

    Raises:
        TrainingFailed: With the root cause, whatever process it happened in.
        UsageError: For a path that another node of the cluster lacks.
        SystemExit: OpenRLHF's parser refused a flag (or printed its help).
    """
    profile = profile_for(run.hardware)
    run = dataclasses.replace(run, hardware=profile.name)  # as found here, for all processes of the run
    flags = Flags(run.openrlhf)
    conditions = conditions_for(profile, run)
    for name, value in profile.env.items():
        os.environ.setdefault(name, value)
    processes.add_programs_to_path()
    os.environ[RUN_ID] = uuid4().hex
    if conditions:
        if not flags.has("--help"):
            _start_ray(profile, flags, conditions, run)
        patches.install(conditions)
    _run(flags.argv)


def conditions_for(profile: Profile, run: RunConfig) -> tuple[str, ...]:
    """Returns the conditions of `patches.py` that hold; none means stock OpenRLHF."""
    held = {
        "cpu": profile.name == "cpu",
        stand_ins.WITHOUT_FLASH_ATTN: profile.name == "cpu" or not stand_ins.has_flash_attn(),
    }
    return (*(name for name, holds in held.items() if holds), *run.conditions)


def worker_env(profile: Profile) -> dict[str, str]:
    """Returns the environment of every Ray worker process; what the user exported wins."""
    env = {name: os.environ.get(name, value) for name, value in {**_OPENRLHF_ENV, **profile.env}.items()}
    # A cluster that was there before has not this process's environment.
    env |= {k: v for k, v in os.environ.items() if k.startswith(_TRAVELS) and k not in _OF_A_NODE}
    # The setup hook runs before Ray gives a worker the driver's sys.path; a checkout that is not
    # installed must be importable there too (Ray 2.55). On a cluster ngrpo must be installed.
    here = str(Path(__file__).resolve().parents[3])
    paths = [here, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p for p in paths if p))
    return env


def _start_ray(profile: Profile, flags: Flags, conditions: Sequence[str], run: RunConfig) -> None:
    """Starts Ray here, or joins the cluster at hand, with the setup hook for every worker."""
    import ray
    from ray.exceptions import RayError

    begin(run)
    everywhere = {"env_vars": worker_env(profile), "worker_process_setup_hook": setup_hook(conditions, run)}
    address = os.environ.get("RAY_ADDRESS") or placement.started_here()
    if address in (None, "local"):
        os.environ.pop("RAY_ADDRESS", None)  # an engine's core would inherit it and start another Ray
        ray.init(address="local", runtime_env=everywhere, **profile.ray_init(flags))
        return
    ray.init(address=address, runtime_env=everywhere)
    try:
        nodes.check_paths(nodes.opened(flags, run.run_dir))
    except RayError as error:
        raise _failed(error) from None
    gpus = sum(group.gpus for group in placement.groups(openrlhf_parser.resolved(flags.argv)))
    there = int(ray.cluster_resources().get("GPU", 0))
    if there < gpus and profile.name == "cpu":  # with CUDA a cluster may grow
        ray.shutdown()
        raise TrainingFailed(
            f"the Ray cluster at {address} has {there} GPUs, and this run places {gpus} (without CUDA they are only"
            f" counted). Start it with `ray start --head --num-gpus {gpus}`, or set RAY_ADDRESS=local for a Ray of"
            " this run's own."
        )


def _run(flags: Sequence[str]) -> None:
    argv, sys.argv = sys.argv, [_PROGRAM, *flags]
    finished = False
    try:
        runpy.run_module(_PROGRAM, run_name="__main__", alter_sys=True)
        finished = True
    except Exception as error:
        raise _failed(error) from None
    finally:
        sys.argv = argv
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
        if not finished:
            end_processes(os.environ[RUN_ID])


def _failed(error: Exception) -> TrainingFailed:
    explained = explanation(error)
    if explained is None:
        traceback.print_exception(error)
    return TrainingFailed((explained or root_cause(error)) + _log_folder())


def _log_folder() -> str:
    try:
        import ray

        node = ray._private.worker._global_node  # No public accessor in Ray 2.55.
        return "" if node is None else f"\n  logs of all processes: {node.get_logs_dir_path()}"
    except (ImportError, AttributeError):
        return ""
