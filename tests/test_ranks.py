"""A rank leaves at once when all is said."""

from __future__ import annotations

import subprocess
import sys

from test_run import environment

from moe_ep_bench.errors import OK

LEAVING = """
import atexit, runpy, sys, time
atexit.register(time.sleep, 1000)  # As a destructor that waits for peers.
sys.argv = ["moe-ep-bench", "run", sys.argv[1], "--list-points"]
runpy.run_module("moe_ep_bench", run_name="__main__")
"""


def test_a_rank_waits_for_nothing_at_its_end_and_all_that_it_said_arrives() -> None:
    command = [sys.executable, "-c", LEAVING, "configs/quickstart.yaml"]
    env = {**environment(), "RANK": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert done.returncode == OK, done.stderr
    assert done.stdout == "0\n"
