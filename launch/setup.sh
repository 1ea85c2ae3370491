#!/usr/bin/env bash
# Make a virtual environment with the pinned packages, or do nothing if it is there already.
#   launch/setup.sh [--venv DIR] [--python PYTHON] [--with EXTRA,...] [--system-torch] [--cuda12] [--check]
# --venv          default: .venv at the root of the repository
# --python        default: the first of python3.11, python3.12, python3 that fits; python3 first with --system-torch
# --with          tables (devices `table:...`), models (checkpoints for `quality` and `trace record`), test (what tests need,
#                 both included); an environment keeps the extras that it was made with
# --system-torch  use the PyTorch that PYTHON has, and its Triton, Transformer Engine and Apex: for GPU containers
# --cuda12        a PyTorch for CUDA 12.6, from pytorch.org; the usual one needs CUDA 13, a driver of 580 or newer
# --check         install nothing: end with 2 where the environment is not there, or its pins are old
# Without --system-torch or --cuda12 it takes an environment that was made with them as it is. Without a network pip is
# told where wheels are: PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR (docs/running.md). Where there is uv it installs in pip's place,
# but for these two kinds of environment, and where pip is told of other places than the usual index.
# Exit status: 0 the environment is there, 1 pip failed, 2 something to correct in the command.
set -euo pipefail

arguments=("$@")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=
extras=
system_torch=
cuda12=
check=

fail() { echo "setup.sh: $1" >&2; exit 2; }
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    --system-torch) system_torch=$1; shift; continue ;;
    --cuda12) cuda12=$1; shift; continue ;;
    --check) check=$1; shift; continue ;;
    --venv) wanted=folder ;;
    --python) wanted="Python 3.11 or 3.12" ;;
    --with) wanted="list of tables, models and test" ;;
    *) fail "unknown argument '$1'; expected --venv DIR, --python PYTHON, --with EXTRA, --system-torch, --cuda12 or --check" ;;
  esac
  case ${2:-} in '' | -*) fail "$1 takes a $wanted, not '${2:-}'" ;; esac
  case $1 in
    --venv) venv=$2 ;;
    --python) python=$2 ;;
    --with) extras+=,$2 ;;
  esac
  shift 2
done

[[ $extras =~ ^(,(tables|models|test))*$ ]] ||
  fail "--with takes a list of tables, models and test, not '${extras#,}'"
[ -z "$cuda12" ] || [ -z "$system_torch" ] || fail "--cuda12 fetches a PyTorch; it does not go with --system-torch"

# Another may be making it right now: what it has left so far says nothing.
if [ -z "${MOE_EP_BENCH_SETUP_LOCKED:-}" ] && [ -e "$venv.lock" ]; then flock "$venv.lock" true 2>/dev/null || true; fi

if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
  fail "--venv takes a virtual environment, or a folder that is new or empty; $venv is neither"
fi

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
has() { "$1" -c "import $2" 2>/dev/null; }
package_of() { "$1" -c "from importlib.metadata import version; print(version('$2'))" 2>/dev/null || true; }
torch_of() { package_of "$1" torch; }

# NVIDIA's containers hold builds like 2.11.0a0+nv26.2, which pip counts as older than 2.11; sort does not.
torch_wanted=$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' "$root/pyproject.toml")
torch_will_do() { [ -n "$1" ] && printf '%s\n' "$torch_wanted" "$1" | sort -V -C; }

# Stamps: .flags and .extras say how an environment was made. The others are written last, so that an interrupted set-up
# is done again: .pins for the packages, .clone for the clone whose code the environment runs.
pins=$(cat "$root/pyproject.toml" "$root/launch/constraints.txt" | sha256sum | cut -d' ' -f1)
made_with=$(cat "$venv/.flags" 2>/dev/null || true)
had=$(cat "$venv/.extras" 2>/dev/null || true)
extras=$(tr , '\n' <<<"$had,$extras" | sed '/^$/d' | sort -u | paste -sd,)

# Whether the environment is of the kind that is asked for.
suits() {
  fits "$venv/bin/python" || return
  [ -z "$system_torch$cuda12" ] || [ "$made_with" = "$system_torch$cuda12" ] || return
  [ -z "$python" ] || [ "$(version_of "$python")" = "$(version_of "$venv/bin/python")" ]
}

# Without build isolation, so that it needs no network: hatchling is in the environment.
install_clone() {
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
    --no-build-isolation --editable "$root" || exit 1
  echo "$root" >"$venv/.clone"
}

unsuited=
suits || unsuited=yes
made=
[ -n "$unsuited" ] || [ "$(cat "$venv/.pins" 2>/dev/null)" != "$pins" ] || [ "$had" != "$extras" ] || made=yes
[ -z "$made" ] || [ "$(cat "$venv/.clone" 2>/dev/null)" != "$root" ] || exit 0
if [ -z "$made" ] && [ -n "$made_with" ] && [ -z "$system_torch$cuda12" ]; then
  # An ordinary set-up would fetch another torch of gigabytes.
  fail "$venv was made with $made_with, and is unfinished, out of date or without an extra: give these flags again, or remove it"
fi
[ -z "$check" ] || [ -n "$made" ] ||
  fail "$venv is not set up: run launch/setup.sh where there is a network, before a job, or name another by VENV"

# One at a time: nodes and jobs share this folder. Whoever has waited begins anew, and finds the environment made.
alone() {
  [ -z "${MOE_EP_BENCH_SETUP_LOCKED:-}" ] || return 0
  mkdir -p "$(dirname "$venv")"
  export MOE_EP_BENCH_SETUP_LOCKED=yes
  if flock "$venv.lock" true 2>/dev/null; then
    exec flock "$venv.lock" bash "${BASH_SOURCE[0]}" "${arguments[@]}"
  fi
  echo "setup.sh: cannot lock $venv.lock; let no other set-up of $venv run meanwhile" >&2
}
if [ -n "$made" ]; then
  alone
  install_clone
  exit 0
