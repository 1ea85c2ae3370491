"""The order of timing, and phases that add up, on a clock that tests turn by hand."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import HandClock

from moe_ep_bench.bench.result import Result
from moe_ep_bench.schema import HOST, THREAD_CPU, TOTAL, UNACCOUNTED
from moe_ep_bench.timing import device as timing_device
from moe_ep_bench.timing.protocol import (
    BREAKDOWN,
    COLUMNS,
    PLAIN,
    UNCOUNTED,
    Step,
    WarmUp,
    all_steps,
    measure,
    order,
    probe_floor_us,
    turn_of,
    warm_breakdowns,
    warm_up,
)
from moe_ep_bench.timing.timer import Clock, CudaClock, PhaseRecorder, Stopwatch, clock_for, timed


def test_nested_phases_are_taken_out_of_what_surrounds_them() -> None:
    clock = HandClock()
    recorder = PhaseRecorder(clock)

    def spend(us: float) -> None:
        clock.now += us

    inner = recorder.wrap("metadata", lambda: spend(5))

    def outer_work() -> None:
        spend(2)
        inner()
        spend(3)

    outer = recorder.wrap("permute", outer_work)
    recorder.begin()
    spend(1)
    outer()
    outer()
    spend(4)
    recorder.end()
    assert recorder.times_us() == {"permute": 10, "metadata": 10, UNACCOUNTED: 5, TOTAL: 25}
    # A phase that raises is left.
    recorder.begin()
    with pytest.raises(ZeroDivisionError):
        recorder.wrap("experts", lambda: 1 / 0)()
    spend(3)
    recorder.end()
    assert recorder.times_us()[UNACCOUNTED] == 3


@pytest.mark.parametrize("num_cases", range(1, 13))
def test_every_case_takes_every_place_and_follows_every_other_equally_often(num_cases: int) -> None:
    rounds = 1 + num_cases % 2
    orders = [order(num_cases, turn) for turn in range(num_cases * rounds)]
    for row in orders:
        assert sorted(row) == list(range(num_cases))
    for place in range(num_cases):
        assert Counter(row[place] for row in orders) == dict.fromkeys(range(num_cases), rounds)
    follows = Counter(pair for row in orders for pair in itertools.pairwise(row))
    assert follows == dict.fromkeys(itertools.permutations(range(num_cases), 2), rounds)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))
def test_every_batch_is_timed_equally_often(num_batches: int, iterations: int, breakdowns: int) -> None:
    steps = [step for step in all_steps(num_batches, iterations, min(breakdowns, iterations)) if step.kind != UNCOUNTED]
    kinds = Counter((step.batch, step.kind) for step in set(steps))
    counts = {PLAIN: iterations, BREAKDOWN: min(breakdowns, iterations)}
    assert kinds == Counter({(batch, kind): n for batch in range(num_batches) for kind, n in counts.items() if n})
    assert len(steps) == kinds.total()


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 9))
def test_no_plain_iteration_of_a_batch_follows_a_broken_down_one_of_any(
    num_batches: int, iterations: int, breakdowns: int
) -> None:
    """Of 240 behind such ones five took 7 to 35 % longer on an H100, each of a batch that had not run since."""
    steps = all_steps(num_batches, iterations, min(breakdowns, iterations))
    for batch in range(num_batches):
        last = max((place for place, step in enumerate(steps) if step.kind == BREAKDOWN), default=len(steps))
        behind = [step.kind for step in steps[last + 1 :] if step.batch == batch]
        assert behind in ([], [UNCOUNTED, *[PLAIN] * (len(behind) - 1)])
    places = [place for place, step in enumerate(steps) if step.kind == BREAKDOWN]
    assert not places or places == list(range(places[0], places[-1] + 1)), "one block, so that one round suffices"
    before, after = (
        (sum(step.kind == PLAIN for step in part) for part in (steps[: places[0]], steps[places[-1] :]))
        if places
        else (0, 0)
    )
    assert abs(before - after) <= num_batches, "in the middle: what drifts evenly strikes both kinds alike"


def test_of_uncounted_iterations_nothing_is_kept() -> None:
    ran, kept, steps = [], [], all_steps(2, 2, 1)
    case = SimpleNamespace(case_id="case", time=lambda step: ran.append(step))
    measure([case], steps, lambda case_id: None, lambda index, step, taken: kept.append(step))
    assert ran == steps
    assert [step.kind for step in steps] == [PLAIN, PLAIN, BREAKDOWN, BREAKDOWN, UNCOUNTED, UNCOUNTED, PLAIN, PLAIN]
    assert kept == [step for step in steps if step.kind != UNCOUNTED]


@given(st.integers(1, 25), st.integers(1, 12))
def test_a_batch_meets_another_order_in_every_round_and_all_of_them_in_time(num_batches: int, num_cases: int) -> None:
    rounds = num_cases * (1 + num_cases % 2)
    for batch in range(num_batches):
        turns = [turn_of(Step(batch, iteration, PLAIN), num_batches, num_cases) for iteration in range(rounds)]
        assert sorted(turn % rounds for turn in turns) == list(range(rounds))
    within = [turn_of(Step(batch, 0, PLAIN), num_batches, num_cases) for batch in range(num_batches)]
    assert within == list(range(num_batches))


class FakeCase:
    """A case whose runs take what ``times`` says, by the clock of the test."""

    watch: Stopwatch

    def __init__(self, spend: Callable[[int], object], case_id: str = "case") -> None:
        self._spend, self.case_id = spend, case_id

    @contextlib.contextmanager
    def ready(self, batch: int, recorder: PhaseRecorder | None = None) -> Iterator[Callable[[], None]]:
        yield lambda: self._spend(batch)

    def time(self, step: Step) -> dict[Any, float]:
        with self.ready(step.batch) as run:
            return self.watch.time(self.case_id, run)


def measured(
    cases: list[FakeCase],
    steps: list[Step],
    clock: Any,
    meet: Callable[[], object] = lambda: None,
    before: Callable[[str], object] = lambda case_id: None,
    flush: Callable[[], object] | None = None,
    hold_us: float = 0.0,
) -> np.ndarray:
    """The loop's times, [cases, steps, columns]."""
    result = Result()
    result.expect([case.case_id for case in cases], steps, COLUMNS)
    for case in cases:
        case.watch = Stopwatch(PhaseRecorder(clock), meet, flush, hold_us)
    measure(cases, steps, before, lambda case, step, times: result.keep(cases[case].case_id, step, times))
    return np.concatenate(list(result.times.values()))


