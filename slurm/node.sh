#!/usr/bin/env bash
# One node of a job: job.sh's srun starts it on each.
# What all nodes agreed on is a status in a file and no failure of the task: srun kills the other tasks at the first
# failure, and they would end with a status of their own while they were ending in order. A task that fails has lost
# its ranks, or is alone with a mistake that only its node can see, and then the others must not wait for it.
set -uo pipefail
# For `run` and its ranks, which handle it.
trap '' USR1
# `run` gets this as well, and what it does then is worth waiting for.
trap : TERM

bash "$ROOT/launch/torchrun.sh" "$@"
status=$?
echo "$status" >"$STATUS_DIR/$SLURM_PROCID"
case $status in
  0 | 1 | 138) ;;
  *) exit "$status" ;;
esac
