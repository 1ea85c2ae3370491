"""Plan a measurement, or print the plan: a ``Point`` for every point of a config's sweep, before anything runs.

Each is found to fit its backend, and its workloads are opened. A batch of the workload is a batch of the model. Its
sequences are the prompts of a prefill; with ``whole.context_length`` it is the next token of each request. Every MoE
layer of a model has scores of its own: of a recording that layer's, of a synthetic workload the same targets solved for
with another seed. So each layer has its own skew, and its own busiest rank.

Where there is no GPU a plan is printed without waiting for torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_ep_bench.bench import checks
from moe_ep_bench.bench.checks import MODELLED, RANKS, ROUTING, VIRTUAL
from moe_ep_bench.bench.description import device_sentence, fit_of, held_here
from moe_ep_bench.bench.point import Point
from moe_ep_bench.bench.sampling import SCORES, sample_of
from moe_ep_bench.config import MEASURED, EmulateConfig, Experiment, SyntheticConfig
from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.expert_rows import load_device, load_device_of_layer
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.cost_model.tables import PREFIX, load_links_of_layer
from moe_ep_bench.errors import OK, UserError, brief, naming
from moe_ep_bench.facts.words import describe_workload, fit_words
from moe_ep_bench.files import stable_hash
from moe_ep_bench.kernels import form_of
from moe_ep_bench.layer.backend import LayerBackend
from moe_ep_bench.policies import source_hash
from moe_ep_bench.policies.contract import check_routing
from moe_ep_bench.policies.lazy import torch
from moe_ep_bench.presets import validated
from moe_ep_bench.runtime.sharing import STAGED, Sharing
from moe_ep_bench.runtime.torchrun import device_type, num_gpus
from moe_ep_bench.workload.batch import Workload
from moe_ep_bench.workload.motion import Motion
from moe_ep_bench.workload.replay import RecordedWorkload
from moe_ep_bench.workload.synthetic import Matched, SyntheticWorkload
from moe_ep_bench.workload.targets import PATTERNS
from moe_ep_bench.workload.trace import open_trace

# Of so many scores in all a plan solves every batch.
_FEW_SCORES = 2**21

# What modelling takes (``modelling_s``).
_START_S, _RANK_S, _SCORE_S = 3.5, 0.9e-3, 8e-9
# A plan that takes longer says how to take a sample.
_LONG_S = 60.0

Opened = dict[str, Mapping[int | None, Workload]]
"""Workloads that points share, by all that decides their batches."""


def plan(
    config: Path,
    overrides: Iterable[str],
    backend: str,
    world_size: int | None = None,
    *,
    on_cpu: bool | None = None,
    point: int | None = None,
    **how: Any,
) -> list[Point]:
    """Plan a config on a backend: every point is found to fit, and its workload found to be there.

    Args:
        overrides: ``key=value`` (``--set``).
        on_cpu: apply the config's ``on_cpu`` section, wherever a layer runs; None = where this machine has no GPU.
        point: only this point of the sweep, from 0.
        how: as of ``plan_experiments``.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    if on_cpu is None:
        on_cpu = device_type() == "cpu" if backend == RANKS else not num_gpus()
    overrides = tuple(overrides)
    experiments = load_experiments(config, overrides, on_cpu=on_cpu and backend == RANKS)
    is_measured = any(experiment.emulate.device == MEASURED for experiment in experiments)
    if on_cpu and backend == VIRTUAL and is_measured:
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
    try_out: bool = True,
    sharing: Sharing | None = None,
) -> list[Point]:
    """Plan experiments that are read already.

    Args:
        config: names their file in errors.
        backend, world_size, on_cpu, sharing: see ``make_point``.
        try_out: make a batch of each, and route two tokens by its policies. Else nothing is drawn or solved for.

    Raises:
        ValueError: see ``plan``; also where points of a sweep are one and the same here, for they would overwrite each
            other: a value is repeated, or this backend does not read the key.
    """
    planned: dict[str, Point] = {}
    opened: Opened = {}
    for experiment in experiments:
        with naming(str(config)):
            point = make_point(experiment, backend, world_size, on_cpu=on_cpu, sharing=sharing, opened=opened)
            if try_out:
                _try_out(point)
        same = planned.setdefault(point.comparison_id, point)
        if same is not point:
            points = (", ".join(f"{key}={value}" for key, value in of.point) for of in (same.experiment, experiment))
            expected = "points that this command measures differently, got one and the same comparison"
            raise UserError(f"expected {expected} for {' and '.join(points)}", "sweep", where=str(config))
    return list(planned.values())


