#!/usr/bin/env bash
# The capacity-aware paper's Figure 4 on one GPU that stands in for eight, in under nine minutes and without network:
#   launch/gpu_emulate.sh DIR [--rehearse] [options of launch/setup.sh]
# configs/papers/capacity-figure4.yaml with layers that are measured: OLMoE and DeepSeek-V2-Lite at 65,536 tokens a rank,
# Mixtral at 65,536, and one Mixtral case at the paper's 524,288, in chunks. All results land in DIR, a summary last.
# --rehearse  on the CPU at toy sizes: tries this script, measures nothing
# Exit status: 0 everything ran, 1 something did not (the summary names it), 2 something to correct in the command.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { echo "gpu_emulate.sh: $1" >&2; exit 2; }
case ${1:-} in
  -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
  '' | -*) fail "expected DIR [--rehearse] [options of launch/setup.sh], got '${1:-}'" ;;
esac
out=$1
shift
rehearse=
if [ "${1:-}" = --rehearse ]; then
  rehearse=$1
  shift
fi
[ ! -e "$out" ] || { [ -d "$out" ] && [ -z "$(ls -A "$out")" ]; } || fail "$out is not a new or empty folder"
"$root/launch/setup.sh" "$@"
python=$root/.venv/bin/python
if [ -n "$rehearse" ]; then
  export CUDA_VISIBLE_DEVICES=
else
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail "torch sees no GPU here; --rehearse tries the script without one"
  export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$root"

report=()
# step COMMAND NAME SECONDS --set key=value...: one results directory, what the command prints, and its table.
step() {
  local command=$1 name=$2 limit=$3 begin=$SECONDS status=0
  shift 3
  [ -z "$rehearse" ] || set -- "$@" --set model.scale=0.03125 --set layer.dtype=float32 --set workload.tokens_per_rank=64 \
    --set workload.sequence_length=32 --set emulate.chunk_tokens=40 --set measure.iterations=1
  echo "gpu_emulate.sh: $name ..."
  timeout --kill-after=10 "$limit" "$python" -m moe_ep_bench "$command" configs/papers/capacity-figure4.yaml \
    --out "$out/$name" --set emulate.device=measured --set emulate.links=h100-nvlink4 \
    --set measure.warmup=1 --set measure.breakdown_iterations=0 "$@" \
    >"$out/$name.txt" 2>"$out/$name.err" || status=$?
  case $status in
    0) report+=("$name: done in $((SECONDS - begin)) s") ;;
    124 | 137) report+=("$name: FAILED, not done within $limit s ($name.txt, $name.err)") ;;
    *) report+=("$name: FAILED with status $status ($name.txt, $name.err)") ;;
  esac
  # `emulate` has printed it.
  [ "$command" = emulate ] ||
    "$python" -m moe_ep_bench summary "$out/$name" >>"$out/$name.txt" 2>>"$out/$name.err" || true
}

size=(--set workload.tokens_per_rank=65536 --set workload.num_batches=2 --set measure.iterations=3)
step reproduce olmoe 120 "${size[@]}" --set model.preset=olmoe-1b-7b
step reproduce deepseek-v2-lite 120 "${size[@]}" --set model.preset=deepseek-v2-lite
step reproduce mixtral 150 "${size[@]}" --set model.preset=mixtral-8x7b --set workload.skew=single_domain
step emulate mixtral-paper-size 120 --set workload.tokens_per_rank=524288 --set workload.num_batches=1 \
  --set measure.iterations=1 --set model.preset=mixtral-8x7b --set workload.skew=single_domain \
  --set 'policies=[{name: token_drop, capacity_factor: 1.5}]' --set 'claims=[]'
{
  [ -z "$rehearse" ] || echo "REHEARSAL on the CPU at toy sizes: no number below means anything."
  printf '%s\n' "${report[@]}"
  for name in olmoe deepseek-v2-lite mixtral mixtral-paper-size; do
    echo
    cat "$out/$name.txt"
  done
} | tee "$out/summary.txt"
[[ ${report[*]} != *FAILED* ]]
