"""What ``emulate`` is to measure: a comparison on virtual ranks behind modelled links, on this device or another.

Shapes: R = virtual ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.config import MEASURED, Experiment, ReplicationConfig
from moe_ep_bench.devices import Device, load_device
from moe_ep_bench.layer.build import DTYPES
from moe_ep_bench.layer.slots import Slots
from moe_ep_bench.links import Links, links_names, load_links
from moe_ep_bench.replication import Replication, replicate
from moe_ep_bench.scopes.comparison import (
    REPLICATION,
    CaseSpec,
    Comparison,
    default_ep_size,
)
from moe_ep_bench.scopes.slices import check_whole_experts


@dataclass(frozen=True)
class Emulated(Comparison):
    """A comparison on virtual ranks.

    Attributes:
        links: what stands between ranks.
        device: what stands for each rank; None = the device that is here, which is measured.
        slots: where experts stand, but for cases that replicate them.
    """

    links: Links
    device: Device | None
    slots: Slots

    on_real_ranks: ClassVar[type[Comparison]] = Comparison
    """What the same is on ranks of its own."""

    @classmethod
    def on(cls, experiment: Experiment, *, on_cpu: bool) -> Self:
        """The experiment on ``layer.ep_size`` virtual ranks (``default_ep_size`` where the config leaves it open).

        Raises:
            ValueError: naming the key whose value does not fit.
        """
        check_whole_experts(experiment, "emulate and advise lay out")
        if experiment.emulate.links is None:
            raise ValueError(
                f"emulate.links: expected one of {', '.join(links_names())}, or a path to such a file; got none"
            )
        if experiment.measure.launches != 1:
            raise ValueError(
                f"measure.launches: emulate makes one launch; expected 1, got {experiment.measure.launches}"
            )
        ep_size = experiment.layer.ep_size or default_ep_size(experiment.model.spec().num_experts)
        _check_parts(experiment)
        try:
            links = load_links(experiment.emulate.links).scaled(experiment.emulate.bandwidth_scale)
        except ValueError as problem:
            raise ValueError(f"emulate.links: {problem}") from None
        try:
            device = None if experiment.emulate.device == MEASURED else load_device(experiment.emulate.device)
        except ValueError as problem:
            raise ValueError(f"emulate.device: {problem}; {MEASURED} is the device that is here") from None
        base = cls.on_real_ranks.of(experiment, ep_size, on_cpu=on_cpu, device=device)
        placement = experiment.route.make_placement(base.model.num_experts, base.ep_size)
        try:
            slots = Slots.of_placement(placement)
        except ValueError as problem:
            raise ValueError(f"route.placement: {problem}") from None
        given = {field.name: getattr(base, field.name) for field in fields(base)}
        found = cls(**given, links=links, device=device, slots=slots)
        found.check_emulation()
        try:
            found.links.all_gather_us(0, found.ep_size)
        except ValueError as problem:
            raise ValueError(f"emulate.links, layer.ep_size: {problem}") from None
        return found

    @cached_property
    def definition(self) -> dict[str, Any]:
        return {
            **super().definition,
            "mode": "emulated",
            "links": self.links.model_dump(mode="json"),
            "device": self.device and self.device.model_dump(mode="json"),
            "slots": self.slots.expert_P.tolist(),
            "chunk_tokens": self.experiment.emulate.chunk_tokens,
        }

    def describe_device(self) -> str:
        """What stands for each rank, where that is modelled."""
        assert self.device is not None
        return self.device.describe(self.parts.experts, whole=self.scope == "model")

    def alternatives(self) -> Iterable[CaseSpec]:
        return [self.case(REPLICATION, "eplb", None, wanted) for wanted in self.experiment.emulate.replication]

    def replicate(self, wanted: ReplicationConfig, load_E: NDArray[np.float64]) -> Replication:
        """Place replicas for a load; see ``replication.replicate``."""
        return replicate(
            load_E,
            num_slots=self.model.num_experts + wanted.spare_per_rank * self.ep_size,
            num_ranks=self.ep_size,
            num_nodes=wanted.num_nodes,
            num_groups=self.model.num_groups or 1,
            policy=wanted.policy,
        )

    def extra_bytes_per_rank(self, case: CaseSpec) -> float | None:
        """Memory that a case's spare slots take on every rank, in all layers of the model; None for other cases."""
        if case.replication is None:
            return None
        plan = self.replicate(case.replication, np.ones(self.model.num_experts))
        return plan.extra_bytes_per_rank(self.model, DTYPES[self.experiment.layer.dtype].itemsize)

    def num_runs(self, cases: Sequence[CaseSpec]) -> int:
        """Runs of a rank's layer, the check included."""
        settings = self.experiment.measure
        per_round = self.workload.num_batches * self.ep_size * len(cases)
        if self.device is not None:
            return per_round
        return (1 + settings.warmup + settings.iterations) * per_round + len(cases)

    def shortage(self, available: int) -> str:
        """What does not fit into so many bytes of memory; empty where all does. A layer's rows go in chunks."""
        return ""

    def memory_words(self, available: int) -> str:
        """For a dry run: what of the memory is needed."""
        rows_gib = self.mean_rows * self.bytes_per_row / 2**30
        return f"rows of a rank take about {rows_gib:.1f} GiB where loads are even"

    @property
    def mean_rows(self) -> float:
        """Rows that a rank computes where loads are even."""
        return self.num_tokens * self.model.top_k / self.ep_size

    @property
    def bytes_per_row(self) -> int:
        """Memory that a (token, expert) pair takes while a rank computes it: permuted twice, and inside the FFN."""
        values = 4 * self.model.hidden_size + 3 * self.model.ffn_hidden_size
        return values * DTYPES[self.experiment.layer.dtype].itemsize

    def check_emulation(self) -> None:
        """Raise ValueError where replicas cannot be placed as asked."""
        most = self.model.num_experts - self.model.num_experts // self.ep_size
        for wanted in self.experiment.emulate.replication:
            if wanted.spare_per_rank > most:
                raise ValueError(
                    f"emulate.replication: spare_per_rank: expected at most {most}, with which every rank holds all"
                    f" {self.model.num_experts} experts; got {wanted.spare_per_rank}"
                )
            try:
                self.replicate(wanted, np.ones(self.model.num_experts))
            except ValueError as problem:
                raise ValueError(f"emulate.replication: {problem}") from None


def _check_parts(experiment: Experiment) -> None:
    """Refuse what only ``run`` does."""
    if experiment.layer.cuda_graph:
        raise ValueError("layer.cuda_graph: true is for run; expected false, for emulate runs eagerly")
    if experiment.layer.dispatcher != "alltoall":
        raise ValueError(
            "layer.dispatcher: emulate stands in for the all-to-all; expected alltoall,"
            f" got {experiment.layer.dispatcher}"
        )
