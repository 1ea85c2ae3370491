"""One experiment on one backend: the cases, the batches and the ranks that a measurement is of.

A *point* measures an MoE layer or a whole model, or routes for a layer:

``ranks``     real processes; times them
``virtual``   this device in place of every rank, one after another, behind modelled links
``modelled``  the same on a device that is not here: nothing runs
``routing``   nothing is timed; what policies do to loads, work and score mass

Whatever the backend, the same config gives the same cases on the same batches. A *case* is one policy, or one of the
references beside it.

Shapes: B = batches, R = ranks, T = tokens of a rank, E = experts, S = sequences, L = layers, F = spare slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.bench.checks import MODELLED, RANKS, ROUTING, VIRTUAL
from moe_ep_bench.config import (
    NO_OVERLAP,
    TWO_BATCH,
    Experiment,
    Lossless,
    RecordedConfig,
    ReplicationConfig,
    Rule,
    SyntheticConfig,
)
from moe_ep_bench.cost_model.devices import PRECISIONS, Device
from moe_ep_bench.cost_model.exchanges import Copies
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.facts import CaseFacts, ModelExtent, Role, Subject
from moe_ep_bench.facts import Workload as WorkloadFacts
from moe_ep_bench.facts.words import label_words, title_words
from moe_ep_bench.files import stable_hash
from moe_ep_bench.kernels import form_of, has_triton
from moe_ep_bench.layer.backend import LayerBackend
from moe_ep_bench.metrics import RANKS_PER_NODE
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.placement import Windows, fullest_by_spare, spread_over_layers
from moe_ep_bench.policies import Policy, RoutingContext, make_policy, source_hash
from moe_ep_bench.policies.contract import Setting, params_of
from moe_ep_bench.policies.lazy import Tensor
from moe_ep_bench.runtime.sharing import Sharing
from moe_ep_bench.schema import REHEARSAL
from moe_ep_bench.workload.batch import Workload, deal_pieces, image_tokens
from moe_ep_bench.workload.replay import RecordedWorkload
from moe_ep_bench.workload.targets import PATTERNS, read_counts

BASELINE, NOISE, BALANCED, POLICY = "baseline", "noise", "balanced", "policy"
# Native routing on replicated experts: what spare memory, or weights that move, buy in place of a policy.
REPLICATION = "replication"

T = TypeVar("T")
# What the baseline computes.
NATIVE = make_policy({"name": "topk"})


# Slots that a budget gives to one layer at most, over the mean; more are planned for at length and seldom gain.
MOST_OF_MEAN = 4
# What the layers of a recording share: the division of a budget, by what decides it.
_DIVIDED: dict[tuple[Any, ...], tuple[int, ...]] = {}


@dataclass(frozen=True)
class CaseSpec:
    """What a case is; ``rule`` None: a reference, which is routed by Megatron-Core as it stands."""

    comparison_id: str
    role: Role
    name: str
    rule: Rule | None = None

    @property
    def policy(self) -> Policy | None:
        """None for references and replication, which take Megatron-Core's own router."""
        return self.rule if isinstance(self.rule, Policy) else None

    @property
    def replication(self) -> Lossless | None:
        return self.rule if isinstance(self.rule, Lossless) else None

    @cached_property
    def case_id(self) -> str:
        """A hash of the point and of all that makes a case: an edited rule never meets old results."""
        return stable_hash([self.comparison_id, self.role, self.name, self.params, *self._code])

    @property
    def settings(self) -> list[Setting]:
        """Of the rule; of files their names alone, for ``_code`` says what they hold."""
        settings = self.rule.settings() if self.rule else []
        return [replace(one, value=Path(str(one.value)).name) if one.is_file else one for one in settings]

    @property
    def params(self) -> dict[str, Any]:
        """The settings as a JSON-ready dict."""
        return params_of(self.settings)

    @property
    def _code(self) -> list[str]:
        """Hashes of a user's policy file and of the data that a policy reads."""
        if self.policy is None:
            return []
        data = self.policy.data
        return [code for code in (source_hash(type(self.policy)), data and data.sha256) if code]

    @property
    def label(self) -> str:
        return label_words(self.name, self.settings, self.role)

    def visible(self, context: RoutingContext) -> RoutingContext:
        """Fields of the context that the case's router may see: policies know the padding, Megatron-Core's does not."""
        hides = self.policy is None and context.token_mask_T is not None
        return replace(context, token_mask_T=None) if hides else context

    def facts(self, **more: Any) -> CaseFacts:
        """What run.json says of the case."""
        data = self.policy and self.policy.data
        return CaseFacts(
            comparison_id=self.comparison_id,
            policy=self.name,
            settings=self.settings,
            role=self.role,
            looks_past_top_k=self.policy is not None and self.policy.looks_past_top_k,
            by_torch=self.policy is not None and not has_triton(self.policy),
            policy_code=next(iter(self._code), None),
            data_model=(data and data.model) or None,
            **more,
        )


