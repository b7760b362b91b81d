# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401
"""Classes of other packages that annotations name: a type checker sees them, and a run imports none of them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from openrlhf.models import Actor
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
    from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from torch.utils.file_baton import FileBaton
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
    from vllm import LLM, SamplingParams
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.request import Request
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler as SamplerV1
    from vllm.v1.worker.gpu.input_batch import InputBatch as InputBatchV2
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
else:

    def __getattr__(name: str) -> Any:
        return Any


Upstream: Any = object
"""The base of a mixin that goes in front of an upstream class: a type checker then allows that class's attributes."""
