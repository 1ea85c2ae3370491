"""Loads that earlier batches left on the experts, for policies with ``carry_loads`` (``policies.laser``).

Batch b starts from what routing batches 0 to b - 1, in this order, left. The chain is worked out once and apart from
all that is timed: so a batch is routed alike on every backend, whichever batch is run first and however often.

Shapes: R = ranks, T = tokens of one rank, E = experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_ep_bench.bench.plan import CaseSpec
from moe_ep_bench.bench.traffic import CaseRouter, Share
from moe_ep_bench.layer.expert_placement import ExpertPlacement
from moe_ep_bench.policies.laser import LoadAwarePolicy


@dataclass(frozen=True, eq=False)
class CarriedLoads:
    """The chains of all cases and layers of a comparison.

    Attributes:
        shares: every rank's tokens of a batch in a layer as a case sees them, rank by rank.
        slots, seed: as of ``CaseRouter``.
    """

    shares: Callable[[CaseSpec, int | None, int], Iterable[Share]]
    slots: ExpertPlacement
    seed: int
    _known: dict[tuple[str, int | None, int], Tensor] = field(default_factory=dict)

    def __call__(self, case: CaseSpec, layer: int | None, index: int, rank: int) -> Tensor | None:
        """What batch ``index`` starts from on a rank, float64 [E]; None = nothing."""
        policy = case.policy
        if index == 0 or not isinstance(policy, LoadAwarePolicy) or not policy.carry_loads:
            return None
        for after in range(1, index + 1):
            if (case.case_id, layer, after) not in self._known:
                self._known[case.case_id, layer, after] = self._left(case, layer, after - 1)
        load_RE = self._known[case.case_id, layer, index]
        return load_RE.sum(dim=0) if policy.load_scope == "all" else load_RE[rank]

    def _left(self, case: CaseSpec, layer: int | None, index: int) -> Tensor:
        """Pairs of every rank's tokens up to batch ``index``: float64 [R, E]."""
        router = CaseRouter(case, self.slots, self.seed, self)
        maps = [router.route(share, index, None).map_TE for share in self.shares(case, layer, index)]
        load_RE = torch.stack([map_TE.sum(dim=0).double() for map_TE in maps])
        return load_RE if index == 0 else load_RE + self._known[case.case_id, layer, index]
