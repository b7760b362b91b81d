#!/usr/bin/env bash
# Hands a training to a Ray cluster that is already there, and follows its log.
#
#   ray start --head --port 6379                     # on the first node
#   ray start --address FIRST_NODE:6379              # on each further node
#   bash examples/clusters/ray_job.sh --config RECIPE --config PLACEMENT [any arguments of ngrpo train ...]
#
# The current folder travels to the cluster with the job, and with it recipes, data, reward functions and perturbations
# of your own. Results stay on the head node, in RUN_DIR. The project must be installed on every node (docs/install.md).
# RAY_API_SERVER_ADDRESS is the dashboard's address, http://127.0.0.1:8265 unless it is set.
set -euo pipefail

exec ray job submit \
  --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" \
  --working-dir . \
  --runtime-env-json '{"excludes": [".git", ".venv", "runs"]}' \
  -- ngrpo train --run-dir "${RUN_DIR:-$HOME/runs/$(date +%Y%m%d-%H%M%S)}" "$@"
