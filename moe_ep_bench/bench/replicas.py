"""Where replicated experts stand, batch by batch, and what balancing them takes.

Replicas are placed for the mean load of all other batches: what a server knows before the tokens come. The static
balancer has replicas share evenly. ``lp`` splits each batch's pairs by a linear program once all counts are known,
which the gather of counts makes every rank know anyway; every rank then solves it by itself, ahead of dispatch.

Solving is not free. What it takes is measured here, on one thread of this machine's CPU, or assumed by the config
(``solve_us``): LPLB's README states about 100 us inside a node, longer between nodes.

Shapes: B = batches, R = ranks, E = experts, P = slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.bench.plan import BASELINE, CaseSpec, Comparison
from moe_ep_bench.bench.traffic import CaseRouter, Share, in_order, rank_pool
from moe_ep_bench.config import ReplicationConfig
from moe_ep_bench.layer.expert_placement import ExpertPlacement, Split
from moe_ep_bench.placement import Replication, balance, load_of_others


@dataclass(frozen=True)
class Solving:
    """What splitting one batch's pairs takes each rank, in microseconds.

    Attributes:
        charged_us: by which the rank is later: measured here, or the config's assumption.
        measured_us: CPU time of the solving thread here; the wall's would count what else the machine does.
    """

    charged_us: float
    measured_us: float


class Replicas:
    """The placements of a comparison's replicated cases.

    Args:
        shares: every rank's tokens of a batch as a case sees them, rank by rank (``CarriedLoads``).
    """

    def __init__(self, comparison: Comparison, shares: Callable[[CaseSpec, None, int], Iterable[Share]]) -> None:
        self._comparison, self._shares = comparison, shares
        self._planned = lru_cache(None)(self._plan)

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """Pairs of each rank's tokens and each expert under the model's own top-k, [B, R, E]."""
        native = CaseSpec("", BASELINE, "native", None)
        router = CaseRouter(native, self._comparison.slots, self._comparison.experiment.layer.seed)

        def counts_of(index: int, share: Share) -> list[int]:
            return router.map_of(share, index, None).sum(0).tolist()

        with rank_pool(torch.device("cpu")) as pool:
            return np.array(
                [
                    list(in_order(pool, partial(counts_of, index), self._shares(native, None, index)))
                    for index in range(self._comparison.workload.num_batches)
                ]
            )

    def slots(self, case: CaseSpec, index: int) -> ExpertPlacement:
        """Where a case's experts stand for batch ``index``: with one batch alone, planned for itself."""
        return self._comparison.slots if case.replication is None else self._planned(case.replication, index)[0]

    def solving(self, case: CaseSpec, index: int) -> Solving | None:
        """What balancing batch ``index`` takes; None where nothing is solved."""
        return None if case.replication is None else self._planned(case.replication, index)[1]

    def _plan(self, wanted: ReplicationConfig, index: int) -> tuple[ExpertPlacement, Solving | None]:
        counts_BRE = self._counts
        plan = self._comparison.replicate(wanted, load_of_others(counts_BRE.sum(axis=1))[index])
        slots = ExpertPlacement.of_replication(plan)
        if wanted.balancer == "static":
            return slots, None
        pairs_P, solving = _solved(plan, counts_BRE[index].sum(axis=0), wanted.solve_us)
        split = Split.of(slots.expert_P, pairs_P, counts_BRE[index])
        return ExpertPlacement(slots.expert_P, slots.num_experts, slots.num_ranks, split), solving


def _solved(
    plan: Replication, load_E: NDArray[np.int64], assumed_us: float | None
) -> tuple[NDArray[np.int64], Solving]:
    """Pairs of every slot, [P], and what finding them took; the first of three is not timed."""
    slot_expert_P = plan.slot_expert_LP[0]
    pairs_P = balance(slot_expert_P, load_E, plan.num_ranks)
    taken_us = []
    for _ in range(2):
        begin = time.thread_time()
        balance(slot_expert_P, load_E, plan.num_ranks)
        taken_us.append(1e6 * (time.thread_time() - begin))
    return pairs_P, Solving(min(taken_us) if assumed_us is None else assumed_us, min(taken_us))
