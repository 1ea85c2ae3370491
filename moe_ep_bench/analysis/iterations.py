"""The samples of one kind of iteration as one array of times. Shapes: I = iterations, R = ranks, P = phases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.reading import ITERATION
from moe_ep_bench.schema import PHASES, TOTAL, UNACCOUNTED

# The last axis of ``Iterations.time_us``.
PHASE_AXIS = (*PHASES, UNACCOUNTED, TOTAL)
_PHASE_PLACES = {phase: place for place, phase in enumerate(PHASE_AXIS)}


@dataclass(frozen=True, eq=False)
class Iterations:
    """Times of one kind of iteration as arrays: I iterations x R ranks x P phases.

    Attributes:
        index: (launch, batch, iteration) of each iteration, ascending.
        time_us: [I, R, P]; 0 where a phase did not occur on a rank.
        host_us: of the totals, [I, R].
        occurred: phases that occurred anywhere.
    """

    index: pd.MultiIndex
    time_us: np.ndarray
    host_us: np.ndarray
    occurred: frozenset[str]

    def of(self, *phases: str) -> np.ndarray:
        """Sum of phases, [I, R]."""
        return self.time_us[:, :, [_PHASE_PLACES[phase] for phase in phases]].sum(axis=2)

    def less(self, floor_us: float, phases: Iterable[str]) -> Iterations:
        """The same with a floor taken off phases, which end at 0."""
        time_us, places = self.time_us.copy(), [_PHASE_PLACES[phase] for phase in phases]
        time_us[:, :, places] = (time_us[:, :, places] - floor_us).clip(min=0.0)
        return replace(self, time_us=time_us)

    def on_slowest(self) -> np.ndarray:
        """Phases of the rank with the longest total in each iteration, [I, P]; of equal ones the first."""
        return self.time_us[np.arange(len(self.index)), self.slowest_rank()]

    def slowest_rank(self) -> np.ndarray:
        return self.of(TOTAL).argmax(axis=1)

    def mean_ms(self, groups: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """Milliseconds of groups of phases: mean over ranks, then median over iterations; empty without iterations."""
        sums = {name: self.of(*phases).mean(axis=1) for name, phases in groups.items()} if len(self.index) else {}
        return {name: float(np.median(sum_us_I)) / 1e3 for name, sum_us_I in sums.items()}

    def series(self, values_I: np.ndarray) -> pd.Series:
        return pd.Series(values_I, self.index)


def iterations_of(samples: pd.DataFrame, kind: str) -> Iterations:
    """Lay out the samples of plain or of breakdown iterations; a phase is summed over all layers that have it."""
    rows = samples[samples["kind"] == kind]
    levels, place_N = [], np.zeros(len(rows), dtype=np.int64)
    for name in ITERATION:
        values, code_N = np.unique(rows[name].to_numpy(dtype=np.int64), return_inverse=True)
        levels.append(values)
        place_N = place_N * len(values) + code_N
    places, iteration_N = np.unique(place_N, return_inverse=True)
    codes = np.unravel_index(places, [max(len(values), 1) for values in levels])
    ranks, rank_N = np.unique(rows["rank"].to_numpy(dtype=np.int64), return_inverse=True)
    phases, phase_N = np.unique(rows["phase"].to_numpy(dtype=str), return_inverse=True)
    axis_N = np.array([_PHASE_PLACES[phase] for phase in phases], dtype=np.int64)[phase_N]
    time_us = np.zeros((len(places), max(len(ranks), 1), len(PHASE_AXIS)))
    np.add.at(time_us, (iteration_N, rank_N, axis_N), rows["time_us"].to_numpy())
    host_us = np.full(time_us.shape[:2], np.nan)
    is_total_N = axis_N == _PHASE_PLACES[TOTAL]
    host_us[iteration_N[is_total_N], rank_N[is_total_N]] = rows["host_us"].to_numpy(dtype=float)[is_total_N]
    arrays = [values[code] for values, code in zip(levels, codes, strict=True)]
    return Iterations(pd.MultiIndex.from_arrays(arrays, names=ITERATION), time_us, host_us, frozenset(map(str, phases)))
