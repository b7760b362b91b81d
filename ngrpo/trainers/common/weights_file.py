# SPDX-License-Identifier: Apache-2.0
"""Weights from a trainer to vLLM through a file in memory, where there is no NCCL: both must share a machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ngrpo.machine.upstream.types import RunnerV1

if TYPE_CHECKING:
    from torch import Tensor

_SHARED_MEMORY = "/dev/shm"


@contextmanager
def written(weights: Mapping[str, Tensor]) -> Iterator[str]:
    """The path of a safetensors file in memory, or in the temporary folder if /dev/shm is too small."""
    from safetensors.torch import save_file

    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    folder = tempfile.gettempdir()
    # Docker gives a container 64 MiB of /dev/shm; writing past its end kills the process (SIGBUS).
    if os.path.isdir(_SHARED_MEMORY) and shutil.disk_usage(_SHARED_MEMORY).free > 1.1 * size:
        folder = _SHARED_MEMORY
    else:
        print(f"[weight sync] {_SHARED_MEMORY} has no room for {size / 2**20:.0f} MiB, using {folder}")
    handle, path = tempfile.mkstemp(prefix="ngrpo-weights-", suffix=".safetensors", dir=folder)
    os.close(handle)
    try:
        save_file(dict(weights), path)
        yield path
    finally:
        os.unlink(path)


def load_weights_file(worker: Any, path: str) -> int:
    """Reloads the model's weights in a vLLM worker from the file of :func:`written`; returns the number of tensors.

    FileNotFoundError on another machine than the trainer's, TypeError for another dtype.
    """
    from safetensors import safe_open

    if not os.path.exists(path):
        raise FileNotFoundError(
            f"No weights at {path} on {os.uname().nodename}: trainer and vLLM engine must share one machine without"
            " CUDA. Start Ray on a single node, or use --hardware cuda."
        )
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        expected = worker.model_config.dtype
        dtype = file.get_tensor(names[0]).dtype
        if dtype != expected:
            raise TypeError(f"The trainer has {dtype} weights, vLLM {expected}: both must be of one dtype.")
        reload_weights(worker.model_runner, ((name, file.get_tensor(name)) for name in names))
    return len(names)


def reload_weights(runner: RunnerV1, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Loads a checkpoint's weights into a model runner of vLLM, where CPU kernels multiply with packed copies.

    vLLM's `load_weights` is not enough: only `reload_weights` restores the checkpoint's layout first. In vLLM 0.29 that
    leaves two kinds of modules unpacked, which are packed here. Otherwise a tied head, which is in no checkpoint, would
    keep the old weights, and experts would be read as if they were packed.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    runner.reload_weights(weights_iterator=iter(weights))
    if runner.device.type != "cpu":
        return
    for module in runner.get_model().modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
