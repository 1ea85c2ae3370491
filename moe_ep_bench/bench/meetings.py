"""Times of virtual ranks' meetings on modelled links: sums, gathers and the two exchanges of a layer.

Shapes: R = virtual ranks, N = nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.bench.point import Point
from moe_ep_bench.bench.traffic import LayerTraffic
from moe_ep_bench.config import NO_OVERLAP
from moe_ep_bench.cost_model.devices import PRECISIONS
from moe_ep_bench.cost_model.exchanges import Copies
from moe_ep_bench.errors import UserError

# Bytes of what travels beside rows: a pair's routing weight, a count, a number of a policy's statistics.
_WEIGHT_BYTES, _COUNT_BYTES, _STATISTIC_BYTES = 4, 8, 8
# Multiprocessors that an exchange holds where nobody says: as DeepSeek-V3 gives it (arXiv 2412.19437, section 3.2.2).
HELD_SMS = 20


def meeting_us(point: Point, traffic: LayerTraffic) -> dict[str, tuple[NDArray[np.float64], float]]:
    """Microseconds [R] of each meeting of a layer on the modelled links, and its ``held_share``."""
    links, num_ranks = point.links, point.ep_size
    assert links is not None
    sms: tuple[int | None, int | None] = (None, None)
    if links.exchange is None:
        rows_RR = sent_copies(traffic, point.sent_for or "pair", 1)
        if point.sent_for is not None:
            rows_RR = links.routed(rows_RR, sent_copies(traffic, "node", -(-num_ranks // links.ranks_per_node)))
        dispatch_us, combine_us = exchange_us(point, rows_RR)
    else:
        sent_RX = sent_copies(traffic, links.exchange.copies, links.exchange.num_nodes)
        dispatch_us, combine_us = links.exchange.times_us(sent_RX)
        sms = links.exchange.held_sms(sent_RX)
    if traffic.slots.moved_bytes_RR is not None:  # The same links carry them, ahead of the rows.
        dispatch_us = dispatch_us + links.all_to_all_us(traffic.slots.moved_bytes_RR)
    if (rearranged := traffic.slots.rearranged) is not None:
        dispatch_us = dispatch_us + rearranged.share * rearranged.once_us(links)
    stats_bytes = 0 if traffic.stats_SE is None else traffic.stats_SE.numel() * _STATISTIC_BYTES
    # A measured exchange tells ranks its counts by itself.
    count_bytes = traffic.counts_RP.shape[1] * _COUNT_BYTES
    gathered_us = 0.0 if links.exchange is not None else links.all_gather_us(count_bytes, num_ranks)
    held_dispatch, held_combine = (held_share(point, of_phase) for of_phase in sms)
    return {
        "wait_policy": (np.full(num_ranks, links.all_reduce_us(stats_bytes, num_ranks)), 0.0),
        "wait_metadata": (np.full(num_ranks, gathered_us), 0.0),
        "wait_dispatch": (dispatch_us, held_dispatch),
        "wait_combine": (combine_us, held_combine),
    }


def sent_copies(traffic: LayerTraffic, copies: Copies, num_nodes: int) -> NDArray[np.int64]:
    """Copies of tokens that each rank sends to each rank, or to each node: int64 [R, R or N].

    A token that goes to another rank for its shared experts alone is a copy of its own there.
    """
    sent_RX = traffic.rank_pairs if copies == "pair" else traffic.copies(copies)
    if traffic.shared_RR is None:
        return sent_RX
    shared_RX = traffic.shared_RR
    if copies == "node":
        shared_RX = shared_RX.reshape(len(shared_RX), num_nodes, -1).sum(axis=2)
    return sent_RX + shared_RX


def exchange_us(point: Point, rows_RR: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Microseconds that dispatch and combine of a layer keep each rank's links busy, float64 [R] each.

    As Megatron-Core's all-to-all over NCCL sends them: a row for each (token, expert), and ahead of the experts its
    weight in an all-to-all of its own. A token that has one copy for each rank carries its weights itself.

    Args:
        rows_RR: from each rank to each.
    """
    links, device, dtype = point.links, point.device, point.experiment.layer.planned_dtype
    assert links is not None
    sent_as, width = point.experiment.layer.dispatch_dtype, point.model.expert_hidden_size
    precision = PRECISIONS[dtype].cast_late.sent(sent_as) if device is None else device.precision(dtype, sent_as)
    dispatch_us, weights_us, combine_us = (
        links.all_to_all_us(sent_RR * num_bytes)
        for sent_RR, num_bytes in (
            (rows_RR, width * precision.sent_bytes),
            (rows_RR, 0 if point.sent_for else _WEIGHT_BYTES),
            (rows_RR.T, width * precision.hidden_bytes),
        )
    )
    return dispatch_us + weights_us, combine_us


def held_share(point: Point, sms: int | None) -> float:
    """The share of a modelled device's multiprocessors that an exchange holds, where anything is beside it.

    Those that its rows state; of others none where pairs are sent, for DeepEP's low-latency kernels receive by a hook,
    else ``HELD_SMS`` (assumed).

    Raises:
        UserError: the device does not state how many it has, or has no more.
    """
    device, links = point.device, point.links
    if point.overlap == NO_OVERLAP or device is None or links is None:
        return 0.0
    if sms is None:
        sms = 0 if links.exchange is not None and links.exchange.copies == "pair" else HELD_SMS
    if not sms:
        return 0.0
    if device.num_sms is None or device.num_sms <= sms:
        expected = f"more than the {sms} multiprocessors that an exchange holds"
        raise UserError(
            f"devices/{device.name}: num_sms: expected {expected}, with emulate.overlap; got {device.num_sms}"
        )
    return sms / device.num_sms
