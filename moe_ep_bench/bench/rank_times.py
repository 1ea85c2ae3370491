"""What one rank's run of a layer or a whole model takes between its meetings with others, modelled for a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.bench.routing import CaseRouter
from moe_ep_bench.bench.traffic import Traffic
from moe_ep_bench.cost_model.layer import RankWork, layer_segments
from moe_ep_bench.cost_model.timeline import Leg, legs_of
from moe_ep_bench.cost_model.whole_model import PassWork, pass_segments
from moe_ep_bench.schema import PhaseKey


@dataclass(frozen=True)
class RankTime:
    """What one rank's run took.

    Attributes:
        legs, meetings: see ``cost_model.timeline.legs_of``.
        host_us: host time to issue it all; ``thread_cpu_us`` is CPU time of the issuing thread.
    """

    legs: list[Leg]
    meetings: list[PhaseKey]
    host_us: float = 0.0
    thread_cpu_us: float = 0.0


def modelled_time(comparison: Comparison, router: CaseRouter, traffic: Traffic, rank: int) -> RankTime:
    """What a rank takes on a device that is not here: see ``cost_model.layer`` and ``cost_model.whole_model``."""
    device, model, dtype = comparison.device, comparison.model, comparison.experiment.layer.dtype
    assert device is not None
    layers = {
        layer: RankWork(
            of_layer.num_tokens_R[rank],
            int(of_layer.counts_RP[rank].sum()),
            of_layer.received(rank),
            sum(of_layer.num_tokens_R),
            None if of_layer.shared_RR is None else int(of_layer.shared_RR[:, rank].sum()),
        )
        for layer, of_layer in traffic.layers.items()
    }
    how: dict[str, Any] = {
        "by_policy": router.case.policy is not None,
        "batch_wide": any(of_layer.stats_SE is not None for of_layer in traffic.layers.values()),
        "alone": comparison.ep_size == 1,
        "dtype": dtype,
    }
    if traffic.lengths_R is None:
        return RankTime(*legs_of(layer_segments(device, model, layers[None], **how)))
    lengths, context = traffic.lengths_R[rank], comparison.context_length
    work = PassWork((), len(lengths), context, layers) if context else PassWork(lengths, 0, 0, layers)
    return RankTime(*legs_of(pass_segments(device, model, comparison.num_layers, work, **how)))
