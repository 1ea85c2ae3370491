"""A layer takes as long as the slower of its host and its device; a host that waits for the device is not slower."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from virtual_time import HandClock

from moe_ep_bench.bench import measured_ranks
from moe_ep_bench.bench.measured_ranks import MeasuredRanks
from moe_ep_bench.config import MeasureConfig
from moe_ep_bench.layer.host import free_memory
from moe_ep_bench.schema import TOTAL, UNACCOUNTED
from moe_ep_bench.timing import timer as timer_module
from moe_ep_bench.timing.protocol import Step, find_waiting
from moe_ep_bench.timing.timer import HOLD_US, HOST, PhaseRecorder, Stopwatch, timed


class Machine:
    """A host that issues runs, and a device that is held and runs them, each with a time of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock_ghz: float = 2.0) -> None:
        self.host, self.device, self.held, self.free_at = HandClock(), HandClock(), [], 0.0
        self.clock_ghz = clock_ghz
        monkeypatch.setattr(time, "perf_counter_ns", lambda: int(self.host.now * 1000))
        monkeypatch.setattr(self.device, "hold", self._hold)

    def _hold(self, hold_us: float) -> float | None:
        self.held.append(hold_us)
        began, held_us = self.device.now, hold_us * 2.0 / self.clock_ghz
        self.device.now, self.free_at = began + held_us, self.host.now + held_us
        return began if hold_us else None

    def case(
        self, case_id: str, issued_us: float, takes_us: float, *, waits: bool = False, fills: bool = False
    ) -> FixedCase:
        """``waits``: when all is issued but the last launch, the host waits until the device has done what it has.

        ``fills``: the device queues half of the launches; before the others it has to begin.
        """

        def run() -> None:
            self.host.now += issued_us / 2
            if fills:
                self.host.now = max(self.host.now, self.free_at)
            self.host.now += issued_us / 2
            if waits:
                self.host.now = max(self.host.now, self.free_at + takes_us)
            self.device.now += takes_us

        return FixedCase(case_id, run)


class FixedCase:
    def __init__(self, case_id: str, run: Callable[[], None]) -> None:
        self.case_id, self.run = case_id, run

    @contextlib.contextmanager
    def ready(self, batch: int, recorder: PhaseRecorder | None = None) -> Iterator[Callable[[], None]]:
        yield self.run


# Name, microseconds that the host takes to issue it, that the device takes, and whether the host waits within it.
CASES = [
    ("prefill", 500, 5000, False),
    ("decode", 400, 200, False),
    ("decode, replayed", 20, 200, False),
    ("waits for its device", 400, 1000, True),
    ("many layers of a slow host", 20_000, 4_000, False),
    ("many layers of a fast one", 20_000, 40_000, False),
]


@pytest.mark.parametrize("clock_ghz", [1.2, 2.0, 2.9])
def test_cases_whose_host_waits_for_its_device_are_found_on_any_rank(
    clock_ghz: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, clock_ghz)
    cases = [machine.case(name, issued_us, takes_us, waits=waits) for name, issued_us, takes_us, waits in CASES]

    def found(slowest: Callable[[np.ndarray], np.ndarray]) -> frozenset[str]:
        return find_waiting(cases, machine.device, lambda: None, slowest, lambda case_id: None)

    assert found(lambda beyond_us_C: beyond_us_C) == {"waits for its device"}
    other_rank_C = np.array([-9.0, -9.0, 30.0, -9.0, -9.0, -9.0])
    expected = {"waits for its device", "decode, replayed"}
    assert found(lambda beyond_us_C: np.maximum(beyond_us_C, other_rank_C)) == expected


