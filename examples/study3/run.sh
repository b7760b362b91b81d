#!/usr/bin/env bash
# The third study (docs/studies/study3.md) on a CPU, from nothing to docs/results/study3.
#
#   nohup bash examples/study3/run.sh [FOLDER] [more words of ngrpo compare ...] > runs/study3.log 2>&1 &
#
# Killed, or with runs that failed, the same command continues: finished runs are kept. More words reach both
# comparisons, e.g. --seeds 0,1,2 for the first seeds. TASKS=gcd runs one of the two and publishes nothing; STEPS=2 is
# for a rehearsal and needs another FOLDER; RESULTS=FOLDER publishes elsewhere. On a machine that does not have the
# folder of earlier seeds, take only the missing seeds: JOIN=1 adds them to those already published.
set -euo pipefail
cd "$(dirname "$0")/../.."

out=${1:-runs/study3}
shift || true
# The same files for every part of the study: parts are joined only where they were trained on the same task.
problems=${PROBLEMS:-runs/study3-problems}
steps=${STEPS:-16}
status=0
for task in ${TASKS:-gcd products}; do
  python examples/study/problems.py "$task" "$problems" 32
  # A run that failed (1) does not keep the other task waiting.
  ngrpo compare --config examples/study3/study.yaml --out "$out/$task" --data.max_samples $((8 * steps)) \
    --task "math:$problems/$task-train.jsonl" --eval.dataset "$problems/$task-eval.jsonl" \
    --eval.data "$problems/$task-eval.jsonl" --eval.scorer math \
    --diagnose.data "$problems/$task-eval.jsonl" --diagnose.scorer math "$@" ||
    { status=$?; [ $status = 1 ] || exit $status; }
done
if [ -z "${TASKS:-}" ]; then
  tables=${RESULTS:+$RESULTS/tables.md}
  python -m benchmarks.study "$out" --contrasts examples/study3/contrasts.yaml --design study3.md \
    --out "${RESULTS:-docs/results/study3}" --tables "${tables:-docs/studies/tables/study3.md}" ${JOIN:+--join}
fi
exit $status
