"""Token Drop and Expanded Drop (arXiv 2503.05066, Algorithms 1 and 2) without sorting anything.

The published formulation sorts every expert's column of T scores to find its best C pairs. What is needed is one
number per expert: the standing (``standings_triton``) of the last pair that it keeps. Where all tokens fit a tile, one
launch finds it (``capacity_tile_triton``), else five (``capacity_passes_triton``). Nothing waits for the host.

Shapes: T = tokens, E = experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from moe_ep_bench.kernels.capacity_passes_triton import drop_in_passes
from moe_ep_bench.kernels.capacity_tile_triton import drop_in_tile
from moe_ep_bench.kernels.standings_triton import Job, ranking, room_of
from moe_ep_bench.kernels.tiles_triton import empty_routing, inputs, layout, rows_of_tile
from moe_ep_bench.policies.capacity import CapacityPolicy, ExpandedDrop
from moe_ep_bench.policies.contract import Routing, RoutingContext


@dataclass(frozen=True, eq=False)
class Counts:
    """What falls out of routing: ``load_E``, kept pairs per expert (int32 [E]), and top-k pairs dropped (int32 [])."""

    load_E: Tensor
    num_dropped: Tensor


def capacity(policy: CapacityPolicy, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None) -> Routing:
    """``token_drop`` and ``expanded_drop``: the routing of ``policies.capacity``."""
    return route_and_count(policy, scores_TE, context)[0]


def route_and_count(policy: CapacityPolicy, scores_TE: Tensor, context: RoutingContext) -> tuple[Routing, Counts]:
    """Route, and say how many pairs each expert keeps.

    Args:
        policy: ``token_drop`` or ``expanded_drop``.
        scores_TE: float32 [T, E], checked; T * E at most ``standings_triton.MOST_PAIRS``, E at most
            ``tiles_triton.MOST_EXPERTS``.
    """
    num_tokens, num_experts = scores_TE.shape
    shape = layout(num_experts, context)
    num_shared = num_experts // context.num_ranks if policy.granularity == "device" else 1
    most = policy.max_experts_per_token if isinstance(policy, ExpandedDrop) else None
    contiguous_TE, bias_E, valid_T = inputs(scores_TE, context)
    job = Job(
        scores_TE=contiguous_TE,
        bias_E=bias_E,
        valid_T=valid_T,
        ranking=ranking(policy, scores_TE, context),
        room=room_of(policy, scores_TE.shape, context, num_shared),
        first_local=context.rank * (num_experts // context.num_ranks),
        scale=context.scale,
        num_shared=num_shared,
        constants={"METRIC": policy.metric, "NORMALIZE": context.normalize, "MOST": most, **shape},
        expansion=_expansion(policy, context, num_experts),
    )
    routing = empty_routing(scores_TE)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=scores_TE.device)
    if num_tokens:
        rows = rows_of_tile(num_tokens, shape)
        if num_tokens <= rows and num_shared == 1:
            drop_in_tile(job, routing, counts, rows)
        else:
            drop_in_passes(job, routing, counts, rows)
    return routing, Counts(counts[:-1], counts[-1])


def _expansion(policy: CapacityPolicy, context: RoutingContext, num_experts: int) -> dict[str, int]:
    """How many further experts a token considers, and of how many on its own rank (0 = anywhere)."""
    if not isinstance(policy, ExpandedDrop):
        return {"NUM_MORE": 0, "NUM_LOCAL": 0, "LOCAL_P": 1}
    if policy.scope == "global":
        return {"NUM_MORE": min(policy.num_candidates or 0, num_experts - context.top_k), "NUM_LOCAL": 0, "LOCAL_P": 1}
    num_local = num_experts // context.num_ranks
    num_more = num_local if policy.num_candidates is None else min(policy.num_candidates, num_local)
    if not num_more:
        num_local = 0
    return {"NUM_MORE": num_more, "NUM_LOCAL": num_local, "LOCAL_P": triton.next_power_of_2(max(1, num_local))}
