"""Where replicated experts stand, batch by batch, and what balancing them takes.

Replicas are placed for the mean load of all other batches: what a server knows before the tokens come. The static
balancer has replicas share evenly. ``lp`` splits each batch's pairs by a linear program once all counts are known,
which the gather of counts makes every rank know anyway; every rank then solves it by itself, ahead of dispatch.

Solving is not free: every rank is later by ``solve_us``.

Shapes: B = batches, R = ranks, E = experts, P = slots.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.bench.cases import BASELINE, CaseSpec
from moe_ep_bench.bench.routing import Batches, CaseRouter, Shares, in_order, rank_pool
from moe_ep_bench.config import ReplicationConfig
from moe_ep_bench.layer.expert_placement import ExpertPlacement, Split
from moe_ep_bench.placement import balance, load_of_others

_NATIVE = CaseSpec("", BASELINE, "native", None)


class Replicas:
    """The placements of a comparison's replicated cases."""

    def __init__(self, batches: Batches) -> None:
        self._batches, self._comparison = batches, batches.comparison
        self._planned = lru_cache(None)(self._plan)

    def slots(self, case: CaseSpec, index: int) -> ExpertPlacement:
        """Where a case's experts stand for batch ``index``: with one batch alone, planned for itself."""
        return self._comparison.slots if case.replication is None else self._planned(case.replication, index)

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """Pairs of each rank's tokens and each expert under the model's own top-k, [B, R, E]."""
        router = CaseRouter(_NATIVE, self._comparison.slots, self._comparison.experiment.layer.seed)

        def counts_of(index: int, shares: Shares) -> list[int]:
            return router.map_of(shares.of(_NATIVE), index, None).sum(0).tolist()

        with rank_pool(torch.device("cpu"), self._batches.num_bytes) as pool:
            indices = range(self._comparison.workload.num_batches)
            ranks = (in_order(pool, partial(counts_of, i), self._batches.shares(None, i)) for i in indices)
            return np.array([list(counts_RE) for counts_RE in ranks])

    def _plan(self, wanted: ReplicationConfig, index: int) -> ExpertPlacement:
        counts_BRE = self._counts
        plan = self._comparison.replicate(wanted, load_of_others(counts_BRE.sum(axis=1))[index])
        slots = ExpertPlacement.of_replication(plan)
        if wanted.balancer == "static":
            return slots
        pairs_P = balance(plan.slot_expert_LP[0], counts_BRE[index].sum(axis=0), plan.num_ranks)
        split = Split.of(slots.expert_P, pairs_P, counts_BRE[index])
        return ExpertPlacement(slots.expert_P, slots.num_experts, slots.num_ranks, split)
