# SPDX-License-Identifier: Apache-2.0
"""The shapes of vLLM's objects that no class of its own says: with what the plugin adds, or of several classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    from ngrpo.rollout.attach import AttachedPerturbation

    Runner = RunnerV1 | RunnerV2


class EngineFlags(Protocol):
    """``EngineArgs``, and the configuration that is made of them."""

    additional_config: Any


class Worker(Protocol):
    """A worker, from the load of its model on."""

    perturbation: AttachedPerturbation
    vllm_config: VllmConfig
    model_config: ModelConfig
    model_runner: Runner
    use_v2_model_runner: bool
    compile_or_warm_up_model: Callable[[], object]


class OutputProcessor(Protocol):
    """Who knows the requests that are not finished."""

    external_req_ids: Mapping[str, list[str]]


class FrontEnd(Protocol):
    """An engine as its caller has it: ``LLMEngine`` or ``AsyncLLM``."""

    vllm_config: VllmConfig
    output_processor: OutputProcessor
    collective_rpc: Callable[..., Any]


class CoreClient(Protocol):
    """Who speaks with the engine's cores, one for each data-parallel rank."""

    core_engines: list[bytes]
    _call_utility_async: Callable[..., Any]
