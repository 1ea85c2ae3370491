#!/usr/bin/env bash
# Set up like the quickstart and run all tests: launch/test.sh [pytest arguments]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/setup.sh"
cd "$root"
# Three files at a time, the longest first (tests/conftest.py): two cores compute while a third test waits.
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=25 "$@"
