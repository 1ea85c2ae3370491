#!/usr/bin/env bash
# What one GPU can show of this program, in under nine minutes and without network:
#   launch/gpu_check.sh DIR [--rehearse] [options of launch/setup.sh]
# GPU tests; configs/gpu-check.yaml at EP 1 (unaccounted time, probe overhead, noise floor); the expert backends against
# a square matmul; routing by Triton against torch at one prefill and one decode shape (gpu_kernels.sh has all shapes).
# All results land in DIR, a summary last (DIR/summary.txt). Where time counts, run launch/setup.sh before.
# --rehearse  on the CPU at toy sizes and without the GPU tests: tries this script, measures nothing
# Exit status: 0 everything ran, 1 something did not (the summary names it), 2 something to correct in the command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpu_common.sh"

experts=(--out "$out")
[ -z "$rehearse" ] || experts+=(--scale 0.03125 --tokens 512 --dtype float32 --square 256 --rounds 3)
step run 170 "$python" -m moe_ep_bench run configs/gpu-check.yaml --out "$out/run" --nproc 1
step table 30 "$python" -m moe_ep_bench show "$out/run"
step experts 60 "$python" benchmarks/experts.py "${experts[@]}"
[ -n "$rehearse" ] || step tests 150 "$python" -m pytest -m gpu tests/test_gpu.py -q -p no:cacheprovider
step policies 100 "$python" benchmarks/policies_gpu.py --quick --out "$out" $rehearse ${rehearse:+--rounds 1}
step figures 30 "$python" plot_results.py "$out/run"

[ -n "$rehearse" ] || report+=("$(tail -n 1 "$out/tests.txt")")
finish experts.txt policies.txt table.txt
