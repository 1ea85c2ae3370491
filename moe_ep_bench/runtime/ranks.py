"""Ranks agree before they do anything costly; a mistake of one is printed once and ends all.

The default group carries the measured traffic (NCCL between GPUs, gloo between CPU ranks). A gloo side group carries
agreement and results: it neither disturbs the measured one nor dies with it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from moe_ep_bench.errors import LOST, USER_ERROR, UserError, brief
from moe_ep_bench.runtime import staged
from moe_ep_bench.runtime.attempts import PEER_LOST, is_of_peers
from moe_ep_bench.runtime.sharing import NCCL, STAGED, Sharing, let_nccl_share
from moe_ep_bench.runtime.torchrun import device_type, leave_status

# NCCL's own threads would abort a rank whose peer is gone, whose device waits for long or whose kernel failed: it would
# leave no word, and be blamed for it. Our guard ends it instead, and says for what it waited.
_NCCL_LEAVES_IT = dict.fromkeys(
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"), "0"
)

# Threads of a CPU rank, in place of as many as it has cores: tests of tiny layers on busy cores would wait for them.
_THREADS = "MOE_EP_BENCH_THREADS"

# Ranks may wait so long for one that reads a recording or writes results.
_SIDE_TIMEOUT = datetime.timedelta(hours=1)


T = TypeVar("T")


class ReportedError(Exception):
    """The job ends on all ranks, and its error is printed: the config is wrong, or results cannot be written."""


@dataclass(frozen=True)
class Ranks:
    """This process among the others.

    Attributes:
        sharing: by what ranks share a device; None = they do not.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    side_group: dist.ProcessGroup
    sharing: Sharing | None = None

    @property
    def backend(self) -> str:
        if self.sharing == STAGED:
            return STAGED
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def oversubscribed(self) -> bool:
        """More ranks on this node than cores they may use: they share time slices, on GPUs those of their hosts."""
        cores = os.sched_getaffinity(0)
        if "RANK" in os.environ:  # A rank may be bound to some of them (torchrun binds them).
            with contextlib.suppress(OSError):
                cores |= os.sched_getaffinity(os.getppid())
        return self.local_world_size > len(cores)

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank, on every rank: plain values, for agreement."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.side_group)
        return values

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank, on rank 0; nothing on the others. For results, which are large."""
        values: list[Any] = [None] * self.world_size if self.is_first else []
        dist.gather_object(value, values or None, dst=0, group=self.side_group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.side_group)
        return values[0]

    def first_error(self, error: T | None) -> tuple[int, T] | None:
        """The first rank that has an error (empty = none), and what it is; None if none has. Every rank calls this."""
        return next(((rank, one) for rank, one in enumerate(self.all_gather(error)) if one), None)

    def report_error(self, error: str) -> bool:
        """Print the first error of any rank (empty = none), once; tell all ranks whether there was one."""
        first = self.first_error(error)
        if first and self.is_first:
            rank, words = first
            print(f"moe-ep-bench: {f'rank {rank}: ' * (rank > 0)}{words}", file=sys.stderr, flush=True)
        return first is not None

    def agree(self, act: Callable[[], T], *, on_first: bool = False) -> T:
        """Call ``act`` on every rank, or on rank 0 alone, whose result all ranks get.

        Raises:
            ReportedError: a rank cannot (ValueError); on all ranks alike, after one line to the user.
        """
        result, error = None, ""
        if self.is_first or not on_first:
            try:
                result = act()
            except ValueError as problem:
                error = str(problem)
        if self.report_error(error):
            raise ReportedError
        return cast(T, self.broadcast(result) if on_first else result)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def as_rank(work: Callable[[], int]) -> int:
    """Do a rank's work; say what ends it, and leave the status to end with where the launcher looks for it."""
    try:
        status = work()
    except ReportedError:
        status = USER_ERROR
    except UserError as error:
        print(f"moe-ep-bench: {error}", file=sys.stderr)
        status = USER_ERROR
    except Exception as error:
        if is_of_peers(error):
            print(f"moe-ep-bench: {PEER_LOST}: {brief(error, 200, quoted=False)}", file=sys.stderr, flush=True)
        else:
            # Not a user's mistake and not a case's failure: show all of it.
            traceback.print_exc()
        status = LOST  # Before or after all cases: another start would end alike.
    return leave_status(status)


def join(timeout_s: float, *, measures: bool = True, sharing: Sharing | None = None) -> Ranks:
    """Meet the other processes that torchrun started; alone without torchrun.

    Args:
        measures: something is timed on the device; False = all is modelled, and any device will do.
        sharing: by what several ranks share a GPU (rank r has GPU r modulo their number); None = each has its own.

    Raises:
        UserError: fewer GPUs on this node than ranks, or GPUs that torch cannot use (``device_type``).
        torch.distributed.DistError, RuntimeError: they do not find each other in time.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    timeout = datetime.timedelta(seconds=timeout_s)
    if (device_type() == "cuda") if measures else torch.cuda.is_available():
        there = torch.cuda.device_count()
        if local_rank >= there and sharing is None:
            share = "or --share-gpu, a rehearsal"
            raise UserError(f"ranks per node: expected at most {there} (the GPUs here) {share}, got {local_world_size}")
        device, backend = torch.device("cuda", local_rank % there), "nccl"
        torch.cuda.set_device(device)
        for name, value in _NCCL_LEAVES_IT.items():
            os.environ.setdefault(name, value)
    else:
        device, backend = torch.device("cpu"), "gloo"
        # One core per rank; with fewer cores than ranks they share.
        cores = max(1, len(os.sched_getaffinity(0)) // local_world_size)
        torch.set_num_threads(int(os.environ.get(_THREADS, cores)))
    if sharing == NCCL:
        let_nccl_share()
    elif sharing == STAGED:
        staged.register()
        backend = STAGED
    # Without a device_id NCCL builds a communicator when a group is first used: most groups never are.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=timeout, **alone)
    side_group = dist.new_group(backend="gloo", timeout=_SIDE_TIMEOUT)
    assert isinstance(side_group, dist.ProcessGroup)  # of all ranks, this one included
    return Ranks(dist.get_rank(), dist.get_world_size(), local_world_size, device, side_group, sharing)
