# SPDX-License-Identifier: Apache-2.0
"""Settings of vLLM that a perturbed engine refuses, since they would silently change the result."""

from ngrpo.config import features
from ngrpo.config.compatibility.row import Row, rows
from ngrpo.config.feature_kinds import above_one, engine, none_of

ENGINE = (
    Row(
        what=engine("speculative_config", name="speculative decoding"),
        conflicts_with=features.IN_ENGINE,
        why="the draft model would not see the perturbed inputs",
    ),
    Row(
        what=engine("parallel_config.pipeline_parallel_size", above_one),
        conflicts_with=features.IN_ENGINE,
        why="only the first pipeline stage embeds tokens",
        fix="set it to 1",
    ),
    *rows(
        [
            engine("parallel_config.decode_context_parallel_size", above_one),
            engine("parallel_config.prefill_context_parallel_size", above_one),
        ],
        conflicts_with=features.IN_ENGINE,
        why="the rows of a step are split over ranks",
        fix="set it to 1",
    ),
    Row(
        what=features.MIXTURE_IN_STEP,
        conflicts_with=features.IN_ENGINE,
        why="vLLM makes all data-parallel ranks of a mixture of experts step together, which is untested",
        fix="start an engine for each rank",
    ),
    Row(
        what=engine("watermark_config", name="watermarking"),
        conflicts_with=features.IN_ENGINE,
        why="the perturbation would replace its draws of tokens",
    ),
    Row(
        what=engine("parallel_config.use_ubatching", name="dual-batch overlap"),
        conflicts_with=features.IN_ENGINE,
        why="each half of a batch would read the replaced inputs from the first row on",
        fix="leave out enable_dbo and ubatch_size",
    ),
    Row(
        what=engine("parallel_config.enable_batch_sharded_sampling"),
        conflicts_with=features.IN_ENGINE,
        why="each rank would draw a part of the batch",
    ),
    Row(
        what=engine("compilation_config.pass_config.enable_sp", name="the sequence-parallel pass"),
        conflicts_with=features.IN_ENGINE,
        why="it rewrites the operations after the embedding, where inputs are replaced",
        fix="set compilation_config={'pass_config': {'enable_sp': False, 'fuse_gemm_comms': False}}",
    ),
    Row(
        what=engine("lora_config", features.adapts_embedding, name="LoRA on the input embedding"),
        conflicts_with=features.IN_ENGINE,
        why="the adapter's difference is added after inputs are replaced",
        fix="give --lora-target-modules without embed_tokens",
    ),
    Row(
        what=engine("model_config.enable_prompt_embeds"),
        conflicts_with=features.IN_ENGINE,
        why="inputs without tokens cannot be replayed",
    ),
    Row(
        what=engine("model_config.enable_trace_replay"),
        conflicts_with=features.IN_ENGINE,
        why="it replaces tokens after they were drawn and recorded",
    ),
    Row(
        what=engine("model_config.is_diffusion", name="a diffusion model"),
        conflicts_with=features.IN_ENGINE,
        why="it draws many tokens in a step",
    ),
    Row(
        what=engine("model_config.runner_type", none_of("generate")),
        conflicts_with=features.IN_ENGINE,
        why="only generation is perturbed",
        fix="use 'generate'",
    ),
    Row(
        what=engine("model_config.is_encoder_decoder", name="an encoder-decoder model"),
        conflicts_with=features.IN_ENGINE,
        why="it has no single input embedding",
    ),
    Row(
        what=engine("kv_transfer_config", name="KV transfer between engines"),
        conflicts_with=features.IN_ENGINE,
        why="perturbed blocks of the KV cache must not be shared",
    ),
    Row(
        what=engine("model_config.enable_return_routed_experts"),
        conflicts_with=features.ROUTED_ENGINE,
        why="a router hands its experts to vLLM or to ngrpo, not to both",
    ),
    Row(
        what=engine("cache_config.prefix_match_unit"),
        conflicts_with=features.ROUTED_ENGINE,
        why="blocks of a prompt are copied without their experts",
    ),
)