@pytest.mark.parametrize(
    ("times", "most", "expected"),
    [
        ([9.0, 5.0, 2.0, 1.01, 1.0, 1.0], 6, WarmUp(5, pytest.approx(1 / 1.01 - 1), True)),
        ([1.0] * 6, 6, WarmUp(2, 0.0, True)),
        ([1.0, 2.0, 4.0], 3, WarmUp(3, 1.0, False)),
        ([1.0], 1, WarmUp(1, None, False)),
        ([], 0, WarmUp(0, None, False)),
    ],
)
def test_warm_up_ends_when_a_round_takes_as_long_as_the_one_before(
    times: list[float], most: int, expected: WarmUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, runs = 0.0, Counter[int]()

    def spend(batch: int) -> None:
        nonlocal now
        now += times[runs[batch]] * (1 + batch)  # Batches differ; only rounds are compared.
        runs[batch] += 1

    monkeypatch.setattr("moe_ep_bench.timing.protocol.time.perf_counter", lambda: now)
    seen: list[str] = []
    result = warm_up([FakeCase(spend)], 3, most, HandClock(), lambda times_B: times_B, seen.append)
    assert result == expected
    assert len(seen) == 3 * result.rounds
    # Ranks end together, by the slowest.
    monkeypatch.setattr("moe_ep_bench.timing.protocol.time.perf_counter", itertools.count().__next__)
    others = iter([np.array([50.0]), np.array([10.0]), np.array([10.0])])
    still = FakeCase(lambda batch: None)
    together = warm_up([still], 1, 9, HandClock(), lambda times_B: np.maximum(times_B, next(others)), seen.append)
    assert together == WarmUp(3, 0.0, True)


def test_breakdowns_are_warmed_up_as_they_are_measured_every_case_on_every_batch() -> None:
    """With all that a phase's first probe sets up, as a communicator."""
    clock, ran = RecordingClock(), []

    class Watched(FakeCase):
        @contextlib.contextmanager
        def ready(self, batch: int, recorder: PhaseRecorder | None = None) -> Iterator[Callable[[], None]]:
            assert recorder is not None
            yield lambda: ran.append((self.case_id, batch))

    cases = [Watched(print, name) for name in "ab"]
    warm_breakdowns(cases, 2, clock, clock.does("meet"), clock.note)
    assert ran == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert clock.queued == [step for case in "abab" for step in (case, "hold", "meet", "stamp", "stamp")]


def test_small_inputs_are_handed_out_in_turn_and_large_ones_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing_device, "cache_bytes", lambda device: 1000)
    small = timing_device.RotatingInput(torch.arange(100, dtype=torch.float32), most=9)
    assert len(small.copies) == 5  # 5 x 400 bytes reach twice the cache
    handed = [small.next() for _ in range(10)]
    assert [copy.data_ptr() for copy in handed] == [copy.data_ptr() for copy in small.copies] * 2
    assert all(torch.equal(copy, small.copies[0]) for copy in handed)
    sizes = ((100, 3, 3), (500, 9, 1), (0, 4, 4))
    for size, most, made in sizes:
        assert len(timing_device.RotatingInput(torch.zeros(size), most=most).copies) == made


