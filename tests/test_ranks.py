"""Ranks that do not meet say so in time, are watched all the time, and leave at once."""

from __future__ import annotations

import subprocess
import sys

from test_run import environment, free_port

from moe_ep_bench.runtime.exit_codes import OK

ALONE = """
import os, sys
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # It brings the backend of that name.
from moe_ep_bench.runtime import ranks

init, port = dist.init_process_group, int(sys.argv[1])
# As NCCL's without a device: the group is made, and nobody is connected yet.
store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
dist.init_process_group = lambda backend, **options: init("fake", store=store, rank=0, world_size=2, **options)
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
try:
    ranks.join(1.0)
except ranks.NotMetError as error:
    print(error, flush=True)
os._exit(0)
"""


def test_ranks_meet_within_their_time_though_the_first_group_connects_nobody() -> None:
    command = [sys.executable, "-c", ALONE, str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(), check=False)
    assert "rank 0 of 2 did not meet the others at 127.0.0.1:" in done.stdout, done.stderr
    assert "within 1 s" in done.stdout
    assert "over the network GLOO_SOCKET_IFNAME (here unset)" in done.stdout, "the other is on another node"


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
