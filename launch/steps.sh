# Steps with time limits that leave a folder and a summary, for scripts that are given a machine for minutes. Sourced, with
# the script's own arguments, after `set -euo pipefail`; the script's head is its help. Afterwards there are $root, $out,
# $python, $rehearse, $only, $minutes and the functions step, show and finish.
# Before, a script may set ONE_GPU, to see the first GPU alone, and most_minutes, in place of 9.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=$(basename "$0")
fail() { echo "$script: $1" >&2; exit 2; }
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
[ -n "${VENV:-}" ] || "$root/launch/setup.sh" --with test "$@"
python=${VENV:-$root/.venv}/bin/python
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}  # An environment that is ready need not have this package.
if [ -n "$rehearse" ]; then
  export CUDA_VISIBLE_DEVICES=
else
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail "torch sees no GPU here; --rehearse tries the script without one"
  [ -z "${ONE_GPU:-}" ] || export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
fi
mkdir -p "$out/steps"
out=$(cd "$out" && pwd)
cd "$root"
deadline=$((SECONDS + 60 * ${minutes:-$([ -n "$rehearse" ] && echo 10000 || echo "${most_minutes:-9}")}))
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
  echo "$script: $name ..."
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

# The end of a script: the summary, and the exit status.
finish() {
  [ -z "$only" ] || for name in ${only//,/ }; do
    [[ " ${order[*]} " == *" $name "* ]] || fail "--only: expected some of ${order[*]}, got $name"
  done
  summary
  [ -z "$missing" ]
}
