#!/usr/bin/env bash
# N-GRPO on a CPU: SmolLM2-135M learns sums of two digits with neighbor mixing, by OpenRLHF and vLLM.
#
#   bash examples/train_neighbor_cpu.sh [RUN_DIR] [more flags of ngrpo train or OpenRLHF ...]
#
# Evaluated before and after, without perturbation, on sums that are held out. DEMO_STEPS=30 trains for longer,
# PERTURBATION=none is stock GRPO. Later flags win, e.g. --train.seed 7.
set -euo pipefail

run=${1:-runs/neighbor}
shift || true
steps=${DEMO_STEPS:-4}
prompts=8   # per step
samples=4   # per prompt: the group

# For responses as short as these, eager attention is the fastest on a CPU.
# Whole steps only: OpenRLHF reads the first max_samples prompts and passes over them once.
exec ngrpo train \
  --perturbation "${PERTURBATION:-neighbor}" \
  --model smollm2-135m --task arithmetic --run-dir "$run" --log-file "$run/train.log" \
  --algo.advantage.estimator group_norm \
  --algo.kl.init_coef 0 \
  --data.max_samples $((prompts * steps)) \
  --data.max_len 128 \
  --rollout.batch_size $prompts \
  --rollout.n_samples_per_prompt $samples \
  --rollout.max_new_tokens 12 \
  --rollout.micro_batch_size 8 \
  --train.batch_size $((prompts * samples)) \
  --train.micro_batch_size 8 \
  --actor.adam.lr 3e-5 \
  --actor.lr_scheduler constant \
  --ds.attn_implementation eager \
  --train.seed 42 --reproducible \
  --eval.at_start --eval.steps "$steps" --ckpt.best_metric_key none \
  "$@"
