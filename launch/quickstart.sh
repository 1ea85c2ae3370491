#!/usr/bin/env bash
# From a fresh clone to a table and figures: set up, measure configs/quickstart.yaml, draw.
#   launch/quickstart.sh [--set key=value ...]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/setup.sh"
out=$root/results/quickstart-$(date +%Y%m%d-%H%M%S)
"$root/launch/torchrun.sh" "$root/configs/quickstart.yaml" --out "$out" "$@"
"$root/.venv/bin/python" "$root/plot_results.py" "$out"
"$root/.venv/bin/python" -m moe_ep_bench show "$out"
