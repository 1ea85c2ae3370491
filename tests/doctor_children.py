"""Functions that tests/test_doctor.py lets processes run; imports little, to start fast."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def echoes(*arguments: Any) -> list[Any]:
    print("noise that is no answer")
    return list(arguments)


def fills_its_output(*_: Any) -> str:
    print("x" * 2**20)
    print("y" * 2**20, file=sys.stderr)
    return "done"


def hangs(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)


def dies(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises(*_: Any) -> None:
    raise ImportError("libtorch_cuda.so: cannot open shared object file")


def exchanges_wrongly(*arguments: Any) -> str:
    """A rank over a transport that changes one value of a message from rank 0 to rank 1."""
    import torch.distributed as dist

    from moe_ep_bench.machine.doctor import exchange

    right = dist.all_to_all_single

    def wrong(received, sent, *sizes):
        right(received, sent, *sizes)
        if dist.get_rank() == 1:
            received[1] += 1

    dist.all_to_all_single = wrong
    return exchange(*arguments)


def is_lost_in_the_exchange(rank: int, *arguments: Any) -> str:
    """Rank 1 dies once they have met, while rank 0 waits for its message."""
    import torch.distributed as dist

    from moe_ep_bench.machine.doctor import exchange

    if rank == 1:
        dist.all_to_all_single = dies
    return exchange(rank, *arguments)
