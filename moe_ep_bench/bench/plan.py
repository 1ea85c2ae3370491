"""Plan a measurement: subject x backend, for every point of a config's sweep, before anything runs.

A *comparison* is one point: a subject (``subjects``: an MoE layer, or a whole model) on a backend, with its cases. A
*case* is a policy, or a reference beside them. A *plan* is all comparisons of a config on one backend:

``ranks``     real processes; times them
``virtual``   this device in place of every rank, one after another, behind modelled links
``modelled``  the same on a device that is not here: nothing runs
``routing``   nothing is timed; what policies do to loads, work and score mass

Whatever the backend, the same config gives the same cases on the same batches.

Shapes: T = tokens, E = experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.bench import checks, words
from moe_ep_bench.bench.fit import fit_on, need_of
from moe_ep_bench.bench.subjects import SUBJECTS, LayerSubject, ep_size_on
from moe_ep_bench.config import MEASURED, ConfigError, Experiment, ReplicationConfig, SyntheticConfig, load_experiments
from moe_ep_bench.cost_model.devices import PRECISIONS, VALUE_BYTES, Device
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.cost_model.table_devices import load_device, load_links
from moe_ep_bench.cost_model.transport import Exchange
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.files import stable_hash
from moe_ep_bench.kernels import compiled
from moe_ep_bench.kernels.dispatch import AUTO, KERNELS
from moe_ep_bench.kernels.toolchain import triton_lacks
from moe_ep_bench.layer.expert_placement import ExpertPlacement
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.models.memory import Fit, Need, layer_rows_values
from moe_ep_bench.placement import Replication, default_ep_size, replicate
from moe_ep_bench.policies import Policy, RoutingContext, make_policy
from moe_ep_bench.policies.contract import check_routing
from moe_ep_bench.policies.lazy import torch
from moe_ep_bench.policies.megatron_drop import MegatronDrop
from moe_ep_bench.policies.own import source_hash
from moe_ep_bench.runtime.progress import SILENT_S, progress_bar
from moe_ep_bench.workload import RecordedWorkload, Workload

RANKS, VIRTUAL, MODELLED, ROUTING = "ranks", "virtual", "modelled", "routing"

BASELINE, NOISE, CEILING, POLICY = "baseline", "noise", "ceiling", "policy"
# Native routing on replicated experts: what spare memory buys in place of a policy.
REPLICATION = "replication"

# What the baseline computes.
NATIVE = make_policy({"name": "topk"})


@dataclass(frozen=True)
class CaseSpec:
    """One policy, or one of the references, on a comparison's workload.

    Attributes:
        policy: None for the references and replication, which take Megatron-Core's own router.
        masks_padding: what routes the case is told which tokens are padding; no router of Megatron-Core's own is.
    """

    case_id: str
    role: str
    name: str
    policy: Policy | None
    replication: ReplicationConfig | None = None
    masks_padding: bool = False

    def told(self, context: RoutingContext) -> RoutingContext:
        """What of ``context`` the case's router is told."""
        return context if self.masks_padding else replace(context, token_mask_T=None)

    @property
    def params(self) -> dict[str, Any]:
        if self.replication is not None:
            return self.replication.params()
        return self.policy.params() if self.policy else {}

    @property
    def is_padded(self) -> bool:
        """Whether pairs of no weight fill every expert up to its capacity."""
        return isinstance(self.policy, MegatronDrop) and self.policy.pad_to_capacity

    @property
    def policy_code(self) -> list[str]:
        """The hash of a policy's file where it is none of this package: an edited rule never meets old results."""
        code = None if self.policy is None else source_hash(type(self.policy))
        return [] if code is None else [code]

    @property
    def capacity_factor(self) -> float:
        """By which its excess load is counted: the policy's own, 1 where it has none."""
        factor = self.params.get("capacity_factor")
        return factor if isinstance(factor, float) else 1.0

    @property
    def label(self) -> str:
        if self.replication is not None:
            spare, solve_us = self.replication.spare_per_rank, self.replication.solve_us
            solving = "" if solve_us is None else f" ({solve_us:g} us to solve)"
            balancer = f" + LP{solving}" if self.replication.balancer == "lp" else ""
            return f"EPLB{balancer}, {spare} spare per rank"
        references = {NOISE: "native again", CEILING: "native, balanced scores"}
        return self.policy.label if self.policy else references.get(self.role, self.name)

    def describe(self, comparison_id: str) -> dict[str, Any]:
        return {
            "comparison_id": comparison_id,
            "policy": self.name,
            "policy_params": self.params,
            "label": self.label,
            "role": self.role,
            **({"policy_code": self.policy_code[0]} if self.policy_code else {}),
            "looks_past_top_k": self.policy is not None and self.policy.looks_past_top_k,
        }


