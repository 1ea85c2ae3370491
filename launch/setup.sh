#!/usr/bin/env bash
# Make a virtual environment with the pinned packages, or do nothing if it is there already.
#   launch/setup.sh [--venv DIR] [--python PYTHON]
# Default: .venv at the root of the repository, with the first of python3.11, python3.12, python3 that fits.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=

while [ $# -gt 0 ]; do
  case $1 in
    --venv) venv=$2; shift 2 ;;
    --python) python=$2; shift 2 ;;
    *) echo "setup.sh: unknown argument $1; expected --venv DIR or --python PYTHON" >&2; exit 2 ;;
  esac
done

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; }

pins=$(cat "$root/pyproject.toml" "$root/launch/constraints.txt" | sha256sum | cut -d' ' -f1)
# Stamps are written last, so that an interrupted set-up is done again: one for the packages, one
# for the clone whose code the environment runs.
if [ "$(cat "$venv/.pins" 2>/dev/null)" = "$pins" ] && fits "$venv/bin/python"; then
  if [ "$(cat "$venv/.clone" 2>/dev/null)" != "$root" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --editable "$root"
    echo "$root" >"$venv/.clone"
  fi
  exit 0
fi

if [ -z "$python" ]; then
  for candidate in python3.11 python3.12 python3; do
    if command -v "$candidate" >/dev/null && fits "$candidate"; then python=$candidate; break; fi
  done
fi
if [ -z "$python" ] || ! fits "$python"; then
  echo "setup.sh: needs Python 3.11 or 3.12${python:+, $python is not one}; name one with --python" >&2
  exit 2
fi

echo "Setting up $venv with $("$python" --version) (a few minutes, once) ..."
rm -f "$venv/.pins" "$venv/.clone"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  --constraint "$root/launch/constraints.txt" --editable "$root[test]"
echo "$root" >"$venv/.clone"
echo "$pins" >"$venv/.pins"
