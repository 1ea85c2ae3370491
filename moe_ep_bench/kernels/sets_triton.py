"""Policies in which a batch agrees on a set of experts, in Triton: ``expert_drop``, ``lynx``, ``oea``, ``xshare``.

They are one rule with other numbers. Each token wants the first few experts of its list. Counted over the
batch, and with the experts' summed scores, these wishes decide which experts are *open*. Then each token
takes its best open experts, looking down its list to some depth:

- ``expert_drop``, ``lynx``: wants its top-k; the least wanted are closed; takes what is left of its top-k.
- ``oea``: wants its base; what anybody wants is open; takes ``k_max`` of that, and its base.
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

from moe_ep_bench.kernels import tiles_triton as tiles
from moe_ep_bench.kernels.rows_triton import first_reaching
from moe_ep_bench.kernels.tiles_triton import NOTHING
from moe_ep_bench.policies.contract import Routing, RoutingContext
from moe_ep_bench.policies.oea import OEA
from moe_ep_bench.policies.skipping import ClosingPolicy, ExpertDrop, Lynx
from moe_ep_bench.policies.xshare import XShare

Rule = dict[str, Any]
BatchWide = ClosingPolicy | OEA | XShare

# How the open experts follow from the statistics.
ALL_BUT_LEAST = tl.constexpr(0)  # all but the AMOUNT least wanted
ALL_BUT_LEAST_WANTED = tl.constexpr(1)  # the same among those that are wanted
WANTED = tl.constexpr(2)  # what anybody wants; this and, in what follows, the best of the rest by summed score:
WITH_BUDGET = tl.constexpr(3)  # AMOUNT of them
WITH_MASS = tl.constexpr(4)  # as many as it takes to hold the share MASS of all score mass
WITH_ROUNDS = tl.constexpr(5)  # one per rank and round, until AMOUNT experts are open

# For a tile: statistics are float64 and take twice the registers.
_WARPS = 2 * tiles.NUM_WARPS
# Elements of a tile that compares experts with experts: float64, 16 a thread.
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
    """The experts that each token wants, or its request where there are requests: bool [BLOCK, WIDTH]."""
    if sets_ptr is not None:
        wanted = tiles.load_rows(sets_ptr, token, token < num_tokens, expert, is_expert, NUM_EXPERTS) != 0
    else:
        wanted = first_reaching(order, scores, COUNT, SHARE, NUM_EXPERTS)
    return wanted


@triton.jit(do_not_specialize=["num_tokens"])
def _take_statistics(scores_ptr, bias_ptr, valid_ptr, sets_ptr, parts_ptr, num_tokens, COUNT: tl.constexpr,
                     SHARE: tl.constexpr, WITH_SUMS: tl.constexpr, BLOCK: tl.constexpr,
                     LAYOUT: tl.constexpr):  # fmt: skip
    """The statistics of each block of tokens: float64 [blocks, S, E]."""
    token, expert, is_expert, scores, order = tiles.ordered_block(
        scores_ptr, bias_ptr, valid_ptr, num_tokens, COUNT, BLOCK, LAYOUT
    )
    wanted = _wanted(order, scores, sets_ptr, token, num_tokens, expert, is_expert, COUNT, SHARE, LAYOUT.num_experts)
    part_ptr = parts_ptr + tl.program_id(0).to(tl.int64) * LAYOUT.num_experts * (2 if WITH_SUMS else 1)
    _store_statistics(part_ptr, scores, wanted, expert, is_expert, WITH_SUMS, LAYOUT.num_experts)


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
    mass_before = tl.zeros([WIDTH], tl.float64)
    mass_of_all = tl.zeros([WIDTH], tl.float64)
    for first in range(0, NUM_EXPERTS, COMPARED):
        other = first + tl.arange(0, COMPARED)
        is_other = other < NUM_EXPERTS
        other_competes, other_key, _ = _competitors(stats_ptr, other, is_other, RULE, NUM_EXPERTS)
        is_near = is_other[None, :] & (other[None, :] // PER_RANK == expert[:, None] // PER_RANK)
        is_before = (other_key[None, :] > key[:, None]) | (
            (other_key[None, :] == key[:, None]) & (other[None, :] < expert[:, None])
        )
        competes_near = is_near & other_competes[None, :]
        place += tl.sum((competes_near & is_before).to(tl.int32), 1)
        if RULE == WITH_MASS:
            mass_before += tl.sum(tl.where(competes_near & is_before, other_key[None, :], 0.0), 1)
            mass_of_all += tl.sum(tl.where(competes_near, other_key[None, :], 0.0), 1)

    if (RULE == ALL_BUT_LEAST) | (RULE == ALL_BUT_LEAST_WANTED):
        is_open = is_expert & ((competes & (place < AMOUNT)) == 0)
    elif RULE == WITH_BUDGET:
        is_open = is_wanted | (competes & (place < AMOUNT))
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
                 BLOCK: tl.constexpr, LAYOUT: tl.constexpr):  # fmt: skip
    """Each token's ``MOST`` best open experts within the first ``DEPTH`` of its list.

    ``TAKES_STATISTICS``: this is the only program; it writes the statistics before it reads them.
    """
    NUM_EXPERTS: tl.constexpr = LAYOUT.num_experts
    deepest: tl.constexpr = DEPTH if DEPTH > COUNT else COUNT
    token, expert, is_expert, scores, order = tiles.ordered_block(
        scores_ptr, bias_ptr, valid_ptr, num_tokens, deepest, BLOCK, LAYOUT
    )
    if TAKES_STATISTICS | KEEPS_WANTED:
        wanted = _wanted(order, scores, sets_ptr, token, num_tokens, expert, is_expert, COUNT, SHARE, NUM_EXPERTS)
    if TAKES_STATISTICS:
        _store_statistics(stats_ptr, scores, wanted, expert, is_expert, WITH_SUMS, NUM_EXPERTS)
        tl.debug_barrier()  # what one thread of this program wrote another is about to read
    if RULE == WANTED:
        is_open = tl.load(stats_ptr + expert, mask=is_expert, other=0.0) > 0
    else:
        is_open = _open_experts(stats_ptr, expert, is_expert, RULE, AMOUNT, MASS, PER_RANK, COMPARED, NUM_EXPERTS,
                                LAYOUT.width)  # fmt: skip

    near = tiles.first_of_list(order, DEPTH, NUM_EXPERTS)
    chosen = near & is_open[None, :]
    if MOST < DEPTH:
        chosen = tiles.first_of_list(tl.where(chosen, order, NOTHING), MOST, NUM_EXPERTS)
    if KEEPS_WANTED:
        chosen = chosen | wanted
    divided_by = near if DIVIDES_BY_NEAR else chosen
    tiles.write_routing(map_ptr, weights_ptr, scores, chosen, divided_by, scale, token, token < num_tokens, expert,
                        is_expert, NORMALIZE, NUM_EXPERTS)  # fmt: skip


# --- The policies' numbers ---------------------------------------------------------------------------------


def _rule(policy: BatchWide, num_experts: int, context: RoutingContext) -> Rule:
    """A policy's compile-time arguments: what it names, and otherwise what changes nothing."""
    top_k = context.top_k
    rule: Rule = {
        "COUNT": top_k, "SHARE": 1.0, "WITH_SUMS": False, "RULE": WANTED.value, "AMOUNT": 0, "MASS": 0.0,
        "PER_RANK": num_experts, "DEPTH": num_experts, "MOST": top_k, "KEEPS_WANTED": False, "DIVIDES_BY_NEAR": False,
    }  # fmt: skip
    if isinstance(policy, ClosingPolicy):
        rule |= {"DEPTH": top_k, "DIVIDES_BY_NEAR": True}
        if isinstance(policy, ExpertDrop):
            rule |= {"RULE": ALL_BUT_LEAST.value, "AMOUNT": policy.num_closed(num_experts)}
        else:
            assert isinstance(policy, Lynx)
            rule |= {"RULE": ALL_BUT_LEAST_WANTED.value, "AMOUNT": policy.num_dropped}
    elif isinstance(policy, OEA):
        rule |= {"COUNT": policy.k0, "SHARE": policy.p, "MOST": policy.most_added(context)}
        if policy.max_rank is not None:
            rule["DEPTH"] = policy.max_rank
        rule["KEEPS_WANTED"] = policy.keeps_base_apart(context)
    else:
        rule |= {"COUNT": policy.k0, "WITH_SUMS": True}
        if policy.mass_threshold is not None:
            rule |= {"RULE": WITH_MASS.value, "MASS": policy.mass_threshold}
        elif policy.rank_budget is not None:
            amount, local = policy.rank_budget * context.num_ranks, num_experts // context.num_ranks
            rule |= {"RULE": WITH_ROUNDS.value, "AMOUNT": amount, "PER_RANK": local}
        elif policy.budget:
            rule |= {"RULE": WITH_BUDGET.value, "AMOUNT": policy.budget}
    return rule | {name: min(rule[name], num_experts) for name in ("COUNT", "AMOUNT", "DEPTH", "MOST")}


