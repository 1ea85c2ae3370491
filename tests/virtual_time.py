"""Time that passes only where a test says so: what is late, and who waits for it, on any machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ep_bench.layer.phases import replaced


class VirtualTime(TorchDispatchMode):
    """A rank's clock: it stands still but for ``let_pass``, and a collective sets it to the last comer's.

    That is how long a collective of an otherwise infinitely fast machine blocks. Active as a
    context manager, on every rank that comes to them.

    Raises (at a collective):
        AssertionError: nobody waits for it, so its time would not be its caller's.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._now_us = 0

    def let_pass(self, time_us: int) -> None:
        self._now_us += time_us

    @contextlib.contextmanager
    def delaying(self, owner: Any, method: str, time_us: int) -> Iterator[None]:
        """Let ``time_us`` pass inside every call of ``owner.method`` while the block runs."""
        inner: Callable[..., Any] = getattr(owner, method)

        def slow(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            self.let_pass(time_us)
            return result

        with replaced(owner, method, slow):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            assert not given.get("async_op"), f"nobody waits for {func}"
            self._wait_for_the_last(dist.ProcessGroup.unbox(given["process_group"]))
        return func(*args, **(kwargs or {}))

    def _wait_for_the_last(self, group: dist.ProcessGroup) -> None:
        now = torch.tensor([self._now_us], device=self._device)
        dist.all_reduce(now, op=dist.ReduceOp.MAX, group=group)
        self._now_us = int(now)

    # As a timer.Clock.

    def stamp(self) -> int:
        return self._now_us

    def wait(self) -> None:
        pass

    def between_us(self, start: int, end: int) -> float:
        return float(end - start)

    def open_range(self, name: str) -> None:
        pass

    def close_range(self) -> None:
        pass
