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
MOE, ATTENTION, REST = PARTS = ("MoE layers", "attention", "the rest")


def times_of(case: Case, is_whole: bool) -> dict[str, pd.Series]:
    """Microseconds of each quantity of a measured case, indexed by (launch, batch, iteration).

    Returns:
        ``ALL``, then ``PARTS`` of a whole model, then every phase that occurred; ``ALL`` alone without breakdown
        iterations.
    """
    found = {ALL: layer_time_us(case)}
    slowest = slowest_us(case) if is_whole else None
    if slowest is not None:
        moe, attention = slowest[list(MOE_PHASES)].sum(axis=1), slowest["attention"]
        found |= {MOE: moe, ATTENTION: attention, REST: slowest[TOTAL] - moe - attention}
    times = case.breakdown
    occurred = [phase for phase in LAYER_PHASES if phase in times.occurred]
    return found | {phase: times.series(times.of(phase).max(axis=1)) for phase in occurred}
