# SPDX-License-Identifier: Apache-2.0
"""Weight sync without NCCL: the trainer's rank 0 hands its weights to the engines through a file in memory.

Used by the CPU profile. OpenRLHF 0.11.2 broadcasts parameter by parameter over NCCL, which CPU has not.
Here rank 0 gathers the state dict (under ZeRO-3 parameter by parameter), writes one safetensors file to
/dev/shm, and each engine's workers map it and reload. Trainer and engines must share a machine.

A perturbation's learned parameters are submodule parameters of the actor and so are in that file (and in
OpenRLHF's own broadcast, with CUDA); `ngrpo.rollout.attach` takes them out again before vLLM loads the rest.

The three functions with `original` are rows of `seams.py`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perturbations.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from ngrpo.rollout.vllm_objects import Worker
    from ngrpo.trainers.openrlhf.objects import ActorTrainer

_SHARED_MEMORY = "/dev/shm"


def no_sync_group(original: Callable[..., None]) -> Callable[..., None]:
    """`ActorPPOTrainer._init_vllm_sync_group`: there is no group to open."""

    def _init_vllm_sync_group(self: ActorTrainer, backend: str) -> None:
        if backend == "nccl":
            raise UsageError("--vllm.sync_backend nccl needs CUDA; the CPU profile uses gloo.")

    return _init_vllm_sync_group


def hand_over_weights(original: Callable[..., None]) -> Callable[..., None]:
    """`ActorPPOTrainer.broadcast_to_vllm`: every rank takes part, rank 0 writes and calls the engines."""

    def broadcast_to_vllm(self: ActorTrainer) -> None:
        import ray
        import torch

        rank_zero = torch.distributed.get_rank() == 0
        weights = _gathered(self, keep=rank_zero)
        if rank_zero:
            if self.strategy.args.vllm.enable_prefix_caching:
                ray.get([engine.reset_prefix_cache.remote() for engine in self.vllm_engines])
            path = _write(weights)
            try:
                ray.get([engine.load_weights_file.remote(path) for engine in self.vllm_engines])
            finally:
                os.unlink(path)
        torch.distributed.barrier()

    return broadcast_to_vllm


def engine_with_file_sync(plain: type) -> type:
    """`RolloutRayActor` with the method that `broadcast_to_vllm` above calls."""

    class FileSyncRolloutRayActor(plain):  # type: ignore[misc, valid-type]
        async def load_weights_file(self, path: str) -> None:
            # A function and not a method name: vLLM ships it to its workers by reference (OpenRLHF sets
            # VLLM_ALLOW_INSECURE_SERIALIZATION), so worker_extension_cls stays OpenRLHF's.
            await self.llm.collective_rpc(load_weights_file, args=(path,))

    return FileSyncRolloutRayActor


def load_weights_file(worker: Worker, path: str) -> int:
    """Runs in a vLLM worker: reloads the model's weights from a safetensors file.

    `reload_weights` and not `load_weights`: on CPU vLLM repacks linear weights after loading, and only the
    former restores the checkpoint's layout first (vLLM 0.29).

    Args:
        worker: vLLM's worker, with `model_runner` and `model_config`.
        path: Written by the trainer's rank 0 on the same machine.

    Returns:
        The number of tensors.

    Raises:
        FileNotFoundError: The engine runs on another machine than the trainer.
        TypeError: The trainer's dtype is not the engine's.
    """
    from safetensors import safe_open

    if not os.path.exists(path):
        raise FileNotFoundError(
            f"No weights at {path} on {os.uname().nodename}: trainer and vLLM engine must share one machine "
            "in the CPU profile. Start Ray on a single node, or use --hardware cuda."
        )
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        expected = worker.model_config.dtype
        found = file.get_tensor(names[0]).dtype
        if found != expected:
            raise TypeError(f"The trainer has {found} weights, vLLM {expected}; use --ds.param_dtype bf16.")
        worker.model_runner.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in names))
    repack_tied_heads(worker.model_runner.get_model())
    return len(names)


def repack_tied_heads(model: nn.Module) -> None:
    """Packs the output heads again, which `reload_weights` of vLLM 0.29 skips where they are tied.

    On CPU the head multiplies with a packed copy of its weight. A tied head appears in no checkpoint, so
    the reload logs "ParallelLMHead: Failed to load weights" and leaves the copy of the old weights: the
    rollout then runs a new body under an old head. Can go when vLLM reprocesses tied heads on reload.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _gathered(trainer: ActorTrainer, keep: bool) -> dict[str, Any]:
    """Returns the actor's parameters on rank 0 (`keep`), an empty dict on the other ranks."""
    import deepspeed

    sharded = trainer.strategy.args.ds.zero_stage == 3
    only_trainable = getattr(trainer.actor, "is_vlm", False)
    weights: dict[str, Any] = {}
    for name, parameter in trainer.actor.model.module.named_parameters():
        if only_trainable and not parameter.requires_grad:
            continue
        with deepspeed.zero.GatheredParameters([parameter], enabled=sharded):
            if keep:
                # A gathered ZeRO-3 parameter is freed on exit, hence the copy there.
                tensor = parameter.detach()
                weights[name] = tensor.clone() if sharded else tensor.contiguous()
    return weights


def _write(weights: dict[str, Any]) -> str:
    """Writes a safetensors file in memory, or in the temporary folder where /dev/shm is too small."""
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
    save_file(weights, path)
    return path