def test_a_flush_writes_twice_the_cache_and_then_reads_it_so_that_no_line_is_left_dirty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing_device, "cache_bytes", lambda device: 1000)
    flush = timing_device.CacheFlush(torch.device("cpu"))
    assert flush._buffer.nbytes == 2000
    flush._buffer = mock.Mock()
    flush()
    assert flush._buffer.mock_calls == [mock.call.add_(1), mock.call.sum()]


def test_cases_are_timed_in_the_planned_order_and_the_hosts_time_is_in_microseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, ran, steps = HandClock(), [], all_steps(4, 3, 0)
    monkeypatch.setattr(time, "thread_time_ns", itertools.count(0, 7000).__next__)
    monkeypatch.setattr(time, "perf_counter_ns", itertools.count(0, 9000).__next__)
    cases = [FakeCase(lambda batch, name=name: ran.append((name, batch)), str(name)) for name in range(3)]
    samples = measured(cases, steps, clock)
    assert gc.isenabled()
    assert ran == [(case, step.batch) for step in steps for case in order(3, turn_of(step, 4, 3))]
    assert (samples[:, :, COLUMNS.index(THREAD_CPU)] == 7).all()
    assert (samples[:, :, COLUMNS.index(HOST)] == 9).all()


class RecordingClock(HandClock):
    """A clock that notes in which order its stream is given a hold and stamps; callers add the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[str] = []

    def hold(self, time_us: float) -> None:
        self.note("hold" if time_us else "no hold")
        super().hold(time_us)

    def stamp(self) -> float:
        self.note("stamp")
        return super().stamp()

    def note(self, what: str) -> None:
        self.queued.append(what)

    def of(self, device: Any) -> RecordingClock:
        """In place of ``clock_for``."""
        return self

    def does(self, what: str) -> Callable[..., None]:
        return lambda *_, **__: self.note(what)


def measures(clock: RecordingClock, _: pytest.MonkeyPatch) -> None:
    cases, steps = [FakeCase(clock.does("work"))], all_steps(1, 1, 0)
    measured(cases, steps, clock, clock.does("meet"), flush=clock.does("flush"), hold_us=300)


def probes(clock: RecordingClock, _: pytest.MonkeyPatch) -> None:
    turns = itertools.cycle(["meet", "work"])
    probe_floor_us(lambda: clock.note(next(turns)), clock, count=2)


def calibrates(clock: RecordingClock, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_ep_bench.cost_model import calibrate

    monkeypatch.setattr(calibrate, "clock_for", clock.of)
    monkeypatch.setattr(calibrate, "_WARM_UP", 0)
    monkeypatch.setattr(calibrate, "_exchange", lambda ranks, share: clock.does("work"))
    monkeypatch.setattr(torch.distributed, "all_reduce", clock.does("meet"))
    ranks = SimpleNamespace(device=torch.device("cpu"), all_gather=lambda times: [times])
    calibrate.measure(ranks, [8], 6)


ALIGNED = ["hold", "meet", "stamp", "work", "stamp"]


@pytest.mark.parametrize(
    ("times", "expected"),
    [(probes, ALIGNED), (calibrates, ALIGNED), (measures, ["flush", *ALIGNED])],
)
def test_what_is_timed_is_queued_behind_a_hold_and_ranks_meet_last(
    times: Callable[[RecordingClock, pytest.MonkeyPatch], None],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the start stamp falls on an idle GPU, or ranks whose clocks differ are held apart again."""
    clock = RecordingClock()
    times(clock, monkeypatch)
    rounds, rest = divmod(len(clock.queued), len(expected))
    assert rounds >= 1
    assert rest == 0
    assert clock.queued == expected * rounds


