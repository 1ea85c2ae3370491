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
ONE_GPU=yes
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
mkdir -p "$out/policies-quick"

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
# Transformer Engine issues 64 experts one by one, which takes a host 5 to 9 ms: so many tokens keep the GPU busy for longer.
te=(--set layer.experts=te --set 'sweep.layer.dtype=[bfloat16,fp8_block]' --set workload.num_tokens=131072 --set workload.num_batches=1)
if [ -n "$rehearse" ]; then
  replayed=(--set layer.experts=decode)
  graphs=(--set sweep.workload.num_tokens=[1,4])
  bfloat16=()
  te=(--set layer.experts=sequential)
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
    rows = pd.read_parquet(path)
    if "time_us" not in rows: continue  # ranks that shared a device were not timed
    rows = rows.query("phase == \"total\" and kind == \"plain\"")
    columns = ["time_us", "host_us", "host_busy_us", "sm_clock_mhz"]
    case = (rows["policy"] + " " + rows["policy_params"]).str.slice(0, 60)
    print(*path.parts[-3::2], rows.groupby(case)[columns].median().round(1).to_string(), sep="\n")'
shared=(env MOE_EP_BENCH_MPS=0 "$python" -m pytest -m gpu -q -n 6 -p no:cacheprovider -p no:benchmark tests/test_shared_gpu.py)
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
# Transformer Engine's layers where it is, in bfloat16 and in FP8.
if [ -n "$rehearse" ] || "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("transformer_engine") is None)'; then
  step te 150 "${module[@]}" run configs/gpu-check.yaml --out "$out/te" --nproc 1 "${te[@]}"
  show te-table 30 "${module[@]}" show "$out/te"
  show published-layer 90 "${module[@]}" emulate configs/published-layer.yaml --out "$out/published-layer"
fi
# Ranks that share this GPU by MPS, where it is; then in turns: every first fault of several.
show shared-ranks 90 "${module[@]}" run configs/quickstart.yaml --share-gpu ${rehearse:+--staged} --nproc "$([ -n "$rehearse" ] && echo 2 || echo 4)" \
  --out "$out/shared-ranks" --set workload.tokens_per_rank=2048 --set workload.num_batches=1 "${tiny[@]}"
[ -n "$rehearse" ] || step shared-tests 240 "${shared[@]}" -k "shared and not staged"
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
[ -n "$rehearse" ] || step shared-staged 150 "${shared[@]}" -k staged
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

finish
