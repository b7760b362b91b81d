#!/usr/bin/env bash
# The second study (docs/study2.md) on a CPU.
#
#   PILOT=1 bash examples/study2/run.sh [FOLDER] [more words of ngrpo compare ...]     the pilot, before it
#   nohup bash examples/study2/run.sh [FOLDER] > runs/study2.log 2>&1 &                the study
#
# Killed, or with runs that failed, the same command goes on: what has finished is kept. TASKS="shortcut two_peaks" runs
# some of the tasks; RATE=4e-4 another learning rate than the sandbox's own, which needs another FOLDER.
set -euo pipefail
cd "$(dirname "$0")/../.."

out=${1:-runs/study2${PILOT:+-pilot}}
shift || true
config=examples/study2/study.yaml tasks=${TASKS:-shortcut shortcut:late two_peaks minimum_sum star_graph}
if [ -n "${PILOT:-}" ]; then
  config=examples/study2/pilot.yaml tasks=${TASKS:-shortcut shortcut:late shortcut:late-plain}
fi
status=0
for task in $tasks; do  # A failed run (1) does not keep the next task waiting.
  ngrpo compare --config "$config" --out "$out/${task//:/-}" --task "$task" ${RATE:+--actor.adam.lr "$RATE"} "$@" ||
    { status=$?; [ $status = 1 ] || exit $status; }
done
exit $status
