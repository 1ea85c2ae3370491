"""Claims about watching the machine, driven by made-up counters and a made-up GPU."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest
import torch
from pydantic import TypeAdapter

from moe_ep_bench.machine import monitor
from moe_ep_bench.machine.monitor import (
    THROTTLE_REASONS,
    Counters,
    MachineSampler,
    MachineState,
    disturbances,
    remarks,
    state_between,
)

CUDA = torch.device("cuda", 0)
IDLE = pynvml.nvmlClocksEventReasonGpuIdle
READINGS = {
    "sm_clock_mhz": 1980,
    "power_w": 650.0,
    "temperature_c": 61,
    "throttle_reasons": 0,
}


def watched(**readings) -> MachineState:
    """The state after a made-up GPU was sampled; a reading is a value, an error to raise, or a function."""
    sampled_again, calls = threading.Event(), itertools.count()

    def read(name):
        reading = {**READINGS, **readings}[name]
        if next(calls) > 3 * len(READINGS):
            sampled_again.set()
        if isinstance(reading, Exception):
            raise reading
        return reading() if callable(reading) else reading

    with MachineSampler(CUDA, period_s=0.001, read=read) as sampler:
        assert sampled_again.wait(20)
    return sampler.stop()


def of_samples(*samples) -> MachineState:
    """The state of a GPU with these samples, and of a machine that did nothing."""
    moment = Counters(0.0, 0.0, math.nan, math.nan)
    return state_between(moment, moment, samples, {})


def state(**fields) -> MachineState:
    """Ten seconds on two cores, by default all of it this rank's own work."""
    return MachineState(
        **{"wall_s": 10.0, "num_cores": 2, "own_cpu_s": 10.0, "machine_cpu_s": 10.0, "stolen_s": 0.0, **fields}
    )


def gpu_state(**shares) -> MachineState:
    return state(sm_clock_mhz=(1950.0, 1980.0, 1980.0), throttle_shares=dict.fromkeys(THROTTLE_REASONS, 0.0) | shares)


# ---- reading


def test_a_state_is_the_difference_of_two_readings() -> None:
    result = state_between(Counters(100.0, 5.0, 50.0, 1.0), Counters(110.0, 12.0, 65.0, 0.0), [], {})
    assert (result.wall_s, result.own_cpu_s, result.machine_cpu_s, result.notes) == (10.0, 7.0, 15.0, ())
    assert result.stolen_s == 0, "a counter that went back"


def test_this_very_machine_is_read_plausibly_and_one_that_hides_itself_is_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MachineSampler(torch.device("cpu")) as sampler:
        used_until = time.process_time() + 0.1
        while time.process_time() < used_until:
            pass
        result = sampler.stop()
    assert result.own_cpu_s > 0.05
    assert (result.num_samples, result.sm_clock_mhz) == (0, None)
    assert result.notes or (result.machine_cpu_s > 0 <= result.stolen_s)
    for times in (FileNotFoundError("/proc/stat"), SimpleNamespace(user=0.0, system=0.0)):
        monkeypatch.setattr(monitor.psutil, "cpu_times", Mock(side_effect=[times] * 2))
        with MachineSampler(torch.device("cpu")) as sampler:
            hidden = sampler.stop()
        assert (hidden.machine_cpu_s, hidden.stolen_s) == (None, None)
        assert "the CPU time of other processes could not be read: " in hidden.notes[0]
        assert disturbances([("a", hidden)]) == []


WORKING, IDLING = {"sm_clock_mhz": 1980, "throttle_reasons": 0}, {"sm_clock_mhz": 345, "throttle_reasons": IDLE}
POWER, HEAT = pynvml.nvmlClocksEventReasonSwPowerCap, pynvml.nvmlClocksEventReasonHwThermalSlowdown
SLOWDOWN, SET_CLOCKS = pynvml.nvmlClocksEventReasonHwSlowdown, pynvml.nvmlClocksEventReasonApplicationsClocksSetting
# Samples, and what the state says of them.
SUMMARISED = {
    "quantiles of all samples": (
        [{"sm_clock_mhz": 1000 + i, "power_w": i, "temperature_c": i} for i in range(101)],
        {"sm_clock_mhz": (1005, 1050, 1095), "power_median_w": 50, "temperature_max_c": 100, "throttle_shares": None},
    ),
    "the clock of an idle GPU is not that of the work": (
        [WORKING, IDLING, IDLING, WORKING], {"sm_clock_mhz": (1980, 1980, 1980)},
    ),
    "never busy": ([IDLING], {"sm_clock_mhz": None}),
    "reasons in the bitmask; idling and set clocks are none": (
        [{"throttle_reasons": mask} for mask in (IDLE | SET_CLOCKS, POWER, POWER | HEAT | SLOWDOWN, POWER)],
        {"throttle_shares": {**dict.fromkeys(THROTTLE_REASONS, 0.0), "power_cap": 0.75, "hw_thermal": 0.25,
                             "hw_slowdown": 0.25}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMMARISED)
def test_samples_are_summarised(name: str) -> None:
    samples, expected = SUMMARISED[name]
    result = of_samples(*samples).as_dict()
    assert {field: result[field] for field in expected} == expected


def lost_after(*readings: int) -> Callable[[], int]:
    left = iter(readings)

    def read() -> int:
        for reading in left:
            return reading
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    return read


@pytest.mark.parametrize(
    ("readings", "temperature", "notes"),
    [
        ({}, 61, ()),
        ({"power_w": pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)}, 61, ("power_w could not be read: Not Supp",)),
        ({"temperature_c": lost_after(60, 62)}, 62, ("temperature_c could not always be read: GPU is lost",)),
    ],
)
def test_what_a_gpu_does_not_say_costs_only_itself(readings: dict, temperature: int, notes: tuple[str, ...]) -> None:
    result = watched(**readings)
    assert (result.sm_clock_mhz, result.temperature_max_c) == ((1980, 1980, 1980), temperature)
    assert result.throttle_shares == dict.fromkeys(THROTTLE_REASONS, 0)
    assert len(result.notes) == len(notes)
    assert all(note.startswith(begin) for note, begin in zip(result.notes, notes, strict=True))


def test_without_nvml_or_with_one_that_hangs_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)))
    with MachineSampler(CUDA) as sampler:
        sampler._thread.join(20)
        assert sampler.stop().notes == ("the GPU could not be read: NVML Shared Library Not Found",)
    monkeypatch.setattr(monitor, "_PATIENCE_S", 0.01)
    asked, answered = threading.Event(), threading.Event()
    with MachineSampler(CUDA, read=lambda name: asked.set() or (answered.wait(60) and None)) as sampler:
        assert asked.wait(20)
        assert "NVML did not answer within 0.01 s" in sampler.stop().notes[0]
        answered.set()
        sampler._thread.join(20)


