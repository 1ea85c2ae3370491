"""Watch the machine while a comparison is timed; watching never ends a run.

A comparison takes its cases in turns, so a slow drift hits all alike. It cannot divide out a machine that changes from
one moment to the next: another process on the cores, a hypervisor that lends them elsewhere, a GPU that lowers its
clock because it is hot. CPU time of all processes less that of our ranks is what others used. A thread samples a GPU's
clock, power and reasons of throttling. What cannot be read becomes a note.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil
import pynvml

from moe_ep_bench.errors import UserError
from moe_ep_bench.machine.gpus import FIELDS, THROTTLE_REASONS

if TYPE_CHECKING:
    import torch

# Share of the cores a rank may use. Daemons of an idle host stay below 1 %.
MAX_FOREIGN_SHARE = 0.05
# Likewise. On a host of one's own it is 0; a stolen slice stops one rank, and all others wait for it.
MAX_STOLEN_SHARE = 0.02
# Share of samples. A GPU with enough cooling and supply is never slowed; one sample may be a fluke.
MAX_SLOWDOWN_SHARE = 0.01
# (p95 - p5) / median. Under a steady load the clock stays within a few steps of 15 MHz.
MAX_CLOCK_VARIATION = 0.05
# Share of samples. A cap that is touched less often changes no median.
MIN_POWER_CAP_SHARE = 0.01

# NVML sets hw_slowdown together with the other two hw reasons, so it comes last: of equal shares the first one counts.
_SLOWDOWNS = {
    "hw_thermal": "heat",
    "sw_thermal": "heat",
    "hw_power_brake": "the brake of its power supply",
    "hw_slowdown": "its hardware (heat or power)",
}
_SAMPLED = ("sm_clock_mhz", "power_w", "temperature_c", "throttle_reasons")
# A call into the driver of a lost GPU may never come back; the run does not wait for it.
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class MachineState:
    """The machine of one rank between begin and end. None: could not be read, or there is no GPU."""

    wall_s: float
    num_cores: int  # that this rank may use
    own_cpu_s: float  # of this process and of children that it waited for
    machine_cpu_s: float | None = None  # of all processes of the machine, without interrupts
    stolen_s: float | None = None  # by the hypervisor
    num_samples: int = 0
    sm_clock_mhz: tuple[float, float, float] | None = None  # quantiles 5, 50 and 95 % where the GPU was not idle
    power_median_w: float | None = None
    temperature_max_c: float | None = None
    throttle_shares: Mapping[str, float] | None = None  # of samples, by name in THROTTLE_REASONS
    notes: tuple[str, ...] = ()  # what could not be read

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Counters(NamedTuple):
    """What the kernel has counted up to a moment; NaN = it does not say."""

    time_s: float
    own_cpu_s: float
    machine_cpu_s: float
    stolen_s: float


class MachineSampler:
    """Watches the machine from ``__enter__`` to ``stop`` or ``__exit__``; on the CPU the counters say all.

    Args:
        read: gives a field of ``_SAMPLED`` of the device, or raises; None = by NVML.
    """

    def __init__(self, device: torch.device, period_s: float = 0.5, read: Callable[[str], Any] | None = None) -> None:
        self._device, self._period_s, self._read = device, period_s, read
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="machine", daemon=True)
        self._samples: list[dict[str, float]] = []
        self._problems: dict[str, str] = {}

    def __enter__(self) -> MachineSampler:
        if self._device.type == "cuda":
            self._thread.start()
        self._begin = self._counters()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> MachineState:
        """End the watch, and say how the machine was."""
        end = self._counters()
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_S)
            if self._thread.is_alive():
                self._problems["the GPU to its end"] = f"NVML did not answer within {_PATIENCE_S:g} s"
        return state_between(self._begin, end, list(self._samples), dict(self._problems))

    def _counters(self) -> Counters:
        def machine() -> tuple[float, float]:
            times = psutil.cpu_times()
            if times.user + times.system == 0:  # As sandboxes show that hide the machine.
                raise UserError("all counters are zero")
            return times.user + times.nice + times.system, times.steal

        counted = self._attempt("the CPU time of other processes", machine) or (np.nan, np.nan)
        return Counters(time.perf_counter(), sum(os.times()[:4]), *counted)

    def _watch(self) -> None:
        read = self._read or self._attempt("the GPU", self._nvml)
        while read is not None:
            values = {name: self._attempt(name, lambda name=name: read(name)) for name in _SAMPLED}
            self._samples.append({name: value for name, value in values.items() if value is not None})
            if self._stopped.wait(self._period_s):
                return

    def _nvml(self) -> Callable[[str], Any]:
        import torch  # Analysis judges states without it.

        # NVML knows nothing of CUDA_VISIBLE_DEVICES: its numbers are not torch's.
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(self._device).uuid}")
        return lambda name: FIELDS[name](gpu)

    def _attempt(self, what: str, read: Callable[[], Any]) -> Any:
        """What ``read`` gives; None where it fails, and the first reason is kept."""
        try:
            return read()
        except Exception as error:  # of whatever kind: watching must not end what it watches
            self._problems.setdefault(what, str(error) or type(error).__name__)
            return None


def state_between(
    begin: Counters, end: Counters, samples: Sequence[Mapping[str, float]], problems: Mapping[str, str]
) -> MachineState:
    """Two readings of the counters, and the samples between them, as one state."""

    def values(name: str, among: Iterable[Mapping[str, float]] = samples) -> list[float]:
        return [sample[name] for sample in among if name in sample]

    # A core that is taken offline sets a counter back.
    wall_s, own_cpu_s, machine_cpu_s, stolen_s = np.maximum(np.subtract(end, begin), 0).tolist()
    idle = pynvml.nvmlClocksEventReasonGpuIdle
    busy = (sample for sample in samples if not int(sample.get("throttle_reasons", 0)) & idle)
    sm_clocks, power, masks = values("sm_clock_mhz", busy), values("power_w"), values("throttle_reasons")
    shares = {
        name: sum(int(mask) & bit > 0 for mask in masks) / len(masks) for name, bit in THROTTLE_REASONS.items() if masks
    }
    always = {what: "always " if values(what) else "" for what in problems}
    return MachineState(
        wall_s=wall_s,
        num_cores=len(os.sched_getaffinity(0)),
        own_cpu_s=own_cpu_s,
        machine_cpu_s=None if np.isnan(machine_cpu_s) else machine_cpu_s,
        stolen_s=None if np.isnan(stolen_s) else stolen_s,
        num_samples=len(samples),
        sm_clock_mhz=tuple(np.quantile(sm_clocks, (0.05, 0.5, 0.95)).tolist()) if sm_clocks else None,
        power_median_w=float(np.median(power)) if power else None,
        temperature_max_c=max(values("temperature_c"), default=None),
        throttle_shares=shares or None,
        notes=tuple(f"{what} could not {always[what]}be read: {why}" for what, why in problems.items()),
    )


# ---- judging ---------------------------------------------------------------------------------------------------------


def disturbances(states: Sequence[tuple[str, MachineState]]) -> list[str]:
    """What makes the times doubtful: a line per kind, the worst host or rank named.

    Args:
        states: host name and state of every rank, in order of rank.
    """
    foreign, stolen, slowed, varied = [], [], [], []
    for host in dict(states):
        of_host = [state for name, state in states if name == host]
        state = of_host[0]  # all ranks of a host see the same machine
        foreign_s = max(0.0, (state.machine_cpu_s or 0.0) - sum(of_rank.own_cpu_s for of_rank in of_host))
        for kind, who, cpu_s in (
            (foreign, "other processes used", foreign_s),
            (stolen, "the hypervisor took", state.stolen_s or 0.0),
        ):
            # No share of the host in the line: a rank may be bound to some of its cores, and others work on any.
            cores = cpu_s / state.wall_s if state.wall_s > 0 else 0.0
            line = f"{who} {cores:.2f} cores of {host} while it was timed (a rank may use {state.num_cores})"
            kind.append((cores / state.num_cores, line))
    for rank, (_, state) in enumerate(states):
        shares = state.throttle_shares or {}
        reason = max(_SLOWDOWNS, key=lambda reason: shares.get(reason, 0.0))
        share = shares.get(reason, 0.0)
        slowed.append(
            (share, f"rank {rank}'s GPU was slowed down by {_SLOWDOWNS[reason]} in {_percent(share)} of the samples")
        )
        if state.sm_clock_mhz:
            low, median, high = state.sm_clock_mhz
            line = f"rank {rank}'s SM clock varied between {low:,.0f} and {high:,.0f} MHz"
            varied.append(((high - low) / max(median, 1.0), line))
    return [
        *_worst(foreign, MAX_FOREIGN_SHARE, "hosts"),
        *_worst(stolen, MAX_STOLEN_SHARE, "hosts"),
        *_worst(slowed, MAX_SLOWDOWN_SHARE, "ranks"),
        *_worst(varied, MAX_CLOCK_VARIATION, "ranks"),
    ]


def remarks(states: Sequence[tuple[str, MachineState]]) -> list[str]:
    """What is worth knowing and no disturbance; ``states`` as for ``disturbances``."""
    shares = [(state.throttle_shares or {}).get("power_cap", 0.0) for _, state in states]
    capped = [
        (share, f"the power cap was active in {_percent(share)} of the samples of rank {rank}'s GPU")
        for rank, share in enumerate(shares)
    ]
    notes = Counter(note for _, state in states for note in state.notes)
    some = {note: f" ({count} of {len(states)} ranks)" for note, count in notes.items() if count < len(states)}
    return [*_worst(capped, MIN_POWER_CAP_SHARE, "ranks"), *(note + some.get(note, "") for note in notes)]


def _worst(lines: Sequence[tuple[float, str]], limit: float, kind: str) -> list[str]:
    """The line with the highest share if that is above ``limit``, and how many others are."""
    above = [line for share, line in sorted(lines, reverse=True) if share > limit]
    return [above[0] + (f" ({len(above)} {kind} in all)" if len(above) > 1 else "")] if above else []


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"
