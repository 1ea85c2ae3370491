"""Policies in which a batch agrees on a set of experts, in Triton: ``expert_drop``, ``lynx``, ``oea``, ``xshare``.

They are one rule with other numbers. Each token wants the first few experts of its list. Counted over the
batch, and with the experts' summed scores, these wishes decide which experts are *open*. Then each token
takes its best open experts, looking down its list to some depth:

- ``expert_drop``, ``lynx``: wants its top-k; the least wanted are closed; takes what is left of its top-k.
- ``oea``: wants its base; what anybody wants is open, and what ranks add; takes ``k_max`` of that, and its base.
- ``xshare``: wants its first k0; what anybody wants is open, and what a budget adds; takes K of that.

The decision is made inside the kernel that chooses, by every program for itself: it compares each expert with each
other one, which costs less than another launch. Where one program holds all tokens it takes the statistics too, so
that a decode step is one launch. Longer batches take them block by block and add the blocks in a fixed order.

Shapes: T = tokens, E = experts, K = top_k, R = EP ranks, S = rows of statistics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.kernels.requests_triton import request_sets
from moe_ep_bench.kernels.rows_triton import (
    first_of_list,
    first_reaching,
    order_rows,
    write_routing,
)
from moe_ep_bench.kernels.tiles_triton import (
    NOTHING,
    NUM_WARPS,
    empty_routing,
    experts_of_columns,
    inputs,
    layout,
    load_rows,
    on_device,
    outputs,
    rows_of_tile,
    tokens_of_block,
)
from moe_ep_bench.policies.contract import Routing, RoutingContext
from moe_ep_bench.policies.oea import OEA
from moe_ep_bench.policies.skipping import ExpertDrop, Lynx
from moe_ep_bench.policies.xshare import XShare

Rule = dict[str, Any]

# How the open experts follow from the statistics.
ALL_BUT_LEAST = tl.constexpr(0)  # all but the AMOUNT least wanted
ALL_BUT_LEAST_WANTED = tl.constexpr(1)  # the same among those that are wanted
WANTED = tl.constexpr(2)  # what anybody wants; this and, in what follows, the best of the rest by summed score:
WITH_BUDGET = tl.constexpr(3)  # AMOUNT of them
WITH_MASS = tl.constexpr(4)  # as many as it takes to hold the share MASS of all score mass
WITH_ROUNDS = tl.constexpr(5)  # one per rank and round, until AMOUNT experts are open
WITH_RANKS_FILLED = tl.constexpr(6)  # on each rank, until it has as many as the fullest

# For a tile: statistics are float64 and take twice the registers.
_WARPS = 2 * NUM_WARPS
# Of a tile that compares experts with experts: float64, 16 a thread.
_COMPARED = 4096


# --- Statistics --------------------------------------------------------------------------------------------


@triton.jit
def _store_statistics(stats_ptr, scores, wanted, expert, is_expert, WITH_SUMS: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Write how many rows want each expert and, where asked for, its summed score: float64 [S, E]."""
    tl.store(stats_ptr + expert, tl.sum(wanted.to(tl.int32), 0).to(tl.float64), mask=is_expert)
    if WITH_SUMS:
        tl.store(stats_ptr + NUM_EXPERTS + expert, tl.sum(scores.to(tl.float64), 0), mask=is_expert)


@triton.jit
def _wanted(order, scores, sets_ptr, token, num_tokens, expert, is_expert, COUNT: tl.constexpr, SHARE: tl.constexpr,
            NUM_EXPERTS: tl.constexpr):  # fmt: skip
    """What each token wants, or where there are requests, what each request does: bool [BLOCK, WIDTH]."""
    if sets_ptr is not None:
        wanted = load_rows(sets_ptr, token, token < num_tokens, expert, is_expert, NUM_EXPERTS) != 0
    else:
        wanted = first_reaching(order, scores, COUNT, SHARE, NUM_EXPERTS)
    return wanted


