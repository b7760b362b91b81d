#!/usr/bin/env bash
# Four arms on a CPU: SmolLM2-135M learns sums of two digits; results.json, results.csv and report.html.
#
#   bash examples/compare_cpu.sh [OUT_DIR] [more arguments of ngrpo compare ...]
#
# SEEDS=0,1,2 repeats each with other data order and draws, STEPS=16 trains for longer.
set -euo pipefail

out=${1:-runs/compare}
shift || true
prompts=8   # per step
samples=4   # per prompt: the group

exec ngrpo compare \
  --perturbations none,neighbor,gaussian,gumbel --seeds "${SEEDS:-0,1}" --out "$out" \
  --model smollm2-135m --task arithmetic \
  --algo.advantage.estimator group_norm \
  --algo.kl.init_coef 0 \
  --data.max_samples $((prompts * ${STEPS:-12})) \
  --data.max_len 128 \
  --rollout.batch_size $prompts \
  --rollout.n_samples_per_prompt $samples \
  --rollout.max_new_tokens 12 \
  --rollout.micro_batch_size 8 \
  --train.batch_size $((prompts * samples)) \
  --train.micro_batch_size 8 \
  --actor.adam.lr 1e-5 \
  --actor.lr_scheduler constant \
  --eval.n 16 --eval.k 1,4,16 --eval.max-tokens 12 --eval.temperature 1 --eval.top-p 1 \
  --diagnose.prompts 16 --diagnose.group 8 --diagnose.embedding-map \
  "$@"
