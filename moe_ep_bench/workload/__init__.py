"""What the layer is fed: tokens and their router scores.

How long an MoE layer takes under expert parallelism depends less on the tokens than on where the
router sends them. If every expert got its mean load, no routing policy could win anything; in
real traffic the busiest expert gets several times as much, its rank is late, and all others wait.
A policy's speedup is therefore a statement about a *distribution of router scores*, and this
package is where that distribution comes from:

* ``SyntheticWorkload`` solves for targets: the load of the busiest expert and of the fullest rank, how sharp
  scores are, how alike neighbours. It answers "what if", and sweeps from balanced to fully collapsed.
* ``RecordedWorkload`` replays what a real model's router did on real text, from ``moe-trace-v1`` files, one
  or several mixed: whole sequences, or the steps of requests that decode side by side. Skew, correlation
  between neighbouring tokens and score shapes are the model's own; only the scores below the top-k, which
  recordings leave out, are modelled.

A workload makes *global* batches (``TokenBatch``: the tokens of all ranks) and does not know how
many ranks there are, so that one workload gives the same bytes to 1, 4 or 64 of them. ``deal``
then hands whole sequences to ranks. Dealing single tokens would average the ranks' traffic and
erase the very differences between ranks that dispatch and combine have to bear. A batch need not fit
in memory: ``Workload.rank_batches`` makes what ``deal`` gives each rank, one rank after the other.

Every workload describes itself (``describe``) in words and numbers for ``run.json``, and
``fingerprint`` hashes the bytes it makes: two runs with one fingerprint saw the same scores.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_ep_bench.workload.batch import TokenBatch, deal
    from moe_ep_bench.workload.recorded import RecordedWorkload, Source
    from moe_ep_bench.workload.skew import peak_load, top_k_load, top_k_share
    from moe_ep_bench.workload.synthetic import SyntheticWorkload
    from moe_ep_bench.workload.tail import TAILS
    from moe_ep_bench.workload.trace import Trace, open_trace
    from moe_ep_bench.workload.workload import Workload

__all__ = [
    "TAILS",
    "RecordedWorkload",
    "Source",
    "SyntheticWorkload",
    "TokenBatch",
    "Trace",
    "Workload",
    "deal",
    "open_trace",
    "peak_load",
    "top_k_load",
    "top_k_share",
]


def __getattr__(name: str) -> object:
    """Import a name of ``__all__`` when it is first used: a config opens recordings, and must not wait for torch."""
    for module in ("tail", "trace", "batch", "workload", "recorded", "skew", "synthetic") if name in __all__ else ():
        found = importlib.import_module(f"{__name__}.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
