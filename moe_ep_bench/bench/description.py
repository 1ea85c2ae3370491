"""Describe comparisons: in ``run.json``, in titles, and what they hold in memory.

Needs no torch but on ranks, for which a dry run does not wait.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ep_bench.bench import checks
from moe_ep_bench.bench.checks import MODELLED, ROUTING, VIRTUAL
from moe_ep_bench.config import Experiment, RecordedConfig, SyntheticConfig
from moe_ep_bench.cost_model.devices import PRECISIONS
from moe_ep_bench.cost_model.whole_model import PassWork, outside_moe_us
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.facts import tokens_words
from moe_ep_bench.files import stable_hash
from moe_ep_bench.kernels import KERNELS, triton_lacks
from moe_ep_bench.machine import provenance
from moe_ep_bench.models.memory import Fit, Served
from moe_ep_bench.policies.lazy import torch
from moe_ep_bench.runtime.torchrun import asked_arguments
from moe_ep_bench.schema import SCHEMA_VERSION
from moe_ep_bench.workload.batch import Workload
from moe_ep_bench.workload.replay import RecordedWorkload
from moe_ep_bench.workload.skews import PATTERNS
from moe_ep_bench.workload.synthetic import SyntheticWorkload

if TYPE_CHECKING:
    from moe_ep_bench.bench.comparison import Comparison
    from moe_ep_bench.runtime.ranks import Ranks


# ---- run.json --------------------------------------------------------------------------------------------------------


def run_json(
    run_id: str,
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
        "mode": comparisons[0].mode,
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
    facts = run_json(run_id, comparisons, environment, configs, described)
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
    mine = provenance.describe_rank(ranks.device)
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
    described = {"requested": "auto", "ran": ", ".join(name for name in KERNELS if name in ran)}
    return {**described, "why": why} if why else described


def _describe(comparison: Comparison, ranks: Ranks | None) -> dict[str, Any]:
    model, experiment = comparison.model, comparison.experiment
    described: dict[str, Any] = {
        "title": comparison.title,
        "sizes": sizes_of(comparison),
        "model": model.name,
        "num_experts": model.num_experts,
        "top_k": model.top_k,
        "num_ranks": comparison.ep_size,
        "num_tokens": comparison.num_tokens,
        "num_batches": comparison.workload.num_batches,
        "workload": describe_workload(comparison),
        "kernel": describe_kernels(comparison),
    }
    if comparison.backend == ROUTING:
        return {
            **described,
            "layer": comparison.layer,
            "traffic": traffic(comparison),
            "phase": phase(comparison),
            "group": comparison.routed_alike,
            "image_share": experiment.workload.image_share,
        }
    assert ranks is not None
    parts, asked = comparison.parts, experiment.layer
    collectives = " with its collectives" * (comparison.ep_size > 1)
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
        "cuda_graph": f"the whole {comparison.scope}{collectives}" if parts.cuda_graph else None,
        "experts": {"requested": asked.experts, "ran": parts.experts, "why": parts.experts_why},
        "permute": {"requested": "auto", "ran": parts.permute},
        "oversubscribed": ranks.oversubscribed,
        "random_weights": True,
        "point": describe_point(experiment),
        "departures": list(model.departures),
    }
    is_modelled = comparison.backend == MODELLED
    if comparison.scope == "model":
        described["whole"] = {
            "num_layers": comparison.num_layers,
            "of_layers": model.num_layers,
            "moe_layers": list(comparison.workloads),
            "context_length": comparison.context_length,
        }
    if comparison.links is not None:
        described["links"] = comparison.links.describe()
        described["device"] = device_words(comparison) if is_modelled else None
        described["fit"] = (fit := fit_of(comparison)) and fit.model_dump()
    if is_modelled and comparison.scope == "layer":
        with contextlib.suppress(UserError):  # Not every model states the rest of itself.
            described["rest"] = rest_of(comparison)
    return described


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
    return {"us_per_moe_layer": slowest_us / model.num_moe_layers, "num_moe_layers": model.num_moe_layers}


def describe_experiment(experiment: Experiment) -> dict[str, Any]:
    """The resolved experiment for ``run.json``, without folders of this machine."""
    described = experiment.model_dump(mode="json")
    if experiment.model.hf_config is not None:
        described["model"]["hf_config"] = experiment.model.spec().source
    if described["emulate"]["links"] is not None:
        described["emulate"]["links"] = Path(described["emulate"]["links"]).name
    if isinstance(experiment.workload, RecordedConfig):
        described["workload"]["trace"] = [path.name for path in experiment.workload.trace]
    return described


def describe_point(experiment: Experiment) -> dict[str, Any]:
    """Swept keys with their values at this point of the sweep, as ``describe_experiment`` says them."""
    described = describe_experiment(experiment)
    return {key: reduce(lambda section, name: section[name], key.split("."), described) for key, _ in experiment.point}


# ---- titles ----------------------------------------------------------------------------------------------------------


def title(comparison: Comparison) -> str:
    """Model, sizes and workload."""
    experiment, model, sizes = comparison.experiment, comparison.model, sizes_of(comparison)
    if comparison.backend == ROUTING:
        layer = "" if comparison.layer is None else f", layer {comparison.layer}"
        return f"{model.name}, {sizes}, {traffic(comparison)}{layer}"
    scaled = f" x {model.scale:g}" if model.scale != 1 else ""
    extent, source = "", workload_in_short(experiment)
    if comparison.scope == "model":
        whole, context = model.num_layers, comparison.context_length
        cut = f"first {comparison.num_layers} of {whole}" if comparison.num_layers < whole else f"all {whole}"
        extent = f"{cut} layers, {f'decode after {tokens_words(context)}' if context else 'prefill'}, "
    if is_drawn(experiment, comparison.ep_size) and experiment.workload.targets(experiment.model.preset)["rank_load"]:
        source += ", experts placed at random, one draw"  # The skew's load of the fullest rank is of another EP size.
    ending = _padding(experiment) + (", CUDA graph" if comparison.parts.cuda_graph else "")
    return f"{model.name}{scaled}, {extent}{sizes}, {source}{ending}"


def sizes_of(comparison: Comparison) -> str:
    """Ranks, tokens of all of them together, and those of a rank: in any batch, from the least to the most."""
    sizes = f"EP {comparison.ep_size}, {tokens_words(comparison.num_tokens)}"
    if comparison.world_size == 1:
        return sizes
    least, most = int(comparison.rank_tokens.min()), int(comparison.rank_tokens.max())
    return f"{sizes} ({f'{least:,}' if least == most else f'{least:,} to {most:,}'} a rank)"


def is_drawn(experiment: Experiment, ep_size: int) -> bool:
    """Whether chance decides how busy ranks are: a synthetic workload's experts stand at random, to no rank's load."""
    config = experiment.workload
    if not isinstance(config, SyntheticConfig) or config.skew in PATTERNS or ep_size == 1:
        return False
    return config.targets(experiment.model.preset, ep_size)["rank_load"] is None


def describe_workload(comparison: Comparison) -> dict[str, Any]:
    """The workload's own words and numbers, its padding, and what a named skew was calibrated to."""
    experiment, config = comparison.experiment, comparison.experiment.workload
    facts: dict[str, Any] = {**comparison.workload.describe(), "padding": None, "seed": config.seed}
    if config.padding_per_rank:
        some = comparison.rank_tokens[comparison.rank_tokens > 0]
        facts["padding"] = {"per_rank": config.padding_per_rank, "of": [int(some.min()), int(some.max())]}
    if not isinstance(config, SyntheticConfig) or config.skew in PATTERNS:
        return facts
    if config.skew_from is not None:
        counted = f"loads of layer {config.layer} counted in {config.skew_from.name}"
        facts["description"] = f"synthetic, {counted}; {facts['description']}"
        return facts
    if experiment.model.preset is None:
        facts["description"] += "; the skew is assumed: nothing was recorded of this model"
    if config.skew is not None:
        skew = config.calibration(experiment.model.preset)
        calibrated = f"synthetic, calibrated to {config.skew} ({skew.basis}: {skew.source})"
        facts["description"] = f"{calibrated}; {facts['description']}"
        facts["skew"] = {"name": config.skew, **skew.model_dump(mode="json", exclude_none=True)}
    return facts


