"""Token Drop and Expanded Drop (arXiv 2503.05066, Algorithms 1 and 2) without sorting anything.

The published formulation sorts every expert's column of T scores to find its best C pairs. What is needed is one
number per expert: the standing (``standings_triton``) of the last pair that it keeps; larger batches find it in five
launches (``capacity_passes_triton``). Where all tokens fit one tile, as in decode, one launch of one program counts for
each pair those that stand before it with its expert. Nothing waits for the host.

Shapes: T = tokens, E = experts, K = top_k.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.kernels.capacity_passes_triton import drop_in_passes
from moe_ep_bench.kernels.standings_triton import (
    NO_PAIR,
    Job,
    capacity_of,
    favour,
    metric_of,
    place,
    ranking,
    room_of,
)
from moe_ep_bench.kernels.tiles_triton import (
    NO_KEY,
    NOTHING,
    as_bytes,
    best_keys_per_row,
    empty_routing,
    experts_of_columns,
    inputs,
    inside_top_groups,
    lanes_of_row,
    layout,
    load_whole_rows,
    order_key,
    preference,
    preference_order,
    rows_of_tile,
    share,
    store_rows,
    tokens_of_block,
)
from moe_ep_bench.policies.capacity import CapacityPolicy, ExpandedDrop
from moe_ep_bench.policies.contract import Routing, RoutingContext

# Of the one program of a decode step: a warp for each of 16 tokens, so that a round of their top-k is two instructions.
_WARPS = 16
# Pairs of pairs of which a thread of it looks at 512.
_MOST_COMPARED = 2**18


def capacity(policy: CapacityPolicy, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None) -> Routing:
    """``token_drop`` and ``expanded_drop``: the routing of ``policies.capacity``.

    Args:
        policy: ``token_drop`` or ``expanded_drop``.
        scores_TE: float32 [T, E], checked; T * E at most ``standings_triton.MOST_PAIRS``, E at most
            ``tiles_triton.MOST_EXPERTS``.
    """
    num_tokens, num_experts = scores_TE.shape
    shape = layout(num_experts, context)
    num_shared = num_experts // context.num_ranks if policy.granularity == "device" else 1
    expansion = _expansion(policy, context, num_experts)
    most = policy.max_experts_per_token if isinstance(policy, ExpandedDrop) else None
    if most is not None and most >= context.top_k + expansion["NUM_MORE"]:
        most = None  # no token has as many candidates
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
        expansion=expansion,
    )
    routing = empty_routing(scores_TE)
    if num_tokens:
        rows = rows_of_tile(num_tokens, shape)
        num_compared = rows * rows * shape["GROUPS_P"] * shape["SIZE_P"]
        if num_tokens <= rows and num_shared == 1 and num_compared <= _MOST_COMPARED:
            _drop_in_tile(job, routing, rows)
        else:
            drop_in_passes(job, routing, rows)
    return routing


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


def _drop_in_tile(job: Job, routing: Routing, block: int) -> None:
    """Fill ``routing``; T is at most ``block``, and every expert has a capacity of its own."""
    assert job.num_shared == 1
    ranking, room = job.ranking, job.room
    _drop[(1,)](
        job.scores_TE, job.bias_E, job.valid_T, ranking.modality_T, ranking.random_TE, as_bytes(routing.map_TE),
        routing.weights_TE, job.scores_TE.shape[0], job.first_local, ranking.index_bits, ranking.range_bits,
        room.least, room.whole, room.part, room.per, job.scale,
        FAVOURED=ranking.favoured, BLOCK=block, LANES=lanes_of_row(block, _WARPS), num_warps=_WARPS,
        NUM_MORE=job.expansion["NUM_MORE"], NUM_LOCAL=job.expansion["NUM_LOCAL"], **job.constants,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "num_tokens", "first_local", "index_bits", "range_bits", "least", "whole", "part", "per", "scale",
    ]
)  # fmt: skip
def _drop(
    scores_ptr, bias_ptr, valid_ptr, modality_ptr, random_ptr, map_ptr, weights_ptr,
    num_tokens, first_local, index_bits, range_bits, least, whole, part, per, scale,
    FAVOURED: tl.constexpr, NUM_MORE: tl.constexpr, NUM_LOCAL: tl.constexpr, METRIC: tl.constexpr,
    NORMALIZE: tl.constexpr, MOST: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUPS_P: tl.constexpr, SIZE_P: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token, is_valid = tokens_of_block(tl.program_id(0) * BLOCK, num_tokens, valid_ptr, BLOCK)
    is_token = token < num_tokens
    expert, is_expert = experts_of_columns(NUM_EXPERTS, GROUPS, GROUPS_P, SIZE_P)
    scores = load_whole_rows(scores_ptr, token, is_token, NUM_EXPERTS, GROUPS, GROUPS_P, SIZE_P, LANES)
    values = preference(scores, bias_ptr, expert, is_expert)
    keys = tl.where(is_expert[None, :], order_key(values), NO_KEY)
    top_keys = keys
    if GROUPS > 1:
        order = preference_order(values, expert, is_expert)
        inside = inside_top_groups(order, values, TOP_K, GROUPS, TOP_GROUPS, GROUPS_P, SIZE_P)
        top_keys = tl.where(inside != NOTHING, keys, NO_KEY)
    is_top = best_keys_per_row(top_keys, expert, TOP_K)
    is_pair = is_top
    if NUM_LOCAL > 0:
        is_local = ((expert >= first_local) & (expert < first_local + NUM_LOCAL))[None, :]
        is_pair = is_pair | best_keys_per_row(tl.where(is_local, keys, NO_KEY), expert, NUM_MORE)
    elif NUM_MORE > 0:
        is_pair = is_pair | best_keys_per_row(tl.where(is_top, NO_KEY, keys), expert, NUM_MORE)
    is_pair = is_pair & is_valid[:, None]

    at = token[:, None] * NUM_EXPERTS + expert[None, :]
    above = favour(modality_ptr, token, is_token, range_bits, FAVOURED)[:, None]
    metric = metric_of(keys, at, token[:, None], num_tokens, random_ptr, is_pair, METRIC, bias_ptr is not None)
    standing = place(above + metric, token[:, None], expert[None, :], index_bits, NUM_EXPERTS)
    standing = tl.where(is_pair, standing, NO_PAIR)
    # Each thread has an expert, and compares all pairs of it: nothing waits for anything.
    is_before = standing[:, None, :] > standing[None, :, :]
    num_before = tl.sum(is_before.to(tl.int32), 0)
    kept = is_pair & (num_before < capacity_of(tl.sum(is_valid.to(tl.int32), 0), least, whole, part, per))
    if MOST is not None:
        kept = best_keys_per_row(tl.where(kept, keys, NO_KEY), expert, MOST)

    weights = tl.where(kept, scores, 0.0)
    if NORMALIZE:
        weights = share(weights, tl.sum(tl.where(is_top, scores, 0.0), 1)[:, None])
    store_rows(weights_ptr, weights * scale, token, is_token, expert, is_expert, NUM_EXPERTS)
    store_rows(map_ptr, kept.to(tl.int8), token, is_token, expert, is_expert, NUM_EXPERTS)
