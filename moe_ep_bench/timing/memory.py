"""Inputs and caches while times are taken.

Inputs are kept out of the cache: in service they come from memory, in a loop they would not. They are rotated: a batch
that fits into the cache is held in several copies, so that the case before has not just read the same bytes. Where a
config asks for it (decode shapes), the whole last-level cache is overwritten before every timed iteration, weights and
all, and then read through: lines that were only read need not be written back while time is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep_bench.machine.provenance import cache_bytes

# What is written or rotated through, over the size of the cache: it must push out everything else.
_OVERSIZE = 2


class CacheFlush:
    """Fills the last-level cache of ``device`` with clean lines of its own, in order with what runs on it."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros(_OVERSIZE * cache_bytes(device) // 8, dtype=torch.int64, device=device)

    def __call__(self) -> None:
        self._buffer.add_(1)
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
