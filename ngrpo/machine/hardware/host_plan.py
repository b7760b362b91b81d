# SPDX-License-Identifier: Apache-2.0
"""What a run takes of its host: the disk for checkpoints, and memory for what leaves the GPUs."""

from pathlib import Path
from shutil import disk_usage

import psutil

from ngrpo.machine.hardware import gpu_plan
from ngrpo.machine.hardware.lora_plan import trained_parameters, weight_bytes
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.placement import GIB, Args, Machine
from perturbations.errors import UsageError

_GB = 1e9  # as disks are sold
_STATES = 12  # float32 bytes for each parameter: a master copy and Adam's two moments
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_SHARED = Path("/dev/shm")
_LEAST_SHARED = GIB  # what NVIDIA's page on NCCL in Docker names
# OpenRLHF's switches that move something into the host's memory.
_IN_HOST_MEMORY = (
    *("ds.adam_offload", "ds.enable_sleep", "vllm.enable_sleep", "train.enable_ema"),
    *("ref.offload", "reward.offload"),
)
_ELSEWHERE = "not checked: it is planned for another machine."


# ---- checkpoints ----


def about_checkpoints(args: Args) -> str:
    """A line about the disk that the checkpoints of a run take."""
    if args["ckpt.save_steps"] < 1:
        return "no checkpoint is saved before the end (--ckpt.save_steps)"
    folder = args["ckpt.path"]
    steps = args["ckpt.save_steps"]
    number = args["ckpt.max_num"]
    size = checkpoint_bytes(args)
    if size is None:
        return f"checkpoints of unknown size in {folder}, every {steps} steps, {number} at a time"
    space = "below 1 GB"
    if size > _GB / 10:
        space = f"{size * number / _GB:.0f} GB, {number} of {size / _GB:.1f} GB each"
    copies = ""
    if args["ckpt.save_hf"]:
        copies = f"; each leaves a model of {saved_model_bytes(args) / _GB:.1f} GB, and OpenRLHF deletes none of these"
    return f"checkpoints in {folder} take {space} (one every {steps} steps, --ckpt.max_num {number}){copies}"


def checkpoint_bytes(args: Args) -> float | None:
    """The size of one of DeepSpeed's checkpoints, with the weights and the optimizer states of actor and critic.

    None where it is unknown; 0 where OpenRLHF saves none (``--ckpt.disable_ds``).
    """
    if args["ckpt.disable_ds"]:
        return 0.0
    names = [args[f"{role}.model_name_or_path"] for role in ("actor", "critic")]
    sizes = [architecture.size_of(name) for name in names if name]
    known_sizes = [size for size in sizes if size is not None]
    if len(known_sizes) < len(sizes):
        return None
    weights = sum(weight_bytes(size, args) for size in known_sizes)
    if args["ds.param_dtype"] == "fp32":
        weights *= 2
    # With LoRA it has the frozen weights too.
    return weights + _STATES * sum(trained_parameters(size, args) for size in known_sizes)


def saved_model_bytes(args: Args) -> float:
    """The size of the model that a checkpoint leaves in Hugging Face's format; with LoRA, of the adapters.

    0 where it is unknown, or none is left.
    """
    size = architecture.size_of(args["actor.model_name_or_path"])
    if size is None or not args["ckpt.save_hf"]:
        return 0.0
    return 2 * trained_parameters(size, args)


