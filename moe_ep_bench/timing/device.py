"""The device while times are taken: inputs and caches, and what it reaches at best.

Inputs are kept out of the cache: in service they come from memory, in a loop they would not. They are rotated: a batch
that fits into the cache is held in several copies, so that the case before has not just read the same bytes. Where a
config asks for it (decode shapes), the whole last-level cache is overwritten before every timed iteration, weights and
all, and then read through: lines that were only read need not be written back while time is taken.

A data sheet's number is no yardstick for the experts' rates: it depends on clocks, power and the shapes. A large square
matmul in the layer's dtype and a large copy are what this device reaches today.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep_bench.machine.provenance import cache_bytes
from moe_ep_bench.timing.timer import clock_for, time_us

# What is written or rotated through, over the size of the cache: it must push out everything else.
_OVERSIZE = 2

_MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
_WARMUPS = {"cuda": 3, "cpu": 1}
_REPETITIONS = {"cuda": 20, "cpu": 3}


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


@dataclass(frozen=True)
class Ceilings:
    """Medians over repetitions, all ranks at once.

    Attributes:
        matmul_tflops: square matmul of ``matmul_size``.
        copy_gbps: bytes read and written per second by a copy, in 1e9.
        read_gbps: bytes read per second by a sum, in 1e9: what weights that are read once can hope for.
    """

    matmul_size: int
    matmul_tflops: float
    copy_gbps: float
    read_gbps: float


@torch.inference_mode()
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    size = _MATMUL_SIZE[device.type]
    left = torch.randn(size, size, device=device).to(dtype)
    product = torch.empty_like(left)
    matmul_us = _median_us(lambda: torch.mm(left, left, out=product), device)
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_us = _median_us(lambda: target.copy_(source), device)
    numbers = source.view(torch.float32)
    read_us = _median_us(numbers.sum, device)
    return Ceilings(size, 2 * size**3 / matmul_us / 1e6, 2 * len(source) / copy_us / 1e3, len(source) / read_us / 1e3)


def _median_us(function: Callable[[], object], device: torch.device) -> float:
    clock = clock_for(device)
    for _ in range(_WARMUPS[device.type]):
        function()
    return statistics.median(time_us(function, clock) for _ in range(_REPETITIONS[device.type]))
