#!/usr/bin/env bash
# Is this program right on this node, and may a campaign start? All GPUs, at most ten minutes, no network:
#   launch/first_node.sh DIR [--minutes N] [--only STEP,...] [--rehearse] [options of launch/setup.sh]
# Every step has a time limit. The same command goes on with what is left and repeats what failed. The last lines say GO,
# or what failed and which files to send: DIR/summary.txt, and DIR/STEP.err of what failed. Run launch/setup.sh before.
# --minutes   after which no step goes on (10; a rehearsal has no limit)
# --only      these steps alone, whatever the time
# --rehearse  on two CPU ranks at toy sizes: tries this script, measures nothing
# NPROC: ranks (default: all GPUs). VENV: an environment that is ready; without it launch/setup.sh makes or takes .venv.
# Exit status: 0 GO, 1 something failed or was not begun, 2 something to correct in the command.
set -euo pipefail
most_minutes=10
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

module=("$python" -m moe_ep_bench)
ranks=${NPROC:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
small=(--set workload.num_batches=2 --set measure.iterations=3)
messages=()
if [ -n "$rehearse" ]; then
  ranks=2
  small=(--set model.scale=0.03125 --set workload.tokens_per_rank=256 --set workload.num_batches=1
    --set measure.iterations=1 --set measure.breakdown_iterations=1 --set measure.warmup=1)
  messages=(--max-bytes 1048576 --repetitions 4)
fi
two='policies=[{name: topk}, {name: token_drop, capacity_factor: 1.0}]'

# What a rank computes, on two of them: equal to a dense layer, whatever the policy.
held='import json, sys
found = json.load(open(sys.argv[1]))
wrong = {name: error for name, error in found.items() if error}
print(f"{len(found) - len(wrong)} laws of layers hold on two ranks, {len(wrong)} do not")
for name, error in wrong.items(): print(name, error, sep="\n")
sys.exit(bool(wrong) or not found)'
laws='"$0" -m torch.distributed.run --standalone --nproc-per-node=2 tests/laws.py layer "$1/laws.json" && "$0" -c "$2" "$1/laws.json"'
# A rank that is killed costs its case alone: status 1, one case lost, all others measured.
killed='status=0; rm -rf "$1"
PYTHONPATH=tests/faults:$PYTHONPATH MOE_EP_BENCH_FAULTS=token_drop=kill "$0" -m moe_ep_bench run configs/quickstart.yaml --out "$@" || status=$?
[ "$status" = 1 ] || { echo "expected status 1 of a run that lost a rank, got $status"; exit 1; }
"$0" -m moe_ep_bench show "$1" | tee "$1.shown"; grep -q ", 1 not (1 failed)" "$1.shown"'

show doctor 60 "${module[@]}" doctor --nproc "$ranks" --out "$out"
show laws 120 bash -c "$laws" "$python" "$out" "$held"
show calibrate 90 "${module[@]}" calibrate --nproc "$ranks" --out "$out/links.yaml" "${messages[@]}"
step quickstart 150 "${module[@]}" run configs/quickstart.yaml --nproc "$ranks" --out "$out/quickstart" "${small[@]}"
show quickstart-table 30 "${module[@]}" show "$out/quickstart"
show validate 150 "${module[@]}" validate configs/quickstart.yaml --nproc "$ranks" --out "$out/validate" --set "emulate.links=$out/links.yaml" \
  "${small[@]}" --set "$two"
show killed 120 bash -c "$killed" "$python" "$out/killed" --nproc "$ranks" --force "${small[@]}" --set "$two" --set measure.timeout_s=60

status=0
finish || status=$?
failed=$(cd "$out/steps" && grep -L " done in " -- * 2>/dev/null | tr '\n' ' ' || true)
if [ "$status" = 0 ] && [ -z "$only" ]; then
  echo "GO: every step ran on $ranks ranks"
elif [ "$status" != 0 ]; then
  echo "NO GO: ${failed% }; send $out/summary.txt and the .err of these steps"
fi
exit "$status"
