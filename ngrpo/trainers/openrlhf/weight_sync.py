# SPDX-License-Identifier: Apache-2.0
"""Where the weight sync is changed, on the trainer's side and in the rollout actor; in order, what happens to weights:

1. They get their noise (``--policy_noise``) while they are sent, and lose it again to the bit, so that every engine and
   every tensor-parallel rank gets the same noisy ones, and vLLM needs to know nothing of it: :func:`sent_with_noise`.
   `policy_noise.py` chooses how much.
2. Without NCCL (the CPU profile) the trainer's rank 0 hands them to the engines through a file in memory:
   :func:`hand_over_weights`. Trainer and engines must share a machine.
3. A rollout actor has neighbors computed anew at the end, and its engine prove itself again: :func:`prepared_engine`.

What a vLLM worker does with them (a perturbation's own parameters, which travel with the policy's, go to its module;
sleep and waking) is `ngrpo/rollout/new_weights.py`. Functions with ``original`` or ``plain`` are rows of `patches.py`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ngrpo.config.run import current_run
from ngrpo.trainers.openrlhf.model_actors import model_of
from perturbations.errors import UsageError, present

if TYPE_CHECKING:
    from torch import nn

    from ngrpo.rollout.vllm_objects import Worker
    from ngrpo.trainers.openrlhf.objects import ActorTrainer, RolloutActor

_SHARED_MEMORY = "/dev/shm"


# --- with noise ---------------------------------------------------------------------------------------------------


def sent_with_noise(original: Callable[..., None]) -> Callable[..., None]:
    """`ActorPPOTrainer.broadcast_to_vllm`, while the parameters have the noise that the trainer asked for."""

    def broadcast_to_vllm(self: ActorTrainer) -> None:
        scale, sync = getattr(self, "policy_noise", (0.0, 0))
        parameters, noise = (
            dict(model_of(self.actor).named_parameters()),
            present(current_run().policy_noise, "--policy_noise"),
        )
        with noise.added(parameters, scale, sync) if scale else nullcontext():
            original(self)

    return broadcast_to_vllm


def told_of_noise(plain: type) -> type:
    """`PolicyModelActor`: looks for the weights that get noise once it has them, and is told the noise of each sync.

    A first stage without noise, and a dry run that could not see the model, would find out late that there are none.
    """

    class NoisyModelActor(plain):  # type: ignore[misc, valid-type]
        def init_model_from_pretrained(self, *args: object, **kwargs: object) -> None:
            super().init_model_from_pretrained(*args, **kwargs)
            names = (name for name, _ in model_of(self.actor).named_parameters())
            present(current_run().policy_noise, "--policy_noise").selected(names)

        def set_policy_noise(self, scale: float, sync: int) -> None:
            self.trainer.policy_noise = (scale, sync)

    return NoisyModelActor


# --- by a file ----------------------------------------------------------------------------------------------------


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
        dtype = file.get_tensor(names[0]).dtype
        if dtype != expected:
            raise TypeError(f"The trainer has {dtype} weights, vLLM {expected}: both must be of one dtype.")
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


# --- at the end ---------------------------------------------------------------------------------------------------


async def _then_prepared(
    actor: RolloutActor, update: Callable[..., Awaitable[Any]], *args: object, empty_cache: bool, **kwargs: object
) -> Any:
    """A weight update of one parameter; ``empty_cache`` marks a sync's last, after which neighbors are computed anew.

    So their memory is taken and given back before a hybrid engine wakes its KV cache.
    """
    result = await update(actor, *args, empty_cache=empty_cache, **kwargs)
    if empty_cache:
        await actor.llm.collective_rpc("perturbation_prepare")
        actor.perturbation_proof.weights_synced()
    return result


def prepared_engine(plain: type) -> type:
    """`RolloutRayActor`, whose perturbation is ready for new weights when a sync has ended.

    Ray pickles this class by value, so its methods only call the function above.
    """

    class PreparedRolloutRayActor(plain):  # type: ignore[misc, valid-type]
        async def update_weight(self, *args: object, empty_cache: bool = False, **kwargs: object) -> Any:
            return await _then_prepared(self, plain.update_weight, *args, empty_cache=empty_cache, **kwargs)

        async def update_weight_cuda_ipc(self, *args: object, empty_cache: bool = False, **kwargs: object) -> Any:
            return await _then_prepared(self, plain.update_weight_cuda_ipc, *args, empty_cache=empty_cache, **kwargs)

        async def load_weights_file(self, path: str) -> None:
            await plain.load_weights_file(self, path)
            self.perturbation_proof.weights_synced()

    return PreparedRolloutRayActor


# --- the file -----------------------------------------------------------------------------------------------------


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
