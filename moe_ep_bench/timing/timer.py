"""Clocks, a recorder that splits an iteration into exclusive phases, and the order in which a run is timed.

Whatever is timed is timed by ``timed`` (phases) or ``time_us`` (one number): the device is held, ranks meet, and the
start stamp and the run are queued behind that. A start stamp on an idle GPU would count the host's time to launch the
first kernel; ranks that met before the hold would part again, because GPUs at other clocks are held for longer.

A recorder keeps one mark per change of phase: a clock reading and the phase that begins there.
The time between two marks belongs to exactly one phase, so nested stages are exclusive by
construction and the phases plus ``unaccounted`` add up to the total.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moe_ep_bench.schema import TOTAL, UNACCOUNTED, PhaseKey

# Of a GPU at 2 GHz. At a lower clock it is held for longer.
_CYCLES_PER_US = 2000

# Columns that concern a whole run: microseconds of the host and of its thread's CPU.
HOST, THREAD_CPU = "host", "thread_cpu"

HOLD_US = 2000.0
"""Hold of a GPU ahead of every timed run, longer than the host takes to issue a layer up to where it waits itself.

It stands for what a server has queued ahead of a layer. At 300 us Token Drop's first kernels came late: on an H200 with
8,192 tokens a layer that takes 1.37 ms took 2.21 ms.
"""


class Clock:
    """perf_counter, for work on the calling thread. Stamps are read later, so that reading disturbs nothing."""

    def stamp(self) -> Any:
        return time.perf_counter_ns()

    def wait(self) -> None:
        """Return once every stamp so far can be read."""

    def between_us(self, start: Any, end: Any) -> float:
        return (end - start) / 1e3

    def hold(self, time_us: float) -> Any:
        """Keep the device busy for about so long; return a stamp of when that began, None = nothing is held."""

    def open_range(self, name: str) -> None:
        """Begin a named range for a profiler that may be looking on; ranges nest."""

    def close_range(self) -> None:
        pass


class CudaClock(Clock):
    """CUDA events on the current stream, and NVTX ranges.

    A stamp that is taken while a graph is captured is set anew by each of its replays.
    """

    def stamp(self) -> torch.cuda.Event:
        inside = {"external": True} if torch.cuda.is_current_stream_capturing() else {}
        event = torch.cuda.Event(enable_timing=True, **inside)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def between_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e3

    def hold(self, time_us: float) -> torch.cuda.Event | None:
        if time_us <= 0:
            return None
        began = self.stamp()
        torch.cuda._sleep(int(time_us * _CYCLES_PER_US))
        return began

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
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.marks: list[Mark] = []
        self._stack: list[PhaseKey] = []

    def begin(self) -> None:
        self.marks.clear()
        self._stack = [UNACCOUNTED]
        self._mark()

    def enter(self, phase: PhaseKey) -> None:
        self._stack.append(phase)
        self._mark()
        self.clock.open_range(phase if isinstance(phase, str) else f"{phase[1]} of layer {phase[0]}")

    def leave(self) -> None:
        self.clock.close_range()
        self._stack.pop()
        self._mark()

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
    *,
    paced: bool = False,
) -> dict[PhaseKey, float]:
    """Return the phases of one run in microseconds, with ``HOST`` and ``THREAD_CPU``.

    Args:
        meet: aligns the ranks that talk to each other; on CUDA it only queues a collective on the stream.
        hold_us: hold of the device, a GPU.
        paced: whether the total is the host's time where it is the longer: layers of a server follow each other, and
            the slower of device and host sets their pace. The rest is ``UNACCOUNTED``.

    ``HOST`` is the time that the host takes to issue the run; where it is not ``paced``, beyond its head start: by the
    device's clock the hold and what others were late to the meeting, less its launch. The CPU, which is not held and
    where the meeting waits for the others, has none.
    """
    recorder.marks.clear()  # Destroying the events of the run before takes a microsecond each.
    recorder.clock.wait()
    held_ns = time.perf_counter_ns()
    held = recorder.clock.hold(hold_us)
    meet()
    cpu_start, host_start = time.thread_time_ns(), time.perf_counter_ns()
    recorder.begin()
    run()
    recorder.end()
    host_end, cpu_end = time.perf_counter_ns(), time.thread_time_ns()
    times = recorder.times_us()
    times[HOST] = (host_end - host_start) / 1e3
    if held is not None and paced:
        beyond_us = max(times[HOST] - times[TOTAL], 0.0)
        times[TOTAL] += beyond_us
        times[UNACCOUNTED] += beyond_us
    elif held is not None:
        head_start_us = recorder.clock.between_us(held, recorder.marks[0][0]) - (host_start - held_ns) / 1e3
        times[HOST] = max(times[HOST] - max(head_start_us, 0.0), 0.0)
    times[THREAD_CPU] = (cpu_end - cpu_start) / 1e3
    return times


class Stopwatch(NamedTuple):
    """How iterations of cases are timed: what comes before the hold, and who meets behind it.

    Attributes:
        flush: empties the cache ahead of each iteration, untimed; None = nothing does.
        waiting: ids of cases whose host waits for the device within a run, so that its own time is not known; all
            others are ``paced`` (``timed``).
    """

    recorder: PhaseRecorder
    meet: Callable[[], object]
    flush: Callable[[], object] | None
    hold_us: float = HOLD_US
    waiting: frozenset[str] = frozenset()

    def time(self, case_id: str, run: Callable[[], object], what: str = "") -> dict[PhaseKey, float]:
        """``timed`` for one iteration of a case, which profilers see as ``what``."""
        if self.flush is not None:
            self.flush()
        self.recorder.clock.open_range(f"{case_id} {what}")
        times = timed(run, self.recorder, self.meet, self.hold_us, paced=case_id not in self.waiting)
        self.recorder.clock.close_range()
        return times


def time_us(
    run: Callable[[], object], clock: Clock, meet: Callable[[], object] = no_meeting, hold_us: float = HOLD_US
) -> float:
    """Return the microseconds of one run; arguments as of ``timed``."""
    return timed(run, PhaseRecorder(clock), meet, hold_us)[TOTAL]
