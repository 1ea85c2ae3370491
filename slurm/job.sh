#!/usr/bin/env bash
# What bench.sbatch and sweep.sbatch run on the first node of their job: one task per node, each starting its ranks.
#   slurm/job.sh CONFIG [--out DIR] [options of launch/torchrun.sh]
# Exit status: that of `moe-ep-bench run` (0 all measured, 1 some cases failed, 2 something to correct, 75 ranks
# lost, 138 time was up between two comparisons); above 128 also what a signal or Slurm ended.
set -uo pipefail

# Knobs; all can be given in the environment as well (sbatch --export=ALL,NPROC=4 ...).
export ROOT=${ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}   # this repository, on a file system that all nodes share
export NPROC=${NPROC:-}                          # ranks per node; empty: all GPUs, without any one per core, 2 to 4
export VENV=${VENV:-}                            # an environment that is ready; empty: .venv, made before (launch/setup.sh)
REQUEUES=${REQUEUES:-0}                          # how often a job may requeue itself when time is up or a node is lost
SRUN_OPTIONS=${SRUN_OPTIONS:-}                   # e.g. a container's, or "apptainer exec ...": docs/running.md

# SITE: modules that nodes need, and the network that NCCL and gloo (agreement between ranks) use. What sbatch was
# given in its environment reaches all ranks as well, and conditions/ of the results hold it.
# module load cuda
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5_0,mlx5_1 NCCL_IB_GID_INDEX=3 NCCL_CROSS_NIC=0
# SITE: in an NGC container (it brings torch, Transformer Engine and Apex) make .venv once before, inside it:
#   srun --nodes=1 --container-image=... --container-mounts=$PWD:$PWD --container-workdir=$PWD \
#     launch/setup.sh --system-torch
# and then give the same three options in SRUN_OPTIONS.

cd "$ROOT" || exit 2
[ -f launch/torchrun.sh ] || { echo "job.sh: ROOT=$ROOT is not this repository; submit from its root" >&2; exit 2; }
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
# Where the tasks leave their statuses: srun itself gives the highest, be it only of a task that it killed.
# What is left where this script's own node was lost.
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || rm -rf "$ROOT/.slurm-job-$SLURM_JOB_ID."*
STATUS_DIR=$(mktemp -d "$ROOT/.slurm-job-$SLURM_JOB_ID.XXXX") || exit 2
export STATUS_DIR
trap 'rm -rf "$STATUS_DIR"' EXIT
# scancel and the end of time reach the tasks as well; this script waits for them.
trap : TERM
# srun reads this too, and a 0 beside --gres would leave the task without the job's GPUs.
[ "${SLURM_GPUS_PER_NODE:-0}" != 0 ] || unset SLURM_GPUS_PER_NODE

# The task's cores: srun does not take them over from sbatch since Slurm 22.05, and would give it one.
cores=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-}}
# shellcheck disable=SC2086  # several options in one variable
srun --kill-on-bad-exit=1 --ntasks-per-node=1 --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
  ${cores:+--cpus-per-task="$cores"} $SRUN_OPTIONS bash "$ROOT/slurm/node.sh" "$@" &
srun=$!
# A signal ends a wait, not what is waited for.
while :; do
  wait "$srun"
  status=$?
  kill -0 "$srun" 2>/dev/null || break
done
# A mistake, be it on one node only, is what the user must see; else what the nodes agreed on.
if grep -qx 2 "$STATUS_DIR"/* 2>/dev/null; then
  status=2
elif [ "$status" = 0 ]; then
  status=$(cat "$STATUS_DIR/0" 2>/dev/null || echo 75)
fi

case $status in
  138) why="time is up" ;;
  75 | 137) why="a node or its ranks were lost (status $status)" ;;
  *) why= ;;
esac
if [ -n "$why" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$REQUEUES" ]; then
  echo "job.sh: $why; requeueing job $SLURM_JOB_ID, which goes on with what is left" >&2
  scontrol requeue "$SLURM_JOB_ID" && exit 0
  scontrol --oneliner show job "$SLURM_JOB_ID" | grep -q ' Requeue=0 ' &&
    echo "job.sh: this job may not be requeued (--requeue lets it); submit it again for what is left" >&2
fi
exit "$status"
