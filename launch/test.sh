#!/usr/bin/env bash
# Set up like the quickstart and run all tests: launch/test.sh [pytest arguments]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/setup.sh"
cd "$root"
exec .venv/bin/python -m pytest "$@"
