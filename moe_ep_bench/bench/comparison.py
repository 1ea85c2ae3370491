"""One experiment on one backend: the cases, the batches and the ranks that a measurement is of.

A *comparison* measures an MoE layer or a whole model, or routes for a layer:

``ranks``     real processes; times them
``virtual``   this device in place of every rank, one after another, behind modelled links
``modelled``  the same on a device that is not here: nothing runs
``routing``   nothing is timed; what policies do to loads, work and score mass

Whatever the backend, the same config gives the same cases on the same batches.

Shapes: B = batches, R = ranks, T = tokens of a rank, E = experts, S = sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.balancers import with_free_slots
from moe_ep_bench.bench import description
from moe_ep_bench.bench.cases import CaseSpec, cases_of
from moe_ep_bench.bench.checks import MODELLED, RANKS, ROUTING, VIRTUAL
from moe_ep_bench.bench.slots import Slots
from moe_ep_bench.config import Experiment, Lossless, ReplicationConfig, SyntheticConfig
from moe_ep_bench.cost_model.devices import PRECISIONS, Device
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.files import stable_hash
from moe_ep_bench.kernels import form_of
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.placement import replicate, replicate_by_risk
from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.policies.lazy import Tensor
from moe_ep_bench.policies.megatron_drop import MegatronDrop
from moe_ep_bench.workload.batch import TokenBatch, Workload, deal_pieces, image_tokens
from moe_ep_bench.workload.replay import RecordedWorkload


@dataclass(frozen=True, eq=False)
class Comparison:
    """One experiment, at one point of its sweep, on one backend: cases that see the same batches.

    Attributes:
        world_size: ranks, real or virtual.
        workloads: by MoE layer, in order (``workloads``).
        parts: what computes the experts and what permutes; nothing does in ``routing``.
        links: what stands between virtual ranks; None on real ones.
        device: what stands for each virtual rank; None = the device that is here.
        on_gpu: scores lie on a GPU.
    """

    experiment: Experiment
    backend: str
    world_size: int
    workloads: Mapping[int | None, Workload]
    parts: Parts
    links: Links | None = None
    device: Device | None = None
    on_gpu: bool = False

    @property
    def mode(self) -> str:
        """Of its rows: one of ``schema.MODES``."""
        return {RANKS: "run", ROUTING: "route"}.get(self.backend, "emulated")

    @property
    def scope(self) -> str:
        """One of ``schema.SCOPES``."""
        return self.experiment.scope

    @cached_property
    def model(self) -> ModelSpec:
        return self.experiment.model.spec()

    @cached_property
    def ep_size(self) -> int:
        """Expert-parallel ranks of a group; other ranks are replicas of the group."""
        return self.experiment.layer.ep_size or self.world_size

    @cached_property
    def slots(self) -> Slots:
        """Where experts stand, but for cases that replicate them."""
        return Slots.contiguous(self.model.num_experts, self.ep_size)

    @property
    def workload(self) -> Workload:
        """The first layer's."""
        return next(iter(self.workloads.values()))

    @property
    def layer(self) -> int | None:
        """Which layer of a recording; None where scores are synthetic, or a whole model's."""
        recorded = self.scope == "layer" and isinstance(self.workload, RecordedWorkload)
        return self.workload.layer if recorded else None

    def row_layer(self, key: int | None) -> int | None:
        """How rows name a layer of ``workloads``: a routed recording's by its own number."""
        return self.layer if self.backend == ROUTING else key

    @property
    def num_layers(self) -> int:
        """Layers that are built, dense ones too."""
        return 1 if self.scope == "layer" else self.experiment.whole.num_layers or self.model.num_layers

    @property
    def context_length(self) -> int:
        """Tokens in the cache of each request of a model that decodes; 0 where a batch is no decode step of a model."""
        return self.experiment.whole.context_length if self.scope == "model" else 0

    @property
    def title(self) -> str:
        return description.title(self)

    def describe_case(self, case: CaseSpec) -> dict[str, Any]:
        """What ``run.json`` says of a case."""
        facts = {**case.describe(self.comparison_id), "subject": self.scope, "backend": self.backend}
        if self.backend != ROUTING:
            facts["kernel"] = self.kernel_of(case)
        if self.links is not None or case.replication is not None:
            facts["extra_bytes_per_rank"] = self.extra_bytes_per_rank(case)
        return facts

    # ---- cases and ids -----------------------------------------------------------------------------------------------

    @cached_property
    def cases(self) -> list[CaseSpec]:
        how = {"timed": self.backend != ROUTING, "replicates": self.backend != RANKS}
        return cases_of(self.experiment, self.comparison_id, **how)

    @cached_property
    def comparison_id(self) -> str:
        return stable_hash(self.definition)

    @cached_property
    def definition(self) -> dict[str, Any]:
        """All that decides what is measured, and nothing of where: equal on any machine; JSON-ready."""
        experiment, layer = self.experiment, self.experiment.layer
        facts = {
            "subject": self.scope,
            "backend": self.backend,
            "model": self.model.model_dump(mode="json"),
            "workload": self._workload_definition(),
        }
        if self.scope == "model":
            facts["whole"] = {**experiment.whole.model_dump(mode="json"), "num_layers": self.num_layers}
        if self.backend == ROUTING:
            return {**facts, "layer": {"ep_size": self.ep_size, "seed": layer.seed}}
        facts |= {
            "layer": {**layer.model_dump(mode="json", exclude_defaults=True), "ep_size": self.ep_size},
            "measure": experiment.measure.definition,
            "world_size": self.world_size,
        }
        if self.links is not None:
            facts["links"] = self.links.model_dump(mode="json")
            facts["device"] = self.device and self.device.model_dump(mode="json")
        return facts

    def _workload_definition(self) -> dict[str, Any]:
        """All that decides what the batches are."""
        config, workload = self.experiment.workload, self.workload
        facts = config.model_dump(mode="json", exclude_defaults=True) | {"kind": config.kind}
        if isinstance(config, SyntheticConfig):
            # What a skew's name or a file of counts stands for may change; what is measured then does too.
            targets = config.targets(self.experiment.model.preset, self.ep_size)
            facts |= {key: value for key, value in targets.items() if value is not None}
            facts = {key: value for key, value in facts.items() if key not in ("skew_from", "layer")}
        if isinstance(workload, RecordedWorkload):
            share = 1 / len(workload.traces)
            facts["trace"] = [{"trace": trace.sha256(), "share": share} for trace in workload.traces]
        return {**facts, "num_tokens": self.num_tokens, "tokens_per_rank": None}

    @property
    def routed_alike(self) -> str:
        """Equal for layers of a recording that are routed alike."""
        workload = {key: value for key, value in self.definition["workload"].items() if key != "layer"}
        return stable_hash({**self.definition, "workload": workload})

    # ---- tokens of ranks ---------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens of a batch over all ranks."""
        return self.experiment.workload.total_tokens(self.world_size)

    @cached_property
    def rank_tokens(self) -> NDArray[np.int64]:
        """Tokens of every rank in every batch: int64 [B, R]."""
        num_batches = self.workload.num_batches
        return np.stack([self.workload.tokens_of_ranks(index, self.world_size) for index in range(num_batches)])

    @property
    def most_tokens(self) -> int:
        """Tokens of the rank that has most of them in any batch."""
        return int(self.rank_tokens.max())

    def lengths_of_ranks(self, index: int) -> list[tuple[int, ...]]:
        """Tokens of each sequence, or of its part, that each rank has of batch ``index``, in order."""
        length_S = self.workload.sequence_lengths(index)
        start_P, rank_P = deal_pieces(length_S, self.world_size)
        length_P = np.diff(start_P)
        return [tuple(length_P[rank_P == rank].tolist()) for rank in range(self.world_size)]

    def rank_batch(self, layer: int | None, index: int, rank: int) -> TokenBatch:
        """A rank's tokens of batch ``index`` as a layer sees them, padding marked."""
        tokens = self.workloads[layer].rank_batch(index, rank, self.world_size)
        return tokens.with_padding(self.experiment.workload.padding_per_rank)

    def rank_batches(self, layer: int | None, index: int) -> Iterator[TokenBatch]:
        """The same of all ranks, rank by rank: one rank's tokens are held at a time."""
        num_padding = self.experiment.workload.padding_per_rank
        ranks = self.workloads[layer].rank_batches(index, self.world_size)
        return (tokens.with_padding(num_padding) for tokens in ranks)

    def context(self, layer: int | None, rank: int, request_id_T: Tensor, valid_T: Tensor | None) -> RoutingContext:
        """Facts of a rank's tokens in a layer, but for randomness; ``CaseSpec.told`` is what a policy sees of them."""
        share = self.experiment.workload.image_share
        return RoutingContext(
            top_k=self.model.top_k,
            num_ranks=self.ep_size,
            rank=rank,
            normalize=self.model.normalize,
            scale=self.model.routed_scale,
            num_groups=self.model.num_groups,
            top_groups=self.model.top_groups,
            token_mask_T=valid_T,
            request_id_T=request_id_T,
            modality_T=None if share is None else image_tokens(request_id_T, share),
            layer_fraction=self.layer_fraction(layer),
        )

    def layer_fraction(self, layer: int | None) -> float:
        """A layer's place in the depth of the model's MoE layers: 0 to below 1; 0 where that is unknown."""
        if layer is not None:
            return self.model.moe_layers.index(layer) / self.model.num_moe_layers
        return 0.0 if self.layer is None else self.layer / self.workload.traces[0].num_layers

    @property
    def num_places(self) -> int | None:
        """MoE layers that ``layer_fraction`` is a place among; None where that is unknown."""
        if self.scope == "model":
            return self.model.num_moe_layers
        return None if self.layer is None else self.workload.traces[0].num_layers

    # ---- kernels and replicas ----------------------------------------------------------------------------------------

    def kernel_of(self, case: CaseSpec) -> str | None:
        """What routes by a case's policy; None where Megatron-Core routes."""
        drops_itself = self.backend in (RANKS, VIRTUAL) and not self.experiment.workload.padding_per_rank
        if case.policy is None or (drops_itself and isinstance(case.policy, MegatronDrop)):
            return None
        device = "cuda" if self.on_gpu else "cpu"
        return form_of(case.policy, device).runs(self.most_tokens, self.model.num_experts)

    def slots_ahead(self, wanted: Lossless, load_BE: NDArray[np.float64]) -> NDArray[np.int64]:
        """The expert in each slot, int64 [P], as loads of batches that are known ahead have it placed."""
        num_experts, num_ranks = self.model.num_experts, self.ep_size
        if not isinstance(wanted, ReplicationConfig):
            return with_free_slots(num_experts, num_ranks, wanted.spare_per_rank)
        sizes = {"num_slots": num_experts + wanted.spare_per_rank * num_ranks, "num_ranks": num_ranks}
        if wanted.plan == "variance":
            return replicate_by_risk(load_BE, **sizes)
        return replicate(load_BE.mean(axis=0), num_groups=self.model.num_groups or 1, **sizes)

    @property
    def expert_bytes(self) -> float:
        """Weights of one expert; scales of quantised blocks are not counted."""
        return self.model.expert_parameters * PRECISIONS[self.experiment.layer.dtype].weight_bytes

    def extra_bytes_per_rank(self, case: CaseSpec) -> float | None:
        """Memory of a case's spare slots on every rank: replicas in all layers of the model, moved weights in one.

        None for other cases.
        """
        if case.replication is None:
            return None
        num_layers = self.model.num_moe_layers if isinstance(case.replication, ReplicationConfig) else 1
        return case.replication.spare_per_rank * self.expert_bytes * num_layers

    def num_iterations(self, cases: Sequence[CaseSpec] | None = None) -> int:
        """About how many runs ``cases`` (None = all) take in one launch: of one real rank, or of all virtual ones."""
        measure = self.experiment.measure
        of_batch = {
            ROUTING: 1,
            RANKS: measure.fewest_rounds + measure.breakdown_iterations,
            MODELLED: self.ep_size,
            VIRTUAL: measure.fewest_rounds * self.ep_size,
        }[self.backend]
        return of_batch * self.workload.num_batches * len(self.cases if cases is None else cases)