def make_point(
    experiment: Experiment,
    backend: str,
    world_size: int | None = None,
    *,
    on_cpu: bool,
    sharing: Sharing | None = None,
    opened: Opened | None = None,
) -> Point:
    """Check that an experiment fits a backend, and open its workloads; no batch is made, but small ones are solved.

    Args:
        backend: ``virtual`` is ``modelled`` where the config names a device (``emulate.device``).
        world_size: real ranks. Other backends have ``Experiment.virtual_ranks``.
        sharing: by what real ranks share a device.
        opened: what other points opened; those whose batches are the same share it, and what it has solved.

    Raises:
        ValueError: naming the key whose value does not fit.
    """
    if backend != RANKS:
        world_size = experiment.virtual_ranks
    assert world_size is not None
    is_emulated = backend in (VIRTUAL, MODELLED)
    experiment = _with_dtype(experiment, is_modelled=is_emulated)
    checks.check_experiment(experiment, backend, world_size)
    by_host = "false with --staged, whose collectives pass through the host"
    checks.refuse(sharing == STAGED and experiment.layer.cuda_graph, "layer.cuda_graph", by_host, "true")
    links = device = None
    if is_emulated:
        links, device = _stand_ins(experiment, experiment.layer.ep_size or world_size)
        backend = backend if device is None else MODELLED
    experiment.workload.dealt_tokens(world_size)  # Raises where ranks cannot have theirs.
    drawn, matched = _sampled(experiment, world_size) if is_emulated else (experiment, None)
    workloads = _shared_workloads(drawn, world_size, opened, matched)
    layer_backend = _layer_backend(experiment, backend, links, device, on_cpu=on_cpu)
    on_gpu = not on_cpu and backend != ROUTING
    point = Point(experiment, backend, world_size, workloads, layer_backend, links, device, on_gpu, sharing)
    checks.check_batches(experiment, point.ep_size, point.num_places, point.rank_tokens)
    _solve_few(point)
    return point


def _sampled(experiment: Experiment, world_size: int) -> tuple[Experiment, Matched | None]:
    """The same with batches of as many tokens as are routed (``emulate.sample_tokens``), and what they are matched to.

    Raises:
        ValueError: they are no part of a batch.
    """
    sample, config = experiment.emulate.sample_tokens, experiment.workload
    if sample is None:
        return experiment, None
    sources = experiment.emulate.sample_ranks or world_size
    num_tokens, others = config.total_tokens(world_size), world_size // sources
    parts = f"a divisor of the batch's {num_tokens // others} tokens, at least {sources} (one a rank)"
    if others > 1:
        parts = parts.replace("tokens,", f"tokens on {sources} of {world_size} ranks,")
    checks.refuse(num_tokens % (sample * others) or sample < sources, "emulate.sample_tokens", parts, sample)
    changed = {"num_tokens": sample, "tokens_per_rank": None}
    matched = Matched(num_tokens, sources) if others > 1 else None
    return experiment.model_copy(update={"workload": config.model_copy(update=changed)}), matched


def _stand_ins(experiment: Experiment, ep_size: int) -> tuple[Links, Device | None]:
    """The links between virtual ranks, and the device that stands for each; None = the one that is here.

    Raises:
        ValueError: there are none of that name, or they are of other sizes.
    """
    asked, emulate, model = experiment.layer, experiment.emulate, experiment.model.spec()
    assert emulate.links is not None
    device, dtype = None, asked.planned_dtype
    with naming(keys=["emulate.device"]):  # A layer that runs casts behind the dispatch.
        dtype = "bfloat16" if emulate.device == MEASURED or load_device(emulate.device).casts_late else dtype
    with naming(keys=["emulate.links"]):
        of_layer = model, ep_size, dtype, emulate.exchange_sms, asked.dispatch_dtype
        links = load_links_of_layer(emulate.links, *of_layer, decodes=experiment.decodes)
        links = links.scaled(emulate.bandwidth_scale)
    if emulate.device != MEASURED:
        copies = links.exchange and links.exchange.copies
        with naming(keys=["emulate.device"]):
            device = load_device_of_layer(emulate.device, model, ep_size, asked.planned_dtype, copies)
        if asked.permute != "auto":
            device = device.model_copy(update={"permute": asked.permute})
    with naming(keys=["emulate.links", "layer.ep_size"]):
        links.all_gather_us(0, ep_size)
        if links.exchange is not None:
            own = "pair beside an exchange, which has copies of its own"
            checks.refuse(emulate.copies != "pair", "copies", own, emulate.copies)
            num_ranks = links.exchange.num_ranks
            checks.refuse(num_ranks != ep_size, "exchange.num_ranks", ep_size, num_ranks)
    return links, device