@triton.jit(do_not_specialize=["num_tokens"])
def _take_statistics(scores_ptr, bias_ptr, valid_ptr, sets_ptr, parts_ptr, num_tokens,
                     COUNT: tl.constexpr, SHARE: tl.constexpr, WITH_SUMS: tl.constexpr, BLOCK: tl.constexpr,
                     NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
                     GROUPS_P: tl.constexpr, SIZE_P: tl.constexpr):  # fmt: skip
    """The statistics of each block of tokens: float64 [blocks, S, E]."""
    expert, is_expert = experts_of_columns(NUM_EXPERTS, GROUPS, GROUPS_P, SIZE_P)
    token, is_there = tokens_of_block(tl.program_id(0) * BLOCK, num_tokens, valid_ptr, BLOCK)
    scores = load_rows(scores_ptr, token, is_there, expert, is_expert, NUM_EXPERTS)
    order = order_rows(
        scores, is_there, bias_ptr, expert, is_expert, COUNT, TOP_K, GROUPS, TOP_GROUPS, GROUPS_P, SIZE_P
    )
    wanted = _wanted(order, scores, sets_ptr, token, num_tokens, expert, is_expert, COUNT, SHARE, NUM_EXPERTS)
    part_ptr = parts_ptr + tl.program_id(0).to(tl.int64) * NUM_EXPERTS * (2 if WITH_SUMS else 1)
    _store_statistics(part_ptr, scores, wanted, expert, is_expert, WITH_SUMS, NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_parts"])
def _add_parts(parts_ptr, stats_ptr, num_parts, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the rows of a float64 [num_parts, size] tensor, in an order that depends on ``num_parts`` alone."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float64)
    first = num_parts * 0
    while first < num_parts:
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * size + column[None, :]
        total += tl.load(parts_ptr + at, mask=(row < num_parts)[:, None] & (column < size)[None, :], other=0.0)
        first += ROWS
    tl.store(stats_ptr + column, tl.sum(total, 0), mask=column < size)


# --- From statistics to open experts -----------------------------------------------------------------------


@triton.jit
def _competitors(stats_ptr, expert, is_expert, RULE: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Which experts compete, by what (float64, the larger the better), and which somebody wants."""
    count = tl.load(stats_ptr + expert, mask=is_expert, other=0.0)
    is_wanted = count > 0
    if RULE == ALL_BUT_LEAST:
        competes, key = is_expert, -count
    elif RULE == ALL_BUT_LEAST_WANTED:
        competes, key = is_wanted, -count
    else:
        competes = is_expert & (count <= 0)
        key = tl.load(stats_ptr + NUM_EXPERTS + expert, mask=is_expert, other=0.0)
    return competes, key, is_wanted


@triton.jit
def _open_experts(stats_ptr, expert, is_expert, RULE: tl.constexpr, AMOUNT: tl.constexpr, MASS: tl.constexpr,
                  PER_RANK: tl.constexpr, COMPARED: tl.constexpr, NUM_EXPERTS: tl.constexpr,
                  WIDTH: tl.constexpr):  # fmt: skip
    """Which experts the batch opens: bool [WIDTH]."""
    competes, key, is_wanted = _competitors(stats_ptr, expert, is_expert, RULE, NUM_EXPERTS)

    # Each expert's place among the competitors of its rank, 0 the best; on ties the lower expert comes first.
    place = tl.zeros([WIDTH], tl.int32)
    num_wanted = tl.zeros([WIDTH], tl.int32)  # on its rank
    mass_before = tl.zeros([WIDTH], tl.float64)
    mass_of_all = tl.zeros([WIDTH], tl.float64)
    for first in range(0, NUM_EXPERTS, COMPARED):
        other = first + tl.arange(0, COMPARED)
        is_other = other < NUM_EXPERTS
        other_competes, other_key, other_wanted = _competitors(stats_ptr, other, is_other, RULE, NUM_EXPERTS)
        is_near = is_other[None, :] & (other[None, :] // PER_RANK == expert[:, None] // PER_RANK)
        is_before = (other_key[None, :] > key[:, None]) | (
            (other_key[None, :] == key[:, None]) & (other[None, :] < expert[:, None])
        )
        competes_near = is_near & other_competes[None, :]
        place += tl.sum((competes_near & is_before).to(tl.int32), 1)
        if RULE == WITH_RANKS_FILLED:
            num_wanted += tl.sum((is_near & other_wanted[None, :]).to(tl.int32), 1)
        if RULE == WITH_MASS:
            mass_before += tl.sum(tl.where(competes_near & is_before, other_key[None, :], 0.0), 1)
            mass_of_all += tl.sum(tl.where(competes_near, other_key[None, :], 0.0), 1)

    if (RULE == ALL_BUT_LEAST) | (RULE == ALL_BUT_LEAST_WANTED):
        is_open = is_expert & ((competes & (place < AMOUNT)) == 0)
    elif RULE == WITH_BUDGET:
        is_open = is_wanted | (competes & (place < AMOUNT))
    elif RULE == WITH_RANKS_FILLED:
        missing = tl.max(tl.where(is_expert, num_wanted, 0), 0) - num_wanted
        is_open = is_wanted | (competes & (place < missing))
    elif RULE == WITH_MASS:
        # Both sums hold the rest in one order, so that before what adds nothing the share is exactly 1.
        wanted_mass = tl.sum(tl.where(is_wanted, key, 0.0), 0)
        mass = wanted_mass + mass_of_all
        share_before = tl.where(mass > 0, (wanted_mass + mass_before) / tl.where(mass > 0, mass, 1.0), 0.0)
        is_open = is_wanted | (competes & (share_before < tl.full([], MASS, tl.float64)))
    else:
        tl.static_assert(RULE == WITH_ROUNDS)
        is_open = is_wanted
        num_open = tl.sum(is_wanted.to(tl.int32), 0)
        rounds = num_open * 0
        while (num_open < AMOUNT) & (rounds < PER_RANK):
            adds = competes & (place == rounds)
            is_open = is_open | adds
            num_open += tl.sum(adds.to(tl.int32), 0)
            rounds += 1
    return is_open


# --- Choosing ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_open(scores_ptr, bias_ptr, valid_ptr, sets_ptr, stats_ptr, map_ptr, weights_ptr, num_tokens, scale,
                 COUNT: tl.constexpr, SHARE: tl.constexpr, WITH_SUMS: tl.constexpr,
                 RULE: tl.constexpr, AMOUNT: tl.constexpr, MASS: tl.constexpr, PER_RANK: tl.constexpr,
                 DEPTH: tl.constexpr, MOST: tl.constexpr, KEEPS_WANTED: tl.constexpr, DIVIDES_BY_NEAR: tl.constexpr,
                 TAKES_STATISTICS: tl.constexpr, NORMALIZE: tl.constexpr, COMPARED: tl.constexpr,
                 BLOCK: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
                 TOP_GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, SIZE_P: tl.constexpr):  # fmt: skip
    """Each token's ``MOST`` best open experts within the first ``DEPTH`` of its list.

    ``TAKES_STATISTICS``: this is the only program; it writes the statistics before it reads them.
    """
    deepest: tl.constexpr = DEPTH if DEPTH > COUNT else COUNT
    expert, is_expert = experts_of_columns(NUM_EXPERTS, GROUPS, GROUPS_P, SIZE_P)
    token, is_there = tokens_of_block(tl.program_id(0) * BLOCK, num_tokens, valid_ptr, BLOCK)
    scores = load_rows(scores_ptr, token, is_there, expert, is_expert, NUM_EXPERTS)
    order = order_rows(scores, is_there, bias_ptr, expert, is_expert, deepest, TOP_K, GROUPS, TOP_GROUPS, GROUPS_P,
                       SIZE_P)  # fmt: skip
    if TAKES_STATISTICS | KEEPS_WANTED:
        wanted = _wanted(order, scores, sets_ptr, token, num_tokens, expert, is_expert, COUNT, SHARE, NUM_EXPERTS)
    if TAKES_STATISTICS:
        _store_statistics(stats_ptr, scores, wanted, expert, is_expert, WITH_SUMS, NUM_EXPERTS)
        tl.debug_barrier()  # what one thread of this program wrote another is about to read
    if RULE == WANTED:
        is_open = tl.load(stats_ptr + expert, mask=is_expert, other=0.0) > 0
    else:
        is_open = _open_experts(stats_ptr, expert, is_expert, RULE, AMOUNT, MASS, PER_RANK, COMPARED, NUM_EXPERTS,
                                GROUPS_P * SIZE_P)  # fmt: skip

    near = first_of_list(order, DEPTH, NUM_EXPERTS)
    chosen = near & is_open[None, :]
    if MOST < DEPTH:
        chosen = first_of_list(tl.where(chosen, order, NOTHING), MOST, NUM_EXPERTS)
    if KEEPS_WANTED:
        chosen = chosen | wanted
    divided_by = near if DIVIDES_BY_NEAR else chosen
    write_routing(map_ptr, weights_ptr, scores, chosen, divided_by, scale, token, token < num_tokens, expert, is_expert,
                  NORMALIZE, NUM_EXPERTS)  # fmt: skip


# --- The policies' numbers ---------------------------------------------------------------------------------


def _rule(wants: int, num_experts: int, **given: Any) -> Rule:
    """A policy's compile-time arguments: what it names, and otherwise what changes nothing."""
    rule: Rule = {
        "COUNT": wants,
        "SHARE": 1.0,
        "WITH_SUMS": False,
        "RULE": WANTED.value,
        "AMOUNT": 0,
        "MASS": 0.0,
        "PER_RANK": num_experts,
        "DEPTH": num_experts,
        "MOST": num_experts,
        "KEEPS_WANTED": False,
        "DIVIDES_BY_NEAR": False,
        **given,
    }
    for name in ("COUNT", "AMOUNT", "DEPTH", "MOST"):
        rule[name] = min(rule[name], num_experts)
    return rule


def _closing_rule(num_experts: int, context: RoutingContext, which: Any, amount: int) -> Rule:
    return _rule(
        context.top_k,
        num_experts,
        RULE=which.value,
        AMOUNT=amount,
        DEPTH=context.top_k,
        MOST=context.top_k,
        DIVIDES_BY_NEAR=True,
    )


def _expert_drop_rule(policy: ExpertDrop, num_experts: int, context: RoutingContext) -> Rule:
    return _closing_rule(num_experts, context, ALL_BUT_LEAST, policy.num_closed(num_experts))


def _lynx_rule(policy: Lynx, num_experts: int, context: RoutingContext) -> Rule:
    return _closing_rule(num_experts, context, ALL_BUT_LEAST_WANTED, policy.num_dropped)


def _oea_rule(policy: OEA, num_experts: int, context: RoutingContext) -> Rule:
    k_max = context.top_k if policy.k_max is None else policy.k_max
    depth = num_experts if policy.max_rank is None else policy.max_rank
    filled = {"RULE": WITH_RANKS_FILLED.value, "WITH_SUMS": True, "PER_RANK": num_experts // context.num_ranks}
    return _rule(
        policy.k0,
        num_experts,
        SHARE=policy.p,
        DEPTH=depth,
        MOST=k_max,
        # Otherwise the base, which opens the list and is open, is among the first k_max.
        KEEPS_WANTED=policy.k0 > k_max or policy.max_rank is not None,
        **(filled if policy.rank_fill else {}),
    )


def _xshare_rule(policy: XShare, num_experts: int, context: RoutingContext) -> Rule:
    if policy.mass_threshold is not None:
        grows: Rule = {"RULE": WITH_MASS.value, "MASS": policy.mass_threshold}
    elif policy.rank_budget is not None:
        amount = policy.rank_budget * context.num_ranks
        grows = {"RULE": WITH_ROUNDS.value, "AMOUNT": amount, "PER_RANK": num_experts // context.num_ranks}
    elif policy.budget:
        grows = {"RULE": WITH_BUDGET.value, "AMOUNT": policy.budget}
    else:
        grows = {}
    return _rule(policy.k0, num_experts, WITH_SUMS=True, MOST=context.top_k, **grows)


# --- Launches ----------------------------------------------------------------------------------------------


def _statistics(rule: Rule, scores_TE: Tensor, context: RoutingContext, sets_TE: Tensor | None) -> Tensor:
    """float64 [S, E]: by one launch where one program holds all tokens, else by two."""
    num_tokens, num_experts = scores_TE.shape
    shape = layout(num_experts, context)
    block = rows_of_tile(num_tokens, shape)
    num_parts = max(1, triton.cdiv(num_tokens, block))
    stats_shape = _statistics_shape(rule, num_experts)
    parts = torch.empty((num_parts, *stats_shape), dtype=torch.float64, device=scores_TE.device)
    _take_statistics[(num_parts,)](
        *inputs(scores_TE, context),
        sets_TE,
        parts,
        num_tokens,
        **{name: rule[name] for name in ("COUNT", "SHARE", "WITH_SUMS")},
        BLOCK=block,
        num_warps=_WARPS,
        **shape,
    )
    if num_parts == 1:
        return parts[0]
    stats_SE = torch.empty(stats_shape, dtype=torch.float64, device=scores_TE.device)
    size, columns = stats_SE.numel(), 16
    _add_parts[(triton.cdiv(size, columns),)](parts, stats_SE, num_parts, size, ROWS=64, COLUMNS=columns)
    return stats_SE


def _statistics_shape(rule: Rule, num_experts: int) -> tuple[int, int]:
    return 2 if rule["WITH_SUMS"] else 1, num_experts


def _routing(
    rule: Rule, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None, sets_TE: Tensor | None
) -> Routing:
    """By one launch where there are statistics or one program holds all tokens."""
    num_tokens, num_experts = scores_TE.shape
    routing = empty_routing(scores_TE)
    if num_tokens == 0:
        return routing
    shape = layout(num_experts, context)
    block = rows_of_tile(num_tokens, shape)
    takes_statistics = stats_SE is None and num_tokens <= block
    if takes_statistics:
        stats_SE = torch.empty(_statistics_shape(rule, num_experts), dtype=torch.float64, device=scores_TE.device)
    elif stats_SE is None:
        stats_SE = _statistics(rule, scores_TE, context, sets_TE)
    _choose_open[(triton.cdiv(num_tokens, block),)](
        *inputs(scores_TE, context),
        sets_TE,
        on_device(stats_SE, scores_TE.device, torch.float64),
        *outputs(routing),
        num_tokens,
        context.scale,
        **rule,
        TAKES_STATISTICS=takes_statistics,
        NORMALIZE=context.normalize,
        COMPARED=max(1, min(_COMPARED // (shape["GROUPS_P"] * shape["SIZE_P"]), triton.next_power_of_2(num_experts))),
        BLOCK=block,
        num_warps=_WARPS,
        **shape,
    )
    return routing


def expert_drop(
    policy: ExpertDrop, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None
) -> Routing:
    """``ExpertDrop.select``. As in all functions here, inputs were checked, and without statistics its own serve."""
    return _routing(_expert_drop_rule(policy, scores_TE.shape[1], context), scores_TE, context, stats_SE, None)


def expert_drop_stats(policy: ExpertDrop, scores_TE: Tensor, context: RoutingContext) -> Tensor:
    """``ExpertDrop.stats``: float64 [1, E]."""
    return _statistics(_expert_drop_rule(policy, scores_TE.shape[1], context), scores_TE, context, None)


def lynx(policy: Lynx, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
    """``Lynx.select``."""
    return _routing(_lynx_rule(policy, scores_TE.shape[1], context), scores_TE, context, stats_SE, None)


def lynx_stats(policy: Lynx, scores_TE: Tensor, context: RoutingContext) -> Tensor:
    """``Lynx.stats``: float64 [1, E]."""
    return _statistics(_lynx_rule(policy, scores_TE.shape[1], context), scores_TE, context, None)


def oea(policy: OEA, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
    """``OEA.select``."""
    return _routing(_oea_rule(policy, scores_TE.shape[1], context), scores_TE, context, stats_SE, None)


def oea_stats(policy: OEA, scores_TE: Tensor, context: RoutingContext) -> Tensor:
    """``OEA.stats``: float64 [1, E], with ``rank_fill`` [2, E]."""
    return _statistics(_oea_rule(policy, scores_TE.shape[1], context), scores_TE, context, None)


def xshare(policy: XShare, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
    """``XShare.select``; in request scope the requests' sets are one launch more."""
    sets_TE = request_sets(policy, scores_TE, context) if stats_SE is None else None
    return _routing(_xshare_rule(policy, scores_TE.shape[1], context), scores_TE, context, stats_SE, sets_TE)


def xshare_stats(policy: XShare, scores_TE: Tensor, context: RoutingContext) -> Tensor:
    """``XShare.stats``: float64 [2, E]."""
    sets_TE = request_sets(policy, scores_TE, context)
    return _statistics(_xshare_rule(policy, scores_TE.shape[1], context), scores_TE, context, sets_TE)