def check_disk(args: Args, machine: Machine | None) -> str | None:
    """Raises ``UsageError`` for checkpoints that the disk has no room for; returns why it could not look, or None."""
    if machine is not None and machine != placement.here():
        return _ELSEWHERE
    size = checkpoint_bytes(args) if args["ckpt.save_steps"] > 0 else 0.0
    if size is None:
        return "not checked: the size of a checkpoint is not known."
    folder = Path(args["ckpt.path"]).expanduser().absolute()
    # A full folder's oldest checkpoint is replaced, so what it holds counts as room.
    kept_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = disk_usage(existing).free
    # How many models are left depends on the number of steps: the first of them must fit.
    needed = size * args["ckpt.max_num"] + saved_model_bytes(args)
    if needed > free + kept_bytes:
        raise UsageError(
            f"--ckpt.path {args['ckpt.path']}: {args['ckpt.max_num']} checkpoints take {needed / _GB:.0f} GB, and its"
            f" disk has {(free + kept_bytes) / _GB:.0f} GB. Fix: a smaller --ckpt.max_num, or another --run-dir."
        )
    return None


# ---- memory ----


def memory_limit() -> float:
    """Bytes that this machine gives to a run's processes: its memory, or less by the limit of a cgroup.

    Slurm, Kubernetes and Docker set such limits. A limit of a cgroup holds for the cgroups in it.
    """
    limits = [float(psutil.virtual_memory().total)]
    lines = _OWN_CGROUP.read_text(encoding="utf-8").splitlines() if _OWN_CGROUP.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root = _CGROUPS
            name = "memory.max"
        elif "memory" in controllers.split(","):  # version 1
            root = _CGROUPS / "memory"
            name = "memory.limit_in_bytes"
        else:
            continue
        own = root / path.strip("/")
        for folder in (own, *own.parents):
            file = folder / name
            if not folder.is_relative_to(root) or not file.is_file():
                continue
            limit = file.read_text().strip()
            if limit.isdecimal():  # "max" is no limit
                limits.append(float(limit))
    return min(limits)


def host_bytes(args: Args, gpu: float) -> float:
    """Bytes of the host's memory for all GPUs of a run, without models of unknown size."""
    total = 0.0
    for group in placement.groups(args):
        host_bytes_per_gpu = sum(part.host for part in gpu_plan.parts_of(group, args, gpu))
        total += group.gpus * host_bytes_per_gpu
    return total


def about_memory(args: Args, machine: Machine | None) -> str:
    """A line about the host's memory that a run takes."""
    if machine is None:
        return "the models are in the machine's memory"
    return f"{host_bytes(args, machine.memory) / GIB:.0f} GiB of the host's memory for what leaves the GPUs"


def check_memory(args: Args, machine: Machine | None) -> str | None:
    """Raises ``UsageError`` where the host's memory is too small; returns why it could not look, or None."""
    if machine is None:
        return None
    if machine != placement.here() or placement.cluster() is not None:
        return _ELSEWHERE
    needed = host_bytes(args, machine.memory)
    limit = memory_limit()
    if needed > limit:
        given_switches = ", ".join(f"--{name}" for name in _IN_HOST_MEMORY if args[name])
        raise UsageError(
            f"{given_switches}: the run takes {needed / GIB:.0f} GiB of the host's memory, and its processes may have"
            f" {limit / GIB:.0f} GiB. Fix: more memory (a job's or a container's limit counts), more GPUs, or a smaller"
            " model."
        )
    return None


# ---- shared memory ----


def check_shared_memory(args: Args, machine: Machine | None) -> str | None:
    """Raises ``UsageError`` where several ranks have too little of it for NCCL; returns why it could not look, or None.

    Ranks of NCCL without a direct link of their GPUs exchange through files in /dev/shm.
    """
    if machine is None or sum(group.gpus for group in placement.groups(args)) < 2:
        return None
    if machine != placement.here() or placement.cluster() is not None:
        return _ELSEWHERE
    size = disk_usage(_SHARED).total if _SHARED.is_dir() else 0
    if size < _LEAST_SHARED:
        raise UsageError(
            f"{_SHARED} has {size / 2**20:.0f} MiB, and ranks on several GPUs need {_LEAST_SHARED / 2**20:.0f} MiB."
            " Docker gives 64 MiB. Fix: start the container with --ipc host, or with --shm-size 16g."
        )
    return None