# --- Launches ----------------------------------------------------------------------------------------------


def stats(policy: BatchWide, scores_TE: Tensor, context: RoutingContext) -> Tensor:
    """The policy's ``stats``, float64 [S, E]: by one launch where one program holds all tokens, else by two."""
    rule = _rule(policy, scores_TE.shape[1], context)
    (num_parts,), block = tiles.blocks_of(scores_TE, context)
    num_parts = max(1, num_parts)
    parts = _empty_stats(rule, scores_TE, num_parts)
    sets_TE = request_sets(policy, scores_TE, context) if isinstance(policy, XShare) else None
    _take_statistics[(num_parts,)](
        *tiles.inputs(scores_TE, context), sets_TE, parts, len(scores_TE),
        **{name: rule[name] for name in ("COUNT", "SHARE", "WITH_SUMS")}, num_warps=_WARPS, **block,
    )  # fmt: skip
    if num_parts == 1:
        return parts[0]
    stats_SE = _empty_stats(rule, scores_TE, 1)[0]
    size, columns = stats_SE.numel(), 16
    _add_parts[(triton.cdiv(size, columns),)](parts, stats_SE, num_parts, size, ROWS=64, COLUMNS=columns)
    return stats_SE


def _empty_stats(rule: Rule, scores_TE: Tensor, num_parts: int) -> Tensor:
    shape = num_parts, 2 if rule["WITH_SUMS"] else 1, scores_TE.shape[1]
    return torch.empty(shape, dtype=torch.float64, device=scores_TE.device)


