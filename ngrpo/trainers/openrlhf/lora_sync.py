# SPDX-License-Identifier: Apache-2.0
"""LoRA in OpenRLHF: the weight sync to the engines, the check at a model's start, and the saved adapter.

OpenRLHF 0.11.2 sends PEFT's parameters under PEFT's names, ``base_model.model.….base_layer.weight`` and
``….lora_A.default.weight``, which vLLM refuses. Here engines get the merged weights of
:mod:`ngrpo.machine.models.lora`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ngrpo.config.run import current_run
from ngrpo.machine.models import four_bit, lora
from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import Actor, ActorPPOTrainer, DeepspeedStrategy, PreTrainedTokenizerBase


@around
def checked_actor(original: Callable[..., None], self: Actor, *args: object, **kwargs: object) -> None:
    """`Actor.__init__`: adapters that a merged weight cannot stand for are an error before the first rollout."""
    original(self, *args, **kwargs)
    four_bit.prepare(self.model)  # the reference model too, which has no adapters
    if lora.has_adapters(self.model):
        perturbation = current_run().perturbation
        lora.check_adapters(self.model, perturbed=perturbation is not None and perturbation.active)
        lora.engine_weights(self.model)  # an adapter without a weight below it is an error now


def send_merged_weights(trainer: ActorPPOTrainer) -> None:
    """`ActorPPOTrainer.broadcast_to_vllm` for a model with adapters: engines get the weights that training changes.

    All ranks take part. As in OpenRLHF, an engine and its trainer either share GPUs, where each rank lends its weight
    by a CUDA IPC handle, or rank 0 broadcasts over NCCL. OpenRLHF's functions that send one parameter are local to its
    method and take a parameter with its name in the model, so they are repeated here for merged weights.
    """
    import ray
    from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync

    is_rank_zero = torch.distributed.get_rank() == 0
    cache_resets = []
    if trainer.strategy.args.vllm.enable_prefix_caching and is_rank_zero:
        cache_resets = [engine.reset_prefix_cache.remote() for engine in trainer.vllm_engines]
    torch.cuda.empty_cache()
    model = trainer.actor.model.module
    weights = lora.changed_weights(model, noised=noised_weights(model))
    for number, weight in enumerate(weights, start=1):
        is_last = number == len(weights)
        with gathered_together(trainer, weight):
            if trainer.use_cuda_ipc:
                lend_by_cuda_ipc(trainer, weight.name, weight.merged().clone(), is_last=is_last)
            elif is_rank_zero:
                broadcast(trainer, weight.name, weight.merged().contiguous(), is_last=is_last)
    if cache_resets:
        ray.get(cache_resets)
    torch.cuda.empty_cache()
    torch_dist_barrier_and_cuda_sync()


def noised_weights(model: nn.Module) -> frozenset[str]:
    """The weights that a run's policy noise changes, by their names in the engine."""
    noise = current_run().policy_noise
    return frozenset() if noise is None else frozenset(noise.selected(lora.base_parameters(model)))


def gathered_together(trainer: ActorPPOTrainer, weight: lora.EngineWeight) -> AbstractContextManager[None]:
    """Makes a weight whole on every rank while the context lasts; all ranks enter it together.

    Under tensor parallelism the base weight is gathered, and adapters are refused. Under ZeRO-3 it is gathered with its
    adapter's A and B. Otherwise every rank has the whole weight already.
    """
    import deepspeed

    settings = trainer.strategy.args.ds
    if settings.tensor_parallel_size > 1:
        model = trainer.actor.model.module
        return deepspeed.module_inject.layers.GatherReplacedLayerParams([weight.base], model)
    return deepspeed.zero.GatheredParameters(weight.parameters, enabled=settings.zero_stage == 3)


def broadcast(trainer: ActorPPOTrainer, name: str, tensor: Tensor, *, is_last: bool) -> None:
    """Rank 0 sends one weight to all engines, by the group that OpenRLHF made (`_broadcast_param`)."""
    import ray

    received = [
        engine.update_weight.remote(name, dtype=tensor.dtype, shape=tensor.shape, empty_cache=is_last)
        for engine in trainer.vllm_engines
    ]
    group = trainer._model_update_group
    if isinstance(group, str):  # --vllm.sync_with_ray: Ray knows the group by its name
        import ray.util.collective as collective

        collective.broadcast(tensor, 0, group_name=group)
    else:
        group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
    ray.get(received)


def lend_by_cuda_ipc(trainer: ActorPPOTrainer, name: str, tensor: Tensor, *, is_last: bool) -> None:
    """Every rank lends one weight to the engine on its GPU (`_handle_cuda_ipc`); it is taken when this returns."""
    import ray
    from openrlhf.trainer.ray.utils import get_physical_gpu_id
    from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync
    from torch.multiprocessing.reductions import reduce_tensor

    handles: list[dict[str, Any]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(handles, {get_physical_gpu_id(): reduce_tensor(tensor)})
    if torch.distributed.get_rank() == 0:
        by_gpu = {gpu: handle for of_rank in handles for gpu, handle in of_rank.items()}
        received = [
            engine.update_weight_cuda_ipc.remote(
                name, dtype=tensor.dtype, shape=tensor.shape, ipc_handles=by_gpu, empty_cache=is_last
            )
            for engine in trainer.vllm_engines
        ]
        ray.get(received)
    torch_dist_barrier_and_cuda_sync()


@around
def save_model(
    original: Callable[..., None],
    self: DeepspeedStrategy,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str,
    **kwargs: object,
) -> None:
    """`DeepspeedStrategy.save_model`: the folder has an adapter as PEFT saves it, and the tokenizer.

    OpenRLHF gathers the whole model for this, adds the base model's ``config.json``, with which the folder looks like a
    whole model without weights, and writes a pickle under ZeRO-3. A perturbation's own parameters are saved beside the
    adapter, by :func:`ngrpo.machine.storage.parameters_file.attach`.
    """
    import deepspeed
    from openrlhf.models import Actor as PolicyOrReference
    from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync

    module = self._unwrap_model(model)
    if not isinstance(model, PolicyOrReference) or not lora.has_adapters(module):
        original(self, model, tokenizer, output_dir, **kwargs)
        return
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    with deepspeed.zero.GatheredParameters(list(trained.values()), enabled=self.stage == 3):
        if self.is_rank_0():
            state = {name: parameter.detach().clone() for name, parameter in trained.items()}
            # Adapters of the embedding are saved as such; the table itself is frozen.
            module.save_pretrained(output_dir, state_dict=state, save_embedding_layers=False)
            tokenizer.save_pretrained(output_dir)
            four_bit.write_config(module, Path(output_dir))
    torch_dist_barrier_and_cuda_sync()