def _layer_backend(
    experiment: Experiment, backend: str, links: Links | None, device: Device | None, *, on_cpu: bool
) -> LayerBackend:
    """What computes the experts and permutes: on a modelled device as its figures have it, whatever is here."""
    if backend == ROUTING:
        return LayerBackend("none")
    if device is None:
        asked = experiment.layer
        how = {"cuda_graph": asked.cuda_graph, "fp8": asked.dtype == "fp8_block"}
        return LayerBackend.choose(asked.experts, asked.permute, **how, on_cpu=on_cpu)
    experts, why = device.experts_ran
    exchange = None if links is None or links.exchange is None else links.exchange.copies
    permute = "none" if exchange == "pair" else {"unfused": "indexed"}.get(device.permute, device.permute)
    return LayerBackend(experts, experts_why=why, permutation=permute)


def _with_dtype(experiment: Experiment, *, is_modelled: bool) -> Experiment:
    """The same with ``layer.dtype``: where none is asked for the checkpoint's, if a modelled device has figures of it.

    Raises:
        ValueError: there is no such device.
    """
    if experiment.layer.dtype is not None:
        return experiment
    dtype = "bfloat16"
    if is_modelled and experiment.emulate.device != MEASURED:
        checkpoint, name = experiment.model.spec().checkpoint_dtype, experiment.emulate.device
        with naming(keys=["emulate.device"]):
            has_it = name.startswith(PREFIX) or checkpoint in load_device(name).dtypes
        dtype = checkpoint if has_it else dtype
    return experiment.model_copy(update={"layer": experiment.layer.model_copy(update={"dtype": dtype})})


def _solve_few(point: Point) -> None:
    """Solve all batches where they are small, so that noise may miss a target in any of them; quick, and all in numpy.

    Raises:
        ValueError: a batch cannot meet its targets.
    """
    num_batches, num_experts = point.workload.num_batches, point.model.num_experts
    if point.num_tokens * num_experts * num_batches * len(point.workloads) <= _FEW_SCORES:
        for workload in point.workloads.values():
            if isinstance(workload, SyntheticWorkload):
                with naming(section="workload"):
                    for index in range(num_batches):
                        workload.solve(index)


def _try_out(point: Point) -> None:
    """Make a batch and route two tokens by every policy: finds what only then can be seen not to fit.

    Raises:
        ValueError: naming the key, or the policy and its field.
    """
    experiment = point.experiment
    # Finds skews that cannot be had; a batch of all ranks may not fit into memory.
    point.workload.rank_batch(0, int(point.rank_tokens[0].argmin()), point.world_size, point.tokens_R)
    scores_TE = torch.rand(2, point.model.num_experts, generator=torch.Generator().manual_seed(0))
    context = point.context(next(iter(point.workloads)), 0, torch.zeros(2, dtype=torch.int64), None)
    context = replace(context, generator=torch.Generator())
    for policy in experiment.make_policies():
        try:
            check_routing(form_of(policy, "cpu").route(scores_TE, context), scores_TE)
        except ValueError as problem:
            hint = "; workload.image_share assumes images" if getattr(problem, "keys", ()) == ("modality_T",) else ""
            raise UserError(f"{policy.name}: {problem}{hint}", "policies") from None
        except Exception as error:
            if source_hash(type(policy)) is None:  # a fault of this package
                raise
            words = brief(f"{type(error).__name__}: {error}", 200, quoted=False)
            raise UserError(f"{policy.name}: route raised {words}", "policies") from error


# ---- a plan for ranks ------------------------------------------------------------------------------------------------


def plan_hash(points: Sequence[Point]) -> str:
    """Equal where plans measure the same cases."""
    return stable_hash([(point.definition, [case.case_id for case in point.cases]) for point in points])