def test_where_nothing_is_held_the_host_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the meeting waits until all have come: that is not the host's time."""
    host = HandClock()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(host.now * 1000))
    assert timed(lambda: host.hold(50), PhaseRecorder(Clock()), lambda: host.hold(900), hold_us=300)[HOST] == 50


def test_clocks_give_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    host = clock_for(torch.device("cpu"))
    monkeypatch.setattr(time, "perf_counter_ns", iter([1_000_000, 4_500_000]).__next__)
    assert host.between_us(host.stamp(), host.stamp()) == 3500
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 2.5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    device = clock_for(torch.device("cuda"))
    assert device.between_us(device.stamp(), device.stamp()) == 2500, "CUDA's are milliseconds"


def test_a_gpu_is_held_and_the_probe_floor_is_the_second_of_two_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two waits for whoever comes late. No launch holds a GPU where no pre-roll is asked for."""
    clock, calls, slept = HandClock(), [], []

    def meet() -> None:
        calls.append(len(calls))
        clock.now += 3 if calls[-1] % 2 else 900

    assert probe_floor_us(meet, clock, count=9) == 3
    assert len(calls) == 18
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(CudaClock, "stamp", lambda self: slept.append("stamp"))
    for time_us in (300.0, 0.0, 0.5):
        CudaClock().hold(time_us)
    assert slept == ["stamp", 600_000, "stamp", "stamp", 1000, "stamp"]


def test_the_length_of_a_hold_tells_the_clock_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    events = (SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 2.5) for _ in range(2))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: next(events))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    clock = CudaClock()
    assert clock.held_mhz() is None
    clock.hold(2000)
    assert clock.held_mhz() == 1600, "4 million cycles in 2.5 ms"
    clock.hold(0)
    assert clock.held_mhz() is None


def test_ceilings_are_rates_of_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing_device, "_median_us", lambda function, device: (function(), 100.0)[1])
    monkeypatch.setitem(timing_device._MATMUL_SIZE, "cpu", 10)
    monkeypatch.setitem(timing_device._COPY_BYTES, "cpu", 500)
    found = timing_device.measure_ceilings(torch.device("cpu"), torch.float32)
    assert found.matmul_tflops == pytest.approx(2 * 1000 / 100e-6 / 1e12)
    assert found.copy_gbps == pytest.approx(2 * 500 / 100e-6 / 1e9)
    assert found.read_gbps == pytest.approx(500 / 100e-6 / 1e9)
