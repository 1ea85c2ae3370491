#!/usr/bin/env bash
# All that one GPU can show of this program, what was never seen first, in at most ten minutes and without network:
#   launch/gpu_session.sh DIR [--minutes N] [--only STEP,...] [--rehearse] [options of launch/setup.sh]
# Every step has a time limit. The same command goes on with what is left and repeats what failed. All results land in
# DIR; DIR/summary.txt is kept up to date and printed last, how steps went at its end. results/README.md says what they
# answer. Run launch/setup.sh before, so that no time goes there; Triton needs a C compiler and Python's headers.
# --minutes   after which no step goes on (9; a rehearsal has no limit)
# --only      these steps alone, whatever the time
# --rehearse  on the CPU at toy sizes and without the GPU tests: tries this script, measures nothing
# VENV: an environment that is ready; without it launch/setup.sh makes or takes .venv.
# Exit status: 0 everything ran, 1 something did not (the summary names it), 2 something to correct in the command.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { echo "gpu_session.sh: $1" >&2; exit 2; }
case ${1:-} in
  -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;;
  '' | -*) fail "expected DIR [--minutes N] [--only STEP,...] [--rehearse] [options of launch/setup.sh], got '${1:-}'" ;;
esac
out=$1
shift
minutes=
only=
rehearse=
while :; do
  case ${1:-} in
    --minutes) minutes=${2:-}; [[ $minutes =~ ^[0-9]+$ ]] || fail "--minutes takes a whole number, not '$minutes'" ;;
    --only) only=${2:-}; [ -n "$only" ] || fail "--only takes names of steps, not ''" ;;
    --rehearse) rehearse=$1; shift; continue ;;
    *) break ;;
  esac
  shift 2
done
[ ! -e "$out" ] || [ -d "$out/steps" ] || { [ -d "$out" ] && [ -z "$(ls -A "$out")" ]; } ||
  fail "$out is neither a new or empty folder nor an earlier session's"
[ -n "${VENV:-}" ] || "$root/launch/setup.sh" "$@"
python=${VENV:-$root/.venv}/bin/python
if [ -n "$rehearse" ]; then
  export CUDA_VISIBLE_DEVICES=
else
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail "torch sees no GPU here; --rehearse tries the script without one"
  export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
fi
mkdir -p "$out/steps" "$out/policies-quick"
out=$(cd "$out" && pwd)
cd "$root"
deadline=$((SECONDS + 60 * ${minutes:-$([ -n "$rehearse" ] && echo 10000 || echo 9)}))
order=()     # names of all steps
shown=()     # of those whose output the summary holds
missing=     # something failed or was not begun
stopped=
child=
trap 'stopped=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' TERM INT

# step NAME SECONDS COMMAND...: run within a time limit, keep the output, go on whatever comes; not again once done. A
# rehearsal's machine may be slow and shared: its limit only ends what hangs.
step() {
  local name=$1 limit=$2 begin=$SECONDS status=0 left=$((deadline - SECONDS)) cut=
  shift 2
  order+=("$name")
  [ -z "$only" ] || [[ ,$only, == *,$name,* ]] || return 0
  [ -z "$rehearse" ] || limit=$((limit * 10))
  [ -z "$only" ] || left=$limit
  ! grep -qs ' done in ' "$out/steps/$name" || return 0
  if [ -n "$stopped" ] || [ "$left" -lt 10 ]; then
    echo "$name: not begun, $([ -n "$stopped" ] && echo the session was ended || echo time was up)" >"$out/steps/$name"
    missing=yes
    return 0
  fi
  [ "$left" -ge "$limit" ] || { limit=$left; cut=", when time was up"; }
  echo "gpu_session.sh: $name ..."
  # INT, so that what is stopped says what it knows: pytest its failures.
  timeout --signal=INT --kill-after=10 "$limit" "$@" >"$out/$name.txt" 2>"$out/$name.err" &
  child=$!
  wait "$child" || status=$?
  # A signal ends the wait, not what is waited for.
  [ -z "$stopped" ] || wait "$child" || status=$?
  child=
  case $status in
    0) echo "$name: done in $((SECONDS - begin)) s" ;;
    124 | 137) echo "$name: FAILED, not done within $limit s$cut ($name.txt, $name.err)" ;;
    *) echo "$name: FAILED with status $status ($name.txt, $name.err)" ;;
  esac >"$out/steps/$name"
  [ "$status" = 0 ] || missing=yes
  summary >/dev/null
}

# show NAME SECONDS COMMAND...: a step whose output the summary holds.
show() {
  shown+=("$1")
  step "$@"
}

# Results of a session are kept in the repository, or sent by mail.
size() {
  local mb
  mb=$({ du -sm --apparent-size "$out" || true; } | cut -f1)
  echo "$mb MB in $out"
  [ "$mb" -le 100 ] || du -sm --apparent-size "$out"/* | sort -n | tail -n 1 |
    sed "s|^\([0-9]*\)\t.*/|TOO LARGE: more than 100 MB. The largest, of \1 MB: |"
}

