#!/usr/bin/env bash
# Asynchronous: engines sample the next batch while the trainer learns from the last one. Of 8 GPUs, 4 and 4.
#
#   MODEL=Qwen/Qwen3-1.7B-Base DATA=prompts.jsonl REWARD=reward.py bash examples/clusters/asynchronous.sh [flags ...]
#
# Answers are then of weights that are up to --train.async_queue_size updates old, so the loss is corrected by
# truncated importance weights. Each answer is of one version of the weights: --train.partial_rollout_enable, which
# would change them in the middle of an answer, is refused with a perturbation.
set -euo pipefail

exec ngrpo train \
  --perturbation "${PERTURBATION:-neighbor}" \
  --model "$MODEL" --data.prompt_dataset "$DATA" --reward.remote_url "$REWARD" \
  --preset grpo \
  --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 1024 \
  --train.async_enable --train.async_queue_size 1 \
  --algo.advantage.is_correction_level token --algo.advantage.is_correction_threshold 0 2 \
  --train.colocate_actor_ref \
  --actor.num_nodes 1 --actor.num_gpus_per_node "${TRAINER_GPUS:-4}" \
  --ref.num_nodes 1 --ref.num_gpus_per_node "${TRAINER_GPUS:-4}" \
  --vllm.num_engines "${ENGINES:-4}" --vllm.tensor_parallel_size 1 \
  --vllm.gpu_memory_utilization 0.9 \
  --ds.zero_stage 3 --actor.gradient_checkpointing_enable \
  "$@"
