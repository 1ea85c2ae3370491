"""Clocks, a recorder that splits an iteration into exclusive phases, and the order in which a run is timed.

Whatever is timed is timed by ``timed`` (phases) or ``time_us`` (one number): the device is held, ranks meet, and the
start stamp and the run are queued behind that. A start stamp on an idle GPU would count the host's time to launch the
first kernel; ranks that met before the hold would part again, because GPUs at other clocks are held for longer.

A recorder keeps one mark per change of phase: a clock reading and the phase that begins there.
The time between two marks belongs to exactly one phase, so nested stages are exclusive by
construction and the phases plus ``unaccounted`` add up to the total.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from moe_ep_bench.schema import HOST, HOST_BUSY, SM_CLOCK, THREAD_CPU, TOTAL, UNACCOUNTED, PhaseKey
from moe_ep_bench.timing.syncs import unseen_syncs, watched_syncs

# Of a GPU at 2 GHz. At a lower clock it is held for longer.
_CYCLES_PER_US = 2000

HOLD_US = 2000.0
"""Hold of a GPU ahead of a timed run, where ``measure.hold_us`` says nothing else.

It stands for what a server has queued ahead of a layer. At 300 us Token Drop's first kernels came late: on an H200 with
8,192 tokens a layer that takes 1.37 ms took 2.21 ms.
"""


class Clock:
    """perf_counter, for work on the calling thread. Stamps are read later, so that reading disturbs nothing.

    Attributes:
        is_apart: whether a device does the work while the host goes on.
        blocked_us: that the host has spent in ``blocking`` so far.
    """

    is_apart = False

    def __init__(self) -> None:
        self.blocked_us = 0.0
        self._depth = 0

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Count the block as time that the host waits for its device; such blocks nest."""
        began_ns, self._depth = time.perf_counter_ns(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.blocked_us += (time.perf_counter_ns() - began_ns) / 1e3

    @property
    def is_blocked(self) -> bool:
        return self._depth > 0

    def watched(self) -> contextlib.AbstractContextManager[Any]:
        """Let every operation that waits for the device be ``blocking`` while the block runs (``timing.syncs``)."""
        return contextlib.nullcontext()

    def unseen(self) -> contextlib.AbstractContextManager[list[str]]:
        """Collect where the block waits for the device and is not ``blocking``."""
        return contextlib.nullcontext([])

    def stamp(self) -> Any:
        return time.perf_counter_ns()

    def wait(self) -> None:
        """Return once every stamp so far can be read."""

    def between_us(self, start: Any, end: Any) -> float:
        return (end - start) / 1e3

    def hold(self, time_us: float) -> None:
        """Keep the device busy for about so long."""

    def held_mhz(self) -> float | None:
        """The clock at which the device spent the last hold; None where nothing was held."""

    def open_range(self, name: str) -> None:
        """Begin a named range for a profiler that may be looking on; ranges nest."""

    def close_range(self) -> None:
        pass


class CudaClock(Clock):
    """CUDA events on the current stream, and NVTX ranges.

    A stamp that is taken while a graph is captured is set anew by each of its replays.
    """

    is_apart = True

    def __init__(self) -> None:
        super().__init__()
        self._held: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None

    def watched(self) -> contextlib.AbstractContextManager[Any]:
        return watched_syncs(self.blocking, "cuda")

    def unseen(self) -> contextlib.AbstractContextManager[list[str]]:
        return unseen_syncs(lambda: self.is_blocked)

    def stamp(self) -> torch.cuda.Event:
        inside = {"external": True} if torch.cuda.is_current_stream_capturing() else {}
        event = torch.cuda.Event(enable_timing=True, **inside)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def between_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e3

    def hold(self, time_us: float) -> None:
        self._held, cycles = None, int(time_us * _CYCLES_PER_US)
        if cycles > 0:
            began = self.stamp()
            torch.cuda._sleep(cycles)
            self._held = began, self.stamp(), cycles

    def held_mhz(self) -> float | None:
        if self._held is None:
            return None
        began, ended, cycles = self._held
        return cycles / self.between_us(began, ended)

    def open_range(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def close_range(self) -> None:
        torch.cuda.nvtx.range_pop()


def clock_for(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else Clock()


# A clock's stamp, and the phase that begins there.
Mark = tuple[Any, PhaseKey]


class PhaseRecorder:
    """Marks of one iteration. ``begin``, then nested ``enter``/``leave``, then ``end``.

    Attributes:
        marks: so far.
        own_us: host time that it took itself to enter and leave phases since ``begin``.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.marks: list[Mark] = []
        self.own_us = 0.0
        self._stack: list[PhaseKey] = []

    def begin(self) -> None:
        self.marks.clear()
        self.own_us = 0.0
        self._stack = [UNACCOUNTED]
        self._mark()

    def enter(self, phase: PhaseKey) -> None:
        began_ns = time.perf_counter_ns()
        self._stack.append(phase)
        self._mark()
        self.clock.open_range(phase if isinstance(phase, str) else f"{phase[1]} of layer {phase[0]}")
        self.own_us += (time.perf_counter_ns() - began_ns) / 1e3

    def leave(self) -> None:
        began_ns = time.perf_counter_ns()
        self.clock.close_range()
        self._stack.pop()
        self._mark()
        self.own_us += (time.perf_counter_ns() - began_ns) / 1e3

    def end(self) -> None:
        self._mark()

    def splice(self, marks: Sequence[Mark]) -> None:
        """Take over marks whose stamps were set by something else, since the last mark of one's own."""
        self.marks += marks

    def _mark(self) -> None:
        self.marks.append((self.clock.stamp(), self._stack[-1]))

    def wrap(self, phase: PhaseKey, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its time credited to ``phase``, less what it calls that is wrapped too."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return timed

    def segments_us(self) -> list[tuple[PhaseKey, float]]:
        """Phase and microseconds of every stretch between two marks, in order; waits for the clock."""
        self.clock.wait()
        return [
            (phase, self.clock.between_us(start, end)) for (start, phase), (end, _) in itertools.pairwise(self.marks)
        ]

    def times_us(self) -> dict[PhaseKey, float]:
        """Microseconds per phase, with ``unaccounted`` and ``total``; waits for the clock."""
        times: dict[PhaseKey, float] = defaultdict(float)
        for phase, time_us in self.segments_us():
            times[phase] += time_us
        times[UNACCOUNTED] += 0.0
        times[TOTAL] = self.clock.between_us(self.marks[0][0], self.marks[-1][0])
        return dict(times)


def no_meeting() -> None:
    """Stand in for a rendezvous where ranks need not be aligned."""


def timed(
    run: Callable[[], object],
    recorder: PhaseRecorder,
    meet: Callable[[], object] = no_meeting,
    hold_us: float = HOLD_US,
) -> dict[PhaseKey, float]:
    """Return the phases of one run in microseconds, and what ``schema.BESIDE_TOTAL`` names.

    Args:
        meet: aligns the ranks that talk to each other; on CUDA it only queues a collective on the stream.
        hold_us: hold of the device, a GPU.

    ``TOTAL`` is the device's time. ``HOST`` is the host's to issue the run; ``HOST_BUSY``, where a device works apart
    from it, the same without what it waited for the device (under ``Clock.watched``) and what the recorder took: layers
    of a server follow each other no faster (``analysis.store``). ``SM_CLOCK`` is that of the hold before the run.
    """
    recorder.marks.clear()  # Destroying the events of the run before takes a microsecond each.
    clock = recorder.clock
    clock.wait()
    clock.hold(hold_us)
    meet()
    blocked_us = clock.blocked_us
    cpu_start, host_start = time.thread_time_ns(), time.perf_counter_ns()
    recorder.begin()
    run()
    recorder.end()
    host_end, cpu_end = time.perf_counter_ns(), time.thread_time_ns()
    blocked_us = clock.blocked_us - blocked_us
    times = recorder.times_us()
    times[HOST] = (host_end - host_start) / 1e3
    if clock.is_apart:
        times[HOST_BUSY] = max(times[HOST] - blocked_us - recorder.own_us, 0.0)
    times[THREAD_CPU] = (cpu_end - cpu_start) / 1e3
    if (clock_mhz := clock.held_mhz()) is not None:
        times[SM_CLOCK] = clock_mhz
    return times


class Stopwatch(NamedTuple):
    """How iterations of cases are timed: what comes before the hold, and who meets behind it.

    Attributes:
        flush: empties the cache ahead of each iteration, untimed; None = nothing does.
    """

    recorder: PhaseRecorder
    meet: Callable[[], object]
    flush: Callable[[], object] | None
    hold_us: float = HOLD_US

    def time(self, case_id: str, run: Callable[[], object], what: str = "") -> dict[PhaseKey, float]:
        """``timed`` for one iteration of a case, which profilers see as ``what``."""
        if self.flush is not None:
            self.flush()
        self.recorder.clock.open_range(f"{case_id} {what}")
        times = timed(run, self.recorder, self.meet, self.hold_us)
        self.recorder.clock.close_range()
        return times


def time_us(
    run: Callable[[], object], clock: Clock, meet: Callable[[], object] = no_meeting, hold_us: float = HOLD_US
) -> float:
    """Return the microseconds of one run; arguments as of ``timed``."""
    return timed(run, PhaseRecorder(clock), meet, hold_us)[TOTAL]