def workload_in_short(experiment: Experiment) -> str:
    """Skew or recording, in the title of what is timed."""
    config, is_model = experiment.workload, experiment.scope == "model"
    if isinstance(config, RecordedConfig):
        step = " decode," if config.is_step else ""
        where = "layer by layer," if is_model else f"layer {config.layer},{step}"
        return f"recorded{' ' if is_model else ', '}{where} {config.tail_words}"
    ending = " in each layer" if is_model else ""
    if config.skew is not None:
        of = None if config.skew in PATTERNS else config.calibration(experiment.model.preset).of
        return config.skew.replace("_", " ") + (f" skew of {of}" if of else "") + ending
    if config.skew_from is not None:
        return f"loads of layer {config.layer} of {config.skew_from.name}{ending}"
    return ("no skew" if config.peak_load is None else f"peak load {config.peak_load:g}") + ending


def traffic(comparison: Comparison) -> str:
    """Where tokens come from, without layer and size, in the title of routing."""
    config, workload = comparison.experiment.workload, comparison.workload
    if isinstance(config, RecordedConfig):
        assert isinstance(workload, RecordedWorkload)
        domains = " + ".join(trace.metadata["domain"] for trace in workload.traces)
        source = f"{domains}, {phase(comparison)}, {config.tail_words}"
    else:
        source = f"synthetic, {workload_in_short(comparison.experiment)}"
    return source + _padding(comparison.experiment)


