# SPDX-License-Identifier: Apache-2.0
"""The CPU profile: unmodified OpenRLHF (Ray, DeepSpeed, vLLM) on a machine without CUDA.

OpenRLHF 0.11.2 assumes CUDA in a handful of places. Each replacement below has a row in the patch table.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ngrpo.machine.hardware import Profile
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import NaiveReplayBuffer
from perturbations.errors import UsageError

if TYPE_CHECKING:
    import torch

_ROLES = ("actor", "ref", "reward", "critic")
_NUMA = "libnuma.so.1"
_KV_BLOCK = 32
"""Tokens of a block of the KV cache: the fewest with which vLLM 0.29 starts on a CPU, where its own default is 128.

The prefix cache holds whole blocks, so responses share a prompt only from its first full block on.
"""


def check(flags: Flags) -> None:
    """Raises ``UsageError`` without the compiler, or the library, that vLLM needs on a CPU."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UsageError(
            f"No C++ compiler ({compiler!r}): vLLM's sampler is compiled on first use. "
            "Install one (Debian: apt-get install g++) or point CXX at it."
        )
    try:
        ctypes.CDLL(_NUMA)
    except OSError:
        raise UsageError(
            f"{_NUMA} is missing: vLLM's kernels for CPUs are linked with it. Install it (Debian: apt-get install"
            " libnuma1)."
        ) from None


def ray_init(flags: Flags) -> dict[str, Any]:
    """Logical resources for a Ray on this machine: one "GPU" for each process of a model, which Ray only counts."""
    factors = [("--vllm.num_engines", "--vllm.tensor_parallel_size")]
    factors += [(f"--{role}.num_nodes", f"--{role}.num_gpus_per_node") for role in _ROLES]
    units = 0
    for first_flag, second_flag in factors:
        units += int(flags.value(first_flag) or 1) * int(flags.value(second_flag) or 1)
    return {
        "num_gpus": units,
        "num_cpus": units + 3,  # one per "GPU" and one for the trainer, or three with asynchronous rollouts
        "include_dashboard": False,
        # Token batches only (weights go through a file). Ray's default is 30% of the memory.
        "object_store_memory": 512 * 2**20,
    }


_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PROFILE = Profile(
    name="cpu",
    env={
        # DeepSpeed looks for CUDA first; where its guess is wrong it fails at init_distributed.
        "DS_ACCELERATOR": "cpu",
        # Ray 2.55 forces 1 thread per worker otherwise. Rollout, forward and training alternate, so
        # each may use the whole machine.
        "OMP_NUM_THREADS": str(_CORES),
        # Threads that wait must not spin: the next phase runs in another process.
        "OMP_WAIT_POLICY": "PASSIVE",
        # "auto" of vLLM 0.29 keeps one core for itself, half of a two-core machine. Binding is off too:
        # bound threads would fight with the trainer's for the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # An engine of one rank in one process. vLLM 0.29 on a CPU otherwise has three, a front end, a core and a
        # worker: ten seconds of imports each, and messages between them at every token.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # GiB of KV cache: 23,000 tokens of SmolLM2-135M. A fraction of the memory (OpenRLHF's default is
        # 0.95 of it) would take what the trainer, on the same machine, needs.
        "VLLM_CPU_KVCACHE_SPACE": "1",
    },
    default_flags={
        **{f"--{role}.num_gpus_per_node": "1" for role in _ROLES},
        "--vllm.num_engines": "1",
        # Compilation costs half a minute at start and gains little on a small model.
        "--vllm.enforce_eager": None,
        # The responses of a group share their prompt, which on a CPU takes most of a short rollout's time.
        "--vllm.enable_prefix_caching": None,
        "--vllm.sync_backend": "gloo",
        # Few processors multiply bfloat16 as fast, and rollout and trainer then agree to 1e-4.
        "--ds.param_dtype": "fp32",
    },
    ray_init=ray_init,
    check=check,
    engine_options={"dtype": "float32", "block_size": _KV_BLOCK},
)


# ---- replacements: each takes the original (see the patch table) ----


def cuda_current_device(original: Callable[[], int]) -> Callable[[], torch.device]:
    """`torch.cuda.current_device` returns the CPU device, which `.to()` and `device=` both take."""
    import torch

    return lambda: torch.device("cpu")


def do_nothing(original: Callable[..., None]) -> Callable[..., None]:
    """`torch.cuda.set_device` and `synchronize`; DeepSpeed's `build_shm_op`, without which gloo reduces (0.19.6)."""
    return lambda *args, **kwargs: None


def device_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    """OpenRLHF asks for a mesh on "cuda"; without CUDA the same mesh lies on "cpu" (gloo)."""
    return lambda device, *args, **kwargs: original("cpu" if device == "cuda" else device, *args, **kwargs)


@around
def replay_buffer_init(original: Callable[..., None], self: NaiveReplayBuffer, *args: object, **kwargs: object) -> None:
    """`NaiveReplayBuffer.__init__` spells its device ``cuda:{index}``, which cannot be said of a CPU."""

    import torch

    current_device = torch.cuda.current_device
    torch.cuda.current_device = lambda: 0  # our replacement returns a device, which `cuda:{index}` cannot name
    try:
        original(self, *args, **kwargs)
    finally:
        torch.cuda.current_device = current_device
    self.target_device = torch.device("cpu")


def engine_arguments(argv: Sequence[str], tensor_parallel_size: int) -> dict[str, Any]:
    """Arguments of a training's engine: small blocks, the trainer's dtype, and a process for each rank.

    Ranks are processes, because vLLM has no Ray executor on a CPU.
    """
    arguments: dict[str, Any] = {"block_size": _KV_BLOCK}
    if Flags(argv).value("--ds.param_dtype") == "fp32":
        arguments["dtype"] = "float32"
    if tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    return arguments


def with_float32(original: Callable[[str], torch.dtype]) -> Callable[[str], torch.dtype]:
    """`convert_to_torch_dtype`: the further choice of ``--ds.param_dtype``, fp32."""
    import torch

    return lambda param_dtype: torch.float32 if param_dtype == "fp32" else original(param_dtype)


@around
def with_torch_adam(original: Callable[..., dict[str, Any]], *args: object, **kwargs: object) -> dict[str, Any]:
    """`get_train_ds_config`: PyTorch's fused AdamW, by DeepSpeed's own switch for it."""
    config = original(*args, **kwargs)
    if config.get("optimizer", {}).get("type") == "AdamW":
        config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
    return config


@around
def waited_for(original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """A collective of DeepSpeed's that has finished when it returns.

    Of several gathers DeepSpeed 0.19.6 waits for the last only, and gloo finishes them in any order: under ZeRO-3 a
    parameter could be read before it was gathered.
    """

    work = original(*args, **kwargs)
    if work is not None:
        work.wait()
    return work
