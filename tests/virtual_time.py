"""Time that passes only where a test says so: what is late, and who waits for it, on any machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ep_bench.layer.phases import replaced
from moe_ep_bench.schema import TOTAL
from moe_ep_bench.timing.timer import Clock


class HandClock(Clock):
    """A clock whose microseconds tests advance."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def stamp(self) -> float:
        return self.now

    def wait(self) -> None:
        pass

    def between_us(self, start: float, end: float) -> float:
        return end - start

    def hold(self, time_us: float) -> None:
        self.now += time_us


class VirtualTime(HandClock, TorchDispatchMode):
    """A rank's clock that torch's operations advance, and that collectives set to the last comer's.

    That is how long a collective blocks on a machine on which nothing else takes time. Active as a
    context manager, on every rank that comes to the collectives.

    Args:
        device: of the ranks' groups.
        op_us: what any operation takes.

    Raises (at a collective):
        AssertionError: nobody waits for it, so its time would not be its caller's.
    """

    def __init__(self, device: torch.device, op_us: float = 0.0) -> None:
        HandClock.__init__(self)
        TorchDispatchMode.__init__(self)
        self._device, self._op_us = device, op_us

    @contextlib.contextmanager
    def delaying(self, owner: Any, method: str, time_us: float) -> Iterator[None]:
        """Let ``time_us`` pass in every call of ``owner.method`` while the block runs."""
        inner: Callable[..., Any] = getattr(owner, method)

        def slow(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            self.now += time_us
            return result

        with replaced(owner, method, slow):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.now += self._op_us
        if func.namespace == "c10d":
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            assert not given.get("async_op"), f"nobody waits for {func}"
            self._wait_for_the_last(dist.ProcessGroup.unbox(given["process_group"]))
        return func(*args, **(kwargs or {}))

    def _wait_for_the_last(self, group: dist.ProcessGroup) -> None:
        latest = torch.tensor([self.now], dtype=torch.float64, device=self._device)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=group)
        self.now = float(latest)


# For a rank whose lateness a test lets others wait for.
LATE_US = 400_000.0


def all_in(phase: str) -> dict[str, float]:
    """What ``passing_where_late`` finds where all the time is one phase's."""
    return {phase: LATE_US, TOTAL: LATE_US}


def passing_where_late(
    device: torch.device, owner: Any, method: str, run: Callable[[VirtualTime], dict[str, float]], *, is_slow: bool
) -> dict[str, float]:
    """Of the times that ``run`` gives by its clock those that are not 0; ``owner.method`` is late where ``is_slow``."""
    clock = VirtualTime(device)
    with clock, clock.delaying(owner, method, LATE_US if is_slow else 0.0):
        times = run(clock)
    return {phase: time_us for phase, time_us in times.items() if time_us}
