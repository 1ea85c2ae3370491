"""Several policies on the same scores, of whose routing only the map is read.

Most rules begin with the model's own top-k, or with the order in which it prefers experts: both are found once for
all. Weights, which only a layer needs, are left out.

Shapes: T = tokens, E = experts; a "row" is whatever competes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moe_ep_bench.kernels.policy_steps import HostSteps
from moe_ep_bench.policies.budget_drop import BudgetDrop
from moe_ep_bench.policies.capacity import ExpandedDrop, TokenDrop
from moe_ep_bench.policies.laser import Laser, LoadOnly
from moe_ep_bench.policies.oea import OEA, Pruned
from moe_ep_bench.policies.skipping import DynamicSkip, ExpertDrop, Lynx
from moe_ep_bench.policies.topk import TopK
from moe_ep_bench.policies.xshare import XShare


class SharedSteps(HostSteps):
    """numba's loops for one rank's scores; to the maps the same as ``HostSteps``."""

    policies = frozenset(
        (TopK, TokenDrop, ExpandedDrop, BudgetDrop, Pruned, OEA, ExpertDrop, Lynx, DynamicSkip, Laser, LoadOnly, XShare)
    )
    """Those whose map follows from no weight."""

    def __init__(self, scores_TE: Tensor) -> None:
        self._scores_TE = scores_TE
        self._kept: dict[str, Tensor] = {}
        self._best: dict[tuple[int, int], Tensor] = {}

    def kept(self, name: str, scores_TE: Tensor, make: Callable[[], Tensor]) -> Tensor:
        if scores_TE is not self._scores_TE:
            return make()
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def best_per_row(self, keys_RN: Tensor, count: int, columns_N: Tensor | None = None) -> Tensor:
        lasts = any(keys_RN is kept for kept in (self._scores_TE, *self._kept.values()))
        if not lasts or columns_N is not None:
            return super().best_per_row(keys_RN, count, columns_N)
        place = id(keys_RN), count
        if place not in self._best:
            self._best[place] = super().best_per_row(keys_RN, count)
        return self._best[place]

    def weights(
        self, scores_TE: Tensor, map_TE: Tensor, norm_map_TE: Tensor | None, width: int, scale: float
    ) -> Tensor:
        return scores_TE.new_zeros(()).expand(scores_TE.shape)
