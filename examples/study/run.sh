#!/usr/bin/env bash
# The study of docs/studies/study.md on a CPU, from nothing to docs/results/. Hours: let it run in the background.
#
#   nohup bash examples/study/run.sh [FOLDER] [more words of ngrpo compare ...] > runs/study.log 2>&1 &
#
# Killed, or with runs that failed, the same command continues: finished runs are kept. More words reach both
# comparisons, e.g. --seeds 0,1 for a rehearsal; another number of steps (STEPS=2) needs another FOLDER. TASKS=sums or
# TASKS=basic runs one of the two, so that both can run side by side; with 24 GB of memory they fit.
set -euo pipefail
cd "$(dirname "$0")/../.."

out=${1:-runs/study}
shift || true
second=${SECOND:-basic}
tasks=${TASKS:-sums $second}

compare() {  # TASK, STEPS, then its words. A failed run (1) does not keep the other task waiting.
  local name=$1 steps=${STEPS:-$2}
  shift 2
  ngrpo compare --config "${CONFIG:-examples/study/study.yaml}" --out "$out/$name" --data.max_samples $((8 * steps)) "$@" ||
    { status=$?; [ $status = 1 ] || exit $status; }
}
status=0
for task in $tasks; do
  if [ "$task" = sums ]; then  # the four arms of study.yaml, and these
    compare sums 8 --task arithmetic \
      --strategy "neighbor" \
      --strategy "gaussian sigma_of=vector" \
      --strategy "gumbel top_p_of=vocabulary" \
      --strategy "soft" \
      --strategy "multiplex" \
      --strategy "neighbor variant=released skip_same_word=true" \
      --strategy "none --rollout.temperature=0.75" "$@"
  else
    python examples/study/problems.py "$task" "$out-problems"
    compare "$task" 12 --task "math:$out-problems/$task-train.jsonl" \
      --eval.dataset "$out-problems/$task-eval.jsonl" \
      --eval.data "$out-problems/$task-eval.jsonl" --eval.scorer math \
      --diagnose.data "$out-problems/$task-eval.jsonl" --diagnose.scorer math "$@"
  fi
done
# RESULTS=FOLDER publishes elsewhere, with the tables next to the results.
tables=${RESULTS:+$RESULTS/tables.md}
[ -n "${TASKS:-}" ] ||
  python -m benchmarks.study "$out" --out "${RESULTS:-docs/results}" --tables "${tables:-docs/studies/tables/study.md}"
exit $status
