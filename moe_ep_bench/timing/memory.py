"""Memory while times are taken: what allocates it, and what the cache holds.

torch's allocator serves a tensor from memory that it holds. Where it holds too little it asks the driver, which waits
for the device, and where the driver has none it first gives back all that it holds and tries again. Either is charged
to the iteration in which it happens, and says nothing about the case. So such iterations are counted.

Inputs are kept out of the cache: in service they come from memory, in a loop they would not. They are rotated: a batch
that fits into the cache is held in several copies, so that the case before has not just read the same bytes. Where a
config asks for it (decode shapes), the whole last-level cache is overwritten before every timed iteration, weights and
all, and then read through: lines that were only read need not be written back while time is taken.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from moe_ep_bench.machine.provenance import cache_bytes

# What is written or rotated through, over the size of the cache: it must push out everything else.
_OVERSIZE = 2
_KEYS = ("num_device_alloc", "num_alloc_retries")


class Allocations:
    """Timed iterations in which the driver was asked for memory.

    Attributes:
        iterations: of each case, how many; cases without any are not there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.iterations: Counter[str] = Counter()

    @contextlib.contextmanager
    def during(self, case_id: str) -> Iterator[None]:
        """Watch one timed iteration of a case; on the CPU there is nothing to see."""
        if self._device.type != "cuda":
            yield
            return
        before = self._so_far()
        yield
        if self._so_far() != before:
            self.iterations[case_id] += 1

    def _so_far(self) -> list[int]:
        stats = torch.cuda.memory_stats(self._device)
        return [stats.get(key, 0) for key in _KEYS]


class CacheFlush:
    """Fills the last-level cache of ``device`` with clean lines of its own, in order with what runs on it.

    Without ``sweeps`` it leaves the lines dirty, for a benchmark of what that costs.
    """

    def __init__(self, device: torch.device, *, sweeps: bool = True) -> None:
        self._sweeps = sweeps
        self._buffer = torch.zeros(_OVERSIZE * cache_bytes(device) // 8, dtype=torch.int64, device=device)

    def __call__(self) -> None:
        self._buffer.add_(1)
        if self._sweeps:
            self._buffer.sum()


class RotatingInput:
    """Equal copies of one tensor, handed out in turn: as many as exceed the cache, ``most`` at the most."""

    def __init__(self, tensor: Tensor, most: int) -> None:
        wanted = -(-_OVERSIZE * cache_bytes(tensor.device) // max(tensor.nbytes, 1))
        self.copies = [tensor, *(tensor.clone() for _ in range(min(wanted, most) - 1))]
        self._turn = -1

    def next(self) -> Tensor:
        self._turn = (self._turn + 1) % len(self.copies)
        return self.copies[self._turn]
