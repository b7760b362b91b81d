#!/usr/bin/env bash
# Disaggregated: some GPUs train, others roll out, each keeps its memory. Of 8 GPUs, 4 train and 4 have an engine.
#
#   MODEL=Qwen/Qwen3-1.7B-Base DATA=prompts.jsonl REWARD=reward.py bash examples/clusters/disaggregated.sh [flags ...]
#
# Actor and reference share their GPUs (--train.colocate_actor_ref). Trainer and engines wait for each other; the
# asynchronous placement has them work at the same time.
set -euo pipefail

exec ngrpo train \
  --perturbation "${PERTURBATION:-neighbor}" \
  --model "$MODEL" --data.prompt_dataset "$DATA" --reward.remote_url "$REWARD" \
  --preset grpo \
  --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 1024 \
  --train.colocate_actor_ref \
  --actor.num_nodes 1 --actor.num_gpus_per_node "${TRAINER_GPUS:-4}" \
  --ref.num_nodes 1 --ref.num_gpus_per_node "${TRAINER_GPUS:-4}" \
  --vllm.num_engines "${ENGINES:-4}" --vllm.tensor_parallel_size 1 \
  --vllm.gpu_memory_utilization 0.9 \
  --ds.zero_stage 3 --actor.gradient_checkpointing_enable \
  "$@"
