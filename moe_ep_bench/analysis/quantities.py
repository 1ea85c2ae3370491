"""What of a case is set beside the same in another run: the whole, and what it consists of.

Of a layer its phases, each on the rank that spends most in it. Of a whole model the pass in three parts, on the rank
that is slowest in each breakdown iteration, where they add up: its MoE layers, waiting included; attention; and all
the rest, which no policy reaches. The phases are then those of all MoE layers together.
"""

from __future__ import annotations

import pandas as pd

from moe_ep_bench.analysis.load import Case
from moe_ep_bench.analysis.timing import layer_time_us
from moe_ep_bench.analysis.whole import MOE_PHASES, slowest_us
from moe_ep_bench.schema import LAYER_PHASES, TOTAL

# The layer, or the pass of a whole model: from plain iterations, as the speedup is.
ALL = "all"
MOE, ATTENTION, REST = "MoE layers", "attention", "the rest"
PARTS = (MOE, ATTENTION, REST)

_ITERATION = ["launch", "batch", "iteration"]


def times_of(case: Case, is_whole: bool) -> dict[str, pd.Series]:
    """Microseconds of each quantity of a measured case, indexed by (launch, batch, iteration).

    Returns:
        ``ALL``, then ``PARTS`` of a whole model, then every phase that occurred; ``ALL`` alone without breakdown
        iterations.
    """
    rows = case.timings[(case.timings["kind"] == "breakdown") & case.timings["phase"].isin(LAYER_PHASES)]
    most = rows.groupby(["phase", *_ITERATION])["time_us"].max()
    present = set(rows["phase"])
    phases = {phase: most.loc[phase] for phase in LAYER_PHASES if phase in present}
    return {ALL: layer_time_us(case), **(_parts(case) if is_whole else {}), **phases}


def _parts(case: Case) -> dict[str, pd.Series]:
    times_us = slowest_us(case)
    if times_us is None:
        return {}
    times_us = times_us.droplevel("rank")
    moe = times_us.reindex(columns=list(MOE_PHASES), fill_value=0.0).sum(axis=1)
    attention = times_us.get("attention", 0.0 * moe)
    return {MOE: moe, ATTENTION: attention, REST: times_us[TOTAL] - moe - attention}
