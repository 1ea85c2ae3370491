"""The order in which things are timed, so that differences between cases are the cases' own.

All cases of a comparison run interleaved on the same batches, in an order that changes from step
to step so that each takes every place and follows every other equally often. Before each timed
iteration ranks are aligned by a collective on the stream. Plain iterations (two clock readings)
give speedups; breakdown iterations (every phase, waiting probed) explain them; the two alternate.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moe_ep_bench.layer.megatron import MoELayer
from moe_ep_bench.layer.phases import Rendezvous, instrumented
from moe_ep_bench.records import PHASES, TOTAL, UNACCOUNTED
from moe_ep_bench.timer import Clock, PhaseRecorder

PLAIN, BREAKDOWN = "plain", "breakdown"

# Columns of a sample: every phase (NaN where it did not occur), then what concerns the whole iteration.
HOST, THREAD_CPU = "host", "thread_cpu"
COLUMNS = (*PHASES, UNACCOUNTED, TOTAL, HOST, THREAD_CPU)


class Runnable(Protocol):
    """A case that can be run on any batch of the comparison."""

    @property
    def case_id(self) -> str: ...

    @property
    def layer(self) -> MoELayer: ...

    def prepare(self, batch: int) -> Tensor:
        """Put the batch's routing into the layer and return its hidden states, [T, 1, D]. Not timed."""
        ...


@dataclass(frozen=True)
class Step:
    """One timed iteration of every case on one batch."""

    batch: int
    iteration: int
    kind: str


def plan(num_batches: int, iterations: int, breakdown_iterations: int) -> list[Step]:
    """All steps: in every round each batch once, plain, and in the first rounds once more broken down."""
    steps = []
    for iteration in range(iterations):
        for batch in range(num_batches):
            steps.append(Step(batch, iteration, PLAIN))
            if iteration < breakdown_iterations:
                steps.append(Step(batch, iteration, BREAKDOWN))
    return steps


def order(num_cases: int, turn: int) -> list[int]:
    """The order of cases in a turn: a row of a Williams design (Aust. J. Sci. Res. A 2, 149, 1949).

    Over ``num_cases`` turns (twice as many if odd) every case takes every place equally often and
    follows every other case equally often, so that neither place nor predecessor favours any.
    """
    zigzag = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(num_cases)]
    row = [(case + turn) % num_cases for case in zigzag]
    return row[::-1] if num_cases % 2 and (turn // num_cases) % 2 else row


@torch.inference_mode()
def measure(
    cases: Sequence[Runnable],
    steps: Sequence[Step],
    clock: Clock,
    meet: Rendezvous,
    before: Callable[[str], None],
) -> np.ndarray:
    """Time every case at every step.

    Args:
        meet: aligns the ranks that talk to each other, on the stream.
        before: called with the case's id ahead of each iteration, untimed (progress, marks, the watchdog).

    Returns:
        float64 [cases, steps, COLUMNS], microseconds.
    """
    samples = np.full((len(cases), len(steps), len(COLUMNS)), np.nan)
    recorder = PhaseRecorder(clock)
    collecting = gc.isenabled()
    gc.disable()  # A collection in the middle of an iteration would be charged to a phase.
    try:
        turns = Counter[str]()
        for number, step in enumerate(steps):
            for index in order(len(cases), turns[step.kind]):
                case = cases[index]
                before(case.case_id)
                hidden_T1D = case.prepare(step.batch)
                if step.kind == PLAIN:
                    times = _timed(case.layer, hidden_T1D, recorder, meet)
                    del times[UNACCOUNTED]  # Nothing was to be accounted for.
                else:
                    with instrumented(case.layer, recorder, meet):
                        times = _timed(case.layer, hidden_T1D, recorder, meet)
                for name, value in times.items():
                    samples[index, number, COLUMNS.index(name)] = value
            turns[step.kind] += 1
            gc.collect(0)
    finally:
        if collecting:
            gc.enable()
    return samples


def _timed(layer: MoELayer, hidden_T1D: Tensor, recorder: PhaseRecorder, meet: Rendezvous) -> dict[str, float]:
    recorder.clock.wait()
    meet()
    cpu_start, host_start = time.thread_time_ns(), time.perf_counter_ns()
    recorder.begin()
    layer(hidden_T1D)
    recorder.end()
    host_end, cpu_end = time.perf_counter_ns(), time.thread_time_ns()
    times = recorder.times_us()
    times[HOST] = (host_end - host_start) / 1e3
    times[THREAD_CPU] = (cpu_end - cpu_start) / 1e3
    return times
