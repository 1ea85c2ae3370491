"""Claims about watching the machine and about provenance, driven by made-up counters and a made-up GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pynvml
import pytest
import torch

from moe_ep_bench.analysis.notes import disturbance_words, power_words
from moe_ep_bench.machine import monitor, provenance
from moe_ep_bench.machine.monitor import (
    GpuSample,
    MachineState,
    capped,
    disturbances,
    state_between,
    watched_machine,
)
from moe_ep_bench.machine.provenance import query_gpus
from moe_ep_bench.timing.device import Ceilings

SLOW = GpuSample(0, 0)
CEILINGS = Ceilings(matmul_size=1, matmul_tflops=1.0, copy_gbps=1.0, read_gbps=1.0)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
IDLE, POWER = pynvml.nvmlClocksEventReasonGpuIdle, pynvml.nvmlClocksEventReasonSwPowerCap
HEAT, SLOWDOWN = pynvml.nvmlClocksEventReasonHwThermalSlowdown, pynvml.nvmlClocksEventReasonHwSlowdown
SET_CLOCKS = pynvml.nvmlClocksEventReasonApplicationsClocksSetting
MOMENT = (0.0, 0.0, 0.0, 0.0)


def state(**fields: object) -> MachineState:
    """Ten seconds on two cores, by default all of it this rank's own work."""
    return MachineState(
        **{"wall_s": 10.0, "num_cores": 2, "own_cpu_s": 10.0, "machine_cpu_s": 10.0, "stolen_s": 0.0, **fields}
    )


def gpu_state(**shares: float) -> MachineState:
    return state(throttle_shares=shares)


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_state_is_the_difference_of_two_readings() -> None:
    result = state_between((100.0, 5.0, 50.0, 1.0), (110.0, 12.0, 65.0, 0.0), [])
    assert (result.wall_s, result.own_cpu_s, result.machine_cpu_s) == (10.0, 7.0, 15.0)
    assert result.stolen_s == 0, "a counter that went back"


def test_this_very_machine_is_read_plausibly(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched_machine(CPU, CEILINGS) as facts:
        used_until = time.process_time() + 0.1
        while time.process_time() < used_until:
            pass
    result = MachineState(**facts["machine"])
    assert result.own_cpu_s > 0.05
    assert (result.throttle_shares, result.sm_clock_mhz) == (None, None)
    assert result.machine_cpu_s is None or (result.machine_cpu_s > 0 <= result.stolen_s)


@pytest.mark.parametrize("times", [FileNotFoundError("/proc/stat"), SimpleNamespace(user=0.0, system=0.0)])
def test_a_machine_that_hides_itself_is_not_accused(times: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor.psutil, "cpu_times", Mock(side_effect=[times] * 3))
    with watched_machine(CPU, CEILINGS) as facts:
        pass
    hidden = MachineState(**facts["machine"])
    assert (hidden.machine_cpu_s, hidden.stolen_s) == (None, None)
    assert disturbances([("a", hidden)]) == []


# Samples, and what the state says of them.
SUMMARISED = {
    "quantiles": ([GpuSample(1000 + i, 0) for i in range(101)], {"sm_clock_mhz": (1005, 1050, 1095)}),
    "the clock of an idle GPU is not that of the work": (
        [GpuSample(1980, 0), GpuSample(345, IDLE), GpuSample(1980, 0)], {"sm_clock_mhz": (1980, 1980, 1980)},
    ),
    "never busy": ([GpuSample(345, IDLE)], {"sm_clock_mhz": None}),
    "reasons in the bitmask; idling and set clocks are none": (
        [GpuSample(1980, mask) for mask in (IDLE | SET_CLOCKS, POWER, POWER | HEAT | SLOWDOWN, POWER)],
        {"throttle_shares": {"power_cap": 0.75, "hw_slowdown": 0.25, "hw_thermal": 0.25, "sw_thermal": 0,
                             "hw_power_brake": 0}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMMARISED)
def test_samples_are_summarised(name: str) -> None:
    samples, expected = SUMMARISED[name]
    result = asdict(state_between(MOMENT, MOMENT, samples))
    assert {field: result[field] for field in expected} == expected


def test_a_gpu_is_sampled_until_the_end_and_one_that_is_lost_costs_the_rest_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost, readings = threading.Event(), iter([GpuSample(1980, 0), GpuSample(1980, HEAT)])

    def read() -> GpuSample:
        for sample in readings:
            return sample
        lost.set()
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(monitor, "nvml_reader", lambda device: read)
    with watched_machine(CUDA, CEILINGS, period_s=0.001) as facts:
        assert lost.wait(20)
    assert facts["machine"]["throttle_shares"]["hw_thermal"] == 0.5


def test_without_nvml_or_with_one_that_hangs_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)))
    with watched_machine(CUDA, CEILINGS) as facts:
        pass
    assert facts["machine"]["throttle_shares"] is None
    asked, answered = threading.Event(), threading.Event()
    monkeypatch.setattr(monitor, "nvml_reader", lambda device: lambda: asked.set() or (answered.wait(60) and SLOW))
    with watched_machine(CUDA, CEILINGS) as facts:
        assert asked.wait(20)
    assert facts["machine"]["throttle_shares"] is None
    answered.set()