def cases_of(comparison_id: str, specs: Iterable[CaseSpec]) -> list[CaseSpec]:
    """The same cases with their ids: hashes of the comparison and of all that makes a case."""
    return [
        replace(one, case_id=stable_hash([comparison_id, one.role, one.name, one.params, *one.policy_code]))
        for one in specs
    ]


@dataclass(frozen=True, eq=False)
class Comparison:
    """One experiment, at one point of its sweep, on one backend: cases that see the same batches.

    Attributes:
        parts: what computes the experts and what permutes; nothing does in ``routing``.
        slots: where experts stand, but for cases that replicate them; real ranks hold them contiguously.
        links: what stands between virtual ranks; None on real ones.
        device: what stands for each virtual rank; None = the device that is here.
        on_gpu: layers run on a GPU, whose libraries take memory too.
    """

    subject: LayerSubject
    backend: str
    parts: Parts
    slots: ExpertPlacement
    links: Links | None = None
    device: Device | None = None
    on_gpu: bool = False

    @classmethod
    def of(cls, experiment: Experiment, backend: str, world_size: int | None = None, *, on_cpu: bool) -> Comparison:
        """Check that the experiment fits its subject and backend, and open its workloads; no batch is made.

        Args:
            backend: ``virtual`` is ``modelled`` where the config names a device (``emulate.device``).
            world_size: real ranks. Other backends have ``layer.ep_size`` ranks, or ``default_ep_size``.

        Raises:
            ValueError: naming the key whose value does not fit.
        """
        links, device, num_experts = None, None, experiment.model.spec().num_experts
        if backend == ROUTING and experiment.scope != "layer":
            raise UserError(f"scope: expected layer for this command, got {experiment.scope}")
        if backend in (RANKS, ROUTING):
            checks.check_context(experiment)
        if backend != RANKS:
            world_size = experiment.layer.ep_size or default_ep_size(num_experts)
        if backend in (VIRTUAL, MODELLED):
            checks.check_emulated(experiment)
            links, device = _load_models(experiment)
            backend = VIRTUAL if device is None else MODELLED
        assert world_size is not None
        ep_size = ep_size_on(experiment, world_size)
        checks.check_ranks(experiment, world_size, ep_size)
        if backend in (RANKS, VIRTUAL):
            checks.check_dtype(experiment)
        if links is not None:
            with naming("emulate.links"):
                links = links.for_layer(experiment.model.spec(), ep_size, experiment.layer.dtype)
        if device is not None:
            with naming("emulate.device"):
                device = device.for_layer(experiment.model.spec(), ep_size, experiment.layer.dtype)
        if backend != ROUTING:
            checks.check_baseline(experiment, ep_size)
        parts = _parts(experiment, backend, on_cpu, device)
        subject = SUBJECTS[experiment.scope].of(experiment, world_size)
        checks.check_layers(experiment, subject.num_places)
        one = cls(subject, backend, parts, ExpertPlacement.contiguous(num_experts, ep_size), links, device, not on_cpu)
        one.describe_kernels("cpu" if on_cpu or backend == ROUTING else "cuda")  # Finds those that cannot run.
        if backend == RANKS:
            return one
        checks.check_placed(experiment, one.slots)
        with naming("emulate.replication"):
            for wanted in experiment.emulate.replication:
                one.replicate(wanted, np.ones(num_experts))
        if links is None:
            return one
        with naming("emulate.links, layer.ep_size"):
            links.all_gather_us(0, ep_size)
        return one

    @property
    def mode(self) -> str:
        """Of its rows: one of ``schema.MODES``."""
        return {RANKS: "run", ROUTING: "route"}.get(self.backend, "emulated")

    @property
    def experiment(self) -> Experiment:
        return self.subject.experiment

    @property
    def workload(self) -> Workload:
        """The first layer's."""
        return self.subject.workload

    @property
    def model(self) -> ModelSpec:
        return self.subject.model

    @property
    def ep_size(self) -> int:
        return self.subject.ep_size

    @property
    def layer(self) -> int | None:
        """Which layer of a recording; None where scores are synthetic, or a whole model's."""
        recorded = self.subject.name == "layer" and isinstance(self.workload, RecordedWorkload)
        return self.workload.layer if recorded else None

    @property
    def exchange(self) -> Exchange:
        """How rows travel between virtual ranks."""
        experiment, model = self.experiment, self.model
        sizes = model.hidden_size, model.top_k, PRECISIONS[experiment.layer.dtype]
        return Exchange(*sizes, experiment.emulate.transport, experiment.emulate.dispatch_dtype)

    # ---- cases and ids -----------------------------------------------------------------------------------------------

    @cached_property
    def cases(self) -> list[CaseSpec]:
        """The baseline, its repetition for the noise floor, all policies, replications, and the ceiling.

        Routing needs neither noise nor ceiling, and ``topk`` only where it is told of padding: else it is the baseline.
        """
        config, asked = self.experiment.workload, self.experiment.emulate.replication
        baseline, noise = CaseSpec("", BASELINE, "native", None), CaseSpec("", NOISE, "native", None)
        replicated = [CaseSpec("", REPLICATION, "eplb", None, one) for one in asked if self.backend != RANKS]
        made = self.experiment.make_policies()
        policies = [CaseSpec("", POLICY, one.name, one, masks_padding=config.mask_padding) for one in made]
        if self.backend == ROUTING:
            masks = config.mask_padding and config.padding_per_rank > 0
            specs = [baseline, *(one for one in policies if masks or one.policy != NATIVE), *replicated]
        else:
            specs = [baseline, noise, *policies, *replicated, CaseSpec("", CEILING, "native_balanced", None)]
        return cases_of(self.comparison_id, specs)

    @cached_property
    def definition(self) -> dict[str, Any]:
        """All that decides what is measured, and nothing of where: equal on any machine; JSON-ready."""
        experiment, layer = self.experiment, self.experiment.layer
        found = {
            "subject": self.subject.name,
            "backend": self.backend,
            "model": self.model.model_dump(mode="json"),
            "workload": self._workload_definition(),
            **self.subject.definition,
        }
        if self.backend == ROUTING:
            return {**found, "layer": {"ep_size": self.ep_size, "seed": layer.seed}}
        found |= {
            "layer": {**layer.model_dump(mode="json", exclude_defaults=True), "ep_size": self.ep_size},
            "measure": experiment.measure.definition,
            "world_size": self.subject.world_size,
        }
        if self.links is None:
            return found
        return {
            **found,
            "links": self.links.model_dump(mode="json"),
            "device": self.device and self.device.model_dump(mode="json"),
            **experiment.emulate.sent,
        }

    def _workload_definition(self) -> dict[str, Any]:
        """All that decides what the batches are."""
        config = self.experiment.workload
        workload = config.model_dump(mode="json", exclude_defaults=True) | {"kind": config.kind}
        if isinstance(config, SyntheticConfig):
            # What a skew's name or a file of counts stands for may change; what is measured then does too.
            targets = config.targets(self.experiment.model.preset, self.ep_size)
            workload |= {key: value for key, value in targets.items() if value is not None}
            workload = {key: value for key, value in workload.items() if key not in ("skew_from", "skew_layer")}
        if isinstance(self.workload, RecordedWorkload):
            traces = zip(self.workload.sources, self.workload.traces, strict=True)
            workload["trace"] = [{"trace": trace.sha256(), "share": source.share} for source, trace in traces]
        return {**workload, "num_tokens": self.subject.num_tokens, "tokens_per_rank": None}

    @cached_property
    def comparison_id(self) -> str:
        return stable_hash(self.definition)

    def alike_but_for(self, *keys: str) -> str:
        """Equal for comparisons that differ in these keys of their workload only."""
        workload = {key: value for key, value in self.definition["workload"].items() if key not in keys}
        return stable_hash({**self.definition, "workload": workload})

    # ---- found to work -----------------------------------------------------------------------------------------------

    def try_out(self) -> None:
        """Make a batch and route two tokens by every policy: finds what only then can be seen not to fit.

        Raises:
            ValueError: naming the key, or the policy and its field.
        """
        experiment, subject = self.experiment, self.subject
        if experiment.workload.padding_per_rank:
            checks.check_padding(experiment.workload.padding_per_rank, subject.rank_tokens)
        # Finds skews that cannot be had; a batch of all ranks may not fit into memory.
        num_ranks = self.subject.world_size if self.links is None else self.ep_size
        self.workload.rank_batch(0, 0, num_ranks, experiment.workload.rank_shares)
        if self.parts.dispatcher == "allgather" and self.ep_size > 1:
            checks.check_gathering(subject.rank_tokens)
        scores_TE = torch.rand(2, self.model.num_experts, generator=torch.Generator().manual_seed(0))
        text_T = torch.zeros(2, dtype=torch.int64)
        context = replace(subject.context(0, text_T, None), generator=torch.Generator())
        for policy in experiment.make_policies():
            try:
                check_routing(compiled(policy, "cpu").route(scores_TE, context), scores_TE)
            except ValueError as problem:
                hint = "; workload.image_share assumes images" if "modality_T" in str(problem) else ""
                raise UserError(f"policies: {policy.name}: {problem}{hint}") from None

    def kernel_of(self, case: CaseSpec, device_type: str) -> str | None:
        """What routes by a case's policy for scores on a "cpu" or "cuda" device; None where Megatron-Core routes.

        Raises:
            ValueError: ``layer.kernel`` asks for what cannot run this policy here.
        """
        if case.policy is None or self._drops_itself(case):
            return None
        with naming("layer.kernel"):
            twin = compiled(case.policy, device_type, self.experiment.layer.kernel)
            return twin.runs(self.subject.fullest_tokens, self.model.num_experts)

    def _drops_itself(self, case: CaseSpec) -> bool:
        """Whether Megatron-Core's own router drops in the layer that runs (``layer.router``)."""
        masked = self.experiment.workload.padding_per_rank > 0 and case.masks_padding
        runs = self.backend in (RANKS, VIRTUAL) and not masked and self.experiment.layer.kernel == AUTO
        return runs and isinstance(case.policy, MegatronDrop)

    def describe_kernels(self, device_type: str) -> dict[str, str]:
        """What was asked for, all that ran, and why on a GPU Triton did not where it was left open."""
        ran, asked = [self.kernel_of(case, device_type) for case in self.cases], self.experiment.layer.kernel
        why = triton_lacks() if device_type == "cuda" and asked == AUTO else ""
        described = {"requested": asked, "ran": ", ".join(one for one in KERNELS if one in ran)}
        return {**described, "why": why} if why else described

    # ---- words -------------------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        return words.title(self)

    def describe_case(self, case: CaseSpec) -> dict[str, Any]:
        """What ``run.json`` says of a case."""
        return {**case.describe(self.comparison_id), "subject": self.subject.name, "backend": self.backend}

    def describe_workload(self) -> dict[str, Any]:
        """See ``words.describe_workload``."""
        return words.describe_workload(self.experiment, self.workload, self.subject.rank_tokens, self.ep_size)

    def describe_device(self) -> str:
        """What stands for each rank, where that is modelled."""
        assert self.device is not None
        whole, num_tokens = self.subject.name == "model", self.subject.num_tokens
        return self.device.describe(whole=whole, num_tokens=num_tokens)

    # ---- how much ----------------------------------------------------------------------------------------------------

    def num_iterations(self, cases: Sequence[CaseSpec] | None = None) -> int:
        """Runs of ``cases`` (None = all) in one launch, checks included: of one real rank, or of all virtual ones.

        A real rank's case is run once to be looked at and once more to be checked after it was timed; where it is kept
        as CUDA graphs it is checked twice, replayed. Breakdowns are warmed up once. Of a model on virtual ranks routing
        the layers ahead counts too.
        """
        num_cases, measure = len(self.cases if cases is None else cases), self.experiment.measure
        num_batches, num_layers = self.workload.num_batches, len(self.subject.workloads)
        if self.backend == ROUTING:
            return num_batches * num_cases
        rounds = 1 + measure.warmup + measure.iterations
        if self.links is None:
            checked = 3 if self.parts.cuda_graph else 1
            breakdowns = measure.breakdown_iterations + bool(measure.breakdown_iterations)
            return ((rounds + breakdowns) * num_batches + checked) * num_cases
        routed = num_layers * num_batches if self.subject.name == "model" else 0
        if self.device is not None:
            return num_batches * self.ep_size * num_cases + routed
        return (rounds * num_batches * self.ep_size + num_layers) * num_cases + routed

    @property
    def need(self) -> Need:
        """What a rank holds of what is built here, roughly."""
        return need_of(self.experiment, self.subject.world_size, self.ep_size)

    @property
    def in_chunks(self) -> bool:
        """Whether virtual ranks run this in as many chunks of tokens as memory asks for."""
        return self.backend == VIRTUAL and self.subject.name == "layer"

    @property
    def bytes_per_row(self) -> int:
        """Memory that a (token, expert) pair takes while a rank computes it: permuted twice, and inside the FFN."""
        return layer_rows_values(self.model, 1) * VALUE_BYTES[self.experiment.layer.dtype]

    @cached_property
    def fit(self) -> Fit | None:
        """Whether the model, served on as many ranks, fits what stands for each; None on real ranks and CPUs."""
        if self.device is not None:
            return fit_on(self.experiment, self.ep_size, self.device.name, self.device.memory_gb * 1e9)
        if self.backend != VIRTUAL or not self.on_gpu:
            return None
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        return fit_on(self.experiment, self.ep_size, gpu.name, gpu.total_memory)

    # ---- replication -------------------------------------------------------------------------------------------------

    def replicate(self, wanted: ReplicationConfig, load_E: NDArray[np.float64]) -> Replication:
        """Place replicas for a load; see ``placement.replicate``."""
        return replicate(
            load_E,
            num_slots=self.model.num_experts + wanted.spare_per_rank * self.ep_size,
            num_ranks=self.ep_size,
            num_nodes=wanted.num_nodes,
            num_groups=self.model.num_groups or 1,
        )

    def extra_bytes_per_rank(self, case: CaseSpec) -> float | None:
        """Memory that a case's spare slots take on every rank, in all layers of the model; None for other cases."""
        if case.replication is None:
            return None
        replicas = self.replicate(case.replication, np.ones(self.model.num_experts))
        return replicas.extra_bytes_per_rank(self.model, PRECISIONS[self.experiment.layer.dtype].weight_bytes)


