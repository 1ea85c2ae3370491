#!/usr/bin/env bash
# Set up like the quickstart and run all tests: launch/test.sh [pytest arguments]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/setup.sh"
cd "$root"
# Two files at a time, the longest first (tests/conftest.py): most tests are one process that computes on one core.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=25 "$@"
