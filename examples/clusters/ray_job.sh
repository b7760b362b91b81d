#!/usr/bin/env bash
# Hands a training to a Ray cluster that is already there, and follows its log.
#
#   ray start --head --port 6379                     # on the first node; --num-gpus N where Ray should count others
#   ray start --address FIRST_NODE:6379              # on each further node
#   bash examples/clusters/ray_job.sh examples/clusters/hybrid.sh [flags ...]
#
# RAY_API_SERVER_ADDRESS is the dashboard, http://127.0.0.1:8265 unless it is set. The project must be installed on
# every node (docs/install.md). Files that a flag names, such as a reward function or a perturbation of your own, are
# taken from this folder, which travels to the cluster with the job; folders of results stay on the head node, in
# RUN_DIR.
set -euo pipefail

script=$1
shift
exec ray job submit \
  --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" \
  --working-dir . \
  --runtime-env-json "{\"excludes\": [\".git\", \".venv\", \"runs\"], \"env_vars\": {\"MODEL\": \"${MODEL:-}\", \"DATA\": \"${DATA:-}\", \"REWARD\": \"${REWARD:-}\"}}" \
  -- bash "$script" --run-dir "${RUN_DIR:-$HOME/runs/$(date +%Y%m%d-%H%M%S)}" "$@"
