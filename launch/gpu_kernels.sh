#!/usr/bin/env bash
# What routing by each policy costs on one GPU, in under nine minutes and without network:
#   launch/gpu_kernels.sh DIR [--rehearse] [options of launch/setup.sh]
# benchmarks/policies_gpu.py: Triton's kernels against torch and the published forms, prefill and decode, inside CUDA
# graphs too, the capacity policies kernel by kernel; then the GPU tests of routing. All results land in DIR, a summary last.
# --rehearse  on the CPU at toy sizes and without the GPU tests: tries this script, measures nothing
# Exit status: 0 everything ran, 1 something did not (the summary names it), 2 something to correct in the command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpu_common.sh"

step policies 240 "$python" benchmarks/policies_gpu.py --out "$out" $rehearse ${rehearse:+--rounds 1}
if [ -z "$rehearse" ]; then
  step tests 290 "$python" -m pytest -m gpu tests/test_gpu_kernels.py -q -p no:cacheprovider
  report+=("$(tail -n 1 "$out/tests.txt")")
fi
finish policies.txt
