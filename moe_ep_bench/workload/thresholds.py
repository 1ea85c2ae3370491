"""LASER's thresholds from what a recording says of a model's scores, so that nobody has to guess them.

LASER (arXiv 2510.03293) leaves a token alone whose top-k holds at least ``eps_high`` of its score mass, and lets any
other choose among experts that score at least ``t_fix`` times its best one. Both depend on how a model's scores
are shaped, and that changes with depth; the paper sets them by layer from statistics of its prefill. The
rule here is our own: for each third of the depth, over all tokens of its layers:

- ``eps_high``: the quantile of the top-k share above which a share ``keep`` of the tokens lies. So ``keep`` is what
  it says: the surest quarter of the tokens, say, keep their own choice.
- ``t_fix``: the median of the K-th best score over the best. So the pool holds experts that come as near to
  the best one as the last of the model's own choices does in the median token.

Shapes: T = tokens, K = top_k.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.laser import BANDS
from moe_ep_bench.workload import open_trace

# Thresholds are rounded to so many decimals: what is printed is what was meant.
_DECIMALS = 3


def laser_thresholds(path: str | Path, keep: float = 0.25) -> dict[str, Any]:
    """Derive LASER's fields from a recording.

    Args:
        path: a ``moe-trace-v1`` file, of prefill as the paper has it.
        keep: share of tokens that are to keep their top-k, 0 to 1.

    Returns:
        ``eps_high`` and ``t_fix`` over all layers, and under ``bands`` those of every third of the depth that has a
        layer: fields of the policy ``laser``, to be completed by ``c``.

    Raises:
        ValueError: ``keep`` out of range, or a recording whose scores do not say what share of the mass the top-k hold.
    """
    if not 0 <= keep <= 1:
        raise UserError(f"keep: expected 0 to 1, got {keep:g}")
    trace = open_trace(path)
    if trace.scores_are_assumed or trace.scores_are_normalised:
        what = "assumed" if trace.scores_are_assumed else "normalised over the top-k"
        raise UserError(f"{path}: score: expected shares of a token's whole score mass, got scores that are {what}")
    shares: dict[str, list[np.ndarray]] = {}
    nearness: dict[str, list[np.ndarray]] = {}
    for layer in range(trace.num_layers):
        scores_TK = trace.read_layer(layer)[1].astype(np.float64)
        band = BANDS[layer * len(BANDS) // trace.num_layers]
        best_T = scores_TK[:, 0]
        shares.setdefault(band, []).append(scores_TK.sum(axis=1))
        nearness.setdefault(band, []).append(scores_TK[best_T > 0, -1] / best_T[best_T > 0])
    return {
        **_thresholds(list(chain(*shares.values())), list(chain(*nearness.values())), keep),
        "bands": {band: _thresholds(shares[band], nearness[band], keep) for band in shares},
    }


def _thresholds(shares: list[np.ndarray], nearness: list[np.ndarray], keep: float) -> dict[str, float]:
    # Float16 scores may sum to a little more than 1, which no threshold may be.
    eps_high = min(float(np.quantile(np.concatenate(shares), 1 - keep)), 1.0)
    t_fix = float(np.median(np.concatenate(nearness)))
    return {"eps_high": round(eps_high, _DECIMALS), "t_fix": round(t_fix, _DECIMALS)}
