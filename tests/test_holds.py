"""A layer takes as long as the slower of its device and its host, whose waiting for the device is no work."""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from virtual_time import HandClock

from moe_ep_bench.analysis.store import paced, pivoted
from moe_ep_bench.bench.measure import Case
from moe_ep_bench.bench.virtual_ranks import VirtualRanks
from moe_ep_bench.config import MeasureConfig
from moe_ep_bench.layer.host import device_scope, free_memory
from moe_ep_bench.layer.virtual import VirtualStack
from moe_ep_bench.schema import HOST, HOST_BUSY, SM_CLOCK, TOTAL, UNACCOUNTED
from moe_ep_bench.timing import syncs
from moe_ep_bench.timing import timer as timer_module
from moe_ep_bench.timing.protocol import PLAIN, Step, measure
from moe_ep_bench.timing.timer import HOLD_US, PhaseRecorder, Stopwatch, timed


class Machine:
    """A host that issues work, and a device that is held and does it in order, each with a time of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock_ghz: float = 2.0) -> None:
        self.host, self.device = HandClock(), HandClock()
        self.device.is_apart, self.held, self.clock_ghz = True, [], clock_ghz
        monkeypatch.setattr(time, "perf_counter_ns", lambda: int(self.host.now * 1000))
        monkeypatch.setattr(self.device, "hold", self._hold)
        monkeypatch.setattr(self.device, "wait", self._catch_up)

    def _hold(self, hold_us: float) -> None:
        self.held.append(hold_us)
        self._work(hold_us * 2.0 / self.clock_ghz)

    def _work(self, time_us: float) -> None:
        """Queue work now; the device begins it when it has come and what was before is done."""
        self.device.now = max(self.device.now, self.host.now) + time_us

    def _catch_up(self) -> None:
        self.host.now = max(self.host.now, self.device.now)

    def run(self, *parts: tuple[float, float]) -> Callable[[], None]:
        """A case: the host issues each part and the device does it (us); between parts the host waits."""

        def run() -> None:
            for number, (issued_us, takes_us) in enumerate(parts):
                if number:
                    with self.device.blocking():
                        self._catch_up()
                self.host.now += issued_us
                self._work(takes_us)

        return run

    def time(self, *parts: tuple[float, float], hold_us: float = HOLD_US) -> dict[Any, float]:
        return Stopwatch(PhaseRecorder(self.device), timer_module.no_meeting, None, hold_us).time("", self.run(*parts))


# By name: what the host issues and the device does, the host waiting in between; then the host's time without that.
CASES = {
    "prefill": ([(500, 5000)], 500),
    "decode": ([(400, 200)], 400),
    "many layers of a slow host": ([(20_000, 4_000)], 20_000),
    "an all-to-all layer": ([(300, 1000), (400, 4000)], 700),
    "one of few tokens": ([(300, 60), (400, 100)], 700),
    # 0.2 ms of work before the host waits, which it needs over 1.9 ms to reach: no hold told it from one that does not.
    "one of a slow host": ([(1950, 200), (400, 300)], 2350),
}


@pytest.mark.parametrize("clock_ghz", [1.2, 2.0, 2.9])
@pytest.mark.parametrize("name", CASES)
def test_the_hosts_time_is_what_it_issues_whatever_it_waits_for_its_device(
    name: str, clock_ghz: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, clock_ghz)
    parts, busy_us = CASES[name]
    times = machine.time(*parts)
    assert machine.held == [HOLD_US]
    assert times[HOST_BUSY] == pytest.approx(busy_us)
    assert times[HOST] >= times[HOST_BUSY]
    assert (times[HOST] > times[HOST_BUSY]) == (len(parts) > 1), "it waited"
    assert times[UNACCOUNTED] == times[TOTAL], "no phase was entered"


@pytest.mark.parametrize("hold_us", [0.0, 300.0, 2000.0, 50_000.0])
def test_no_hold_hides_the_host_of_a_layer_that_waits(hold_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Machine(monkeypatch).time(*CASES["one of few tokens"][0], hold_us=hold_us)
    assert max(times[TOTAL], times[HOST_BUSY]) == pytest.approx(700 if hold_us else 860, abs=1)


def test_what_the_probes_of_a_phase_take_is_not_the_hosts_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual ranks are always timed by phase."""
    machine = Machine(monkeypatch)
    stamp = machine.device.stamp
    monkeypatch.setattr(
        machine.device, "stamp", lambda: (setattr(machine.host, "now", machine.host.now + 5), stamp())[1]
    )
    recorder = PhaseRecorder(machine.device)
    phase = recorder.wrap("experts", machine.run((400, 200)))
    times = timed(lambda: [phase() for _ in range(10)], recorder)
    assert times[HOST] == 4000 + 22 * 5
    assert times[HOST_BUSY] == 4000 + 2 * 5, "those at both ends are the run's"


