"""Watch the machine while a comparison is timed; watching never ends a run.

A comparison takes its cases in turns, so a slow drift hits all alike. It cannot divide out a machine that changes from
one moment to the next: another process on the cores, a hypervisor that lends them elsewhere, a GPU that lowers its
clock because it is hot. CPU time of all processes less that of our ranks is what others used. A thread samples a GPU's
clock and its reasons of throttling. What cannot be read is None.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil
import pynvml

from moe_ep_bench.machine import provenance

if TYPE_CHECKING:
    import torch

    from moe_ep_bench.timing.device import Ceilings

# From which share on times are doubtful. Of the cores that a rank may use: daemons of an idle host stay below 1 %, and
# on a host of one's own nothing is stolen; a stolen slice stops one rank, and all others wait for it. Of the samples of
# a GPU: with enough cooling and supply it is never slowed, and one sample may be a fluke.
_MOST_FOREIGN, _MOST_STOLEN, _MOST_SLOWED = 0.05, 0.02, 0.01
# Idling and a clock that somebody set are reasons for a low clock too, but no throttling.
THROTTLE_REASONS = {
    "power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "hw_thermal": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "sw_thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}
# NVML sets hw_slowdown together with the other two hw reasons, so it comes last: of equal shares the first one counts.
_SLOWDOWNS = ("hw_thermal", "sw_thermal", "hw_power_brake", "hw_slowdown")


@dataclass(frozen=True)
class MachineState:
    """The machine of one rank between begin and end. None: could not be read, or there is no GPU."""

    wall_s: float
    num_cores: int  # that this rank may use
    own_cpu_s: float  # of this process and of children that it waited for
    machine_cpu_s: float | None = None  # of all processes of the machine, without interrupts
    stolen_s: float | None = None  # by the hypervisor
    sm_clock_mhz: tuple[float, float, float] | None = None  # quantiles 5, 50 and 95 % where the GPU was not idle
    throttle_shares: Mapping[str, float] | None = None  # of samples, by name in THROTTLE_REASONS


class GpuSample(NamedTuple):
    sm_clock_mhz: float
    throttle_reasons: int  # bits, with those of no throttling


@contextlib.contextmanager
def watched_machine(device: torch.device, ceilings: Ceilings, period_s: float = 0.5) -> Iterator[dict[str, Any]]:
    """Yield a dict that says, once the block has run, what this rank's machine can do and did meanwhile.

    Args:
        ceilings: measured before layers are built: behind the warm-up, the allocator could have to give back what the
            warm-up made it hold.
        period_s: between samples of a GPU; on the CPU the counters say all.
    """
    facts: dict[str, Any] = {}
    samples: list[GpuSample] = []
    stopped = threading.Event()

    def watch() -> None:
        with contextlib.suppress(pynvml.NVMLError):  # no driver, or one that has lost its GPU
            read = nvml_reader(device)
            samples.append(read())
            while not stopped.wait(period_s):
                samples.append(read())

    if device.type == "cuda":  # A call into the driver of a lost GPU may never come back: nobody waits for the thread.
        threading.Thread(target=watch, name="machine", daemon=True).start()
    begin = counters()
    try:
        yield facts
    finally:
        end = counters()
        stopped.set()
    facts |= {
        "hostname": socket.gethostname(),
        "machine": asdict(state_between(begin, end, list(samples))),
        "ceilings": asdict(ceilings),
        "peak_memory_bytes": provenance.peak_memory_bytes(device),
    }


def nvml_reader(device: torch.device) -> Callable[[], GpuSample]:
    """What samples a GPU, which is known to NVML by other numbers than torch's (CUDA_VISIBLE_DEVICES)."""
    import torch  # Analysis judges states without it.

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return lambda: GpuSample(
        pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),  # from driver 535 on
    )


def counters() -> tuple[float, float, float, float]:
    """Seconds up to now, as in ``MachineState``: wall, own, machine, stolen; NaN = the kernel does not say."""
    machine = stolen = np.nan
    with contextlib.suppress(OSError):
        times = psutil.cpu_times()
        if times.user + times.system:  # 0: sandboxes hide the machine.
            machine, stolen = times.user + times.nice + times.system, times.steal
    return time.perf_counter(), sum(os.times()[:4]), machine, stolen


