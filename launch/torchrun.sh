#!/usr/bin/env bash
# Measure one config on this node's GPUs (or CPU cores), or on many nodes, by torchrun:
#   launch/torchrun.sh CONFIG [--out DIR] [--set key=value] [--point I] [--dry-run] [--force] [--cpu]
# Started once per node. Several nodes: NNODES, MASTER_ADDR and MASTER_PORT (of node 0) tell them where to meet; in a
# Slurm step of one task per node, those that are not given come from Slurm. Any other option of torchrun is a variable
# of its own, PET_MAX_RESTARTS for instance.
# NPROC: ranks per node (default: all GPUs; without any, one CPU rank per core, 2 to 4).
# VENV: an environment that is ready; without it launch/setup.sh makes or takes .venv. In a Slurm job it makes none.
# SIGTERM ends the job at once, SIGUSR1 after what it is measuring; the same command goes on with what is left.
set -euo pipefail
# Whoever measures handles it; until that has started, nothing is there to be ended.
trap '' USR1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { echo "torchrun.sh: $1" >&2; exit 2; }

if [ -n "${VENV:-}" ]; then
  [ -x "$VENV/bin/python" ] || fail "VENV=$VENV has no bin/python; expected a virtual environment, or none given"
else
  # A job's nodes may have no network, and would all wait for pip.
  "$root/launch/setup.sh" ${SLURM_JOB_ID:+--check}
fi
if [ -z "${NNODES:-}" ] && [ "${SLURM_STEP_NUM_NODES:-1}" -gt 1 ]; then
  [ "$SLURM_STEP_NUM_TASKS" = "$SLURM_STEP_NUM_NODES" ] ||
    fail "$SLURM_STEP_NUM_TASKS tasks on $SLURM_STEP_NUM_NODES nodes; expected one per node (srun --ntasks-per-node=1)"
  NNODES=$SLURM_STEP_NUM_NODES
  # In a container there may be no scontrol; slurm/job.sh gives the host from outside.
  MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)}
  # Jobs may share a node; below the ports that systems give out themselves.
  MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
  PET_RDZV_ID=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
fi
# Homes are shared: ranks of all nodes, or of all tasks of an array, would compile into one folder at once.
if [ "${NNODES:-1}" -gt 1 ] || [ -n "${SLURM_JOB_ID:-}" ]; then
  export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/moe-ep-bench-triton-$UID}
fi
if [ "${NNODES:-1}" -gt 1 ]; then
  : "${MASTER_ADDR:?NNODES is above 1: set MASTER_ADDR to the host of node 0}"
  export PET_NNODES=$NNODES PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=$MASTER_ADDR:${MASTER_PORT:-29400}
  export PET_RDZV_ID=${PET_RDZV_ID:-moe-ep-bench}
fi
exec "${VENV:-$root/.venv}/bin/python" -m moe_ep_bench run ${NPROC:+--nproc "$NPROC"} "$@"