def test_nobody_watches_once_the_block_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "nvml_reader", lambda device: lambda: SLOW)
    before = threading.enumerate()  # An earlier test's may be about to end.
    with watched_machine(CUDA, CEILINGS, period_s=0.001):
        (watch,) = [one for one in threading.enumerate() if one.name == "machine" and one not in before]
    watch.join(20)
    assert not watch.is_alive()


def test_the_gpu_is_found_by_the_uuid_that_torch_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of-{device.index}"))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda gpu, clock: f"clock of {gpu}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda gpu: f"reasons of {gpu}")
    sample = monitor.nvml_reader(torch.device("cuda", 3))()
    assert sample == ("clock of GPU-of-3", "reasons of GPU-of-3")


# ---- judging ---------------------------------------------------------------------------------------------------------

BOTH = state(own_cpu_s=9.0, machine_cpu_s=18.0)
OF_B = "cores of b while it was timed (a rank may use 2)"
HOT = "rank 1's GPU was slowed down by heat in 14 % of the samples"
JUDGED = {
    "ranks of one host are added": ([("a", BOTH), ("a", BOTH)], None),
    "a rank that took more than the host says": ([("a", state(own_cpu_s=12.0))], None),
    "a little foreign work": ([("a", state(machine_cpu_s=10.9))], None),
    "no time at all": ([("a", state(wall_s=0.0, own_cpu_s=0.0, stolen_s=1.0))], None),
    "a little stolen time": ([("a", state(stolen_s=0.3))], None),
    "a power cap, and one sample": ([("a", gpu_state(power_cap=1.0, hw_thermal=0.01))], None),
    "a little too much": ([("b", state(machine_cpu_s=11.1))], f"other processes used 0.11 {OF_B}"),
    "the worst of several hosts": (
        [("a", state(machine_cpu_s=12.0)), ("b", state(machine_cpu_s=15.0)), ("c", state())],
        f"other processes used 0.50 {OF_B}",
    ),
    "ranks of two hosts": ([("a", state()), ("b", BOTH)], f"other processes used 0.90 {OF_B}"),
    "stolen time": (
        [("b", state(stolen_s=1.6)), ("b", state(stolen_s=1.6, machine_cpu_s=20.0))],
        f"the hypervisor took 0.16 {OF_B}",
    ),
    "heat, which is also the hardware's": (
        [("a", gpu_state()), ("a", gpu_state(hw_thermal=0.14, hw_slowdown=0.14))], HOT,
    ),
    "heat that the driver sees": ([("a", gpu_state()), ("a", gpu_state(sw_thermal=0.14))], HOT),
    "hardware, of two ranks": (
        [("a", gpu_state(hw_slowdown=share)) for share in (0.5, 0.875)],
        "rank 1's GPU was slowed down by its hardware (heat or power) in 87.5 % of the samples",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_what_disturbs_is_named_with_its_share_and_place_and_a_quiet_machine_is_not_accused(name: str) -> None:
    states, line = JUDGED[name]
    assert list(map(disturbance_words, disturbances(states))) == ([line] if line else [])


def clocked(median: float, **shares: float) -> MachineState:
    return state(throttle_shares=shares, sm_clock_mhz=(median - 50, median, median + 25))


CAPPED = {
    "no GPU": ([state()], ""),
    "free": ([clocked(1980, power_cap=0.01, hw_thermal=1.0)], ""),
    "one GPU": (
        [clocked(1950, power_cap=0.97)],
        "rank 0's GPU was power-capped in 97 % of the samples: SM clock 1,900 to 1,975 MHz, median 1,950",
    ),
    "of several the slowest that was capped": (
        [clocked(1980), clocked(1950, power_cap=1.0), clocked(1850, power_cap=0.5), clocked(1700)],
        "rank 2's GPU was power-capped in 50 % of the samples: SM clock 1,800 to 1,875 MHz, median 1,850; "
        "2 of 4 GPUs were capped, the fastest's median is 1,980",
    ),
    "idle ones have no clock": ([state(throttle_shares={"power_cap": 1.0})], ""),
}


@pytest.mark.parametrize("name", CAPPED)
def test_a_power_cap_is_told_with_the_clocks_of_the_slowest_gpu(name: str) -> None:
    states, words = CAPPED[name]
    assert power_words(capped(states)) == words


# ---- provenance ------------------------------------------------------------------------------------------------------

# One GPU as ``query_gpus`` gives it.
H100 = {
    "index": 0, "driver": "570.86.15", "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-0",
    "compute_capability": [9, 0], "memory_mib": 81559.0, "memory_free_mib": 81077.0, "sm_clock_mhz": 345,
    "sm_clock_limit_mhz": 1980, "power_limit_w": 700.0, "power_default_w": 700.0, "mig": "Disabled",
}  # fmt: skip
ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "570.86.15",
    "nvmlDeviceGetCount": lambda: 1,
    "nvmlDeviceGetHandleByIndex": lambda index: "handle",
    "nvmlDeviceGetName": lambda gpu: "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUUID": lambda gpu: "GPU-0",
    "nvmlDeviceGetCudaComputeCapability": lambda gpu: (9, 0),
    "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=81559 * 2**20, free=81077 * 2**20),
    "nvmlDeviceGetClockInfo": lambda gpu, clock: {pynvml.NVML_CLOCK_SM: 345}[clock],
    "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: 1980,
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu: 700_000,
    "nvmlDeviceGetMigMode": lambda gpu: [0, 0],
}


def failing(error: int) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise pynvml.NVMLError(error)

    return fail


NOT_SAID = failing(pynvml.NVML_ERROR_NOT_SUPPORTED)
# What a driver answers otherwise, and what is read then.
DRIVERS = {
    "all is said, in the units of the names": ({}, {}),
    "what is not said is unknown and not zero": (
        {"nvmlDeviceGetEnforcedPowerLimit": NOT_SAID, "nvmlDeviceGetMigMode": NOT_SAID},
        {"power_limit_w": None, "mig": None},
    ),
}


@pytest.mark.parametrize("name", DRIVERS)
def test_a_gpu_is_read_field_by_field(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, expected = DRIVERS[name]
    for function, answer in {**ANSWERS, **answers}.items():
        monkeypatch.setattr(pynvml, function, answer)
    assert query_gpus() == [{**H100, **expected}]


def test_code_is_known_by_every_file_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_PACKAGE", tmp_path)
    hashes = set()
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", "")):
        (tmp_path / name).write_text(text)
        hashes.add(provenance.code_hash())
    assert len(hashes) == 3


def test_cpu_results_compare_as_they_did_and_gpu_results_by_their_transport_too() -> None:
    """As directories were compared before there was more provenance; these still have to be resumed."""
    on_cpu = {"device_name", "python", "torch", "megatron_core", "transformer_engine", "apex", "cuda"}
    described = provenance.describe(CPU)
    assert set(provenance.conditions(described)) == on_cpu
    on_gpus = provenance.conditions({**described, "device_type": "cuda"})
    assert set(on_gpus) == on_cpu | {"nccl", "triton", "deep_ep"}
    assert on_gpus["torch"] == torch.__version__


def test_variables_come_from_a_fixed_list_and_secrets_never() -> None:
    kept = ("NCCL_P2P_DISABLE", "TORCH_NCCL_BLOCKING_WAIT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_JOB_ID")
    secret = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_NCCL_PASSWORD", "HOME", "CUDA_TOKEN", "SLURM_JWT")
    variables = {**dict.fromkeys(kept, "1"), **dict.fromkeys(secret, "secret")}
    assert provenance.relevant_variables(variables) == dict.fromkeys(kept, "1")


def test_gpus_are_described_with_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "query_gpus", lambda: [H100])
    # nvidia-smi underlines.
    monkeypatch.setattr(provenance, "output_of", lambda *command: "\x1b[4mGPU0 GPU1\x1b[0m\n X NV18")
    there = {"driver": "570.86.15", "gpus": [H100], "topology": ["GPU0 GPU1", " X NV18"]}
    assert provenance.describe_gpus() == there
