# What the scripts for a machine with one GPU share; they source it, with their arguments:
#   SCRIPT DIR [--rehearse] [options of launch/setup.sh]
# It reads the arguments, sets up, goes to the repository's root, and leaves: out (DIR, made, absolute), rehearse
# (--rehearse or nothing), python, report (a line per step), and the functions fail, step and finish.
script=$(basename "$0")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { echo "$script: $1" >&2; exit 2; }
case ${1:-} in
  -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;;
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
# step NAME SECONDS COMMAND...: run within a time limit, keep the output, go on whatever comes. A rehearsal's machine may
# be slow and shared: its limit only ends what hangs.
step() {
  local name=$1 limit=$2 begin=$SECONDS status=0
  [ -z "$rehearse" ] || limit=$((limit * 10))
  shift 2
  echo "$script: $name ..."
  # INT, so that what is stopped says what it knows: pytest its failures.
  timeout --signal=INT --kill-after=10 "$limit" "$@" >"$out/$name.txt" 2>"$out/$name.err" || status=$?
  case $status in
    0) report+=("$name: done in $((SECONDS - begin)) s") ;;
    124 | 137) report+=("$name: FAILED, not done within $limit s ($name.txt, $name.err)") ;;
    *) report+=("$name: FAILED with status $status ($name.txt, $name.err)") ;;
  esac
}

# finish FILE...: the report, then what these hold, on the terminal and as summary.txt; the script's exit status.
finish() {
  {
    [ -z "$rehearse" ] || echo "REHEARSAL on the CPU at toy sizes: no number below means anything."
    printf '%s\n' "${report[@]}"
    for file in "$@"; do
      echo
      cat "$out/$file"
    done
  } | tee "$out/summary.txt"
  [[ ${report[*]} != *FAILED* ]]
}