@dataclass(frozen=True, eq=False)
class Plan(Sequence[Comparison]):
    """What a config asks of one backend: a comparison for each point of its sweep, in the sweep's order.

    Attributes:
        overrides: of the config's keys (``--set``).
    """

    config: Path
    overrides: tuple[str, ...]
    comparisons: tuple[Comparison, ...]

    def __len__(self) -> int:
        return len(self.comparisons)

    def __getitem__(self, index: Any) -> Any:
        return self.comparisons[index]

    def find_case(self, wanted: str) -> tuple[Comparison, CaseSpec]:
        """The one case whose id, label or policy name is ``wanted``.

        Raises:
            ValueError: none or several are; the message lists them.
        """
        cases = [(comparison, case) for comparison in self.comparisons for case in comparison.cases]
        keys = ("case_id", "label", "name")
        matches = ([pair for pair in cases if getattr(pair[1], key) == wanted] for key in keys)
        found = next(filter(None, matches), [])
        if len(found) == 1:
            return found[0]
        listed = "; ".join(f"{case.case_id} ({case.label}, {one.title})" for one, case in found or cases)
        expected = "one" if found else "a case: its id, label or policy"
        raise UserError(f"--profile {wanted}: expected {expected} of {listed}")


def plan(
    config: Path,
    overrides: Iterable[str],
    backend: str,
    world_size: int | None = None,
    *,
    on_cpu: bool = False,
    point: int | None = None,
    before: Callable[[Experiment], object] = lambda experiment: None,
    try_out: bool = True,
) -> Plan:
    """Plan a config on a backend: every comparison is found to fit, and its workload found to be there.

    Args:
        backend, world_size: see ``Comparison.of``.
        on_cpu: apply the config's ``on_cpu`` section, wherever a layer runs.
        point: only this point of the sweep, from 0.
        before: called ahead of each comparison, which may take long to make: batches are solved for, recordings read.
        try_out: make a batch of each (``Comparison.try_out``). Else nothing is drawn or solved for.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    overrides = tuple(overrides)
    experiments: Sequence[Experiment] = load_experiments(config, overrides, on_cpu=on_cpu and backend == RANKS)
    if on_cpu and backend in (VIRTUAL, MODELLED) and any(one.emulate.device == MEASURED for one in experiments):
        experiments = load_experiments(config, overrides, on_cpu=True)
    if point is not None:
        if not 0 <= point < len(experiments):
            last = len(experiments) - 1
            raise UserError(f"--point: expected 0 to {last} (the points of {config}'s sweep), got {point}")
        experiments = [experiments[point]]
    how: Any = {"overrides": overrides, "on_cpu": on_cpu, "before": before, "try_out": try_out}
    return plan_experiments(config, experiments, backend, world_size, **how)


def plan_experiments(
    config: Path,
    experiments: Sequence[Experiment],
    backend: str,
    world_size: int | None = None,
    *,
    overrides: tuple[str, ...] = (),
    on_cpu: bool = False,
    before: Callable[[Experiment], object] = lambda experiment: None,
    try_out: bool = True,
) -> Plan:
    """Plan experiments that are read already; ``config`` names their file in errors. See ``plan``."""
    comparisons = []
    shown = progress_bar(len(experiments), "point", shown=backend != RANKS, delay=SILENT_S)
    with naming(str(config)), shown as bar:
        for experiment in experiments:
            bar.set_description(f"planning {config.name}")
            checks.check_size(experiment, world_size or 1)
            before(experiment)
            comparisons.append(Comparison.of(experiment, backend, world_size, on_cpu=on_cpu))
            if try_out:
                comparisons[-1].try_out()
            bar.update()
    _check_distinct(config, comparisons)
    return Plan(config, overrides, tuple(comparisons))


def _check_distinct(config: Path, comparisons: Sequence[Comparison]) -> None:
    """Refuse a sweep whose points are one and the same comparison here: they would overwrite each other.

    Such is a repeated value, and a key that this backend does not read.

    Raises:
        ConfigError: one line naming the file, the swept key and its values.
    """
    first: dict[str, Comparison] = {}
    for one in comparisons:
        other = first.setdefault(one.comparison_id, one)
        if other is one:
            continue
        mine, theirs = dict(one.experiment.point), dict(other.experiment.point)
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
        return Parts(experts="none", permute="none", kernel=asked.kernel)
    if modelled is not None:
        experts, why = modelled.experts_ran
        return Parts(experts=experts, permute="indexed", kernel=asked.kernel, experts_why=why)
    how = asked.experts, asked.permute, asked.kernel, asked.dispatcher
    return Parts.choose(*how, cuda_graph=asked.cuda_graph, on_cpu=on_cpu)
