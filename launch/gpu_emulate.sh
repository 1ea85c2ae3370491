#!/usr/bin/env bash
# The capacity-aware paper's Figure 4 on one GPU that stands in for eight, in under nine minutes and without network:
#   launch/gpu_emulate.sh DIR [--rehearse] [options of launch/setup.sh]
# configs/papers/capacity-figure4.yaml with layers that are measured: OLMoE and DeepSeek-V2-Lite at 65,536 tokens a rank,
# Mixtral at 65,536, and one Mixtral case at the paper's 524,288, in chunks. All results land in DIR, a summary last.
# --rehearse  on the CPU at toy sizes: tries this script, measures nothing
# Exit status: 0 everything ran, 1 something did not (the summary names it), 2 something to correct in the command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpu_common.sh"

# emulate COMMAND NAME SECONDS --set key=value...: one results directory, what the command prints, and its table.
emulate() {
  local command=$1 name=$2 limit=$3
  shift 3
  [ -z "$rehearse" ] || set -- "$@" --set model.scale=0.03125 --set layer.dtype=float32 --set workload.tokens_per_rank=64 \
    --set workload.sequence_length=32 --set emulate.chunk_tokens=40 --set measure.iterations=1
  step "$name" "$limit" "$python" -m moe_ep_bench "$command" configs/papers/capacity-figure4.yaml \
    --out "$out/$name" --set emulate.device=measured --set emulate.links=h100-nvlink4 \
    --set measure.warmup=1 --set measure.breakdown_iterations=0 "$@"
  # `emulate` has printed it.
  [ "$command" = emulate ] ||
    "$python" -m moe_ep_bench show "$out/$name" >>"$out/$name.txt" 2>>"$out/$name.err" || true
}

size=(--set workload.tokens_per_rank=65536 --set workload.num_batches=2 --set measure.iterations=3)
emulate papers olmoe 120 "${size[@]}" --set model.preset=olmoe-1b-7b
emulate papers deepseek-v2-lite 120 "${size[@]}" --set model.preset=deepseek-v2-lite
emulate papers mixtral 150 "${size[@]}" --set model.preset=mixtral-8x7b --set workload.skew=single_domain
emulate emulate mixtral-paper-size 120 --set workload.tokens_per_rank=524288 --set workload.num_batches=1 \
  --set measure.iterations=1 --set model.preset=mixtral-8x7b --set workload.skew=single_domain \
  --set 'policies=[{name: token_drop, capacity_factor: 1.5}]' --set 'claims=[]'
finish olmoe.txt deepseek-v2-lite.txt mixtral.txt mixtral-paper-size.txt