fi

# Why a Python cannot be the base; nothing if it can.
objection() {
  fits "$1" || { echo "$1 does not run as Python 3.11 or 3.12"; return; }
  local prefix torch
  prefix=$("$1" -c 'import sys; print(sys.prefix)')
  torch=$(torch_of "$1")
  if [ -n "$system_torch" ] && [ "$prefix" -ef "$venv" ]; then
    echo "$1 belongs to $venv itself"
  elif [ -n "$system_torch" ] && [ -z "$torch" ]; then
    echo "$1 has no torch, and $torch_wanted or newer is needed"
  elif [ -n "$system_torch" ] && ! torch_will_do "$torch"; then
    echo "$1 has torch $torch, and $torch_wanted or newer is needed"
  elif ! has "$1" ensurepip && { [ -z "$system_torch" ] || ! has "$1" pip; }; then
    echo "$1 can give an environment no pip: it lacks ensurepip (Debian, Ubuntu: the package python3-venv)"
  fi
}

candidates=(python3.11 python3.12 python3)
[ -z "$system_torch" ] || candidates=(python3 python3.12 python3.11)
[ -z "$python" ] || candidates=("$python")
base=
objections=
for candidate in "${candidates[@]}"; do
  command -v "$candidate" >/dev/null || [ -n "$python" ] || continue
  why=$(objection "$candidate")
  [ -n "$why" ] || { base=$candidate; break; }
  objections+=${objections:+; }$why
done
[ -n "$base" ] || fail "${objections:-there is no Python 3.11 or 3.12}; name another with --python"
alone

echo "Setting up $venv with $("$base" --version) (a few minutes, once) ..."
venv_options=()
# What was made for another Python or another torch is not built upon.
[ -z "$unsuited" ] || [ ! -e "$venv/pyvenv.cfg" ] || venv_options+=(--clear)
rm -f "$venv/.pins" "$venv/.clone"
base_is_venv=$("$base" -c 'import sys; print("yes" * (sys.prefix != sys.base_prefix))')
if [ -n "$system_torch" ]; then
  [ -n "$base_is_venv" ] || venv_options+=(--system-site-packages)
  # Debian's Python may lack ensurepip; then pip is the system's, like torch.
  has "$base" ensurepip || venv_options+=(--without-pip)
fi
"$base" -m venv "${venv_options[@]}" "$venv"
echo "$system_torch$cuda12" >"$venv/.flags"
echo "$extras" >"$venv/.extras"
if [ -n "$system_torch" ]; then
  # --system-site-packages shows the packages below a virtual environment, not its own: a .pth file does.
  [ -z "$base_is_venv" ] || "$base" -c '
import site
for folder in site.getsitepackages():
    print(f"import site; site.addsitedir({folder!r})")
' >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/system-torch.pth"
  # Else pip would fetch one.
  [ "$(torch_of "$venv/bin/python")" = "$(torch_of "$base")" ] || fail "$venv does not see the torch of $base"
fi

# A container's own pins are not ours.
unset PIP_CONSTRAINT
needs=$("$venv/bin/python" -c '
import pathlib, sys, tomllib
table = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())
project = table["project"]
needs = table["build-system"]["requires"] + project["dependencies"]
for extra in filter(None, sys.argv[3].split(",")):
    needs += project["optional-dependencies"][extra]
print("\n".join(need for need in needs if not (sys.argv[2] and need.startswith(("torch>=", "triton")))))
' "$root/pyproject.toml" "$system_torch" "$extras")
constraints=$(cat "$root/launch/constraints.txt")
if [ -n "$system_torch" ]; then
  # Whatever another package asks for, these two stay as they are; there may be a torch without a triton.
  constraints=$(grep -v -e '^torch==' -e '^triton==' <<<"$constraints")
  for package in torch triton; do
    version=$(package_of "$base" "$package")
    constraints+=${version:+$'\n'$package==$version}
  done
fi
# The newest CUDA 12 that pytorch.org builds both pinned versions for.
[ -z "$cuda12" ] || constraints=$(sed 's/^\(torch==[0-9.]*\)/\1+cu126/' <<<"$constraints")
# A line for each package, so that minutes of downloads are not silent.
progress() {
  sed -unE \
    -e 's/^ *(Downloading|Using cached|Processing) (.*\/)?([A-Za-z0-9_.]+)-([^-]+)-[^ ]*\.whl( \([0-9.]+ [kMG]?B\))?( .*)?$/  \3 \4\5/p' \
    -e 's/^Installing collected packages.*/  installing them .../p'
}
# uv reads nothing of what pip is told, and other torches than the index's are pip's.
told=$("$venv/bin/python" -m pip config list 2>/dev/null || true)
if [ -z "$system_torch$cuda12" ] && command -v uv >/dev/null &&
  ! grep -qE '[:.](no-index|index-url|extra-index-url|find-links)=' <<<"$told"; then
  uv pip install --python "$venv/bin/python" --constraint <(echo "$constraints") --requirement <(echo "$needs") || exit 1
else
  # Python compiles what it imports; to compile all that is installed takes a minute.
  "$venv/bin/python" -m pip install --no-compile --progress-bar off --disable-pip-version-check \
    ${cuda12:+--extra-index-url https://download.pytorch.org/whl/cu126} \
    --constraint <(echo "$constraints") --requirement <(echo "$needs") | progress || exit 1
fi
install_clone
echo "$pins" >"$venv/.pins"
