"""Count what allocates device memory while it is timed.

torch's allocator serves a tensor from memory that it holds. Where it holds too little it asks the driver, which waits
for the device, and where the driver has none it first gives back all that it holds and tries again. Either is charged
to the iteration in which it happens, and says nothing about the case.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch

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
