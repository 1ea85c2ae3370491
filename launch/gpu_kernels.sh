#!/usr/bin/env bash
# What routing by each policy costs on one GPU, in under nine minutes and without network:
#   launch/gpu_kernels.sh DIR [--rehearse] [options of launch/setup.sh]
# benchmarks/policies_gpu.py: Triton's kernels against torch and the published forms, prefill and decode, inside CUDA
# graphs too, the capacity policies kernel by kernel; then the GPU tests of routing. All results land in DIR, a summary
# last. Where time counts, run launch/setup.sh before. Triton needs a C compiler and Python's headers.
# --rehearse  on the CPU at toy sizes and without the GPU tests: tries this script, measures nothing
# Exit status: 0 everything ran, 1 something did not (the summary names it), 2 something to correct in the command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpu_common.sh"

step policies 240 "$python" benchmarks/policies_gpu.py --out "$out" $rehearse ${rehearse:+--rounds 1}

# Most of a test's time goes into compiling its kernels, on one core: so several at once, each with a part of the tests.
tests() {
  local part pids=() status=0
  for part in 1x64 16x128 777x60 3001x256 'kind or largest' graph; do
    "$python" -m pytest -m gpu tests/test_gpu_kernels.py -v -p no:cacheprovider --maxfail=20 -k "$part" \
      >"$out/tests-${part%% *}.txt" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  return $status
}
if [ -z "$rehearse" ]; then
  export -f tests
  export python out
  step tests 290 bash -c tests
  for file in "$out"/tests-*.txt; do report+=("$(basename "$file" .txt): $(tail -n 1 "$file")"); done
fi
finish policies.txt
