"""The measurement behind ``emulate`` with ``scope: model``: every case's pass on every virtual rank, set side by side.

As ``emulation`` does it for a layer: routing first, of all layers and ranks, then every rank's pass, then the ranks
side by side, with a meeting's time on the links from the bytes that its own layer sends.

Shapes: R = virtual ranks, S = steps, C = columns of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.devices import Device
from moe_ep_bench.measure.protocol import Step
from moe_ep_bench.records import at
from moe_ep_bench.scopes.comparison import CaseSpec
from moe_ep_bench.scopes.emulated import Emulated
from moe_ep_bench.scopes.emulated_model import EmulatedModel
from moe_ep_bench.scopes.emulation import Emulation
from moe_ep_bench.scopes.job import Job
from moe_ep_bench.scopes.model_rows import model_columns, write_model_case
from moe_ep_bench.scopes.model_traffic import ModelBatches, ModelRouter, ModelShares, ModelTraffic, layer_batches
from moe_ep_bench.scopes.rows import PackedMetrics
from moe_ep_bench.scopes.small_layers import SmallLayers, few_of
from moe_ep_bench.scopes.traffic import CaseRouter, RankBatches, Traffic
from moe_ep_bench.scopes.virtual_model_timing import MeasuredModels, ModelledModels
from moe_ep_bench.scopes.virtual_timing import RankTimer
from moe_ep_bench.workload import TokenBatch


def new_emulation(
    comparison: Emulated, cases: Sequence[CaseSpec], device: torch.device, begin: Callable[[str], None]
) -> Emulation:
    """What measures a comparison of layers, or of whole models."""
    kind = ModelEmulation if isinstance(comparison, EmulatedModel) else Emulation
    return kind(comparison, cases, device, begin)


class ModelEmulation(Emulation):
    """One measurement of whole models; arguments as for a layer."""

    comparison: EmulatedModel

    def __init__(
        self, comparison: Emulated, cases: Sequence[CaseSpec], device: torch.device, begin: Callable[[str], None]
    ) -> None:
        super().__init__(comparison, cases, device, begin)
        self.columns = model_columns(self.comparison)
        self.plans = self.comparison.layer_plans()
        self.layer_errors: dict[tuple[str, int], float] = {}

    def _errors(self) -> Iterator[tuple[CaseSpec, float, str]]:
        checked = SmallLayers(self.comparison, self.device)
        for layer, plan in self.plans.items():
            few = [few_of(tokens) for tokens in RankBatches(plan, 0)]
            for case in list(self.cases):
                self.begin(case.case_id)
                error = checked.error(self._router(case, layer), plan, few)
                self.layer_errors[case.case_id, layer] = error
                yield case, error, f" in layer {layer}"

    def _no_metrics(self) -> list[PackedMetrics]:
        # A batch has a row for every layer, as ``write_model_case`` wants it.
        return [PackedMetrics(self.num_ranks, self.num_batches * len(self.plans)) for _ in self.cases]

    def _modelled(self, device: Device) -> RankTimer:
        return ModelledModels(self.comparison, device)

    def _measured(self) -> RankTimer:
        return MeasuredModels(self.comparison, self.device)

    def _router(self, case: CaseSpec, layer: int) -> CaseRouter:
        return CaseRouter(case, self.comparison.slots, self.seed, layer)

    def _routed(self, index: int) -> tuple[ModelBatches, list[ModelRouter], list[ModelTraffic]]:
        routers = [ModelRouter(case, {layer: self._router(case, layer) for layer in self.plans}) for case in self.cases]
        traffic: list[dict[int, Traffic]] = [{} for _ in routers]
        kept: dict[int, RankBatches] = {}
        for layer, plan in self.plans.items():
            self.begin(self.comparison.comparison_id)
            ranks, own = layer_batches(plan, index, len(self.plans)), [router.layers[layer] for router in routers]
            for of_case, one in zip(traffic, self._traffic(plan, own, ranks, index, 1), strict=True):
                of_case[layer] = one
            if self.comparison.device is None:  # Else counts are all that is asked for.
                kept[layer] = ranks
        lengths_R = self.comparison.lengths_of_ranks(index)
        return ModelBatches(kept), routers, [ModelTraffic(lengths_R, of_case) for of_case in traffic]

    def _shares(self, tokens: dict[int, TokenBatch], rank: int) -> ModelShares:
        return ModelShares(self.plans, tokens, rank, self.device)

    def _put_metrics(self, number: int, index: int, traffic: ModelTraffic) -> None:
        metrics = self.metrics[number]
        for place, (layer, one) in enumerate(traffic.layers.items()):
            row = index * len(self.plans) + place
            metrics.put_all((slice(None), row), one.metrics)
            error = self.layer_errors.get((self.cases[number].case_id, layer))
            if index == 0 and error is not None:
                metrics.column("reference_error")[:, row] = error

    def _link_us(self, traffic: ModelTraffic) -> dict[str, NDArray[np.float64]]:
        return {
            at(layer, meeting): link_us
            for layer, one in traffic.layers.items()
            for meeting, link_us in self._layer_link_us(one).items()
        }

    def _write_case(
        self,
        job: Job,
        case: CaseSpec,
        steps: Sequence[Step],
        times_RSC: Sequence[NDArray[np.float64]],
        routing: dict[str, list[Any]],
    ) -> None:
        write_model_case(job, self.comparison, case, steps, times_RSC, self.columns, routing)
