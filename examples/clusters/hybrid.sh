#!/usr/bin/env bash
# Hybrid engine: trainer and vLLM take turns on the same GPUs. One node with 8 GPUs; NODES=2 for two of them.
#
#   MODEL=Qwen/Qwen3-1.7B-Base DATA=prompts.jsonl REWARD=reward.py bash examples/clusters/hybrid.sh [flags ...]
#
# --train.colocate_all places actor, reference and engines on each GPU, --vllm.enable_sleep and --ds.enable_sleep have
# each side give its memory back while the other works. So actor GPUs must be engines × tensor-parallel size.
set -euo pipefail

nodes=${NODES:-1}
gpus=${GPUS_PER_NODE:-8}

exec ngrpo train \
  --perturbation "${PERTURBATION:-neighbor}" \
  --model "$MODEL" --data.prompt_dataset "$DATA" --reward.remote_url "$REWARD" \
  --preset grpo \
  --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 1024 \
  --train.colocate_all --vllm.enable_sleep --ds.enable_sleep \
  --actor.num_nodes "$nodes" --actor.num_gpus_per_node "$gpus" \
  --ref.num_nodes "$nodes" --ref.num_gpus_per_node "$gpus" \
  --vllm.num_engines $((nodes * gpus)) --vllm.tensor_parallel_size 1 \
  --vllm.gpu_memory_utilization 0.6 \
  --ds.zero_stage 3 --actor.gradient_checkpointing_enable \
  "$@"
