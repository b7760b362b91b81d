# SPDX-License-Identifier: Apache-2.0
"""What a perturbed engine cannot be combined with: it is refused by its configuration, before a model loads."""

from contextlib import nullcontext
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo.rollout import settings
from ngrpo.rollout.input_override import find_input_embedding
from perturbations import create
from perturbations.errors import UsageError

SPEC = {"name": "neighbor", "rate": 0.1}
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


def config(model: str, spec: dict[str, Any] | None = SPEC, **options: Any) -> Any:
    from vllm import EngineArgs

    if spec is not None:
        options["additional_config"] = {"perturbation": spec}
    return EngineArgs(model, **options).create_engine_config()


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ({"name": "neighbour"}, {}, "Did you mean 'neighbor'"),
        ({"name": "neighbor", "k": 50000}, {}, r"k=50000.*\[2, 4095\]"),
        ({"rate": 0.1}, {}, "a dictionary with a 'name'"),
        (SPEC, {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "pipeline_parallel_size=2"),
        (SPEC, {"speculative_config": SPECULATIVE}, "speculative decoding"),
        (SPEC, {"enable_prompt_embeds": True}, "enable_prompt_embeds"),
        (SPEC, {"enable_lora": True}, "LoRA on the input embedding"),
    ],
)
def test_refused_before_a_model_loads(
    smollm2: str, spec: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(smollm2, spec, **options)


@pytest.mark.parametrize(
    ("section", "name", "value", "message"),
    [
        ("parallel_config", "enable_dbo", True, "dual-batch overlap"),
        ("parallel_config", "ubatch_size", 2, "dual-batch overlap"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode_context_parallel_size=2"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill_context_parallel_size=2"),
        ("parallel_config", "enable_batch_sharded_sampling", True, "enable_batch_sharded_sampling"),
        ("compilation_config.pass_config", "enable_sp", True, r"sequence-parallel pass.*'enable_sp': False"),
        ("model_config", "enable_trace_replay", True, "enable_trace_replay"),
        ("model_config", "runner_type", "pooling", "runner_type='pooling'"),
        ("__class__", "watermark_config", SimpleNamespace(), "watermarking"),  # a setting of vLLM 0.31
    ],
)
def test_refused_where_a_cpu_would_switch_it_off(
    smollm2: str, section: str, name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU platform resets these, or wants more devices than there are, so the test sets them afterwards."""
    vllm_config = config(smollm2)
    perturbation = create(**SPEC)
    settings.check_engine(vllm_config, perturbation)
    section_config = attrgetter(section)(vllm_config)
    monkeypatch.setattr(section_config, name, value, raising=False)
    with pytest.raises(UsageError, match=message):
        settings.check_engine(vllm_config, perturbation)


def test_data_parallel_mixtures_of_experts_are_refused(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_config = config(smollm2, data_parallel_size=2)
    perturbation = create(**SPEC)
    settings.check_engine(vllm_config, perturbation)
    monkeypatch.setattr(type(vllm_config.model_config), "is_moe", True)
    with pytest.raises(UsageError, match="data_parallel_size=2 for a mixture of experts"):
        settings.check_engine(vllm_config, perturbation)


def test_lora_on_other_modules_is_not_refused(smollm2: str) -> None:
    vllm_config = config(smollm2)
    perturbation = create(**SPEC)
    vllm_config.lora_config = SimpleNamespace(target_modules=["q_proj", "v_proj"])
    settings.check_engine(vllm_config, perturbation)

    every_module = None
    for modules in (["q_proj", "model.embed_tokens"], every_module):
        vllm_config.lora_config = SimpleNamespace(target_modules=modules)
        with pytest.raises(UsageError, match="embed_tokens"):
            settings.check_engine(vllm_config, perturbation)


def test_a_quantised_embedding_is_refused() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    embedding = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(embedding)
    model = torch.nn.ModuleDict({"embed_tokens": embedding})
    embedding.quant_method = UnquantizedEmbeddingMethod()
    assert find_input_embedding(model) is embedding
    embedding.quant_method = SimpleNamespace()
    with pytest.raises(UsageError, match="embed_tokens is quantised"):
        find_input_embedding(model)


@pytest.mark.parametrize("triton", [True, False])
def test_the_model_runner_is_the_one_that_stock_vllm_has(
    smollm2: str, monkeypatch: pytest.MonkeyPatch, triton: bool
) -> None:
    import vllm.config.vllm as vllm_config

    specs = (None, {"name": "none"}, SPEC)
    monkeypatch.setattr(vllm_config, "HAS_TRITON", triton)

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    for spec in specs:
        assert config(smollm2, spec).use_v2_model_runner == triton, spec

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    for spec in specs:
        assert config(smollm2, spec).use_v2_model_runner is False, spec

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    for spec in specs:
        with nullcontext() if triton else pytest.raises(ValueError, match="requires Triton"):
            assert config(smollm2, spec).use_v2_model_runner
