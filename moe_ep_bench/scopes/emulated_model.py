"""What ``emulate`` is to measure with ``scope: model``: whole models on virtual ranks behind modelled links.

Shapes: R = virtual ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from moe_ep_bench.scopes.comparison import CaseSpec, Comparison, Planned
from moe_ep_bench.scopes.emulated import Emulated
from moe_ep_bench.scopes.model_comparison import ModelComparison
from moe_ep_bench.workload.batch import deal_sequences
from moe_ep_bench.workload.streamed import StreamedWorkload


@dataclass(frozen=True)
class LayerPlan(Planned):
    """One MoE layer of a comparison of whole models, as what routes it sees it.

    Attributes:
        fraction: where in the depth it stands, 0 to below 1.
    """

    fraction: float

    @property
    def layer_fraction(self) -> float:
        return self.fraction


@dataclass(frozen=True)
class EmulatedModel(Emulated, ModelComparison):
    """A comparison of whole models on virtual ranks."""

    on_real_ranks: ClassVar[type[Comparison]] = ModelComparison

    def layer_plans(self) -> dict[int, LayerPlan]:
        """By MoE layer that is built, its own scores and its place in the depth."""
        return {
            layer: LayerPlan(self.experiment, self.world_size, workload, self.fraction_of(layer))
            for layer, workload in zip(self.moe_layers, self.workloads, strict=True)
        }

    def lengths_of_ranks(self, index: int) -> list[tuple[int, ...]]:
        """Tokens of each sequence that each rank has of batch ``index``, in order."""
        assert isinstance(self.workload, StreamedWorkload)
        length_S = self.workload.sequence_lengths(index)
        rank_S = deal_sequences(length_S, self.ep_size, self.experiment.workload.rank_shares)
        return [tuple(length_S[rank_S == rank].tolist()) for rank in range(self.ep_size)]

    @property
    def most_tokens(self) -> int:
        """Tokens of the rank that has most of them in any batch."""
        shares = self.experiment.workload.rank_shares
        numbers = range(self.workload.num_batches)
        return max(int(np.max(self.workload.tokens_of_ranks(number, self.ep_size, shares))) for number in numbers)

    def describe(self) -> dict[str, Any]:
        described = super().describe()
        if self.device is not None:
            described["whole"]["attention"] = "modelled"
        return described

    def num_runs(self, cases: Sequence[CaseSpec]) -> int:
        """Passes of a rank, and what is done for each MoE layer: its check, and a batch's routing."""
        num_moe, num_batches = len(self.moe_layers), self.workload.num_batches
        further_checks = 0 if self.device is not None else (num_moe - 1) * len(cases)
        return super().num_runs(cases) + further_checks + num_moe * num_batches

    @property
    def num_held_batches(self) -> int:
        return 1

    def shortage(self, available: int) -> str:
        """What does not fit into so many bytes of memory, and how many layers would; empty where all does."""
        need = self.memory_bytes_per_rank()
        if self.device is not None or need <= available:
            return ""
        gib = 2**30
        return f"needs about {need / gib:.1f} GiB, {available / gib:.1f} GiB are free{self.hint_for(available)}"

    def memory_words(self, available: int) -> str:
        gib = 2**30
        return f"memory about {self.memory_bytes_per_rank() / gib:.1f} GiB of {available / gib:.1f} GiB"

    def check_emulation(self) -> None:
        """Raise ValueError where experts are to stand, or a rank's rows to be computed, as only one layer's can be."""
        if self.experiment.emulate.replication:
            raise ValueError("emulate.replication: expected none with scope model, where experts are not replicated")
        if not self.slots.is_contiguous:
            raise ValueError("route.placement: expected contiguous with scope model")
        if self.experiment.emulate.chunk_tokens is not None:
            raise ValueError(
                "emulate.chunk_tokens: expected null with scope model, where a pass is run whole;"
                f" got {self.experiment.emulate.chunk_tokens}"
            )