@dataclass(frozen=True, eq=False)
class Point:
    """One experiment, at one point of its sweep, on one backend: cases that see the same batches.

    Attributes:
        world_size: ranks, real or virtual.
        workloads: by MoE layer, in order (``plan.open_workloads``).
        layer_backend: what computes the experts and what permutes; nothing does in ``routing``.
        links: what stands between virtual ranks; None on real ones.
        device: what stands for each virtual rank; None = the device that is here.
        on_gpu: scores lie on a GPU.
        sharing: by what real ranks share a device, so that nothing is timed; None = each has its own.
    """

    experiment: Experiment
    backend: str
    world_size: int
    workloads: Mapping[int | None, Workload]
    layer_backend: LayerBackend
    links: Links | None = None
    device: Device | None = None
    on_gpu: bool = False
    sharing: Sharing | None = None

    @property
    def mode(self) -> str:
        """The mode of its rows (``schema.Mode``)."""
        if self.sharing is not None:
            return REHEARSAL
        return {RANKS: "run", ROUTING: "route"}.get(self.backend, "emulated")

    @property
    def table(self) -> str:
        """Whose rows make a case done (``schema.TABLES``)."""
        return {REHEARSAL: REHEARSAL, "route": "routing"}.get(self.mode, "samples")

    @property
    def scope(self) -> Literal["layer", "model"]:
        """What is measured."""
        return self.experiment.scope

    @cached_property
    def model(self) -> ModelSpec:
        return self.experiment.model.spec()

    @cached_property
    def ep_size(self) -> int:
        """Expert-parallel ranks of a group; other ranks are replicas of the group."""
        return self.experiment.layer.ep_size or self.world_size

    @property
    def overlap(self) -> str:
        """How exchanges and computation overlap (``emulate.overlap``); not at all on real links."""
        return NO_OVERLAP if self.links is None else self.experiment.emulate.overlap

    @property
    def sent_for(self) -> Copies | None:
        """The rule of copies of a modelled DeepEP or a measured exchange; None = NCCL's, a row for each pair."""
        if self.links is None or self.links.exchange is not None:
            return self.links and self.links.exchange and self.links.exchange.copies
        return "rank" if self.experiment.emulate.copies == "rank" else None

    @property
    def num_parts(self) -> int:
        """Micro-batches that every rank's tokens of a batch are cut into, and routed one by one."""
        return 2 if self.overlap == TWO_BATCH else 1

    @property
    def routing_work(self) -> int:
        """Micro-batches of ranks, in all batches and layers: what modelling this point takes."""
        return self.workload.num_batches * self.num_sources * len(self.workloads) * self.num_parts

    @property
    def ranks_per_node(self) -> int:
        """As the links have it; rank r is on node r // ranks_per_node."""
        return RANKS_PER_NODE if self.links is None else self.links.ranks_per_node

    @property
    def workload(self) -> Workload:
        """The first layer's."""
        return next(iter(self.workloads.values()))

    @property
    def layer(self) -> int | None:
        """The layer of a recording; None with synthetic scores or a whole model."""
        workload = self.workload
        return workload.layer if self.scope == "layer" and isinstance(workload, RecordedWorkload) else None

    def row_layer(self, key: int | None) -> int | None:
        """The layer as rows name it: a routed recording's own number, else the key of ``workloads``."""
        return self.layer if self.backend == ROUTING else key

    @property
    def num_layers(self) -> int:
        """Layers that are built, dense ones too."""
        return 1 if self.scope == "layer" else self.experiment.whole.num_layers or self.model.num_layers

    @property
    def context_length(self) -> int:
        """Tokens in the cache of each request of a model that decodes; 0 where a batch is no decode step of a model."""
        return self.experiment.whole.context_length if self.scope == "model" else 0

    # ---- cases and ids -----------------------------------------------------------------------------------------------

    @cached_property
    def cases(self) -> list[CaseSpec]:
        """The baseline, its repetition for the noise floor, all policies, replications, and the balanced case.

        Routing needs neither noise nor balanced case, and ``topk`` only where it knows of padding: else it is the
        baseline.
        """
        experiment, timed = self.experiment, self.backend != ROUTING
        keeps_topk = timed or experiment.workload.padding_per_rank
        policies = [policy for policy in experiment.make_policies() if keeps_topk or policy != NATIVE]
        virtual = self.backend != RANKS
        lossless = (*experiment.emulate.replication, *experiment.emulate.rebalance) if virtual else ()
        case = partial(CaseSpec, self.comparison_id)
        return [
            case(BASELINE, "native"),
            *[case(NOISE, "native")] * timed,
            *(case(POLICY, policy.name, policy) for policy in policies),
            *(case(REPLICATION, wanted.name, wanted) for wanted in lossless),
            *[case(BALANCED, "native_balanced")] * timed,
        ]

    def case_facts(self, case: CaseSpec) -> CaseFacts:
        """What ``run.json`` says of a case."""
        wanted, divided = case.replication, {}
        if isinstance(wanted, ReplicationConfig) and wanted.spare_budget is not None:
            spare_L = list(self.spare_by_layer(wanted))
            divided = {"spare_by_layer": spare_L, "spare_layers": self._model_layers(range(len(spare_L)))}
        return case.facts(extra_bytes_per_rank=self.extra_bytes_per_rank(case), **divided)

    @cached_property
    def comparison_id(self) -> str:
        return stable_hash(self.definition)

    @property
    def routed_alike(self) -> str:
        """Equal for layers of a recording that are routed alike."""
        workload = {key: value for key, value in self.definition["workload"].items() if key != "layer"}
        return stable_hash({**self.definition, "workload": workload})

    @cached_property
    def definition(self) -> dict[str, Any]:
        """All that decides what is measured, and nothing of where: equal on any machine; JSON-ready."""
        experiment, layer = self.experiment, self.experiment.layer
        facts = {
            "subject": self.scope,
            "backend": self.backend,
            "model": self.model.model_dump(mode="json", exclude={"checkpoint_dtype"}),
            "workload": self._workload_definition(),
            "layer": {"ep_size": self.ep_size, "seed": layer.seed},
        }
        if self.scope == "model":
            facts["whole"] = {**experiment.whole.model_dump(mode="json"), "num_layers": self.num_layers}
        if self.backend != ROUTING:
            usual = {"dtype"} if layer.dtype == "bfloat16" else set()
            asked = layer.model_dump(mode="json", exclude_defaults=True, exclude=usual)
            facts["layer"] = {**asked, "ep_size": self.ep_size}
            facts |= {"measure": experiment.measure.definition, "world_size": self.world_size}
        if self.links is not None:
            facts["links"] = self.links.model_dump(mode="json")
            unseen = {"dtypes", *(["num_sms"] if self.overlap == NO_OVERLAP else [])}
            facts["device"] = self.device and self.device.model_dump(mode="json", exclude=unseen)
            if self.overlap != NO_OVERLAP:
                facts["overlap"] = self.overlap
            if self.links.exchange is None and self.sent_for is not None:
                facts["copies"] = self.sent_for
        return facts

    def _workload_definition(self) -> dict[str, Any]:
        """All that decides what the batches are."""
        config, workload = self.experiment.workload, self.workload
        facts = config.model_dump(mode="json", exclude_defaults=True) | {"kind": config.kind}
        if isinstance(config, SyntheticConfig):
            # What a skew's name or a file of counts stands for may change; what is measured then does too.
            targets = config.targets(self.experiment.model, self.ep_size)
            facts |= {key: value for key, value in targets.items() if value is not None}
            unseen = {"skew_from", "layer", "balanced", *(["batch_peak_load"] if config.is_balanced else [])}
            facts = {key: value for key, value in facts.items() if key not in unseen}
            if all(self.windows(one).window is not None for one in self.experiment.emulate.replication):
                facts.pop("history", None)  # Served batches are the same, and plans know as many as they say.
        if isinstance(workload, RecordedWorkload) and isinstance(config, RecordedConfig):
            facts["trace"] = [trace.sha256() for trace in workload.traces]
            facts |= {"order": config.order, "history": workload.num_history}
        if self.is_sampled:
            facts["sample_tokens"] = workload.num_tokens
        if self.num_sources < self.world_size:
            facts["sample_ranks"] = self.num_sources
        return {**facts, "num_tokens": self.num_tokens, "tokens_per_rank": None}

    # ---- facts -------------------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """Model, sizes and workload."""
        return title_words(self.subject)

    @cached_property
    def subject(self) -> Subject:
        """What is measured, as ``run.json`` has it."""
        model, whole = self.model, None
        if self.scope == "model":
            whole = ModelExtent(
                num_layers=self.num_layers, of_layers=model.num_layers, context_length=self.context_length
            )
        several = self.world_size > 1
        return Subject(
            model=model.name,
            scale=model.scale,
            num_experts=model.num_experts,
            top_k=model.top_k,
            num_ranks=self.ep_size,
            world_size=self.world_size,
            num_tokens=self.num_tokens,
            rank_tokens=(int(self.rank_tokens.min()), int(self.rank_tokens.max())) if several else None,
            workload=self._workload_facts,
            whole=whole,
            cuda_graph=self.scope if self.layer_backend.cuda_graph else None,
        )

    def _model_layers(self, rows: Sequence[int]) -> list[int]:
        """What the model calls layers of the recording; empty where nothing tells, or it has the same numbers."""
        assert isinstance(self.workload, RecordedWorkload)
        layers = [self.workload.traces[0].layer_of(row, self.model.moe_layers) for row in rows]
        known = [layer for layer in layers if layer is not None]
        return known if len(known) == len(rows) and known != [*rows] else []

    @property
    def _workload_facts(self) -> WorkloadFacts:
        """The workload's facts, its padding, and what a named skew was calibrated to."""
        experiment, config = self.experiment, self.experiment.workload
        preset = experiment.model.preset
        facts: dict[str, Any] = {**self.workload.describe(), "seed": config.seed}
        if config.padding_per_rank:
            some = self.rank_tokens[self.rank_tokens > 0]
            facts["padding"] = {"per_rank": config.padding_per_rank, "of": [int(some.min()), int(some.max())]}
        if self.layer is not None and isinstance(self.workload, RecordedWorkload):
            facts["model_layers"] = self._model_layers([self.layer])
        if isinstance(config, SyntheticConfig):
            # The skew's load of the fullest rank may be of another EP size.
            placed = is_drawn(experiment, self.ep_size) and config.targets(experiment.model)["rank_load"]
            peaks = {name: getattr(config, name) for name in ("peak_load", "batch_peak_load")}
            facts |= {**peaks, "is_one_draw": bool(placed)}
            if config.skew_from is not None:
                counts = read_counts(config.skew_from, experiment.model.moe_layers)
                facts["counted"] = {"file": config.skew_from.name, "layer": config.layer, **counts.describe()}
            elif config.skew is not None and config.skew not in PATTERNS:
                skew = config.calibration(preset)
                # A peak load in place of the skew's own is of no layer that was recorded.
                omitted = {"layers"} if any(peaks.values()) else None
                own = skew.model_dump(mode="json", exclude_none=True, exclude=omitted)
                facts["skew"] = {"name": config.skew, **own}
        return WorkloadFacts(**facts)

    # ---- tokens of ranks ---------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens of a batch over all ranks."""
        return self.experiment.workload.total_tokens(self.world_size)

    @property
    def is_sampled(self) -> bool:
        """Some tokens of a batch stand for all (``emulate.sample_tokens``)."""
        return self.workload.num_tokens < self.num_tokens

    @property
    def num_sources(self) -> int:
        """Ranks whose tokens are drawn (``emulate.sample_ranks``); rank r has those of r modulo so many."""
        return (self.is_sampled and self.experiment.emulate.sample_ranks) or self.world_size

    @property
    def stands_for(self) -> int:
        """Tokens of a rank for which each one that is routed there stands."""
        return self.num_tokens * self.num_sources // (self.workload.num_tokens * self.world_size)

    def of_ranks(self, of_sources: Sequence[T]) -> list[T]:
        """What is of each rank whose tokens are drawn, of every rank."""
        return [of_sources[rank % self.num_sources] for rank in range(self.world_size)]

    @cached_property
    def rank_tokens(self) -> NDArray[np.int64]:
        """Tokens of every rank in every batch: int64 [B, R]."""
        dealt = self.num_sources, self.tokens_R
        routed = [self.workload.tokens_of_ranks(index, *dealt) for index in range(self.workload.num_batches)]
        return self.stands_for * np.tile(np.stack(routed), self.world_size // self.num_sources)

    @cached_property
    def tokens_R(self) -> NDArray[np.int64] | None:  # noqa: N802
        """Tokens of every rank in any batch, where they were asked for: int64 [R]."""
        return self.experiment.workload.dealt_tokens(self.world_size)

    @property
    def most_tokens(self) -> int:
        """Tokens of the rank that has most of them in any batch."""
        return int(self.rank_tokens.max())

    def lengths_of_ranks(self, index: int) -> list[tuple[int, ...]]:
        """Tokens of each sequence, or of its part, that each rank has of batch ``index``, in order."""
        length_S = self.workload.sequence_lengths(index)
        start_P, rank_P = deal_pieces(length_S, self.num_sources, self.tokens_R)
        length_P = np.diff(start_P)
        of_sources = [tuple(length_P[rank_P == rank].tolist()) * self.stands_for for rank in range(self.num_sources)]
        return self.of_ranks(of_sources)

    def context(self, layer: int | None, rank: int, request_id_T: Tensor, valid_T: Tensor | None) -> RoutingContext:
        """Facts of a rank's tokens in a layer, but for randomness (``CaseSpec.visible``)."""
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
        place = self.layer if layer is None else self.model.moe_layers.index(layer)
        num_places = self.num_places
        return 0.0 if place is None or num_places is None else place / num_places

    @property
    def num_places(self) -> int | None:
        """MoE layers that ``layer_fraction`` is a place among; None where that is unknown."""
        if self.scope == "model":
            return self.model.num_moe_layers
        workload = self.workload
        return workload.traces[0].num_layers if isinstance(workload, RecordedWorkload) else None

    def windows(self, replication: ReplicationConfig) -> Windows:
        """Which batches its plans know."""
        return self.experiment.windows(replication)

    # ---- kernels and replicas ----------------------------------------------------------------------------------------

    def kernel_of(self, case: CaseSpec) -> str | None:
        """What routes by a case's policy; None where Megatron-Core routes."""
        if case.policy is None:
            return None
        device = "cuda" if self.on_gpu else "cpu"
        return form_of(case.policy, device).runs(self.most_tokens, self.model.num_experts)

    @property
    def expert_bytes(self) -> float:
        """Weights of one expert, scales of quantised blocks included."""
        return self.model.expert_parameters * PRECISIONS[self.experiment.layer.planned_dtype].weight_bytes

    def exchange_pairs(self, load_E: NDArray[np.int64]) -> int | None:
        """Pairs that a rank computes while two ranks of a node exchange an expert; None = there are no such times.

        Of experts as busy as a batch's are on average, whose pairs grow by a half: where that takes no time, as reading
        weights does, more than all pairs.
        """
        if self.links is None or self.device is None or self.links.intra is None:
            return None
        mean, model = load_E.mean(), self.model
        precision = self.device.precision(self.experiment.layer.planned_dtype)
        size = model.expert_hidden_size, model.ffn_hidden_size
        few_us, more_us = (
            self.device.experts_us(
                *size,
                np.full(len(load_E) // self.ep_size, factor * mean),
                precision,
                num_matrices=model.expert_matrices,
                num_tokens=round(factor * self.num_tokens),
            )
            for factor in (1, 1.5)
        )
        pair_us = (more_us - few_us) / (0.5 * mean * len(load_E) / self.ep_size)
        exchange_us = float(self.links.intra.time_us(self.expert_bytes))
        return int(load_E.sum()) + 1 if pair_us * load_E.sum() < exchange_us else int(exchange_us / pair_us) + 1

    def extra_bytes_per_rank(self, case: CaseSpec) -> float | None:
        """Memory of a case's spare slots on every rank: replicas in all layers of the model, moved weights in one.

        None for other cases.
        """
        if case.replication is None:
            return None
        if not isinstance(case.replication, ReplicationConfig):
            return self.spare_here(case.replication) * self.expert_bytes
        return float(np.mean(self.spare_by_layer(case.replication))) * self.expert_bytes * self.model.num_moe_layers

    def spare_here(self, wanted: Lossless) -> int:
        """Spare slots of a rank in this layer."""
        if not isinstance(wanted, ReplicationConfig):
            return wanted.spare_per_rank or 0
        spare_L = self.spare_by_layer(wanted)
        return spare_L[0 if self.layer is None or len(spare_L) == 1 else self.layer]

    def spare_by_layer(self, wanted: ReplicationConfig) -> tuple[int, ...]:
        """Spare slots of a rank in each layer of the recording, or of all layers alike.

        A budget is divided by the loads that the first plan knows; no layer gets more than ``MOST_OF_MEAN`` times the
        mean.
        """
        if wanted.spare_budget is None:
            assert wanted.spare_per_rank is not None
            return (wanted.spare_per_rank,)
        assert isinstance(self.workload, RecordedWorkload)
        key = self.routed_alike, wanted.plan, wanted.spare_budget, self.windows(wanted).known(0)
        if key not in _DIVIDED:
            load_LBE = self.workload.loads(range(self.workload.traces[0].num_layers), key[-1]).astype(np.float64)
            num_layers, _, num_experts = load_LBE.shape
            budget = int(wanted.spare_budget * num_layers + 1e-9)
            most = min(budget, MOST_OF_MEAN * math.ceil(wanted.spare_budget), num_experts - num_experts // self.ep_size)
            sizes = {"most": most, "num_ranks": self.ep_size, "num_groups": self.model.num_groups or 1}
            fullest_LF = np.array([fullest_by_spare(wanted.plan, load_BE, **sizes) for load_BE in load_LBE])
            _DIVIDED[key] = spread_over_layers(fullest_LF, budget)
        return _DIVIDED[key]

    @property
    def iterations_per_case(self) -> int:
        """About how many runs a case takes in one launch: of a real rank, of all virtual ones by turns or at once."""
        measure = self.experiment.measure
        of_batch = {
            ROUTING: 1,
            RANKS: measure.fewest_rounds + measure.breakdown_iterations,
            MODELLED: 1,
            VIRTUAL: measure.fewest_rounds * self.ep_size,
        }[self.backend]
        return of_batch * self.workload.num_batches


def is_drawn(experiment: Experiment, ep_size: int) -> bool:
    """Whether chance decides how busy ranks are: a synthetic workload's experts stand at random, to no rank's load."""
    config = experiment.workload
    if not isinstance(config, SyntheticConfig) or config.skew in PATTERNS or ep_size == 1:
        return False
    return config.targets(experiment.model, ep_size)["rank_load"] is None
