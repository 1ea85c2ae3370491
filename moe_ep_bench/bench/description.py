"""What ``run.json`` says of comparisons and cases, in the types by which it is read (``facts``).

Needs no torch but on ranks, for which a dry run does not wait.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

from moe_ep_bench.bench import checks
from moe_ep_bench.bench.checks import MODELLED, VIRTUAL
from moe_ep_bench.bench.point import Point
from moe_ep_bench.config import Experiment, SyntheticConfig
from moe_ep_bench.cost_model.devices import FP8, PRECISIONS
from moe_ep_bench.cost_model.phases import PassWork, outside_moe_us
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.facts import Component, JsonRecord, Rest, RoutedFacts, Subject, TimedFacts
from moe_ep_bench.facts.words import describe_device
from moe_ep_bench.files import stable_hash
from moe_ep_bench.kernels import KERNELS, triton_lacks
from moe_ep_bench.machine import provenance
from moe_ep_bench.models.memory import Fit, Served
from moe_ep_bench.policies.lazy import torch
from moe_ep_bench.runtime.torchrun import asked_arguments
from moe_ep_bench.schema import SCHEMA_VERSION
from moe_ep_bench.workload.synthetic import SyntheticWorkload

if TYPE_CHECKING:
    from moe_ep_bench.runtime.ranks import Ranks


# ---- run.json --------------------------------------------------------------------------------------------------------


def run_json(
    run_id: str,
    comparisons: Sequence[Any],
    environment: Mapping[str, Any],
    facts_of: Callable[[Any], JsonRecord],
) -> dict[str, Any]:
    """What ``run.json`` says of comparisons of ``plan``, or of ``quality``.

    JSON's keys are sorted, and ids say nothing: ``order`` is the config's.
    """
    experiments = {id(comparison.experiment): comparison.experiment for comparison in comparisons}
    cases = [(comparison, *numbered) for comparison in comparisons for numbered in enumerate(comparison.cases)]
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "mode": comparisons[0].mode,
        "scope": comparisons[0].scope,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": [experiment.model_dump(mode="json") for experiment in experiments.values()],
        **provenance.asked(asked_arguments()),
        "environment": dict(environment),
        "hashes": {
            "code": provenance.code_hash(),
            "config": stable_hash([comparison.definition for comparison in comparisons]),
        },
        "comparisons": {
            comparison.comparison_id: {**facts_of(comparison).model_dump(mode="json"), "order": order}
            for order, comparison in enumerate(comparisons)
        },
        "cases": {
            case.case_id: {**comparison.case_facts(case).model_dump(mode="json"), "order": order}
            for comparison, order, case in cases
        },
    }


def describe_timed_run(ranks: Ranks, run_id: str, comparisons: Sequence[Point]) -> dict[str, Any]:
    """``run.json`` of real or virtual ranks, as rank 0 writes it; every rank calls this, and solves for its batches.

    Raises:
        ValueError: a batch cannot meet its targets; one line.
    """
    for comparison in comparisons:
        for workload in comparison.workloads.values():
            with naming(comparison.title):
                for index in range(workload.num_batches):
                    workload.solve(index)
    of_ranks = ranks.all_gather(provenance.describe_rank(ranks.device))
    # Of one rank: it asks the driver, which answers all ranks of a node alike and slowly.
    described = provenance.describe(ranks.device) if ranks.is_first else {}
    return run_json(run_id, comparisons, {**described, "ranks": of_ranks}, partial(timed_facts, ranks=ranks))


# ---- facts -----------------------------------------------------------------------------------------------------------


def routed_facts(comparison: Point) -> RoutedFacts:
    facts = {"group": comparison.routed_alike, "layer": comparison.layer, "scale": None, "world_size": None}
    return RoutedFacts(**{**_shared(comparison), **facts})


def timed_facts(comparison: Point, ranks: Ranks) -> TimedFacts:
    model, experiment, layer_backend = comparison.model, comparison.experiment, comparison.layer_backend
    facts = {
        "num_replicas": comparison.world_size // comparison.ep_size,
        "dtype": experiment.layer.dtype,
        "backend": ranks.backend,
        "sharing": ranks.sharing,
        "experts": Component(
            requested=experiment.layer.experts, ran=layer_backend.experts, why=layer_backend.experts_why
        ),
        "permute": Component(requested=experiment.layer.permute, ran=layer_backend.permute),
        "oversubscribed": ranks.oversubscribed,
        "random_weights": True,
        "departures": list(model.departures),
        "point": point_of(experiment),
    }
    if comparison.links is not None:
        facts |= {
            **links_facts(comparison),
            "fit": fit_of(comparison),
            "copies": experiment.emulate.copies,
            "overlap": comparison.overlap,
            "dispatch_dtype": experiment.layer.dispatch_dtype,
        }
    if comparison.backend == MODELLED:
        facts |= device_facts(comparison)
        if comparison.scope == "layer":
            with contextlib.suppress(UserError):  # Not every model states the rest of itself.
                facts["rest"] = rest_of(comparison)
    return TimedFacts(**_shared(comparison), **facts)


def _shared(comparison: Point) -> dict[str, Any]:
    """Facts of any comparison (``facts.ComparisonFacts``)."""
    tokens_R = comparison.tokens_R
    return {
        **{name: getattr(comparison.subject, name) for name in Subject.model_fields},
        "fullest_tokens": None if tokens_R is None else tokens_R.max() / tokens_R.mean(),
        "num_batches": comparison.workload.num_batches,
        "sample_tokens": comparison.workload.num_tokens if comparison.is_sampled else None,
        "sample_ranks": comparison.num_sources if comparison.num_sources < comparison.world_size else None,
        "kernel": kernels_of(comparison),
        **_drawn(comparison),
    }


def _drawn(comparison: Point) -> dict[str, Any]:
    """What is known of synthetic batches once they are drawn; of a model the mean of its layers, and all checksums."""
    workloads = [one for one in comparison.workloads.values() if isinstance(one, SyntheticWorkload)]
    if not workloads:
        return {}
    overlaps = [one.load_overlap for one in workloads if one.load_overlap is not None]
    checksums = [one.routing_checksum(comparison.ep_size) for one in workloads]
    return {
        "load_overlap": sum(overlaps) / len(overlaps) if len(overlaps) == len(workloads) else None,
        "routing_checksum": checksums[0] if len(checksums) == 1 or None in checksums else stable_hash(checksums),
    }


def point_of(experiment: Experiment) -> dict[str, Any]:
    """Swept keys with their values at this point of the sweep, as ``run.json`` has them."""
    described = experiment.model_dump(mode="json")
    return {key: reduce(lambda section, name: section[name], key.split("."), described) for key, _ in experiment.point}


def kernels_of(comparison: Point) -> Component:
    """All that routed, and why on a GPU Triton did not."""
    ran = {comparison.kernel_of(case) for case in comparison.cases}
    why = triton_lacks() if comparison.on_gpu else ""
    return Component(requested="auto", ran=", ".join(name for name in KERNELS if name in ran), why=why)


def links_facts(comparison: Point) -> dict[str, Any]:
    """The model of what moves between virtual ranks, by field of ``TimedFacts``."""
    links = comparison.links
    assert links is not None
    scale = comparison.experiment.emulate.bandwidth_scale
    return {"links": links.facts(scale), "exchange": links.exchange and links.exchange.facts}


def device_facts(comparison: Point) -> dict[str, Any]:
    """The model of what stands for each rank, by field of ``TimedFacts``."""
    device = comparison.device
    assert device is not None
    return {"device": device.facts, "expert_rows": device.experts and device.experts.facts}


def device_sentence(comparison: Point) -> str:
    """The same for a dry run."""
    described = device_facts(comparison)
    whole = comparison.scope == "model"
    return describe_device(*described.values(), whole=whole, num_tokens=comparison.num_tokens)


def rest_of(comparison: Point) -> Rest:
    """What a modelled layer comes to in a pass of its whole model: attention, dense layers, norms, the output layer.

    They are modelled as in whole models (``cost_model.phases``), of the slowest rank, in batch 0: its prompts, or
    one step of its requests with ``whole.context_length`` tokens each in the cache.

    Raises:
        ValueError: the model or the device does not state what a whole model needs; one line.
    """
    experiment, model, device = comparison.experiment, comparison.model, comparison.device
    assert device is not None
    checks.check_whole_model(model, experiment)
    if experiment.workload.is_step and not experiment.whole.context_length:
        raise UserError("expected the tokens in the cache of a step's requests, got 0", "whole.context_length")
    passes = [PassWork(lengths, experiment.whole.context_length) for lengths in set(comparison.lengths_of_ranks(0))]
    slowest_us = max(outside_moe_us(device, model, work, dtype=experiment.layer.planned_dtype) for work in passes)
    lengths, num_layers = [length for work in passes for length in work.lengths], model.num_moe_layers
    return Rest(
        us_per_moe_layer=slowest_us / num_layers,
        num_moe_layers=num_layers,
        context_length=experiment.whole.context_length,
        prompt_lengths=None if experiment.whole.context_length else (min(lengths), max(lengths)),
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


def served(experiment: Experiment) -> Served:
    """The config's model as it is served."""
    model, workload, dtype = experiment.model.spec(), experiment.workload, experiment.layer.planned_dtype
    precision = PRECISIONS[dtype]
    return Served(
        model,
        dtype,
        precision.hidden_bytes,
        precision.weight_bytes,
        _served_tokens(workload.tokens_of_ranks, workload.total_tokens),
        workload.request_tokens,
        experiment.whole.context_length,
        partial(_rank_load, experiment, model.num_experts),
        precision.weight_bytes if model.quantized == "all_linear" and experiment.layer.dtype in FP8 else None,
    )


