#!/usr/bin/env bash
# What decode steps take on one GPU, over the experts that they activate, in under nine minutes and without network:
#   launch/gpu_decode.sh DIR [--rehearse] [options of launch/setup.sh]
# benchmarks/decode_experts.py: the decode kernels beside grouped GEMMs, from which tokens on those win. Layers run eagerly
# beside the same replayed from CUDA graphs, 1 to 512 tokens a step; padding; requests with draft tokens; OEA's and
# XShare's tables; the GPU tests of decode. All results land in DIR, a summary last. Where time counts, run
# launch/setup.sh before. Triton needs a C compiler and Python's headers.
# --rehearse  on the CPU at toy sizes and without graphs and GPU tests: tries this script, measures nothing
# Exit status: 0 everything ran, 1 something did not (the summary names it), 2 something to correct in the command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpu_common.sh"

small=()
[ -z "$rehearse" ] || small=(--set workload.num_batches=1 --set measure.iterations=1 --set measure.breakdown_iterations=1
  --set measure.max_warmup=1 --set measure.flush_l2=false --set model.scale=0.03125)

# measured NAME SECONDS CONFIG OPTIONS...: run it and print its table.
measured() {
  local name=$1 limit=$2 config=$3
  shift 3
  step "$name" "$limit" "$python" -m moe_ep_bench launch "$config" --nproc 1 --out "$out/$name" "${small[@]}" "$@"
  step "$name-table" 30 "$python" -m moe_ep_bench summary "$out/$name"
  step "$name-figures" 30 "$python" plot_results.py "$out/$name"
}

step experts 90 "$python" benchmarks/decode_experts.py --out "$out" $rehearse ${rehearse:+--rounds 1}
measured graph 130 configs/decode-graph.yaml ${rehearse:+--set sweep.workload.num_tokens=[1,4]}
measured speculative 50 configs/decode-speculative.yaml
finish experts.txt graph-table.txt speculative-table.txt
