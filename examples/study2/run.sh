#!/usr/bin/env bash
# The second study (docs/studies/study2.md) on a CPU.
#
#   PILOT=1 bash examples/study2/run.sh [FOLDER] [more words of ngrpo compare ...]     the pilot, before it
#   nohup bash examples/study2/run.sh [FOLDER] > runs/study2.log 2>&1 &                the study
#
# Killed, or with runs that failed, the same command continues: finished runs are kept. TASKS="shortcut two_peaks" runs
# some of the tasks; RATE=4e-4 another learning rate, which needs another FOLDER.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."

out=${1:-runs/study2${PILOT:+-pilot}}
shift || true
status=0

run() {  # CONFIG TASK [more words]: a failed run (1) does not keep the next task waiting.
  ngrpo compare --config "$1" --out "$out/${2//:/-}" --task "$2" ${RATE:+--actor.adam.lr "$RATE"} "${@:3}" ||
    { status=$?; [ $status = 1 ] || exit $status; }
}

up_to() {  # GROUP FILE: the file with its groups of arms up to one; it ends with them.
  awk -v last="$1" '/^  # group [0-9]+:/ {over = $3 + 0 > last} !over' "$2"
}

if [ -n "${PILOT:-}" ]; then
  run "$here/pilot.yaml" shortcut:late "$@"
  run "$here/pilot_shortcut.yaml" shortcut "$@"
  for task in shortcut:late-plain shortcut:first-plain; do run "$here/rate.yaml" $task "$@"; done
  exit $status
fi
mkdir -p "$out"

words=("$@")

stage() {  # GROUPS [TASK ...]: group after group, each on every one of the tasks.
  local group task file
  for group in $1; do
    for task in "${@:2}"; do
      file=$here/$task.yaml
      [ -f "$file" ] || file=$here/study.yaml
      grep -q "^  # group $group:" "$file" || continue
      up_to "$group" "$file" > "$out/$(basename "$file" .yaml)-$group.yaml"
      run "$out/$(basename "$file" .yaml)-$group.yaml" "$task" "${words[@]}"
    done
  done
}

read -ra tasks <<< "${TASKS:-shortcut:late shortcut two_peaks minimum_sum star_graph}"
stage 1 "${tasks[@]}"
stage "2 3 4 6" "${tasks[0]}"
stage "2 3 4" "${tasks[@]:1}"
exit $status
