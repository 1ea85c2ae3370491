"""Which cases are timed behind a hold of the device, and which show their launches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from virtual_time import HandClock

from moe_ep_bench.bench.measured_ranks import MeasuredRanks
from moe_ep_bench.timing import timer as timer_module
from moe_ep_bench.timing.protocol import find_launch_bound
from moe_ep_bench.timing.timer import HOLD_US, PhaseRecorder, Stopwatch


class Machine:
    """A host that issues runs, and a device that is held and runs them, each with a time of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.device, self.held, self.free_at = HandClock(), HandClock(), [], 0.0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: int(self.host.now * 1000))
        monkeypatch.setattr(self.device, "hold", self._hold)

    def _hold(self, hold_us: float) -> float:
        self.held.append(hold_us)
        self.free_at = self.host.now + hold_us
        return hold_us

    def case(self, case_id: str, issued_us: float, takes_us: float, *, waits: bool = False) -> FixedCase:
        """``waits``: when all is issued but the last launch, the host waits until the device has done what it has."""

        def run() -> None:
            self.host.now += issued_us
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


def test_cases_that_are_issued_more_slowly_than_they_run_are_found_on_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    cases = [
        machine.case("prefill", 500, 5000),
        machine.case("decode", 400, 200),
        machine.case("decode, replayed", 20, 200),
        machine.case("waits for its device", 400, 1000, waits=True),
        machine.case("many layers of a slow host", 20_000, 4_000),
        machine.case("many layers of a fast one", 20_000, 40_000),
    ]

    def found(slowest: Callable[[np.ndarray], np.ndarray]) -> frozenset[str]:
        return find_launch_bound(cases, machine.device, lambda: None, slowest, lambda case_id: None)

    slow = {"decode", "many layers of a slow host"}
    assert found(lambda excess_C: excess_C) == slow
    other_rank_C = np.array([-1.0, -1.0, 30.0, -1.0, -1.0, -1.0])
    assert found(lambda excess_C: np.maximum(excess_C, other_rank_C)) == {*slow, "decode, replayed"}


def test_only_they_are_timed_without_a_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    watch = Stopwatch(PhaseRecorder(machine.device), timer_module.no_meeting, None, unheld=frozenset(["decode"]))
    for case in (machine.case("prefill", 500, 5000), machine.case("decode", 400, 200)):
        watch.time(case.case_id, case.run)
    assert machine.held == [HOLD_US, 0.0]


def test_a_case_that_one_virtual_rank_issues_slowly_is_held_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated ranks show their launches where real ones do."""
    machine, timer = Machine(monkeypatch), MeasuredRanks.__new__(MeasuredRanks)
    timer.virtual = SimpleNamespace(exchange=SimpleNamespace(checks_counts=True))
    timer.watch = Stopwatch(PhaseRecorder(machine.device), timer_module.no_meeting, None)
    for issued_us in (400, 100):  # ranks in turn
        turns = [machine.case("decode", issued_us, 200), machine.case("prefill", 500, 5000)]
        timer.leave_unheld(turns, lambda case_id: None)
    assert timer.watch.unheld == {"decode"}
