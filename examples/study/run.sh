#!/usr/bin/env bash
# The study of docs/study.md on a CPU, from nothing to docs/results/. Hours: let it run in the background.
#
#   nohup bash examples/study/run.sh [FOLDER] [more words of ngrpo compare ...] > runs/study.log 2>&1 &
#
# Killed, or with runs that failed, the same command goes on: what has finished is kept. More words reach both
# comparisons, e.g. --seeds 0,1 for a rehearsal; another number of steps (STEPS=2) needs another FOLDER.
set -euo pipefail
cd "$(dirname "$0")/../.."

out=${1:-runs/study}
shift || true
second=${SECOND:-basic3}

python examples/study/problems.py "$second" "$out-problems"
compare() {  # TASK, then its words. A failed run (1) does not keep the other task waiting.
  local name=$1
  shift
  ngrpo compare --config "${CONFIG:-examples/study/study.yaml}" --out "$out/$name" --data.max_samples $((8 * ${STEPS:-24})) "$@" ||
    { status=$?; [ $status = 1 ] || exit $status; }
}
status=0
compare sums --task arithmetic "$@"
compare "$second" --task "math:$out-problems/$second-train.jsonl" \
  --eval.dataset "$out-problems/$second-eval.jsonl" \
  --eval.data "$out-problems/$second-eval.jsonl" --eval.scorer math \
  --diagnose.data "$out-problems/$second-eval.jsonl" --diagnose.scorer math "$@"
python -m benchmarks.study "$out" --out "${RESULTS:-docs/results}"
exit $status
