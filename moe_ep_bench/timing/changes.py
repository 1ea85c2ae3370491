"""What may be concluded from two jobs that timed the same cases, one after the other.

Inside a job baseline and case take turns, so that their ratios are pairs (``statistics``). Two jobs share
no moment: iteration 3 of one has nothing to do with iteration 3 of the other. What they do share is the
batches, for equal case ids mean equal workloads. So the sample is one ratio per *batch*, the new job's median
over the old one's, in which the batch's own length cancels; iterations of a cell only go into its median.
The estimate is the median of these ratios, its interval the bootstrap over batches.

What slows or speeds a whole job (the node, its temperature, where memory came to lie) is the same in all its
batches, so no number of batches shows it; only other launches do. With several, their scatter is added
by Student's t for two samples (the deviations of both jobs pooled, L_old + L_new - 2 degrees of freedom).
With one launch on either side the interval speaks of these two launches only.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from moe_ep_bench.timing.statistics import LEVEL, Estimate, NoiseFloor, estimate_median

_CELL = ["launch", "batch"]


def estimate_change(old: pd.Series, new: pd.Series) -> Estimate | None:
    """Return new / old, batch by batch, with its interval.

    Args:
        old, new: positive values of one case in two jobs, indexed by (launch, batch, iteration).

    Returns:
        A ratio above 1 where values grew; None where the jobs share no batch or a batch's median is not above 0.
    """
    ratios = _of_batches(new) / _of_batches(old)
    ratios = ratios[ratios.notna()]
    if ratios.empty or not (np.isfinite(ratios) & (ratios > 0)).all():
        return None
    index = pd.MultiIndex.from_product([[0], ratios.index, [0]], names=["launch", "batch", "iteration"])
    estimate = estimate_median(pd.Series(ratios.to_numpy(), index))
    assert estimate is not None
    counts = [values.index.get_level_values("launch").nunique() for values in (old, new)]
    if not estimate.is_interval or max(counts) == 1:
        return replace(estimate, num_launches=min(counts))
    launch_half = _launch_half_width(_launch_deviations(old), _launch_deviations(new))
    down, up = (math.hypot(math.log(end / estimate.median), launch_half) for end in (estimate.low, estimate.high))
    low, high = estimate.median * math.exp(-down), estimate.median * math.exp(up)
    return replace(estimate, low=low, high=high, num_launches=min(counts))


def joint_floor(old: NoiseFloor, new: NoiseFloor) -> NoiseFloor:
    """The floor of a change: either job's noise is in it, and independent widths add in quadrature, in logs."""
    half = math.hypot(math.log(old.high), math.log(new.high))
    return NoiseFloor(math.exp(-half), math.exp(half))


def _of_batches(values: pd.Series) -> pd.Series:
    return values.groupby(level="batch").median()


def _launch_deviations(values: pd.Series) -> np.ndarray:
    """Logs of how far each launch lies from the others of its job, batches of unequal length put on one scale: [L]."""
    cells = values.groupby(level=_CELL).median()
    relative = np.log(cells / cells.groupby(level="batch").transform("median"))
    medians_L = relative.groupby(level="launch").median().to_numpy()
    return medians_L - medians_L.mean()


def _launch_half_width(old_L: np.ndarray, new_L: np.ndarray) -> float:
    """Half the width, in logs, of Student's interval of two samples' difference; one at least has two launches."""
    degrees = len(old_L) + len(new_L) - 2
    pooled = math.sqrt((np.square(old_L).sum() + np.square(new_L).sum()) / degrees)
    return float(stdtrit(degrees, (1 + LEVEL) / 2)) * pooled * math.sqrt(1 / len(old_L) + 1 / len(new_L))
