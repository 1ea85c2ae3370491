"""The order in which things are timed, so that differences between cases are the cases' own.

All cases of a comparison run interleaved on the same batches, in an order that changes from step
to step so that each takes every place and follows every other equally often. Ahead of each timed
iteration a GPU is held for a moment, so that the first launches are issued before the clock starts,
and then ranks are aligned by a collective on the stream. The host is clocked beside, without what it waits for the
device (``timer.timed``). Before anything is timed, rounds over
all cases go on until one takes as long as the one before it. Plain iterations (two clock readings)
give speedups; breakdown iterations (every phase, waiting probed) explain them, in the middle of the plain ones. They
leave the allocator another memory, in which single plain iterations took 3 to 35 % longer on an H100: a round of plain
ones behind them is not counted.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from moe_ep_bench.layer.phases import Rendezvous
from moe_ep_bench.schema import BESIDE_TOTAL, LAYER_PHASES, TOTAL, UNACCOUNTED, PhaseKey
from moe_ep_bench.timing.timer import Clock, PhaseRecorder, time_us, timed

PLAIN, BREAKDOWN, UNCOUNTED = "plain", "breakdown", "uncounted"

# Two rounds that differ by less are the same.
SETTLED_CHANGE = 0.02


def sample_keys(phases: Sequence[PhaseKey]) -> tuple[PhaseKey, ...]:
    """Columns of a sample: phases (NaN where one did not occur), then what concerns the whole iteration."""
    return (*phases, UNACCOUNTED, TOTAL, *BESIDE_TOTAL)


COLUMNS = sample_keys(LAYER_PHASES)


class Runnable(Protocol):
    """A case that can be run on any batch of the comparison."""

    @property
    def case_id(self) -> str: ...

    def ready(
        self, batch: int, recorder: PhaseRecorder | None = None
    ) -> contextlib.AbstractContextManager[Callable[[], object]]:
        """Put the batch's routing into the layer and hand out what runs it, while the block lasts. Not timed.

        Args:
            recorder: gets the phases of the run; None = it is run without any of that.
        """
        ...


@dataclass(frozen=True)
class Step:
    """One timed iteration of every case on one batch; ``rank``: as which virtual rank.

    ``kind``: one that is uncounted is a plain one of which nothing is kept.
    """

    batch: int
    iteration: int
    kind: str
    rank: int = 0


class Timed(Protocol):
    """A case that times itself: see ``timer.Stopwatch`` for all that an iteration consists of."""

    @property
    def case_id(self) -> str: ...

    def time(self, step: Step) -> Any:
        """Put the step's routing in place, untimed, and return what one iteration took."""
        ...


def all_steps(num_batches: int, iterations: int, breakdown_iterations: int) -> list[Step]:
    """All steps, in rounds of each batch once: half of the plain ones, broken down ones, an uncounted one, the rest."""
    half = -(-iterations // 2)
    rounds = [(PLAIN, iteration) for iteration in range(half)]
    rounds += [(BREAKDOWN, iteration) for iteration in range(breakdown_iterations)]
    if breakdown_iterations and half < iterations:
        rounds.append((UNCOUNTED, half))
    rounds += [(PLAIN, iteration) for iteration in range(half, iterations)]
    return [Step(batch, iteration, kind) for kind, iteration in rounds for batch in range(num_batches)]


def order(num_cases: int, turn: int) -> list[int]:
    """The order of cases in a turn: a row of a Williams design (Aust. J. Sci. Res. A 2, 149, 1949).

    Over ``num_cases`` turns (twice as many if odd) every case takes every place equally often and
    follows every other case equally often, so that neither place nor predecessor favours any.
    """
    zigzag = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(num_cases)]
    row = [(case + turn) % num_cases for case in zigzag]
    return row[::-1] if num_cases % 2 and (turn // num_cases) % 2 else row


def turn_of(step: Step, num_batches: int, num_cases: int) -> int:
    """Which turn's order a step takes: consecutive ones within a round, and from round to round another for a batch."""
    period = num_cases * (1 + num_cases % 2)
    stride = next(stride for stride in range(num_batches, num_batches + period) if math.gcd(stride, period) == 1)
    return step.iteration * stride + step.batch


@dataclass(frozen=True)
class WarmUp:
    """How warming up went.

    Attributes:
        rounds: untimed rounds over all batches and cases.
        change: how much longer (+) or shorter (-) the last round took than the one before it, median
            over batches, slowest rank; None with fewer than two rounds.
        settled: whether that was within ``SETTLED_CHANGE``.
    """

    rounds: int
    change: float | None
    settled: bool


@torch.inference_mode()
def warm_up(
    cases: Sequence[Runnable],
    num_batches: int,
    most: int,
    clock: Clock,
    slowest: Callable[[np.ndarray], np.ndarray],
    before: Callable[[str], None],
) -> WarmUp:
    """Run all cases on all batches until a round takes as long as the one before it.

    Args:
        most: rounds at most.
        slowest: the element-wise maximum over ranks, so that all ranks stop together.
    """
    earlier_B: np.ndarray | None = None
    change = None
    for number in range(1, most + 1):
        times_B = np.empty(num_batches)
        for batch in range(num_batches):
            start = time.perf_counter()
            for case in cases:
                before(case.case_id)
                with case.ready(batch) as run:
                    run()
            clock.wait()
            times_B[batch] = time.perf_counter() - start
        times_B = slowest(times_B)
        if earlier_B is not None:
            change = float(np.median(times_B / earlier_B)) - 1
            if abs(change) <= SETTLED_CHANGE:
                return WarmUp(number, change, settled=True)
        earlier_B = times_B
    return WarmUp(most, change, settled=False)


@torch.inference_mode()
def warm_breakdowns(
    cases: Sequence[Runnable], num_batches: int, clock: Clock, meet: Rendezvous, before: Callable[[str], None]
) -> None:
    """Break every case down once on every batch: a phase's first probe sets up what its ranks meet in."""
    recorder = PhaseRecorder(clock)
    for batch in range(num_batches):
        for case in cases:
            before(case.case_id)
            with case.ready(batch, recorder) as run:
                timed(run, recorder, meet)


@contextlib.contextmanager
def collections_between() -> Iterator[None]:
    """Keep the garbage collector from running by itself: in the middle of an iteration a phase would be charged."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@torch.inference_mode()
def measure(
    cases: Sequence[Timed],
    steps: Sequence[Step],
    before: Callable[[str], object],
    keep: Callable[[int, Step, Any], object],
) -> None:
    """Time every case at every step: the loop behind all measured times, of real and of virtual ranks.

    Args:
        before: called with the case's id ahead of each iteration, untimed (progress, the guard).
        keep: called with the case's index, the step and what the case's ``time`` found.
    """
    num_batches = 1 + max(step.batch for step in steps)
    with collections_between():
        for step in steps:
            for index in order(len(cases), turn_of(step, num_batches, len(cases))):
                before(cases[index].case_id)
                taken = cases[index].time(step)
                if step.kind != UNCOUNTED:
                    keep(index, step, taken)
            gc.collect(0)


def probe_floor_us(meet: Callable[[], object], clock: Clock, count: int = 50) -> float:
    """What a waiting probe costs when nobody waits: the second of two collectives that follow each other, median."""
    return float(np.median([time_us(meet, clock, meet) for _ in range(count)]))