def test_on_the_cpu_the_host_is_the_device() -> None:
    times = timed(lambda: None, PhaseRecorder(timer_module.Clock()))
    assert HOST in times
    assert HOST_BUSY not in times
    assert SM_CLOCK not in times


def test_the_hold_of_a_config_is_that_of_the_clock_unless_it_says_otherwise() -> None:
    assert MeasureConfig().hold_us == HOLD_US
    assert MeasureConfig().definition == {}, "cases keep their ids"
    assert MeasureConfig(hold_us=300).definition == {"hold_us": 300}


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
    assert timed(machine.run((400, 200)), recorder)[HOST] == 400


# ---- operations that wait --------------------------------------------------------------------------------------------

NUMBERS = torch.arange(6.0)
MASK = NUMBERS > 2
# On the CPU in the place of a GPU: what reads values of the device, and what does not.
WAITING = {
    "item": lambda: NUMBERS[1].item(),
    "tolist": lambda: NUMBERS.tolist(),
    "cpu": lambda: NUMBERS.cpu(),
    "bool": lambda: bool(MASK.any()),
    "int": lambda: int(NUMBERS.sum()),
    "float": lambda: float(NUMBERS.sum()),
    "index": lambda: [0, 1, 2][torch.tensor(1)],
    "if": lambda: 1 if MASK.all() else 0,
    "a mask": lambda: NUMBERS[MASK],
    "a mask among indices": lambda: NUMBERS.view(2, 3)[0, MASK[:3]],
    "nonzero": lambda: MASK.nonzero(),
    "torch.nonzero": lambda: torch.nonzero(MASK),
    "masked_select": lambda: NUMBERS.masked_select(MASK),
    "unique": lambda: torch.unique(NUMBERS),
    "equal": lambda: torch.equal(NUMBERS, NUMBERS),
    "repeat_interleave": lambda: NUMBERS.repeat_interleave(torch.tensor([1] * 6)),
    "synchronize": lambda: torch.cuda.synchronize(),
    "a stream": lambda: torch.cuda.current_stream().synchronize(),
    "an event": lambda: torch.cuda.current_stream().record_event().synchronize(),
    "a tensor of the host's values": lambda: torch.tensor([1.0], device="cpu"),
}
RUNNING = {
    "arithmetic": lambda: NUMBERS * 2 + NUMBERS.sum(),
    "slices": lambda: (NUMBERS[1:], NUMBERS[torch.zeros(2, dtype=torch.int64)], NUMBERS[None, 2]),
    "where": lambda: torch.where(MASK, NUMBERS, 0.0),
    "another dtype": lambda: NUMBERS.to(torch.float64),
    "the same device": lambda: NUMBERS.to("cpu"),
    "rows whose number is known": lambda: NUMBERS.repeat_interleave(torch.ones(6, dtype=torch.int64), output_size=6),
    "a fixed repeat": lambda: NUMBERS.repeat_interleave(2),
}