def plan_text(points: Sequence[Point]) -> str:
    """A plan as JSON, for the ranks that carry it out: its experiments, and its hash."""
    experiments = [
        {"values": point.experiment.model_dump(exclude_unset=True), "point": point.experiment.point} for point in points
    ]
    facts = {"hash": plan_hash(points), "world_size": points[0].world_size, "sharing": points[0].sharing}
    return json.dumps({**facts, "experiments": experiments}, default=str)


def read_plan(text: str, world_size: int) -> list[Point]:
    """The points of ``plan_text``, on this rank; the config is not read again.

    Args:
        world_size: ranks that have met; others than were planned where nodes have unlike numbers of them.

    Raises:
        ValueError: a workload cannot be opened here, or the plan comes to other cases than it did.
    """
    document = json.loads(text)
    experiments = []
    for planned in document["experiments"]:
        experiment = validated(Experiment, planned["values"], "the plan")
        experiment._point = tuple(map(tuple, planned["point"]))
        experiments.append(experiment)
    on_cpu, how = device_type() == "cpu", {"sharing": document["sharing"]}
    points = plan_experiments(Path("the plan"), experiments, RANKS, world_size, on_cpu=on_cpu, try_out=False, **how)
    if (found := plan_hash(points)) != document["hash"] and world_size == document["world_size"]:
        raise UserError(f"the plan: expected the cases of {document['hash']}, as it was launched; got {found}")
    return points


# ---- a plan in words -------------------------------------------------------------------------------------------------


def dry_run(
    config: Path, overrides: Sequence[str], backend: str, world_size: int | None = None, point: int | None = None
) -> int:
    """Print the cases of every point, and what its runs would take; run nothing, touch no device.

    Args:
        backend: ``ranks``, ``virtual`` or ``routing``.
        world_size: real ranks.
    """
    points = plan(config, overrides, backend, world_size, point=point, try_out=False)
    for one in points:
        print("\n  ".join(_lines(one)))
    return OK


