"""Plan a measurement: one comparison for every point of a config's sweep, before anything runs.

A *comparison* is one experiment on one backend, with its cases (``cases``). It measures an MoE layer or a whole model:

``ranks``     real processes; times them
``virtual``   this device in place of every rank, one after another, behind modelled links
``modelled``  the same on a device that is not here: nothing runs
``routing``   nothing is timed; what policies do to loads, work and score mass

Whatever the backend, the same config gives the same cases on the same batches.

Shapes: B = batches, R = ranks, T = tokens of a rank, E = experts, S = sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.bench import checks, words
from moe_ep_bench.bench.cases import CaseSpec, cases_of
from moe_ep_bench.bench.workloads import open_workloads
from moe_ep_bench.config import MEASURED, ConfigError, Experiment, ReplicationConfig, SyntheticConfig, load_experiments
from moe_ep_bench.cost_model.devices import PRECISIONS, Device
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.cost_model.table_devices import load_device, load_links
from moe_ep_bench.cost_model.transport import Exchange
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.files import stable_hash
from moe_ep_bench.kernels import form_of
from moe_ep_bench.kernels.dispatch import AUTO
from moe_ep_bench.layer.expert_placement import ExpertPlacement
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.placement import Replication, default_ep_size, replicate
from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.policies.contract import check_routing
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.megatron_drop import MegatronDrop
from moe_ep_bench.runtime.progress import SILENT_S, progress_bar
from moe_ep_bench.workload import RecordedWorkload, TokenBatch, Workload
from moe_ep_bench.workload.batch import deal_pieces, image_tokens

RANKS, VIRTUAL, MODELLED, ROUTING = "ranks", "virtual", "modelled", "routing"


@dataclass(frozen=True, eq=False)
class Comparison:
    """One experiment, at one point of its sweep, on one backend: cases that see the same batches.

    Attributes:
        world_size: ranks, real or virtual.
        workloads: by MoE layer, in order (``workloads``).
        parts: what computes the experts and what permutes; nothing does in ``routing``.
        links: what stands between virtual ranks; None on real ones.
        device: what stands for each virtual rank; None = the device that is here.
        on_gpu: layers run on a GPU, whose libraries take memory too.
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
    def slots(self) -> ExpertPlacement:
        """Where experts stand, but for cases that replicate them."""
        return ExpertPlacement.contiguous(self.model.num_experts, self.ep_size)

    @property
    def workload(self) -> Workload:
        """The first layer's."""
        return next(iter(self.workloads.values()))

    @property
    def layer(self) -> int | None:
        """Which layer of a recording; None where scores are synthetic, or a whole model's."""
        recorded = self.scope == "layer" and isinstance(self.workload, RecordedWorkload)
        return self.workload.layer if recorded else None

    @property
    def row_layers(self) -> dict[int | None, int | None]:
        """By key of ``workloads`` how rows name the layer: a routed recording's by its own number."""
        return {key: self.layer if self.backend == ROUTING else key for key in self.workloads}

    @property
    def num_layers(self) -> int:
        """Layers that are built, dense ones too."""
        return 1 if self.scope == "layer" else self.experiment.whole.num_layers or self.model.num_layers

    @property
    def context_length(self) -> int:
        """Tokens in the cache of each request of a model that decodes; 0 where a batch is no decode step of a model."""
        return self.experiment.whole.context_length if self.scope == "model" else 0

    @property
    def exchange(self) -> Exchange:
        """How rows travel between virtual ranks."""
        emulate, model = self.experiment.emulate, self.model
        sizes = model.hidden_size, model.top_k, PRECISIONS[self.experiment.layer.dtype]
        return Exchange(*sizes, emulate.transport, emulate.dispatch_dtype)

    @property
    def title(self) -> str:
        return words.title(self)

    def describe_case(self, case: CaseSpec) -> dict[str, Any]:
        """What ``run.json`` says of a case."""
        return {**case.describe(self.comparison_id), "subject": self.scope, "backend": self.backend}

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
            facts |= {"links": self.links.model_dump(mode="json"), **experiment.emulate.sent}
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
            traces = zip(workload.sources, workload.traces, strict=True)
            facts["trace"] = [{"trace": trace.sha256(), "share": source.share} for source, trace in traces]
        return {**facts, "num_tokens": self.num_tokens, "tokens_per_rank": None}

    def alike_but_for(self, *keys: str) -> str:
        """Equal for comparisons that differ in these keys of their workload only."""
        workload = {key: value for key, value in self.definition["workload"].items() if key not in keys}
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
            return (layer - self.model.first_dense_layers) / self.model.num_moe_layers
        return 0.0 if self.layer is None else self.layer / self.workload.traces[0].num_layers

    @property
    def num_places(self) -> int | None:
        """MoE layers that ``layer_fraction`` is a place among; None where that is unknown."""
        if self.scope == "model":
            return self.model.num_moe_layers
        return None if self.layer is None else self.workload.traces[0].num_layers

    # ---- kernels and replicas ----------------------------------------------------------------------------------------

    def kernel_of(self, case: CaseSpec, device_type: str) -> str | None:
        """What routes by a case's policy for scores on a "cpu" or "cuda" device; None where Megatron-Core routes."""
        config, asked = self.experiment.workload, self.parts.kernel
        drops_itself = self.backend in (RANKS, VIRTUAL) and not config.padding_per_rank and asked == AUTO
        if case.policy is None or (drops_itself and isinstance(case.policy, MegatronDrop)):
            return None
        return form_of(case.policy, device_type, asked).runs(self.most_tokens, self.model.num_experts)

    def replicate(self, wanted: ReplicationConfig, load_E: NDArray[np.float64]) -> Replication:
        """Place replicas for a load; see ``placement.replicate``."""
        num_slots = self.model.num_experts + wanted.spare_per_rank * self.ep_size
        return replicate(load_E, num_slots=num_slots, num_ranks=self.ep_size, num_groups=self.model.num_groups or 1)

    def extra_bytes_per_rank(self, case: CaseSpec) -> float | None:
        """Memory that a case's spare slots take on every rank, in all layers of the model; None for other cases."""
        if case.replication is None:
            return None
        plan = self.replicate(case.replication, np.ones(self.model.num_experts))
        return plan.extra_bytes_per_rank(self.model, PRECISIONS[self.experiment.layer.dtype].weight_bytes)

    def num_iterations(self, cases: Sequence[CaseSpec] | None = None) -> int:
        """Runs of ``cases`` (None = all) in one launch, checks included: of one real rank, or of all virtual ones.

        A real rank's case is run once to be looked at and once more to be checked after it was timed; where it is kept
        as CUDA graphs it is checked twice, replayed. Breakdowns are warmed up once. Of a model on virtual ranks routing
        the layers ahead counts too.
        """
        num_cases, measure = len(self.cases if cases is None else cases), self.experiment.measure
        num_batches, num_layers = self.workload.num_batches, len(self.workloads)
        routed = num_layers * num_batches if self.scope == "model" else 0
        rounds = 1 + measure.warmup + measure.iterations
        checked = 3 if self.parts.cuda_graph else 1
        breakdowns = measure.breakdown_iterations + bool(measure.breakdown_iterations)
        return {
            ROUTING: num_batches * num_cases,
            RANKS: ((rounds + breakdowns) * num_batches + checked) * num_cases,
            MODELLED: num_batches * self.ep_size * num_cases + routed,
            VIRTUAL: (rounds * num_batches * self.ep_size + num_layers) * num_cases + routed,
        }[self.backend]