@pytest.mark.parametrize(("waits", "name"), [*((True, name) for name in WAITING), *((False, name) for name in RUNNING)])
def test_operations_that_read_values_are_clocked_and_others_are_not(waits: bool, name: str) -> None:
    entered = []

    @contextlib.contextmanager
    def blocking() -> Iterator[None]:
        entered.append(name)
        yield

    operation = WAITING[name] if waits else RUNNING[name]
    with device_scope():
        expected = operation()
        with syncs.watched_syncs(blocking, "cpu"):
            found = operation()
            count = len(entered)
        operation()
    assert (count > 0) == waits
    assert len(entered) == count, "nothing is watched any more"
    assert str(found) == str(expected)


def test_copies_between_host_and_device_wait_unless_they_need_not() -> None:
    numbers = torch.zeros(2, device="meta")
    for waits, args, kwargs in [
        (True, ("cpu",), {}), (True, (torch.device("cpu"),), {}), (True, (), {"device": "cpu"}),
        (False, ("cpu",), {"non_blocking": True}), (False, (torch.bfloat16,), {}), (False, ("meta",), {}),
        (False, (numbers,), {}),
    ]:  # fmt: skip
        assert syncs._crosses("meta", (numbers, *args), kwargs) == waits, (args, kwargs)
    assert syncs._crosses("meta", (torch.zeros(2), "meta"), {}), "a copy from pages waits too"


def test_waits_that_no_clock_sees_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says so itself, at the line; a stand-in for its warning."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    clock = timer_module.Clock()

    def sync() -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1)", stacklevel=2)

    with syncs.unseen_syncs(lambda: clock.is_blocked) as places:
        with clock.blocking():
            sync()
        warnings.warn("another matter", stacklevel=1)
        sync()
        line = inspect.currentframe().f_lineno - 1
    assert places == [f"test_holds.py:{line}"]
    assert modes == ["warn", "default"]


# ---- the slower of the two -------------------------------------------------------------------------------------------


def samples(device_us: list[float], host_us: list[float | None], kind: str = "plain", **changes: Any) -> pd.DataFrame:
    """Totals of one cell, and of broken down ones what is unaccounted for: 10 us."""
    where = {"case": 0, "launch": 0, "batch": 0, "rank": 0, "kind": kind, "layer": None, **changes}
    about = [{**where, "iteration": number} for number in range(len(device_us))]
    totals = [
        {**one, "phase": TOTAL, "time_us": device, HOST_BUSY: host}
        for one, device, host in zip(about, device_us, host_us, strict=True)
    ]
    rest = [{**one, "phase": UNACCOUNTED, "time_us": 10.0, HOST_BUSY: None} for one in about if kind == "breakdown"]
    return pd.DataFrame([*rest, *totals])


def times_of(rows: pd.DataFrame, phase: str = TOTAL) -> list[float]:
    return rows[phase].dropna().tolist()


@pytest.mark.parametrize(
    ("device_us", "host_us", "expected"),
    [
        ([5, 6, 7], [1, 2, 3], [5, 6, 7]),
        ([5, 6, 7], [9, 8, 10], [9, 8, 10]),
        # They alternate: neither takes 9, which the larger of each iteration would say.
        ([9, 5, 9, 5, 5], [5, 9, 5, 9, 5], [9, 5, 9, 5, 5]),
        ([5, 6, 7], [None, None, None], [5, 6, 7]),
    ],
)
def test_a_batch_takes_as_long_as_the_slower_of_device_and_host_by_their_medians(
    device_us: list[float], host_us: list[float | None], expected: list[float]
) -> None:
    found = times_of(paced(pivoted(samples(device_us, host_us))))
    assert found == expected
    known = [one for one in host_us if one is not None]
    assert np.median(found) == max(np.median(device_us), np.median(known) if known else 0)