@pytest.mark.parametrize(("waits", "disturbed"), [(True, (0, 3)), (False, (4, 5, 7, 8))])
def test_a_host_that_is_disturbed_waits_as_its_fastest_runs_do(
    waits: bool, disturbed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of three, each way: without a hold, or behind both holds."""
    machine = Machine(monkeypatch)
    model, runs = machine.case("model", 40_000, 60_000, waits=waits), itertools.count()

    def run() -> None:
        machine.host.now += 50_000 if next(runs) in disturbed else 0
        model.run()

    found = find_waiting(
        [FixedCase("model", run)], machine.device, lambda: None, lambda beyond_us_C: beyond_us_C, lambda case_id: None
    )
    assert found == ({"model"} if waits else frozenset())


def test_a_slow_host_waits_for_no_device_that_cannot_queue_all_of_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    cases = [machine.case("1,600 launches", 11_000, 4_000, fills=True), machine.case("layer", 400, 1000, waits=True)]
    waiting = find_waiting(cases, machine.device, lambda: None, lambda beyond_us_C: beyond_us_C, lambda case_id: None)
    assert waiting == {"layer"}


@pytest.mark.parametrize(("name", "issued_us", "takes_us", "waits"), CASES)
def test_the_slower_of_host_and_device_sets_the_pace(
    name: str, issued_us: float, takes_us: float, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every case is held for as long, so that none gains by a head start that another has not."""
    machine = Machine(monkeypatch)
    waiting = frozenset([name]) if waits else frozenset()
    watch = Stopwatch(PhaseRecorder(machine.device), timer_module.no_meeting, None, waiting=waiting)
    case = machine.case(name, issued_us, takes_us, waits=waits)
    times = watch.time(case.case_id, case.run)
    assert machine.held == [HOLD_US]
    assert times[TOTAL] == (takes_us if waits else max(issued_us, takes_us))
    assert times[UNACCOUNTED] == times[TOTAL], "no phase was entered"
    if not waits:
        assert times[HOST] == issued_us


@pytest.mark.parametrize("late_us", [0, 5000])
@pytest.mark.parametrize("clock_ghz", [1.2, 2.0, 2.9])
def test_the_device_says_how_long_a_host_that_waits_had_a_head_start(
    clock_ghz: float, late_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would seem to issue work until the end on a GPU of a low clock, and where another rank came late."""
    machine = Machine(monkeypatch, clock_ghz)

    def meet() -> None:
        machine.device.now += late_us
        machine.free_at += late_us

    case = machine.case("waits", 400, 1000, waits=True)
    assert timed(case.run, PhaseRecorder(machine.device), meet)[HOST] == pytest.approx(1000, abs=1)


def test_the_marks_of_the_run_before_are_given_back_before_the_hosts_time_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H100 the first plain run after broken down ones was issued 30 us later than others."""
    machine = Machine(monkeypatch)

    class Event:
        def __del__(self) -> None:
            machine.host.now += 1

    recorder = PhaseRecorder(machine.device)
    recorder.marks += [(Event(), UNACCOUNTED) for _ in range(30)]
    assert timed(machine.case("decode", 400, 200).run, recorder, paced=True)[HOST] == 400


def test_without_a_hold_the_host_sets_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU, where what the host does is the work."""
    machine = Machine(monkeypatch)
    case = machine.case("decode", 400, 200)
    times = timed(case.run, PhaseRecorder(machine.device), hold_us=0.0, paced=True)
    assert (times[HOST], times[TOTAL]) == (400, 200)


@pytest.mark.parametrize(("device", "waiting"), [("cuda", {"native", "topk"}), ("cpu", set())])
def test_hosts_of_virtual_ranks_wait_on_a_gpu(device: str, waiting: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("builder", "VirtualRanks", "clock_for"):
        monkeypatch.setattr(measured_ranks, name, lambda *_: None)
    settings = SimpleNamespace(measure=MeasureConfig(), layer=None)
    cases = [SimpleNamespace(case_id=name) for name in ("native", "topk")]
    facts = {"ep_size": 2, "most_tokens": 1, "scope": "model", "context_length": 0}
    comparison = SimpleNamespace(experiment=settings, cases=cases, **facts)
    assert MeasuredRanks(comparison, torch.device(device)).watch.waiting == waiting


def test_the_last_rounds_of_each_virtual_rank_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Case:
        def __init__(self, ranks: object, router: SimpleNamespace, *of_rank: object) -> None:
            self.case_id = router.case_id

        def time(self, step: Step) -> tuple[str, int, int]:
            return self.case_id, step.rank, step.iteration

    monkeypatch.setattr(measured_ranks, "RankCase", Case)
    ranks, measure = MeasuredRanks.__new__(MeasuredRanks), MeasureConfig(iterations=3)
    ranks.virtual = SimpleNamespace(group=SimpleNamespace(size=lambda: 2))
    ranks._comparison = SimpleNamespace(experiment=SimpleNamespace(measure=measure), workloads=[None])
    batches, traffic = SimpleNamespace(share=lambda *_: None), SimpleNamespace(index=0)
    routed = [(SimpleNamespace(case_id=name, batches=batches), traffic) for name in ("native", "topk")]
    last = range(measure.fewest_rounds)[-3:]
    expected = [[[(name, rank, number) for number in last] for rank in range(2)] for name in ("native", "topk")]
    assert ranks.times(routed, lambda case_id: None) == expected


def test_the_peak_of_memory_is_that_of_a_comparison_and_not_of_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of emulated ranks too: the copy that is a yardstick takes 2 GiB."""
    done: list[str] = []
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: done.append(name))
    free_memory(torch.device("cuda"))
    assert done == ["empty_cache", "reset_peak_memory_stats"]