summary() {
  {
    [ -z "$rehearse" ] || echo "REHEARSAL on the CPU at toy sizes: no number below means anything."
    for name in "${shown[@]}"; do
      if [ -s "$out/$name.txt" ]; then printf '== %s\n' "$name"; cat "$out/$name.txt"; echo; fi
    done
    size
    cat "$out/provenance.txt"
    for file in "$out"/*tests.txt; do [ ! -e "$file" ] || echo "$(basename "$file"): $(tail -n 1 "$file")"; done
    for name in "${order[@]}"; do [ ! -e "$out/steps/$name" ] || cat "$out/steps/$name"; done
  } >"$out/.summary.txt"
  mv "$out/.summary.txt" "$out/summary.txt"
  cat "$out/summary.txt"
}

{
  echo "commit $(git rev-parse HEAD 2>/dev/null || echo unknown)$([ -z "$(git status --porcelain 2>/dev/null)" ] || echo ', changed'), $(date -u +%Y-%m-%dT%H:%MZ)"
  [ -n "$rehearse" ] || nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.max.sm --format=csv,noheader || true
} >>"$out/provenance.txt"

# Sizes follow the estimate of memory (moe_ep_bench/models/memory.py), of which a step may take four fifths of a GPU;
# tests/test_gpu_session.py holds all steps to it. The paper's tokens of Mixtral take 164 GB.
most_tokens=524288
memory_mib=$([ -n "$rehearse" ] || nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1 || true)
for needed_gib in 191 96 48; do
  [ "${memory_mib:-81559}" -ge $((needed_gib * 1024)) ] || most_tokens=$((most_tokens / 2))
done
[ "$most_tokens" = 524288 ] || [ -n "$rehearse" ] || echo "mixtral-paper-size: $most_tokens tokens a rank, as the paper's 524288 do not fit" \
  "${memory_mib:-81559} MiB" >>"$out/provenance.txt"

module=("$python" -m moe_ep_bench)
small=()      # of decode steps
tiny=()       # of emulated layers
replayed=(--set layer.experts=decode --set layer.cuda_graph=true)
graphs=(--set sweep.layer.cuda_graph=[true] --set sweep.workload.num_tokens=[16,512])
bfloat16=(--set layer.dtype=bfloat16)  # of configs whose table is in 4 bits
if [ -n "$rehearse" ]; then
  replayed=(--set layer.experts=decode)
  graphs=(--set sweep.workload.num_tokens=[1,4])
  bfloat16=()
  small=(--set model.scale=0.03125 --set layer.dtype=float32 --set workload.num_batches=1 --set measure.iterations=1
    --set measure.breakdown_iterations=1 --set measure.warmup=1 --set measure.flush_l2=false)
  tiny=(--set model.scale=0.03125 --set layer.dtype=float32 --set workload.tokens_per_rank=64
    --set workload.sequence_length=32 --set measure.iterations=1
    --set workload.skew=single_domain --set workload.num_batches=1)
fi

# emulate COMMAND NAME SECONDS OPTIONS...: layers of Figure 4, measured on this GPU in the place of eight. Of the traffics
# single_domain alone, three draws of it where time allows: making 524,288 tokens takes a core 20 s.
emulate() {
  local command=$1 name=$2 limit=$3
  shift 3
  show "$name" "$limit" "${module[@]}" "$command" configs/papers/capacity-figure4.yaml --out "$out/$name" \
    --set emulate.device=measured --set emulate.links=h100-nvlink4 --set measure.warmup=1 \
    --set measure.breakdown_iterations=0 --set workload.skew=single_domain --set workload.num_batches=1 "$@" "${tiny[@]}"
  # `emulate` has printed it.
  [ "$command" = emulate ] || show "$name-table" 30 "${module[@]}" show "$out/$name"
}

# table NAME SECONDS OPTIONS...: a paper's decode table from CUDA graphs, of one draw.
table() {
  local name=$1 limit=$2
  shift 2
  show "$name" "$limit" "${module[@]}" papers "configs/papers/$name.yaml" --nproc 1 --out "$out/$name" \
    --set workload.num_batches=10 --set 'sweep.workload.seed=[1]' "${replayed[@]}" "${small[@]}" "$@"
}

# decode NAME SECONDS OPTIONS...: a config of decode steps, and what it says.
decode() {
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "${module[@]}" run "configs/$name.yaml" --nproc 1 --out "$out/$name" "${small[@]}" "$@"
  show "$name-table" 30 "${module[@]}" show "$out/$name"
}

# virtual NAME SECONDS OPTIONS...: the quickstart's layer, measured on this GPU in the place of eight.
virtual() {
  local name=$1 limit=$2
  shift 2
  show "$name" "$limit" "${module[@]}" emulate configs/quickstart.yaml --out "$out/$name" --set layer.ep_size=8 \
    --set emulate.device=measured --set emulate.links=h100-nvlink4 --set workload.num_batches=2 \
    --set measure.breakdown_iterations=1 "$@" "${tiny[@]}" ${rehearse:+--set layer.ep_size=2}
}

waiting='import sys; from pathlib import Path; import pandas as pd
for path in sorted(Path(sys.argv[1]).glob("*/cases/*.parquet")):
    rows = pd.read_parquet(path).query("phase == \"total\" and kind == \"plain\"")
    columns = ["time_us", "host_us", "host_busy_us", "sm_clock_mhz"]
    case = (rows["policy"] + " " + rows["policy_params"]).str.slice(0, 60)
    print(*path.parts[-3::2], rows.groupby(case)[columns].median().round(1).to_string(), sep="\n")'
measured=(--set workload.tokens_per_rank=65536 --set measure.iterations=3 --set 'sweep.recorded=[]')
one_draw=(--set 'sweep.workload.seed=[1]')
draws=(--set 'sweep.workload.seed=[1,2,3]')
# Recorded layers that were named before any was measured, where recordings/ is there.
recorded=(--set 'sweep.workload.layer=[3,9,15,21]' --set
  'sweep.workload.trace=[recordings/deepseek-v2-lite-intent.safetensors,recordings/deepseek-v2-lite-summary.safetensors]')

# What everything else rests on. Most of a test's time goes into compiling its kernels, on one core: so many at once.
# NGC images set the variable; float32 must be float32 all the same.
[ -n "$rehearse" ] || step tests 200 env TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 "$python" -m pytest -m gpu -q -n "$(nproc)" \
  --maxprocesses 14 --dist loadgroup -p no:cacheprovider -p no:benchmark tests/test_gpu.py tests/test_forms.py tests/test_decode_experts.py
# Decode steps, eager and from graphs; the graphs in a second job, and what two jobs differ by.
decode decode-graph 130 ${rehearse:+--set sweep.workload.num_tokens=[1,4]}
step decode-again 60 "${module[@]}" run configs/decode-graph.yaml --nproc 1 --out "$out/decode-again" "${small[@]}" \
  "${graphs[@]}"
show decode-compared 20 "${module[@]}" compare "$out/decode-graph" "$out/decode-again"
# One GPU in the place of eight, with many tokens and with few.
virtual quickstart 50
virtual few-tokens 40 --set workload.tokens_per_rank=64
# Native against native, unaccounted time and probe overhead, of layers at true size.
step run 80 "${module[@]}" run configs/gpu-check.yaml --out "$out/run" --nproc 1
show run-table 30 "${module[@]}" show "$out/run"
# Are cases that take turns as fast as each is alone, on a GPU that is warm with it?
show back-to-back 70 "$python" benchmarks/back_to_back.py --out "$out" $rehearse
decode model-decode-graph 50 --set whole.num_layers=4 --set workload.num_batches=3 --set measure.iterations=5 \
  --set sweep.workload.tokens_per_rank=[16] ${rehearse:+--set whole.num_layers=2 --set whole.context_length=16}
# What the GPU takes of each case, and the host with and without waiting for it.
show waiting 20 "$python" -c "$waiting" "$out"
virtual budget-drop 50 --set 'policies=[{name: topk}, {name: budget_drop, max_lost_mass: 0.01}]'
# What time is left for, here or when the command is given again.
decode decode-padding 40 "${replayed[@]}" ${rehearse:+--set sweep.workload.padding_per_rank=[4]}
table xshare-table4 100 "${bfloat16[@]}"
table xshare-table3 100 "${bfloat16[@]}"
table oea-table5 100 ${rehearse:+--set sweep.workload.num_tokens=[8] --set sweep.workload.peak_load=[6.4]}
emulate papers mixtral 150 "${measured[@]}" "${one_draw[@]}" --set model.preset=mixtral-8x7b
show policies 240 "$python" benchmarks/policies.py --gpu --out "$out" $rehearse ${rehearse:+--rounds 1}
# What a GPU has shown before.
show device 260 "$python" benchmarks/device.py --out "$out" $rehearse
show policies-quick 100 "$python" benchmarks/policies.py --gpu --quick --out "$out/policies-quick" $rehearse ${rehearse:+--rounds 1}
table oea-table3 130 ${rehearse:+--set sweep.workload.num_tokens=[8] --set sweep.workload.peak_load=[6.4]}
emulate papers olmoe 180 "${measured[@]}" "${draws[@]}" --set model.preset=olmoe-1b-7b
emulate papers deepseek-v2-lite 200 "${draws[@]}" "${recorded[@]}" --set workload.tokens_per_rank=16384 --set measure.iterations=3 \
  --set model.preset=deepseek-v2-lite
emulate emulate mixtral-paper-size 120 "${measured[@]}" "${one_draw[@]}" --set "workload.tokens_per_rank=$most_tokens" \
  --set measure.iterations=1 --set model.preset=mixtral-8x7b \
  --set 'policies=[{name: token_drop, capacity_factor: 1.5}]' --set 'claims=[]'
for name in run decode-graph; do step "$name-figures" 30 "$python" plot_results.py "$out/$name"; done

[ -z "$only" ] || for name in ${only//,/ }; do
  [[ " ${order[*]} " == *" $name "* ]] || fail "--only: expected some of ${order[*]}, got $name"
done
summary
[ -z "$missing" ]