def modelling_s(points: Iterable[Point]) -> float:
    """CPU seconds that an answer takes, about: to start and to say it, and for each case what a rank and a score take.

    Fitted to three questions on two busy cores. Where ranks share tokens, policies that know their rank route them for
    each.
    """
    routed_s = 0.0
    for point in points:
        scores = point.workload.num_batches * point.workload.num_tokens * point.model.num_experts
        of_all = sum(case.policy is not None and case.policy.knows_rank for case in point.cases)
        routed = len(point.cases) + of_all * (point.world_size // point.num_sources - 1)
        routed_s += routed * (_RANK_S * point.routing_work + _SCORE_S * scores * len(point.workloads))
    return _START_S + routed_s


def _lines(point: Point) -> Iterator[str]:
    """The title, the cases, and what they take."""
    backend = point.backend
    batches = f"{point.workload.num_batches} batches of {describe_workload(point.subject)}"
    yield f"{point.title} on {point.world_size} rank(s), {batches}"
    for case in point.cases:
        kernel = point.kernel_of(case) if backend == RANKS else None
        yield f"{case.case_id}  {case.role:11}  {case.label}" + (f", routed by {kernel}" if kernel else "")
    if backend == MODELLED:
        fit = fit_of(point)
        yield "; ".join([*filter(None, [fit and fit_words(fit)]), f"{device_sentence(point)}: nothing is run"])
        yield f"about {(seconds := modelling_s([point])):,.0f} CPU seconds"
        sample = {} if point.is_sampled else sample_of([point.experiment], SCORES)
        if seconds > _LONG_S and sample:
            keys = " ".join(f"--set emulate.{key}={value}" for key, value in sample.items())
            yield f"less on a sample of the tokens, as `advise` takes one: {keys}"
    elif backend != ROUTING:
        sizes = {name: size / 2**30 for name, size in held_here(point).items()}
        weights, rest = sizes["expert_bytes"] + sizes["other_weight_bytes"], sizes["cache_bytes"] + sizes["row_bytes"]
        number = point.iterations_per_case * len(point.cases) * point.experiment.measure.launches
        yield f"about {weights:.1f} GiB of weights and {rest:.1f} GiB of activations a rank; {number:,} iterations"


# ---- workloads -------------------------------------------------------------------------------------------------------


def _shared_workloads(
    experiment: Experiment, world_size: int, opened: Opened | None, matched: Matched | None
) -> Mapping[int | None, Workload]:
    """``open_workloads``, or what a point with the same batches opened."""
    shared = {} if opened is None else opened
    own = {name: getattr(experiment, name).model_dump(mode="json") for name in ("model", "workload")}
    sizes = [
        experiment.scope,
        experiment.whole.num_layers,
        experiment.layer.ep_size,
        world_size,
        experiment.num_history,
        *([matched] if matched else []),
    ]
    key = stable_hash([own, sizes])
    if key not in shared:
        shared[key] = open_workloads(experiment, world_size, matched)
    return shared[key]


def open_workloads(
    experiment: Experiment, world_size: int, matched: Matched | None = None
) -> dict[int | None, Workload]:
    """The workload of every MoE layer that is built, by layer; None is the key of a layer that stands alone.

    Layers differ in seed, and under some seeds of a skew independent tokens share more experts than its target: of many
    layers one would often be such, and stand in the way of the model.

    Raises:
        ValueError: one cannot be had; names the key.
    """
    if experiment.scope == "layer":
        return {None: _open(experiment, world_size, matched=matched)}
    model, config = experiment.model.spec(), experiment.workload
    num_built = experiment.whole.num_layers or model.num_layers
    moe_layers = [layer for layer in model.moe_layers if layer < num_built]
    workloads: dict[int | None, Workload] = {}
    for number, layer in enumerate(moe_layers):
        changed: dict[str, Any] = {"layer": number}
        if isinstance(config, SyntheticConfig):
            changed = {"seed": int(np.random.SeedSequence((config.seed, number)).generate_state(1)[0])}
        of_layer = experiment.model_copy(update={"workload": config.model_copy(update=changed)})
        workload = workloads[layer] = _open(of_layer, world_size, or_chance=True)
        if isinstance(workload, RecordedWorkload):
            recorded, needed = workload.traces[0].num_layers, len(moe_layers)
            built = f"the {needed} MoE layers that are built of {model.name}; whole.num_layers builds fewer"
            checks.refuse(recorded < needed, "workload.trace", built, recorded)
    return workloads


def num_by_arrival(experiment: Experiment, most: int) -> int:
    """Batches that recordings have if no token comes twice, those that plans know included; no more than ``most``.

    Raises:
        ValueError: a recording cannot be used; names the key.
    """
    config = experiment.workload.model_copy(update={"order": "shuffled", "num_batches": 1})
    plain = experiment.model_copy(update={"workload": config, "emulate": EmulateConfig()})
    workload = _open(plain, experiment.virtual_ranks)
    assert isinstance(workload, RecordedWorkload)
    return workload.num_by_arrival(most)


def _open(
    experiment: Experiment, world_size: int, *, or_chance: bool = False, matched: Matched | None = None
) -> Workload:
    """``or_chance``, ``matched``: see ``SyntheticWorkload``."""
    config, model = experiment.workload, experiment.model.spec()
    shape: dict[str, Any] = {
        **{name: getattr(model, name) for name in ("num_experts", "top_k", "num_groups", "top_groups")},
        "num_tokens": config.total_tokens(world_size),
        "num_batches": config.num_batches,
        "seed": config.seed,
        "num_history": experiment.num_history,
    }
    if not isinstance(config, SyntheticConfig):
        keys = ("layer", "tail", "topk_share", "arrangement", "tokens_per_request", "order", "mix")
        with naming(keys=["workload.trace"]):
            traces = tuple(map(open_trace, config.trace))
        with naming(section="workload"):
            return RecordedWorkload(traces, **shape, **{key: getattr(config, key) for key in keys})
    with naming(section="workload"):
        shape["sequence_length"] = config.sequence_length
        if config.skew in PATTERNS:
            return SyntheticWorkload(pattern=config.skew, **shape)
        targets = config.targets(experiment.model, experiment.layer.ep_size or world_size)
        load = targets.pop("rank_load")
        rank_load = (load["ep_size"], load["load"]) if load else None
        cuts = tuple(tuple(cut.values()) for cut in targets.pop("cuts", ()))
        motion = Motion(config.motion, config.motion_batches) if config.motion and config.motion_batches else None
        how = {"rank_load": rank_load, "cuts": cuts, "motion": motion, "or_chance": or_chance, "matched": matched}
        return SyntheticWorkload(**shape, **targets, **how)