def select(policy: BatchWide, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None) -> Routing:
    """The policy's ``select``: by one launch where there are statistics or one program holds all tokens.

    In request scope the requests' sets are one launch more.
    """
    num_tokens, num_experts = scores_TE.shape
    routing = tiles.empty_routing(scores_TE)
    if num_tokens == 0:
        return routing
    rule = _rule(policy, num_experts, context)
    grid, block = tiles.blocks_of(scores_TE, context)
    takes_statistics = stats_SE is None and grid == (1,)
    sets_TE = None
    if takes_statistics:
        sets_TE = request_sets(policy, scores_TE, context) if isinstance(policy, XShare) else None
        stats_SE = _empty_stats(rule, scores_TE, 1)[0]
    elif stats_SE is None:
        stats_SE = stats(policy, scores_TE, context)
    _choose_open[grid](
        *tiles.inputs(scores_TE, context), sets_TE, tiles.on_device(stats_SE, scores_TE.device, torch.float64),
        *tiles.outputs(routing), num_tokens, context.scale, **rule,
        TAKES_STATISTICS=takes_statistics, NORMALIZE=context.normalize,
        COMPARED=max(1, min(_COMPARED // block["LAYOUT"].width, triton.next_power_of_2(num_experts))),
        num_warps=_WARPS, **block,
    )  # fmt: skip
    return routing


# --- Requests ----------------------------------------------------------------------------------------------
#
# A request is all tokens of one id, wherever they stand. Its set stands in the row of one of its tokens, so that nobody
# has to know how many requests there are. The program of a request's first token looks through all ids for the others,
# and adds their scores in order, in one launch. That is for decode steps: larger batches are torch's.

MOST_REQUEST_TOKENS = 1024
_MOST_REQUEST_ROWS = 4


@triton.jit
def _add_rows(wanted, sums, token, is_there, scores_ptr, bias_ptr, expert, is_expert, COUNT: tl.constexpr,
              BLOCK: tl.constexpr, LAYOUT: tl.constexpr):  # fmt: skip
    """Count by expert which of a tile's tokens want it, and add the tokens' scores one after the other."""
    row = tl.arange(0, BLOCK)
    if COUNT > 0:
        scores = tiles.load_rows(scores_ptr, token, is_there, expert, is_expert, LAYOUT.num_experts)
        order = tiles.order_rows(scores, is_there, bias_ptr, expert, is_expert, COUNT, LAYOUT)
        wanted += tl.sum(tiles.first_of_list(order, COUNT, LAYOUT.num_experts).to(tl.int32), 0)
    for place in range(BLOCK):
        is_one = (row == place) & is_there
        at = tl.sum(tl.where(is_one, token, 0), 0) * LAYOUT.num_experts + expert
        is_score = is_expert & (tl.sum(is_one.to(tl.int32), 0) > 0)
        sums += tl.load(scores_ptr + at, mask=is_score, other=0.0).to(tl.float64)
    return wanted, sums


@triton.jit
def _store_set(set_ptr, wanted, sums, num_valid, expert, is_expert, BUDGET: tl.constexpr, LAYOUT: tl.constexpr):
    """Write what a request's tokens want and the ``BUDGET`` best of the rest; nothing where all are padding."""
    in_set = wanted > 0
    if LAYOUT.num_experts <= BUDGET:
        in_set = is_expert
    else:
        left = is_expert & (wanted == 0)
        num_added = num_valid * 0
        while (num_valid > 0) & (num_added < BUDGET):
            best = tl.max(tl.where(left, sums, -1.0), 0)
            adds = left & (expert == tl.min(tl.where(left & (sums == best), expert, LAYOUT.num_experts), 0))
            in_set = in_set | adds
            left = left & (adds == 0)
            num_added += 1
    in_set = in_set & (num_valid > 0)
    tl.store(set_ptr + expert, in_set.to(tl.uint8), mask=is_expert)


@triton.jit(do_not_specialize=["num_tokens"])
def _find_sets(scores_ptr, bias_ptr, valid_ptr, id_ptr, sets_ptr, num_tokens, COUNT: tl.constexpr,
               BUDGET: tl.constexpr, TOKENS_P: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr):  # fmt: skip
    """A program per token; it works where its token is the first valid one of a request."""
    expert, is_expert = tiles.experts_of_columns(LAYOUT)
    row = tl.arange(0, BLOCK)
    here = tl.program_id(0).to(tl.int64)
    every, is_valid = tiles.tokens_of_block(here * 0, num_tokens, valid_ptr, TOKENS_P)
    ids = tl.load(id_ptr + every, mask=is_valid, other=0)
    is_mine = is_valid & (ids == tl.load(id_ptr + here))
    nth = tl.cumsum(is_mine.to(tl.int32), 0) - 1
    opens = tl.min(tl.where(is_mine, every, num_tokens), 0) == here
    num_rows = tl.where(opens, tl.sum(is_mine.to(tl.int32), 0), 0)

    width: tl.constexpr = LAYOUT.width
    wanted = tl.zeros([width], tl.int32)
    sums = tl.zeros([width], tl.float64)
    first = num_rows * 0
    while first < num_rows:
        is_row = is_mine[None, :] & (nth[None, :] == (first + row)[:, None])
        token = tl.sum(tl.where(is_row, every[None, :], 0), 1)
        is_there = first + row < num_rows
        wanted, sums = _add_rows(
            wanted, sums, token, is_there, scores_ptr, bias_ptr, expert, is_expert, COUNT, BLOCK, LAYOUT
        )
        first += BLOCK
    _store_set(sets_ptr + here * LAYOUT.num_experts, wanted, sums, num_rows, expert, is_expert, BUDGET, LAYOUT)


def request_sets(policy: XShare, scores_TE: Tensor, context: RoutingContext) -> Tensor | None:
    """The experts that every request opens, in one of its rows: uint8 [T, E]; None in the other scopes."""
    if policy.scope != "request":
        return None
    num_tokens, num_experts = scores_TE.shape
    sets_TE = torch.empty((num_tokens, num_experts), dtype=torch.uint8, device=scores_TE.device)
    if num_tokens == 0:
        return sets_TE
    layout, device = tiles.Layout.of(num_experts, context), scores_TE.device
    rows = tiles.inputs(scores_TE, context)
    id_T = tiles.on_device(context.request_id_T, device, torch.int64)
    count, budget = min(policy.k0, num_experts), min(policy.request_budget or 0, num_experts)
    _find_sets[(num_tokens,)](
        *rows, id_T, sets_TE, num_tokens, COUNT=count, BUDGET=budget, TOKENS_P=triton.next_power_of_2(num_tokens),
        BLOCK=min(_MOST_REQUEST_ROWS, layout.rows(num_tokens)), LAYOUT=layout, num_warps=_WARPS,
    )  # fmt: skip
    return sets_TE
