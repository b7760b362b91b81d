# SPDX-License-Identifier: Apache-2.0
"""Pairs that a training refuses on one kind of hardware, or for want of a package."""

from ngrpo.config import features
from ngrpo.config.compatibility.row import Row, rows
from ngrpo.config.feature_kinds import both, flag, hardware, without

CPU_MODEL = (
    Row(
        what=features.HEAD_SIZE,
        conflicts_with=hardware("cpu"),
        why="the engine would not start",
        fix="use another model",
    ),
)

_CPU = (
    *CPU_MODEL,
    Row(
        what=flag("--vllm.sync_backend", only="nccl"),
        conflicts_with=hardware("cpu"),
        why="NCCL needs CUDA",
        fix="leave it out; gloo is set",
    ),
    Row(
        what=flag("--vllm.gpu_memory_utilization"),
        conflicts_with=hardware("cpu"),
        why="the KV cache has a fixed size",
        fix="use VLLM_CPU_KVCACHE_SPACE (GiB)",
    ),
    Row(
        what=flag("--vllm.enable_sleep"),
        conflicts_with=hardware("cpu"),
        why="vLLM has no sleep mode on a CPU",
    ),
    Row(
        what=flag("--ds.use_liger_kernel"),
        conflicts_with=hardware("cpu"),
        why="Liger kernels need CUDA",
    ),
    Row(
        what=flag("--ds.param_dtype", only="fp16"),
        conflicts_with=hardware("cpu"),
        why="DeepSpeed has no float16 on a CPU",
        fix="leave it out for float32",
    ),
    Row(
        what=both(flag("--ds.tensor_parallel_size", off="1"), flag("--ds.param_dtype", only="fp32")),
        conflicts_with=hardware("cpu"),
        why="OpenRLHF's tensor parallelism needs bfloat16",
        fix="add --ds.param_dtype bf16",
    ),
    Row(
        what=both(flag("--ds.load_in_4bit"), flag("--ds.param_dtype", only="fp32")),
        conflicts_with=hardware("cpu"),
        why="OpenRLHF 0.11.2 computes 4-bit layers in bfloat16",
        fix="add --ds.param_dtype bf16",
    ),
    Row(
        what=flag("--ds.ring_attn_size", off="1"),
        conflicts_with=hardware("cpu"),
        why="flash-attn computes ring attention, and flash-attn needs CUDA",
    ),
    Row(
        what=features.FLASH_ATTENTION,
        conflicts_with=hardware("cpu"),
        why="flash-attn computes it, and flash-attn needs CUDA",
        fix="use sdpa or eager",
    ),
)

_PACKAGES = (
    Row(
        what=flag("--use_ms"),
        conflicts_with=without("modelscope"),
        why="OpenRLHF imports modelscope for it",
        fix="pip install modelscope",
    ),
    Row(
        what=flag("--logger.wandb.key"),
        conflicts_with=without("wandb"),
        why="OpenRLHF imports wandb for it",
        fix="pip install wandb",
    ),
    Row(
        what=features.LORA,
        conflicts_with=without("peft"),
        why="OpenRLHF imports peft for it",
        fix="pip install peft",
    ),
    Row(
        what=flag("--ds.use_liger_kernel"),
        conflicts_with=without("liger-kernel"),
        why="OpenRLHF imports liger-kernel for it",
        fix="pip install liger-kernel",
    ),
    Row(
        what=flag("--ds.load_in_4bit"),
        conflicts_with=without("bitsandbytes"),
        why="transformers imports bitsandbytes for it",
        fix="pip install bitsandbytes",
    ),
)

_CUDA = (
    *rows(
        [flag("--ds.param_dtype", only="fp32"), flag("--ds.param_dtype", only="fp16")],
        conflicts_with=hardware("cuda"),
        why="OpenRLHF's engines compute in bfloat16 on CUDA",
        fix="use bf16, or leave it out",
    ),
    *rows(
        [flag("--actor.optim", only="muon"), flag("--critic.optim", only="muon")],
        conflicts_with=flag("--ds.zero_stage", only="3"),
        why="DeepSpeed 0.19.6 computes Muon of whole gradients, and the ranks hold slices",
        fix="use --ds.zero_stage 2",
    ),
    *rows(
        [flag("--actor.optim", only="muon"), flag("--critic.optim", only="muon")],
        conflicts_with=flag("--ds.adam_offload"),
        why="DeepSpeed 0.19.6 computes Muon of whole gradients, and the ranks hold slices",
        fix="leave --ds.adam_offload out, or use Adam",
    ),
    Row(
        what=flag("--vllm.sync_backend", only="gloo"),
        conflicts_with=hardware("cuda"),
        why="OpenRLHF 0.11.2 sends weights by NCCL or CUDA IPC, whatever the backend's name is",
        fix="leave it out",
    ),
    Row(
        what=flag("--ds.ring_attn_size", off="1"),
        conflicts_with=features.WITHOUT_FLASH_ATTN,
        why="flash-attn computes ring attention, and it is not installed where the run starts",
        fix="leave it out, or install flash-attn, for which docs/install.md names prebuilt wheels",
    ),
    Row(
        what=features.FLASH_ATTENTION_2,
        conflicts_with=features.WITHOUT_FLASH_ATTN,
        why="flash-attn computes it, and that is not installed where the run starts",
        fix="use sdpa or eager, or install flash-attn, for which docs/install.md names prebuilt wheels",
    ),
)

HARDWARE = (*_CPU, *_PACKAGES, *_CUDA)
