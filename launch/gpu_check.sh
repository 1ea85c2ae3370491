#!/usr/bin/env bash
# What one GPU can show of this program, in under eight minutes and without network:
#   launch/gpu_check.sh DIR [--rehearse] [options of launch/setup.sh]
# GPU tests; configs/gpu-check.yaml at EP 1 (unaccounted time, probe overhead, noise floor); the expert
# backends against a square matmul. All results land in DIR, a one-page summary last (DIR/summary.txt).
# --rehearse  on the CPU at toy sizes and without the GPU tests: tries this script, measures nothing
# Exit status: 0 everything ran, 1 something did not (the summary names it), 2 something to correct in the command.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { echo "gpu_check.sh: $1" >&2; exit 2; }
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

# step NAME SECONDS COMMAND...: run within a time limit, keep the output, go on whatever comes.
report=()
step() {
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  echo "gpu_check.sh: $name ..."
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.txt" 2>"$out/$name.err" || status=$?
  case $status in
    0) report+=("$name: done in $((SECONDS - begin)) s") ;;
    124 | 137) report+=("$name: FAILED, not done within $limit s ($name.txt, $name.err)") ;;
    *) report+=("$name: FAILED with status $status ($name.txt, $name.err)") ;;
  esac
}

experts=(--out "$out")
[ -z "$rehearse" ] || experts+=(--scale 0.03125 --tokens 512 --dtype float32 --square 256 --rounds 3)
step run 170 "$python" -m moe_ep_bench launch configs/gpu-check.yaml --out "$out/run" --nproc 1
step summary 30 "$python" -m moe_ep_bench summary "$out/run"
step experts 60 "$python" benchmarks/experts.py "${experts[@]}"
[ -n "$rehearse" ] || step tests 170 "$python" -m pytest -m gpu -q -p no:cacheprovider
step figures 30 "$python" plot_results.py "$out/run"

table=$(cat "$out/summary.txt")
rm "$out/summary.txt"
{
  [ -z "$rehearse" ] || echo "REHEARSAL on the CPU at toy sizes: no number below means anything."
  printf '%s\n' "${report[@]}"
  [ -n "$rehearse" ] || tail -n 1 "$out/tests.txt"
  echo
  cat "$out/experts.txt"
  echo
  echo "$table"
} | tee "$out/summary.txt"
[[ ${report[*]} != *FAILED* ]]