def test_the_gpu_is_found_by_the_uuid_that_torch_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of-{device.index}"))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", asked.append)
    for name in READINGS:
        monkeypatch.setitem(monitor.FIELDS, name, lambda gpu: 1)
    with MachineSampler(torch.device("cuda", 3)):
        pass
    assert asked == ["GPU-of-3"]


# ---- judging


BOTH = state(own_cpu_s=9.0, machine_cpu_s=18.0)
OF_B = "cores of b while it was timed (a rank may use 2)"
QUIET = {
    "own work": [("a", state(own_cpu_s=20.0, machine_cpu_s=20.0))],
    "ranks of one host are added": [("a", BOTH), ("a", BOTH)],
    "a little foreign work": [("a", state(machine_cpu_s=10.9))],
    "less than nothing": [("a", state(machine_cpu_s=8.0))],
    "no time at all": [("a", state(wall_s=0.0, own_cpu_s=0.0, stolen_s=1.0))],
    "a little stolen time": [("a", state(stolen_s=0.3))],
    "a power cap and other limits": [
        ("a", gpu_state(power_cap=1.0, sync_boost=1.0, display_clocks=1.0, hw_thermal=0.01))
    ],
    "a clock that varies a little": [("a", state(sm_clock_mhz=(1900.0, 1980.0, 1980.0)))],
    "steady GPUs": [("a", gpu_state()), ("b", gpu_state())],
}
DISTURBED = {
    "a foreign process": (
        [("a", state()), ("b", state(machine_cpu_s=12.4)), ("c", state())],
        f"other processes used 0.24 {OF_B}",
    ),
    "a little too much": ([("b", state(machine_cpu_s=11.1))], f"other processes used 0.11 {OF_B}"),
    "the worst of several hosts": (
        [("a", state(machine_cpu_s=12.0)), ("b", state(machine_cpu_s=15.0)), ("c", state())],
        f"other processes used 0.50 {OF_B} (2 hosts in all)",
    ),
    "ranks of two hosts": ([("a", state()), ("b", BOTH)], f"other processes used 0.90 {OF_B}"),
    "stolen time": (
        [("b", state(stolen_s=1.6)), ("b", state(stolen_s=1.6, machine_cpu_s=20.0))],
        f"the hypervisor took 0.16 {OF_B}",
    ),
    **{
        f"slowed down by {cause}: {', '.join(shares)}": (
            [("a", gpu_state()), ("a", gpu_state(**shares))],
            f"rank 1's GPU was slowed down by {cause} in 14 % of the samples",
        )
        for shares, cause in (
            ({"hw_thermal": 0.14, "hw_slowdown": 0.14}, "heat"),
            ({"sw_thermal": 0.14}, "heat"),
            ({"hw_power_brake": 0.14, "hw_slowdown": 0.14}, "the brake of its power supply"),
            ({"hw_slowdown": 0.14}, "its hardware (heat or power)"),
        )
    },
    "a clock that varies": (
        [("a", state(sm_clock_mhz=(low, 1900.0, 1980.0))) for low in (1200.0, 1700.0)],
        "rank 0's SM clock varied between 1,200 and 1,980 MHz (2 ranks in all)",
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_a_quiet_machine_is_not_accused(name):
    assert disturbances(QUIET[name]) == []


@pytest.mark.parametrize("name", DISTURBED)
def test_what_disturbs_is_named_with_its_share_and_place(name):
    states, line = DISTURBED[name]
    assert disturbances(states) == [line]


def test_the_power_cap_is_remarked_for_the_worst_rank():
    assert remarks(QUIET["steady GPUs"]) == []
    ranks = [("a", gpu_state(power_cap=0.5)), ("a", gpu_state(power_cap=0.875)), ("a", gpu_state(power_cap=0.005))]
    assert remarks(ranks) == ["the power cap was active in 88 % of the samples of rank 1's GPU (2 ranks in all)"]


def test_what_could_not_be_read_is_remarked_once():
    everywhere, somewhere = "the power draw could not be read: x", "the temperature could not be read: y"
    ranks = [("a", state(notes=(everywhere,))), ("b", state(notes=(everywhere, somewhere)))]
    assert remarks(ranks) == [everywhere, f"{somewhere} (1 of 2 ranks)"]


@pytest.mark.parametrize(
    "original", [of_samples(READINGS, READINGS), state(notes=("no GPU", "no /proc"))], ids=["gpu", "cpu"]
)
def test_a_state_survives_json(original):
    assert TypeAdapter(MachineState).validate_json(json.dumps(original.as_dict())) == original