def _served_tokens(asked: tuple[int, ...] | float | None, total: Callable[[int], int]) -> Callable[[int], int]:
    """Tokens of a batch by the number of ranks, as if every rank had as many as the fullest."""
    if isinstance(asked, tuple):
        return lambda num_ranks: max(asked) * num_ranks
    return lambda num_ranks: round(total(num_ranks) * min(asked or 1, num_ranks))


def _rank_load(experiment: Experiment, num_experts: int, ep_size: int) -> float | None:
    """The fullest rank's load over the mean: as it is asked for, or the busiest expert's, eased by the other L - 1.

    Loads of a rank's L experts, in no order, deviate from their mean by 1 / sqrt(L) of what an expert's does.
    """
    config = experiment.workload
    if not isinstance(config, SyntheticConfig):
        return None
    targets = config.targets(experiment.model, ep_size)
    if targets["rank_load"] is not None:
        return targets["rank_load"]["load"]
    if config.peak_load == 1:  # No target: every expert is as popular.
        return 1.0
    peak_load = targets["peak_load"] or targets["batch_peak_load"]
    return None if peak_load is None else 1 + (peak_load - 1) / math.sqrt(num_experts / ep_size)


def fit_of(comparison: Point) -> Fit | None:
    """Whether the model, served on as many ranks, fits what stands for each; None on real ranks and CPUs."""
    model, device = served(comparison.experiment), comparison.device
    if device is not None:
        return model.fit(comparison.ep_size, device.name, device.memory_gb * 1e9)
    if comparison.backend != VIRTUAL or not comparison.on_gpu:
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return model.fit(comparison.ep_size, gpu.name, gpu.total_memory)


def held_here(comparison: Point) -> dict[str, int]:
    """Bytes on a rank, roughly, of the layer or the layers that are built here, by the names of ``Fit``.

    Transformer Engine keeps experts' weights in FP8 beside those in bfloat16, which a server would drop.
    """
    built = 0 if comparison.scope == "layer" else comparison.experiment.whole.num_layers
    model = served(comparison.experiment)
    if comparison.layer_backend.fp8:
        rounded = PRECISIONS["fp8_block"]
        model = model._replace(
            expert_value_bytes=model.value_bytes + rounded.weight_bytes,
            linear_value_bytes=None,
            rounded_value_bytes=rounded.sent_bytes,
        )
    return model.footprint(comparison.world_size, comparison.ep_size, built)
