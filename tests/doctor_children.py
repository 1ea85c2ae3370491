"""What tests/test_doctor.py lets ranks do in place of ``doctor.exchange``."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist

from moe_ep_bench.machine.doctor import exchange


def exchanges_wrongly(rank: int, *arguments: Any) -> None:
    """Exchange over a transport that changes one value of a message from rank 0 to rank 1."""
    right = dist.all_to_all_single

    def wrong(received, sent, *sizes):
        right(received, sent, *sizes)
        if rank == 1:
            received[1] += 1

    dist.all_to_all_single = wrong
    exchange(rank, *arguments)


def is_lost(rank: int, *arguments: Any) -> None:
    """Rank 1 dies once they have met, while rank 0 waits for its message."""
    if rank == 1:
        dist.all_to_all_single = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    exchange(rank, *arguments)
