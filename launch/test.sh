#!/usr/bin/env bash
# Set up like the quickstart, with what tests need, and run the fast part of the tests, which is in almost every file:
#   launch/test.sh                       all that is not marked slow
#   launch/test.sh --all                 everything, as CI does
#   launch/test.sh [pytest arguments]    what these choose, slow or not
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/setup.sh" --with test
cd "$root"
chosen=("$@")
case ${1-} in
  '') chosen=(-m "not slow") ;;
  --all) chosen=("${@:2}") ;;
esac
# Three files at a time, the longest first (tests/conftest.py): two cores compute while a third test waits.
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=25 "${chosen[@]}"