# ---- planning --------------------------------------------------------------------------------------------------------


def plan(
    config: Path,
    overrides: Iterable[str],
    backend: str,
    world_size: int | None = None,
    *,
    on_cpu: bool = False,
    point: int | None = None,
    **how: Any,
) -> list[Comparison]:
    """Plan a config on a backend: every comparison is found to fit, and its workload found to be there.

    Args:
        overrides: ``key=value`` (``--set``).
        on_cpu: apply the config's ``on_cpu`` section, wherever a layer runs.
        point: only this point of the sweep, from 0.
        how: as of ``plan_experiments``.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    overrides = tuple(overrides)
    experiments = load_experiments(config, overrides, on_cpu=on_cpu and backend == RANKS)
    runs_here = backend in (VIRTUAL, MODELLED) and any(
        experiment.emulate.device == MEASURED for experiment in experiments
    )
    if on_cpu and runs_here:
        experiments = load_experiments(config, overrides, on_cpu=True)
    if point is not None:
        if not 0 <= point < len(experiments):
            last = len(experiments) - 1
            raise UserError(f"--point: expected 0 to {last} (the points of {config}'s sweep), got {point}")
        experiments = [experiments[point]]
    return plan_experiments(config, experiments, backend, world_size, on_cpu=on_cpu, **how)


def plan_experiments(
    config: Path,
    experiments: Sequence[Experiment],
    backend: str,
    world_size: int | None = None,
    *,
    on_cpu: bool = False,
    before: Callable[[Experiment], object] = lambda experiment: None,
    try_out: bool = True,
) -> list[Comparison]:
    """Plan experiments that are read already.

    Args:
        config: names their file in errors.
        backend, world_size, on_cpu: see ``compare``.
        before: called ahead of each comparison, which may take long to make: batches are solved for, recordings read.
        try_out: make a batch of each (``try_out``). Else nothing is drawn or solved for.

    Raises:
        ValueError: see ``plan``.
    """
    comparisons = []
    shown = progress_bar(len(experiments), "point", shown=backend != RANKS, delay=SILENT_S)
    with naming(str(config)), shown as bar:
        for experiment in experiments:
            bar.set_description(f"planning {config.name}")
            before(experiment)
            comparisons.append(compare(experiment, backend, world_size, on_cpu=on_cpu))
            if try_out:
                _try_out(comparisons[-1])
            bar.update()
    _check_distinct(config, comparisons)
    return comparisons


def compare(experiment: Experiment, backend: str, world_size: int | None = None, *, on_cpu: bool) -> Comparison:
    """Check that an experiment fits a backend, and open its workloads; no batch is made.

    Args:
        backend: ``virtual`` is ``modelled`` where the config names a device (``emulate.device``).
        world_size: real ranks. Other backends have ``layer.ep_size`` ranks, or ``default_ep_size``.

    Raises:
        ValueError: naming the key whose value does not fit.
    """
    checks.refuse(checks.sizes(experiment, world_size or 1))
    model, layer, links, device = experiment.model.spec(), experiment.layer, None, None
    if backend == ROUTING:
        checks.refuse(checks.routed_alone(experiment))
    if backend in (RANKS, ROUTING):
        checks.refuse(checks.without_cache(experiment))
    if backend != RANKS:
        world_size = layer.ep_size or default_ep_size(model.num_experts)
    assert world_size is not None
    ep_size = layer.ep_size or world_size
    if backend in (VIRTUAL, MODELLED):
        checks.refuse(checks.emulated(experiment))
        links, device = _load_models(experiment)
        backend = VIRTUAL if device is None else MODELLED
    checks.refuse(checks.ranks(experiment, world_size, ep_size))
    if backend in (RANKS, VIRTUAL):
        checks.refuse(checks.dtype(experiment))
    if links is not None:
        with naming("emulate.links"):
            links = links.for_layer(model, ep_size, layer.dtype)
        with naming("emulate.links, layer.ep_size"):
            links.all_gather_us(0, ep_size)
    if device is not None:
        with naming("emulate.device"):
            device = device.for_layer(model, ep_size, layer.dtype)
    if backend != ROUTING:
        checks.refuse(checks.baseline(experiment, ep_size))
    if backend != RANKS:
        checks.refuse(checks.replicas(experiment, ep_size))
    parts = _parts(experiment, backend, on_cpu, device)
    if experiment.scope == "model":
        checks.refuse(checks.whole_model(model, experiment))
        checks.refuse(checks.whole_batches(experiment))
    workloads = open_workloads(experiment, world_size)
    comparison = Comparison(experiment, backend, world_size, workloads, parts, links, device, not on_cpu)
    if experiment.scope == "model":
        checks.refuse(checks.dealing(comparison.rank_tokens))
    checks.refuse(checks.by_layer(experiment, comparison.num_places))
    for case in comparison.cases:  # Finds replicas that cannot be placed.
        with naming("emulate.replication"):
            comparison.extra_bytes_per_rank(case)
    return comparison


def find_case(comparisons: Sequence[Comparison], wanted: str) -> tuple[Comparison, CaseSpec]:
    """The one case whose id, label or policy name is ``wanted``.

    Raises:
        ValueError: none or several are; the message lists them.
    """
    cases = [(comparison, case) for comparison in comparisons for case in comparison.cases]
    keys = ("case_id", "label", "name")
    matches = ([pair for pair in cases if getattr(pair[1], key) == wanted] for key in keys)
    matching = next(filter(None, matches), [])
    if len(matching) == 1:
        return matching[0]
    listed = "; ".join(f"{case.case_id} ({case.label}, {comparison.title})" for comparison, case in matching or cases)
    expected = "one" if matching else "a case: its id, label or policy"
    raise UserError(f"--profile {wanted}: expected {expected} of {listed}")


def _try_out(comparison: Comparison) -> None:
    """Make a batch and route two tokens by every policy: finds what only then can be seen not to fit.

    Raises:
        ValueError: naming the key, or the policy and its field.
    """
    experiment = comparison.experiment
    num_padding = experiment.workload.padding_per_rank
    if num_padding:
        checks.refuse(checks.padding(num_padding, comparison.rank_tokens))
    # Finds skews that cannot be had; a batch of all ranks may not fit into memory.
    comparison.workload.rank_batch(0, 0, comparison.world_size)
    if comparison.parts.dispatcher == "allgather" and comparison.ep_size > 1:
        checks.refuse(checks.gathering(comparison.rank_tokens))
    scores_TE = torch.rand(2, comparison.model.num_experts, generator=torch.Generator().manual_seed(0))
    context = comparison.context(next(iter(comparison.workloads)), 0, torch.zeros(2, dtype=torch.int64), None)
    context = replace(context, generator=torch.Generator())
    for policy in experiment.make_policies():
        try:
            check_routing(form_of(policy, "cpu").route(scores_TE, context), scores_TE)
        except ValueError as problem:
            hint = "; workload.image_share assumes images" if "modality_T" in str(problem) else ""
            raise UserError(f"policies: {policy.name}: {problem}{hint}") from None


def _check_distinct(config: Path, comparisons: Sequence[Comparison]) -> None:
    """Refuse a sweep whose points are one and the same comparison here: they would overwrite each other.

    Such is a repeated value, and a key that this backend does not read.

    Raises:
        ConfigError: one line naming the file, the swept key and its values.
    """
    first: dict[str, Comparison] = {}
    for comparison in comparisons:
        earlier = first.setdefault(comparison.comparison_id, comparison)
        if earlier is comparison:
            continue
        mine, theirs = dict(comparison.experiment.point), dict(earlier.experiment.point)
        differing = [key for key in mine if mine[key] != theirs[key]]
        if not differing:
            point = ", ".join(f"{key}={value}" for key, value in mine.items())
            raise ConfigError(f"{config}: sweep: expected every value once, got {point} twice")
        values, others = (", ".join(str(at[key]) for key in differing) for at in (mine, theirs))
        raise ConfigError(
            f"{config}: sweep.{', sweep.'.join(differing)}: {others} and {values} are one and the same comparison "
            f"for this command; expected values that it measures differently, or one (--set {differing[0]}=VALUE)"
        )


def _load_models(experiment: Experiment) -> tuple[Links, Device | None]:
    """What stands between virtual ranks, and for each of them; ValueError naming the key of a file that is bad."""
    config = experiment.emulate
    assert config.links is not None
    with naming("emulate.links"):
        links = load_links(config.links).scaled(config.bandwidth_scale)
    with naming("emulate.device", f"; {MEASURED} is the device that is here"):
        return links, None if config.device == MEASURED else load_device(config.device)


def _parts(experiment: Experiment, backend: str, on_cpu: bool, modelled: Device | None) -> Parts:
    """What computes and permutes here; on a modelled device what it is modelled with, whatever this machine has."""
    asked = experiment.layer
    if backend == ROUTING:
        return Parts(experts="none", permute="none")
    if modelled is not None:
        experts, why = modelled.experts_ran
        return Parts(experts=experts, permute="indexed", experts_why=why)
    return Parts.choose(asked.experts, asked.dispatcher, cuda_graph=asked.cuda_graph, on_cpu=on_cpu)
