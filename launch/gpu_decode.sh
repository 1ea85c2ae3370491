#!/usr/bin/env bash
# What decode steps take on one GPU, over the experts that they activate, in under nine minutes and without network:
#   launch/gpu_decode.sh DIR [--rehearse] [options of launch/setup.sh]
# benchmarks/decode_experts.py: the decode kernels beside grouped GEMMs, and from how many tokens on those win. OEA's and
# XShare's tables from CUDA graphs; layers run eagerly beside the same replayed, 1 to 512 tokens a step; the same of four
# layers of a whole model; padding; the GPU tests of graphs and of the decode kernels. All results land in DIR, a summary
# last. Where time counts, run launch/setup.sh before. Triton needs a C compiler and Python's headers.
# --rehearse  on the CPU at toy sizes, without graphs and GPU tests: tries this script, measures nothing
# Exit status: 0 everything ran, 1 something did not (the summary names it), 2 something to correct in the command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpu_common.sh"

replayed=(--set layer.dispatcher=allgather --set layer.experts=decode --set layer.cuda_graph=true)
small=()
if [ -n "$rehearse" ]; then
  replayed=(--set layer.dispatcher=allgather --set layer.experts=decode)
  small=(--set model.scale=0.03125 --set layer.dtype=float32 --set workload.num_batches=1 --set measure.iterations=1
    --set measure.breakdown_iterations=1 --set measure.max_warmup=1 --set measure.flush_l2=false)
fi

# table NAME SECONDS: a paper's table, timed here.
table() {
  local batches=(--set workload.num_batches=10)
  step "$1" "$2" "$python" -m moe_ep_bench papers "configs/papers/$1.yaml" --nproc 1 --out "$out/$1" \
    "${batches[@]}" "${replayed[@]}" "${small[@]}"
}

# steps NAME SECONDS OPTIONS...: a config of decode steps, what it says, and its figures.
steps() {
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$python" -m moe_ep_bench run "configs/$name.yaml" --nproc 1 --out "$out/$name" \
    "${small[@]}" "$@"
  step "$name-says" 30 "$python" -m moe_ep_bench show "$out/$name"
  step "$name-figures" 30 "$python" plot_results.py "$out/$name"
}

[ -n "$rehearse" ] || step tests 80 "$python" -m pytest -m gpu -q -p no:cacheprovider tests/test_decode_experts.py \
  tests/test_gpu.py -k 'decode or gpu_equals'
step experts 80 "$python" benchmarks/decode_experts.py --out "$out" $rehearse ${rehearse:+--rounds 1}
table oea-table3 70
steps decode-graph 110 ${rehearse:+--set sweep.workload.num_tokens=[1,4]}
step decode-fit 20 "$python" -m moe_ep_bench calibrate --from "$out/decode-graph"
steps model-decode-graph 50 --set whole.num_layers=4 --set workload.num_batches=3 --set measure.iterations=5 \
  --set sweep.workload.tokens_per_rank=[16] ${rehearse:+--set whole.num_layers=2 --set whole.context_length=16}
table oea-table5 40
table xshare-table3 40
table xshare-table4 40
steps decode-padding 40 "${replayed[@]}" ${rehearse:+--set sweep.workload.padding_per_rank=[4]}

[ -n "$rehearse" ] || report+=("$(tail -n 1 "$out/tests.txt")")
finish experts.txt oea-table3.txt decode-graph-says.txt decode-fit.txt model-decode-graph-says.txt oea-table5.txt xshare-table3.txt \
  xshare-table4.txt decode-padding-says.txt
