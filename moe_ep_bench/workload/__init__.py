"""What the layer is fed: tokens and their router scores.

How long an MoE layer takes under expert parallelism depends less on the tokens than on where the router sends them:
the busiest expert's rank is late, and all others wait. So a policy's speedup is a statement about a *distribution of
router scores*. ``SyntheticWorkload`` solves for targets; ``RecordedWorkload`` replays what a real model's router did.

A workload makes *global* batches (``TokenBatch``: the tokens of all ranks) and does not know how many ranks there are,
so that one workload gives the same bytes to 1, 4 or 64 of them. ``deal`` then hands whole sequences to ranks: single
tokens would average the ranks' traffic and erase the differences that dispatch and combine have to bear. Every workload
describes itself (``describe``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_ep_bench.workload.batch import TokenBatch, deal
    from moe_ep_bench.workload.replay import RecordedWorkload, Source
    from moe_ep_bench.workload.synthetic import SyntheticWorkload
    from moe_ep_bench.workload.trace import Trace, open_trace
    from moe_ep_bench.workload.workload import Workload

__all__ = [
    "RecordedWorkload",
    "Source",
    "SyntheticWorkload",
    "TokenBatch",
    "Trace",
    "Workload",
    "deal",
    "open_trace",
]


def __getattr__(name: str) -> object:
    """Import a name of ``__all__`` when it is first used: a config opens recordings, and must not wait for torch."""
    for module in ("trace", "batch", "workload", "replay", "synthetic") if name in __all__ else ():
        content = importlib.import_module(f"{__name__}.{module}")
        if hasattr(content, name):
            return getattr(content, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