def test_each_rank_batch_and_case_has_its_own_slower_one_and_phases_leave_the_rest_unaccounted() -> None:
    parts = [
        samples([5, 5, 5], [9, 9, 9], "breakdown"),
        samples([5, 5, 5], [1, 1, 1], "breakdown", rank=1),
        samples([7, 7, 7], [8, 8, 8], "breakdown", batch=1),
        samples([7, 7, 7], [1, 1, 1], "plain", batch=1),
    ]
    found = paced(pivoted(pd.concat(parts, ignore_index=True).sample(frac=1, random_state=1)))
    at = {key: rows for key, rows in found.groupby(["rank", "batch", "kind"])}
    assert times_of(at[0, 0, "breakdown"]) == [9] * 3
    assert times_of(at[0, 0, "breakdown"], UNACCOUNTED) == [14] * 3
    assert times_of(at[1, 0, "breakdown"]) == [5] * 3
    assert times_of(at[1, 0, "breakdown"], UNACCOUNTED) == [10] * 3
    assert times_of(at[0, 1, "breakdown"]) == [8] * 3
    assert times_of(at[0, 1, "plain"]) == [7] * 3


# ---- virtual ranks ---------------------------------------------------------------------------------------------------


def test_a_batch_has_a_round_more_where_there_is_a_warm_up() -> None:
    rounds = [MeasureConfig(iterations=3, warmup=warmup).fewest_rounds for warmup in (0, 1, 5)]
    assert rounds == [4, 5, 5]


def test_the_last_rounds_of_each_virtual_rank_count() -> None:
    ranks, settings = VirtualRanks.__new__(VirtualRanks), MeasureConfig(iterations=3)
    ranks.settings, ranks.num_ranks, kept = settings, 2, []
    cases = [SimpleNamespace(case_id=name, time=lambda step: step) for name in ("native", "topk")]
    measure(cases, ranks.steps(0), lambda case_id: None, lambda case, step, taken: kept.append((case, taken)))
    last = range(settings.fewest_rounds)[-3:]
    for number in range(2):
        found = [(step.iteration, step.rank) for case, step in kept if case == number]
        assert found == [(iteration, rank) for iteration in last for rank in range(2)]
    assert len(kept) == 2 * 3 * 2


def test_virtual_ranks_note_where_their_host_waits_unclocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first iteration, which does not count: torch looks at every operation for it."""
    clock = HandClock()
    monkeypatch.setattr(clock, "unseen", lambda: contextlib.nullcontext(["mine.py:7", "mine.py:7"]))
    monkeypatch.setattr(VirtualRanks, "ready", lambda *_: contextlib.nullcontext(lambda: None))
    ranks = VirtualRanks.__new__(VirtualRanks)
    ranks.watch = Stopwatch(PhaseRecorder(clock), timer_module.no_meeting, None)
    ranks.virtual = SimpleNamespace()
    case = Case(SimpleNamespace(case_id="topk"), ranks)
    case.time(Step(0, 1, PLAIN))
    assert case.unclocked == []
    case.time(Step(0, 0, PLAIN))
    assert case.unclocked == ["mine.py:7"]


def test_virtual_ranks_compute_on_what_a_layers_norm_gives() -> None:
    """Numbers of one sign change fewer bits, and draw less power, than hidden states do."""
    ranks = VirtualStack.__new__(VirtualStack)
    ranks._buffers, ranks._generator = {}, torch.Generator().manual_seed(1)
    rows_ND = ranks._buffer(1000, torch.empty(0, 64, dtype=torch.bfloat16)).float()
    weights_N = ranks._buffer(1000, torch.empty(0))
    assert rows_ND.shape == (1000, 64)
    assert abs(float(rows_ND.mean())) < 0.02
    assert float(rows_ND.square().mean()) == pytest.approx(1, abs=0.02)
    assert 0 <= float(weights_N.min()) < 0.05 < 0.95 < float(weights_N.max()) < 1
    again = ranks._buffer(10, torch.empty(0, 64, dtype=torch.bfloat16))
    assert torch.equal(again.float(), rows_ND[:10]), "kept from run to run"


def test_the_peak_of_memory_is_that_of_a_comparison_and_not_of_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of emulated ranks too: the copy that is a yardstick takes 2 GiB."""
    done: list[str] = []
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: done.append(name))
    free_memory(torch.device("cuda"))
    assert done == ["empty_cache", "reset_peak_memory_stats"]