def state_between(begin: Sequence[float], end: Sequence[float], samples: Sequence[GpuSample]) -> MachineState:
    """Two readings of the ``counters``, and the samples between them, as one state."""
    # A core that is taken offline sets a counter back.
    wall_s, own_cpu_s, machine_cpu_s, stolen_s = np.maximum(np.subtract(end, begin), 0).tolist()
    busy_mhz = [clock for clock, mask in samples if not mask & pynvml.nvmlClocksEventReasonGpuIdle]
    shares = {
        name: sum(mask & bit > 0 for _, mask in samples) / len(samples)
        for name, bit in THROTTLE_REASONS.items()
        if samples
    }
    return MachineState(
        wall_s=wall_s,
        num_cores=len(os.sched_getaffinity(0)),
        own_cpu_s=own_cpu_s,
        machine_cpu_s=None if np.isnan(machine_cpu_s) else machine_cpu_s,
        stolen_s=None if np.isnan(stolen_s) else stolen_s,
        sm_clock_mhz=tuple(np.quantile(busy_mhz, (0.05, 0.5, 0.95)).tolist()) if busy_mhz else None,
        throttle_shares=shares or None,
    )


# ---- judging ---------------------------------------------------------------------------------------------------------


class Disturbance(NamedTuple):
    """What took cores of a host, or slowed a rank's GPU down.

    Attributes:
        kind: processes, hypervisor, or one of ``THROTTLE_REASONS``.
        share: of the cores that a rank may use, or of a GPU's samples.
        where: the host, or the rank.
    """

    kind: str
    share: float
    where: str | int
    cores: float = 0.0
    num_cores: int = 0  # that a rank may use


class Capped(NamedTuple):
    """The slowest GPU that its power limit held back.

    Attributes:
        share: of the samples.
        clock_mhz: quantiles as in ``MachineState``.
        fastest_mhz: the fastest GPU's median.
    """

    rank: int
    share: float
    clock_mhz: tuple[float, float, float]
    num_capped: int
    num_gpus: int
    fastest_mhz: float


def disturbances(states: Sequence[tuple[str, MachineState]]) -> list[Disturbance]:
    """What makes the times doubtful: the highest share of each kind, where that is above the limit.

    Args:
        states: host name and state of every rank, in order of rank.
    """
    foreign, stolen, slowed = [], [], []
    for host in dict(states):
        of_host = [state for name, state in states if name == host]
        machine = of_host[0]  # all ranks of a host see the same
        foreign_s = (machine.machine_cpu_s or 0.0) - sum(state.own_cpu_s for state in of_host)
        for found, kind, cpu_s in ((foreign, "processes", foreign_s), (stolen, "hypervisor", machine.stolen_s or 0.0)):
            cores = cpu_s / machine.wall_s if machine.wall_s > 0 else 0.0
            found.append(Disturbance(kind, cores / machine.num_cores, host, cores, machine.num_cores))
    for rank, (_, state) in enumerate(states):
        shares = dict(state.throttle_shares or {})
        reason = max(_SLOWDOWNS, key=lambda name: shares.get(name, 0.0))
        slowed.append(Disturbance(reason, shares.get(reason, 0.0), rank))
    kinds = ((foreign, _MOST_FOREIGN), (stolen, _MOST_STOLEN), (slowed, _MOST_SLOWED))
    worst = ((max(found, key=lambda one: one.share), most) for found, most in kinds if found)
    return [one for one, most in worst if one.share > most]


def capped(states: Sequence[MachineState]) -> Capped | None:
    """The slowest GPU that its power limit held back; None where none was.

    Args:
        states: of every rank, in order of rank.
    """
    clocks = {rank: state.sm_clock_mhz for rank, state in enumerate(states) if state.sm_clock_mhz}
    shares = {rank: (states[rank].throttle_shares or {}).get("power_cap", 0.0) for rank in clocks}
    held = [rank for rank, share in shares.items() if share > _MOST_SLOWED]
    if not held:
        return None
    rank, fastest = min(held, key=lambda rank: clocks[rank][1]), max(median for _, median, _ in clocks.values())
    return Capped(rank, shares[rank], clocks[rank], len(held), len(clocks), fastest)
