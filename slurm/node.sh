#!/usr/bin/env bash
# One node of a job: job.sh's srun starts it on each.
# What all nodes agreed on is a status in a file and no failure of the task: srun kills the other tasks at the first
# failure, and they would end with a status of their own while they were ending in order. A task that fails has lost
# its ranks, or is alone with a mistake that only its node can see, and then the others must not wait for it.
# With FIRST_POINT (of sweep.sbatch): POINTS_PER_TASK points of a sweep at once, each of one rank on a place of its own.
set -uo pipefail
# For `run` and its ranks, which handle it.
trap '' USR1
# `run` gets this as well, and what it does then is worth waiting for.
trap : TERM

# What starts a program on each GPU that this task has; without any (or with --cpu), on each core.
places() {
  local ids part core
  ids=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)}
  case "$ids $* " in '-1 '* | NoDevFiles* | *' --cpu '*) ids= ;; esac
  [ -z "$ids" ] || { printf 'env CUDA_VISIBLE_DEVICES=%s\n' ${ids//,/ }; return; }
  for part in $(sed -n 's/^Cpus_allowed_list:\t//p' /proc/self/status | tr , ' '); do
    for ((core = ${part%-*}; core <= ${part#*-}; core++)); do echo "taskset -c $core"; done
  done
}

# Exit status: 2 where a point has that, else the highest.
several_points() {
  local listed last places point pids=() status worst=0
  mapfile -t places < <(places "$@")
  if [ "$POINTS_PER_TASK" -gt ${#places[@]} ]; then
    echo "POINTS_PER_TASK: expected at most ${#places[@]} (GPUs here, or cores), got $POINTS_PER_TASK" >&2
    return 2
  fi
  listed=$(bash "$ROOT/launch/torchrun.sh" "$@" --list-points) || return
  last=$(($(grep -c '^[0-9]' <<<"$listed") - 1))
  if [ "$FIRST_POINT" -gt "$last" ]; then
    echo "--point: expected 0 to $last, got $FIRST_POINT; fewer tasks will do" >&2
    return 2
  fi
  [ "$last" -lt $((FIRST_POINT + POINTS_PER_TASK)) ] || last=$((FIRST_POINT + POINTS_PER_TASK - 1))
  for ((point = FIRST_POINT; point <= last; point++)); do
    # shellcheck disable=SC2086  # words of one command
    ${places[point - FIRST_POINT]} bash "$ROOT/launch/torchrun.sh" "$@" --point "$point" &
    pids[point]=$!
  done
  for point in "${!pids[@]}"; do
    # A signal ends a wait, not what is waited for.
    while kill -0 "${pids[point]}" 2>/dev/null; do wait "${pids[point]}"; done
    wait "${pids[point]}"
    status=$?
    [ "$status" = 0 ] || echo "node.sh: point $point ended with status $status" >&2
    if [ "$status" = 2 ] || { [ "$worst" != 2 ] && [ "$status" -gt "$worst" ]; }; then worst=$status; fi
  done
  return "$worst"
}

if [ -n "${FIRST_POINT:-}" ]; then
  several_points "$@"
else
  bash "$ROOT/launch/torchrun.sh" "$@"
fi
status=$?
echo "$status" >"$STATUS_DIR/$SLURM_PROCID"
case $status in
  0 | 1 | 138) ;;
  *) exit "$status" ;;
esac
