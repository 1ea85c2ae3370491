#!/usr/bin/env bash
# Measure one config on this node's GPUs (or CPU cores), or on many nodes:
#   launch/torchrun.sh CONFIG [--out DIR] [--set key=value] [--dry-run] [--force]
# Started once per node. Several nodes: NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT tell them apart.
# NPROC: ranks per node (default: all GPUs; without any, one CPU rank per core, 2 to 4).
# Restarts the job when a process group is lost, and resumes an interrupted results directory.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/setup.sh"
nodes=(${NPROC:+--nproc "$NPROC"})
if [ "${NNODES:-1}" -gt 1 ]; then
  : "${NODE_RANK:?NNODES is above 1: set NODE_RANK (0 to NNODES - 1) on each node}"
  : "${MASTER_ADDR:?NNODES is above 1: set MASTER_ADDR to the host of node 0}"
  nodes+=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master "$MASTER_ADDR:${MASTER_PORT:-29400}")
fi
exec "$root/.venv/bin/python" -m moe_ep_bench launch "${nodes[@]}" "$@"
