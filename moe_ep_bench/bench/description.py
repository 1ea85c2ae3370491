"""Describe a run in ``run.json``: its comparisons and cases, their workloads, and where they are measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ep_bench.bench import checks, words
from moe_ep_bench.bench.comparison import MODELLED, ROUTING, Comparison
from moe_ep_bench.bench.words import fit_of
from moe_ep_bench.config import Experiment
from moe_ep_bench.cost_model.devices import PRECISIONS
from moe_ep_bench.cost_model.whole_model import PassWork, outside_moe_us
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.files import stable_hash
from moe_ep_bench.kernels.dispatch import AUTO, KERNELS
from moe_ep_bench.kernels.toolchain import triton_lacks
from moe_ep_bench.machine import provenance
from moe_ep_bench.runtime.torchrun import asked_arguments
from moe_ep_bench.schema import SCHEMA_VERSION
from moe_ep_bench.workload.batch import Workload
from moe_ep_bench.workload.synthetic import SyntheticWorkload

if TYPE_CHECKING:  # It imports torch, for which a dry run does not wait.
    from moe_ep_bench.runtime.ranks import Ranks


def run_json(
    run_id: str,
    mode: str,
    comparisons: Sequence[Any],
    environment: Mapping[str, Any],
    configs: Iterable[Any],
    describe: Callable[[Any], dict[str, Any]],
) -> dict[str, Any]:
    """What ``run.json`` says of comparisons of ``plan``, or of ``quality``.

    JSON's keys are sorted, and ids say nothing: ``order`` is the config's.
    """
    cases = [(comparison, *numbered) for comparison in comparisons for numbered in enumerate(comparison.cases)]
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "mode": mode,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": list(configs),
        **provenance.asked(asked_arguments()),
        "environment": dict(environment),
        "hashes": {
            "code": provenance.code_hash(),
            "config": stable_hash([comparison.definition for comparison in comparisons]),
        },
        "comparisons": {
            comparison.comparison_id: {**describe(comparison), "order": order}
            for order, comparison in enumerate(comparisons)
        },
        "cases": {
            case.case_id: {**comparison.describe_case(case), "order": order} for comparison, order, case in cases
        },
    }


def describe_run(
    run_id: str, comparisons: Sequence[Comparison], environment: Mapping[str, Any], ranks: Ranks | None = None
) -> dict[str, Any]:
    """``run.json`` of planned comparisons; ``ranks`` are those of timed ones."""
    configs = (describe_experiment(comparison.experiment) for comparison in comparisons)
    described = partial(_describe, ranks=ranks)
    facts = run_json(run_id, comparisons[0].mode, comparisons, environment, configs, described)
    return {**facts, "scope": comparisons[0].scope}


def describe_timed_run(
    ranks: Ranks,
    run_id: str,
    comparisons: Sequence[Comparison],
    before: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """``run.json`` of real or virtual ranks, as rank 0 writes it; every rank calls this.

    Args:
        before: called ahead of each batch that this rank solves for.

    Raises:
        ValueError: a batch cannot meet its targets; one line, on every rank.
    """
    for comparison in comparisons:
        with naming(comparison.title):
            solve_together(tuple(comparison.workloads.values()), ranks, before)
    mine = provenance.describe_rank(ranks.device, several_nodes=ranks.local_world_size < ranks.world_size)
    of_ranks = ranks.told(mine)
    # Of one rank: it asks the driver, which answers all ranks of a node alike and slowly.
    described = provenance.describe(ranks.device) if ranks.is_first else {}
    return describe_run(run_id, comparisons, {**described, "ranks": of_ranks}, ranks)


def solve_together(workloads: Sequence[Workload], ranks: Ranks, before: Callable[[], object]) -> None:
    """Solve for the targets of all batches: ranks share them, and tell each other what they solved; all call this.

    Raises:
        ValueError: some batch cannot meet its targets; on every rank.
    """
    solvable = [workload for workload in workloads if isinstance(workload, SyntheticWorkload)]
    batches = [(workload, index) for workload in solvable for index in range(workload.num_batches)]
    problem = ""
    try:
        for workload, index in batches[ranks.rank :: ranks.world_size]:
            before()
            workload.solve(index)
    except ValueError as error:
        problem = str(error)
    for refused in filter(None, ranks.told(problem)):
        raise UserError(refused)
    for rank, solved in enumerate(ranks.told([workload.solved() for workload in solvable])):
        for workload, of_workload in zip(solvable, solved, strict=True):
            if rank != ranks.rank:
                workload.take_solved(of_workload)


def describe_kernels(comparison: Comparison) -> dict[str, str]:
    """All that ran, and why on a GPU Triton did not."""
    ran = {comparison.kernel_of(case) for case in comparison.cases}
    why = triton_lacks() if comparison.on_gpu else ""
    described = {"requested": AUTO, "ran": ", ".join(name for name in KERNELS if name in ran)}
    return {**described, "why": why} if why else described


def _describe(comparison: Comparison, ranks: Ranks | None) -> dict[str, Any]:
    model, experiment = comparison.model, comparison.experiment
    described: dict[str, Any] = {
        "title": comparison.title,
        "sizes": words.sizes_of(comparison),
        "model": model.name,
        "num_experts": model.num_experts,
        "top_k": model.top_k,
        "num_ranks": comparison.ep_size,
        "num_tokens": comparison.num_tokens,
        "num_batches": comparison.workload.num_batches,
        "workload": words.describe_workload(comparison),
        "kernel": describe_kernels(comparison),
    }
    if comparison.backend == ROUTING:
        return {
            **described,
            "layer": comparison.layer,
            "traffic": words.traffic(comparison),
            "phase": words.phase(comparison),
            # Equal for layers that are routed alike.
            "group": comparison.alike_but_for("layer"),
            "family": comparison.alike_but_for("layer", "num_tokens", "num_batches"),
            "bytes_per_pair": int(model.expert_hidden_size * PRECISIONS[experiment.layer.dtype].sent_bytes),
            "image_share": experiment.workload.image_share,
        }
    assert ranks is not None
    parts, asked = comparison.parts, experiment.layer
    described |= {
        "scale": model.scale,
        "num_replicas": comparison.world_size // comparison.ep_size,
        "world_size": comparison.world_size,
        "hidden_size": model.expert_hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "expert_matrices": model.expert_matrices,
        "dtype": asked.dtype,
        "backend": ranks.backend,
        "dispatcher": parts.dispatcher,
        "cuda_graph": parts.held_by_graphs(comparison.ep_size, comparison.scope),
        "experts": {"requested": asked.experts, "ran": parts.experts, "why": parts.experts_why},
        "permute": {"requested": AUTO, "ran": parts.permute},
        "fusions": parts.fusions(model),
        "flush_l2": experiment.measure.flush_l2,
        "oversubscribed": ranks.oversubscribed,
        "random_weights": True,
        "point": describe_point(experiment),
        "departures": list(model.departures),
    }
    is_modelled = comparison.backend == MODELLED
    if comparison.scope == "model":
        described["whole"] = _describe_model(comparison, modelled=is_modelled)
        described["departures"] += words.departures(model, comparison.context_length, modelled=is_modelled)
    if comparison.links is not None:
        described["links"] = comparison.links.describe()
        described["device"] = device_words(comparison) if is_modelled else None
        described["transport"] = experiment.emulate.transport
        described["dispatch_dtype"] = experiment.emulate.dispatch_dtype
        fit = fit_of(comparison)
        described["fit"] = fit and fit.model_dump()
    if is_modelled and comparison.scope == "layer":
        with contextlib.suppress(UserError):  # Not every model states the rest of itself.
            described["rest"] = rest_of(comparison)
    return described


def _describe_model(comparison: Comparison, *, modelled: bool) -> dict[str, Any]:
    """How much of a whole model is built."""
    model, context, workloads = comparison.model, comparison.context_length, comparison.workloads
    by_chance = (isinstance(one, SyntheticWorkload) and one.shares_by_chance for one in workloads.values())
    built = "torch scaled_dot_product_attention"
    return {
        "num_layers": comparison.num_layers,
        "of_layers": model.num_layers,
        "moe_layers": list(workloads),
        "of_moe_layers": model.num_moe_layers,
        "context_length": context,
        "attention": words.modelled_attention(model, context) if modelled else built,
        "num_shared_by_chance": sum(by_chance),
    }


def device_words(comparison: Comparison) -> str:
    """What stands for each rank, where that is modelled."""
    assert comparison.device is not None
    return comparison.device.describe(whole=comparison.scope == "model", num_tokens=comparison.num_tokens)


def rest_of(comparison: Comparison) -> dict[str, Any]:
    """What a modelled layer comes to in a pass of its whole model: attention, dense layers, norms, the output layer.

    They are modelled as in whole models (``cost_model.whole_model``), of the slowest rank, in batch 0: its prompts, or
    one step of its requests with ``whole.context_length`` tokens each in the cache.

    Returns:
        Microseconds of a pass that no MoE layer takes, over the number of MoE layers; as ``run.json`` has it.

    Raises:
        ValueError: the model or the device does not state what a whole model needs; one line.
    """
    experiment, model, device = comparison.experiment, comparison.model, comparison.device
    assert device is not None
    checks.refuse(checks.whole_model(model, experiment))
    context, dtype = experiment.whole.context_length, experiment.layer.dtype
    passes = [
        PassWork((), sum(lengths), context, {}) if context else PassWork(lengths, 0, 0, {})
        for lengths in comparison.lengths_of_ranks(0)
    ]
    slowest_us = max(outside_moe_us(device, model, work, dtype=dtype) for work in passes)
    return {
        "us_per_moe_layer": slowest_us / model.num_moe_layers,
        "num_moe_layers": model.num_moe_layers,
        "context_length": context,
        "attention": words.modelled_attention(model, context),
    }


def describe_experiment(experiment: Experiment) -> dict[str, Any]:
    """The resolved experiment for ``run.json``, without folders of this machine."""
    described = experiment.model_dump(mode="json")
    if experiment.model.hf_config is not None:
        described["model"]["hf_config"] = experiment.model.spec().source
    if described["emulate"]["links"] is not None:
        described["emulate"]["links"] = Path(described["emulate"]["links"]).name
    for recording in described["workload"].get("trace", ()):
        recording["trace"] = Path(recording["trace"]).name
    return described


def describe_point(experiment: Experiment) -> dict[str, Any]:
    """Swept keys with their values at this point of the sweep, as ``describe_experiment`` says them."""
    described = describe_experiment(experiment)
    return {key: reduce(lambda section, name: section[name], key.split("."), described) for key, _ in experiment.point}