def phase(comparison: Comparison) -> str:
    """``decode`` where a batch is one step of many requests or was recorded in decoding, else ``prefill``."""
    workload = comparison.workload
    traces = workload.traces if isinstance(workload, RecordedWorkload) else ()
    decoded = {trace.metadata["phase"] for trace in traces} == {"decode"}
    return "decode" if decoded or comparison.experiment.workload.is_step else "prefill"


def _padding(experiment: Experiment) -> str:
    """Padding in a title, behind a comma; empty where there is none."""
    num_padding = experiment.workload.padding_per_rank
    return f", {num_padding:,} padding a rank" if num_padding else ""


# ---- memory ----------------------------------------------------------------------------------------------------------


def served(experiment: Experiment) -> Served:
    """The config's model as it is served."""
    workload, precision = experiment.workload, PRECISIONS[experiment.layer.dtype]
    return Served(
        experiment.model.spec(),
        experiment.layer.dtype,
        precision.hidden_bytes,
        precision.weight_bytes,
        workload.total_tokens,
        workload.request_tokens,
        experiment.whole.context_length,
        getattr(workload, "peak_load", None),
    )


def fit_of(comparison: Comparison) -> Fit | None:
    """Whether the model, served on as many ranks, fits what stands for each; None on real ranks and CPUs."""
    model, device = served(comparison.experiment), comparison.device
    if device is not None:
        return model.fit(comparison.ep_size, device.name, device.memory_gb * 1e9)
    if comparison.backend != VIRTUAL or not comparison.on_gpu:
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return model.fit(comparison.ep_size, gpu.name, gpu.total_memory)


def held_here(comparison: Comparison) -> dict[str, int]:
    """Bytes on a rank, roughly, of the layer or the layers that are built here, by the names of ``Fit``."""
    built = 0 if comparison.scope == "layer" else comparison.experiment.whole.num_layers
    return served(comparison.experiment).footprint(comparison.world_size, comparison.ep_size, built)
