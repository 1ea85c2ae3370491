"""The layers of a whole model one by one: as wide as a page, however many policies were timed.

Under native each layer's attention and, where it has one, its dense layer; its MoE layer under native and under the
few policies that gain most from end to end. All others are in the rows: ``show --format csv --samples``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from moe_ep_bench.analysis.load import Case
from moe_ep_bench.schema import LAYER_PHASES, MOE_REST

# What an MoE layer's time consists of.
MOE_PHASES = (*LAYER_PHASES, MOE_REST)
MOST_POLICIES = 4
_ITERATION = ["launch", "batch", "iteration"]


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """Milliseconds by layer; mean over ranks, median over breakdown iterations.

    Attributes:
        parts: columns attention and dense, under native; NaN where a layer has no such part.
        moe: a column for native and one for each policy shown, named by labels.
        num_policies: how many could have been shown.
    """

    parts: pd.DataFrame
    moe: pd.DataFrame
    num_policies: int

    @property
    def shown_words(self) -> str:
        """Whose columns there are."""
        num_shown = len(self.moe.columns) - 1
        if num_shown == self.num_policies:
            return "mean over ranks, median over breakdown iterations"
        return (
            f"mean over ranks, median over breakdown iterations; the {num_shown} of {self.num_policies} policies that "
            "gain most from end to end"
        )


def layer_times(native: Case, policies: Sequence[Case]) -> LayerTimes:
    """The table of some cases' layers; cases without are passed over.

    Args:
        policies: the first of them are shown, as many as ``MOST_POLICIES``.
    """
    known = [case for case in policies if case.layers is not None and len(case.layers)]
    shown = (native, *known[:MOST_POLICIES])
    times = {case.label: by_layer_ms(case.layers) for case in shown if case.layers is not None}
    of_native = times[native.label]
    parts = {kind: of_native[kind] for kind in ("attention", "dense") if kind in of_native}
    moe = {label: of_case.get("moe") for label, of_case in times.items()}
    return LayerTimes(
        pd.DataFrame(parts, index=of_native.index, dtype=float),
        pd.DataFrame(moe, index=of_native.index, dtype=float),
        len(known),
    )


def by_layer_ms(rows: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of each layer: columns attention, moe, dense and rest; mean over ranks, median over iterations.

    Args:
        rows: as ``Case.layers``; what is of no layer is left out.
    """
    rows = rows[rows["layer"].notna()]
    kinds = rows["phase"].where(~rows["phase"].isin(MOE_PHASES), "moe")
    sums = rows.groupby([rows["layer"].astype(int), kinds, *_ITERATION, rows["rank"]])["time_us"].sum()
    means = sums.groupby(level=["layer", "phase", *_ITERATION]).mean()
    return means.groupby(level=["layer", "phase"]).median().unstack("phase") / 1e3
