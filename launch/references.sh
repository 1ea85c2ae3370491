#!/usr/bin/env bash
# Make results/reference/ anew, as far as this machine can: launch/references.sh [--measured | --redraw] [--only NAME,...]
# --measured  also what CPU ranks measure: on an idle machine with two cores
# --redraw    nothing is made: tables and figures of the results that are there, by the package of today
# --only      some results alone, by their names in results/reference/
# Modelled results take about two hours on two cores. A result is made in results/references/ and replaces the old one
# when it is whole; one that the package of today has made is skipped, so the same command goes on where it stopped.
# Recordings are read from recordings/ (docs/workloads.md). Results of a GPU are launch/gpu_session.sh's.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { echo "references.sh: $1" >&2; exit 2; }
modelled="lossless whatif-skew balance-recorded-modelled traffic-shift whole-capacity-modelled clusters tables papers-modelled atlas"
of_ranks="quickstart-2cpu deepseek-v2-lite-recorded-2cpu decode-2cpu"
measured=
redraw=
only=
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    --measured) measured=yes ;;
    --redraw) redraw=yes ;;
    --only) only=${2:-}; [ -n "$only" ] || fail "--only takes names of results, not ''"; shift ;;
    *) fail "unknown argument '$1'; expected --measured, --redraw or --only NAME,..." ;;
  esac
  shift
done
names="$modelled${measured:+ $of_ranks}"
[ -z "$redraw" ] || names=$(cd "$root/results/reference" && dirname -- */run.json | xargs)
for name in ${only//,/ }; do
  case " $names " in *" $name "*) ;; *) fail "--only $name: expected one of $names" ;; esac
done
cd "$root"
[ -n "$redraw" ] || for recording in deepseek-v2-lite-{intent,summary,translation} gpt-oss-20b-mixed; do
  [ -e "recordings/$recording.safetensors" ] || fail "recordings/$recording.safetensors is not there (docs/workloads.md)"
done
launch/setup.sh --with tables,models
[ -n "$redraw" ] || [ -z "$(git status --porcelain -- moe_ep_bench configs benchmarks)" ] || fail "commit first: results name the commit that made them"
package=$(git rev-parse HEAD:moe_ep_bench HEAD:configs HEAD:benchmarks | sha256sum)
bench=.venv/bin/moe-ep-bench
python=.venv/bin/python
work=results/references
mkdir -p "$work"

is_made() { [ "$(cat "$work/$1.made" 2>/dev/null)" = "$package" ]; }
# result NAME COMMAND...: run a command whose last argument is the folder that it fills.
result() {
  local name=$1
  shift
  case ",$only," in ,, | *",$name,"*) ;; *) return 0 ;; esac
  ! is_made "$name" || { echo "$name: made already"; return 0; }
  # Begun by another package: not to be gone on with.
  [ "$(cat "$work/$name.begun" 2>/dev/null)" = "$package" ] || rm -rf "${work:?}/$name"
  echo "$package" >"$work/$name.begun"
  echo "$name ..."
  "$@" "$work/$name" >"$work/$name.log" 2>&1 || fail "$name ended with status $?: $work/$name.log"
  echo "$package" >"$work/$name.made"
}
# Tables and figures of a directory in results/reference/, of the figures those that the gallery names.
drawn() { # NAME
  local there=results/reference/$1 drawn=$work/$1-drawn figure
  "$bench" show "$there" >"$there/summary.txt"
  rm -rf "$drawn"
  for figure in $(sed -n "s|^$1/figures/\(.*\)\.png:.*|\1|p" docs/gallery.yaml); do
    [ -d "$drawn" ] || { cp -r "$there" "$drawn" && "$bench" plot "$drawn" >/dev/null; }
    mkdir -p "$there/figures"
    cp "$drawn/figures/$figure".{png,csv} "$there/figures"
  done
}
# A directory of results: what its tables and figures are made of, then these.
directory() { # NAME COMMAND...
  local name=$1
  result "$@"
  is_made "$name" || return 0
  local there=results/reference/$name
  rm -rf "$there"
  mkdir -p "$there"
  for part in run.json cases conditions routing frontier claims.csv claims.json claims.txt; do
    [ ! -e "$work/$name/$part" ] || cp -r "$work/$name/$part" "$there"
  done
  drawn "$name"
}
# Tables that a program writes: NAME FILES COMMAND...
tables() {
  local name=$1 files=$2 file
  shift 2
  result "$name" "$@"
  ! is_made "$name" || for file in $files; do cp "$work/$name/$file" results/reference; done
}
shift_of() { # the figure of moving traffic
  "$bench" emulate configs/traffic-shift.yaml --out "$1"
  "$bench" plot "$1" --figures batches
  cp "$1/figures/batches.png" "$1/traffic-shift.png"
  cp "$1/figures/batches.csv" "$1/traffic-shift.csv"
}

if [ -n "$redraw" ]; then
  for name in $names; do
    case ",$only," in ,, | *",$name,"*) echo "$name ..." && drawn "$name" ;; esac
  done
  exit
fi

tables lossless "lossless.csv lossless.md lossless.png" "$python" benchmarks/lossless.py recordings --out
directory whatif-skew "$bench" emulate configs/whatif-skew.yaml --out
directory balance-recorded-modelled "$bench" emulate configs/balance-recorded.yaml --out
tables traffic-shift "traffic-shift.csv traffic-shift.png" shift_of
directory whole-capacity-modelled \
  "$bench" papers configs/papers/whole/whole-capacity.yaml --set workload.num_batches=2 --out
tables clusters clusters.csv "$python" benchmarks/clusters.py --out
tables tables "$(cd results/reference && echo tables-*.csv)" "$python" benchmarks/tables.py --out
tables papers-modelled papers-modelled.csv "$python" benchmarks/papers.py --out
tables atlas "atlas.csv atlas.png" "$python" benchmarks/atlas.py --work "$work/atlas-answers" --out
if [ -n "$measured" ]; then
  directory quickstart-2cpu "$bench" run configs/quickstart.yaml --nproc 2 --out
  directory deepseek-v2-lite-recorded-2cpu "$bench" run configs/deepseek-v2-lite-recorded.yaml --nproc 2 --out
  directory decode-2cpu \
    "$bench" run configs/decode.yaml --nproc 1 --set 'sweep.workload.num_tokens=[1,4,16,64]' --set measure.warmup=1 --out
fi
