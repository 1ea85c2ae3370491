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

from moe_ep_bench.kernels import standings_triton as standings
from moe_ep_bench.kernels import tiles_triton as tiles
from moe_ep_bench.kernels.capacity_passes_triton import drop_in_passes
from moe_ep_bench.kernels.standings_triton import NO_PAIR, Job
from moe_ep_bench.kernels.tiles_triton import NO_KEY
from moe_ep_bench.policies.capacity import CapacityPolicy
from moe_ep_bench.policies.contract import Routing, RoutingContext

# Of the one program of a decode step: a warp for each of 16 tokens, so that a round of their top-k is two instructions.
_WARPS = 16
# Pairs of pairs of which a thread of it looks at 512.
_MOST_COMPARED = 2**18


def select(policy: CapacityPolicy, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None) -> Routing:
    """The policy's ``select``.

    Args:
        scores_TE: T * E at most ``standings_triton.MOST_PAIRS``, E at most ``tiles_triton.MOST_EXPERTS``.
        stats_SE: None.
    """
    num_tokens = len(scores_TE)
    job, routing = Job.of(policy, scores_TE, context), tiles.empty_routing(scores_TE)
    if num_tokens:
        block = job.layout.rows(num_tokens)
        if num_tokens <= block and job.num_shared == 1 and block * block * job.layout.width <= _MOST_COMPARED:
            _drop[(1,)](
                *job.read, *tiles.outputs(routing), num_tokens, job.first_local, job.index_bits, job.range_bits,
                *job.room, context.scale, **job.offers, **job.writes, BLOCK=block,
                LANES=tiles.lanes_of_row(block, _WARPS), LAYOUT=job.layout, num_warps=_WARPS,
            )  # fmt: skip
        else:
            drop_in_passes(job, routing, block, context.scale)
    return routing


@triton.jit(
    do_not_specialize=[
        "num_tokens", "first_local", "index_bits", "range_bits", "least", "whole", "part", "per", "scale",
    ]
)  # fmt: skip
def _drop(
    scores_ptr, bias_ptr, valid_ptr, modality_ptr, random_ptr, map_ptr, weights_ptr,
    num_tokens, first_local, index_bits, range_bits, least, whole, part, per, scale,
    FAVOURED: tl.constexpr, NUM_MORE: tl.constexpr, NUM_LOCAL: tl.constexpr, METRIC: tl.constexpr,
    NORMALIZE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    NUM_EXPERTS: tl.constexpr = LAYOUT.num_experts
    token, is_valid = tiles.tokens_of_block(tl.program_id(0) * BLOCK, num_tokens, valid_ptr, BLOCK)
    is_token = token < num_tokens
    expert, is_expert = tiles.experts_of_columns(LAYOUT)
    scores = tiles.load_whole_rows(scores_ptr, token, is_token, LANES, LAYOUT)
    values = tiles.preference(scores, bias_ptr, expert, is_expert)
    keys, top_keys = tiles.keys_and_those_in_top_groups(values, expert, is_expert, LAYOUT)
    is_top = tiles.best_keys_per_row(top_keys, expert, LAYOUT.top_k)
    is_pair = is_top
    if NUM_LOCAL > 0:
        is_local = ((expert >= first_local) & (expert < first_local + NUM_LOCAL))[None, :]
        is_pair = is_pair | tiles.best_keys_per_row(tl.where(is_local, keys, NO_KEY), expert, NUM_MORE)
    elif NUM_MORE > 0:
        is_pair = is_pair | tiles.best_keys_per_row(tl.where(is_top, NO_KEY, keys), expert, NUM_MORE)
    is_pair = is_pair & is_valid[:, None]

    at = token[:, None] * NUM_EXPERTS + expert[None, :]
    above = standings.favour(modality_ptr, token, is_token, range_bits, FAVOURED)[:, None]
    SIGNED: tl.constexpr = bias_ptr is not None
    metric = standings.metric_of(keys, at, token[:, None], num_tokens, random_ptr, is_pair, METRIC, SIGNED)
    standing = standings.place(above + metric, token[:, None], expert[None, :], index_bits, NUM_EXPERTS)
    standing = tl.where(is_pair, standing, NO_PAIR)
    # Each thread has an expert, and compares all pairs of it: nothing waits for anything.
    is_before = standing[:, None, :] > standing[None, :, :]
    num_before = tl.sum(is_before.to(tl.int32), 0)
    kept = is_pair & (num_before < standings.capacity_of(tl.sum(is_valid.to(tl.int32), 0), least, whole, part, per))
    if MOST is not None:
        kept = tiles.best_keys_per_row(tl.where(kept, keys, NO_KEY), expert, MOST)

    weights = tl.where(kept, scores, 0.0)
    if NORMALIZE:
        weights = tiles.share(weights, tl.sum(tl.where(is_top, scores, 0.0), 1)[:, None])
    tiles.store_rows(weights_ptr, weights * scale, token, is_token, expert, is_expert, NUM_EXPERTS)
    tiles.store_rows(map_ptr, kept.to(tl.int8), token, is_token, expert, is_expert, NUM_EXPERTS)
