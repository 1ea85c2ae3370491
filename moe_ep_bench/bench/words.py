"""Describe a comparison in a few words, and what it takes on its ranks: for titles and ``run.json``.

Needs no torch, for which a dry run does not wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_ep_bench.config import Experiment, RecordedConfig, SyntheticConfig
from moe_ep_bench.cost_model.devices import PRECISIONS
from moe_ep_bench.facts import tokens_words
from moe_ep_bench.models import LatentAttention, ModelSpec
from moe_ep_bench.models.memory import Fit, Need, footprint
from moe_ep_bench.policies.lazy import torch
from moe_ep_bench.workload.counts import one_rank_words, read_counts
from moe_ep_bench.workload.replay import RecordedWorkload
from moe_ep_bench.workload.skews import PATTERNS

if TYPE_CHECKING:
    from moe_ep_bench.bench.comparison import Comparison


def title(comparison: Comparison) -> str:
    """Model, sizes and workload."""
    experiment, model, sizes = comparison.experiment, comparison.model, sizes_of(comparison)
    if comparison.backend == "routing":
        layer = "" if comparison.layer is None else f", layer {comparison.layer}"
        return f"{model.name}, {sizes}, {traffic(comparison)}{layer}"
    scaled = f" x {model.scale:g}" if model.scale != 1 else ""
    extent, source = "", workload_in_short(experiment)
    if comparison.scope == "model":
        whole, context = model.num_layers, comparison.context_length
        cut = f"first {comparison.num_layers} of {whole}" if comparison.num_layers < whole else f"all {whole}"
        extent = f"{cut} layers, {f'decode after {tokens_words(context)}' if context else 'prefill'}, "
    by_chance = ", experts placed at random, one draw" if ranks_by_chance(experiment, comparison.ep_size) else ""
    ending = by_chance + _padding(experiment) + (", CUDA graph" if comparison.parts.cuda_graph else "")
    return f"{model.name}{scaled}, {extent}{sizes}, {source}{ending}"


def sizes_of(comparison: Comparison) -> str:
    """Ranks, tokens of all of them together, and those of a rank: in any batch, from the least to the most."""
    sizes = f"EP {comparison.ep_size}, {tokens_words(comparison.num_tokens)}"
    if comparison.world_size == 1:
        return sizes
    workload, tokens_BR = comparison.workload, comparison.rank_tokens
    least, most = int(tokens_BR.min()), int(tokens_BR.max())
    # A sequence is cut where there are fewer than ranks that get any tokens.
    active = int((tokens_BR > 0).any(axis=0).sum())
    is_cut = any(len(workload.sequence_lengths(index)) < active for index in range(workload.num_batches))
    num_tokens = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{sizes} ({num_tokens} a rank{', sequences cut' * is_cut})"


def ranks_by_chance(experiment: Experiment, ep_size: int) -> str:
    """Where a skew's load of the fullest rank is of another number of ranks, what stands in its place."""
    config = experiment.workload
    if not isinstance(config, SyntheticConfig) or config.skew in PATTERNS or ep_size == 1:
        return ""
    preset = experiment.model.preset
    known = config.targets(preset)["rank_load"]
    if known is None or config.targets(preset, ep_size)["rank_load"] is not None:
        return ""
    return f"experts placed at random, in one draw of the traffic: the skew's rank load is of EP {known['ep_size']}"


def describe_workload(comparison: Comparison) -> dict[str, Any]:
    """The workload's own words and numbers, its padding, and what a named skew was calibrated to."""
    experiment, config = comparison.experiment, comparison.experiment.workload
    facts: dict[str, Any] = {**comparison.workload.describe(), "padding": None, "seed": config.seed}
    if config.padding_per_rank:
        some = comparison.rank_tokens[comparison.rank_tokens > 0]
        extremes = [int(some.min()), int(some.max())]
        facts["padding"] = {"per_rank": config.padding_per_rank, "of": extremes}
        tokens = " to ".join(f"{number:,}" for number in np.unique(extremes))
        facts["description"] += (
            f"; {config.padding_per_rank:,} of {tokens} tokens a rank are padding, masked from policies"
        )
    if not isinstance(config, SyntheticConfig) or config.skew in PATTERNS:
        return facts
    if config.skew_from is not None:
        counted = f"synthetic, {_counted(config)} counted in {config.skew_from.name}"
        found = counted, one_rank_words(read_counts(config.skew_from)), facts["description"]
        return {**facts, "description": "; ".join(filter(None, found))}
    if experiment.model.preset is None:
        facts["description"] += "; the skew is assumed: nothing was recorded of this model"
    if config.skew is not None:
        skew = config.calibration(experiment.model.preset)
        calibrated = f"synthetic, calibrated to {config.skew} ({skew.basis}: {skew.source})"
        by_chance = ranks_by_chance(experiment, comparison.ep_size)
        facts["description"] = "; ".join(filter(None, (calibrated, facts["description"], by_chance)))
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
        return f"{_counted(config)} of {config.skew_from.name}{ending}"
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


def modelled_attention(model: ModelSpec, context_length: int) -> str:
    """What is modelled of attention, in a few words."""
    if not context_length:
        return "modelled"
    if isinstance(model.attention, LatentAttention):
        return "modelled as absorbed MLA, which engines serve"
    return "modelled on a cache as engines keep it, with positions in its keys"


def departures(model: ModelSpec, context_length: int, *, modelled: bool) -> list[str]:
    """Where attention as it is built is simpler than the model's, or than an engine's."""
    attention, is_latent = model.attention, isinstance(model.attention, LatentAttention)
    latent = "it holds whole keys and values, not their latent."
    plain = "it holds keys without positions, which every step gives to all of them anew."
    sentences = {
        "Rotary positions have the base 10,000 and are not scaled; every layer attends to all earlier tokens.": True,
        "Attention's sinks are left out.": getattr(attention, "sinks", False),
        "The bias of attention's output is left out.": getattr(attention, "bias", "none") == "all",
        "Queries and keys are normalised head by head, the model's over all heads together.": (
            getattr(attention, "qk_norm", "none") == "all_heads"
        ),
        f"The cache is Megatron-Core's static one: {latent if is_latent else plain}": (
            context_length > 0 and not modelled
        ),
    }
    return [sentence for sentence, holds in sentences.items() if holds]


def _padding(experiment: Experiment) -> str:
    """Padding in a title, behind a comma; empty where there is none."""
    num_padding = experiment.workload.padding_per_rank
    return f", {num_padding:,} padding a rank" if num_padding else ""


def _counted(config: SyntheticConfig) -> str:
    """What of ``skew_from`` is taken."""
    return "peak load" if config.layer is None else f"loads of layer {config.layer}"


# ---- memory ----------------------------------------------------------------------------------------------------------


def fit_of(comparison: Comparison) -> Fit | None:
    """Whether the model, served on as many ranks, fits what stands for each; None on real ranks and CPUs."""
    experiment, ep_size, device = comparison.experiment, comparison.ep_size, comparison.device
    if device is not None:
        return fit_on(experiment, ep_size, device.name, device.memory_gb * 1e9)
    if comparison.backend != "virtual" or not comparison.on_gpu:
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return fit_on(experiment, ep_size, gpu.name, gpu.total_memory)


def fit_on(experiment: Experiment, ep_size: int, device: str, device_bytes: float) -> Fit:
    """What each rank of the whole model, served, holds, and the fewest ranks that hold it: the same batch on more."""
    model = experiment.model.spec()

    def on(size: int) -> Fit:
        facts = {"device": device, "device_bytes": device_bytes, "dtype": experiment.layer.dtype, "ep_size": size}
        return Fit(**facts, **_footprint(experiment, size, size), is_whole=model.other_parameters() is not None)

    larger = (size for size in range(ep_size, model.num_experts + 1) if model.num_experts % size == 0)
    fitting = next((size for size in larger if on(size).holds()), None)
    return on(ep_size).model_copy(update={"fitting_ep_size": fitting})


def need_of(comparison: Comparison) -> Need:
    """What a rank holds, roughly, of the layer or the layers that are built here."""
    experiment = comparison.experiment
    built = 0 if experiment.scope == "layer" else experiment.whole.num_layers
    sizes = _footprint(experiment, comparison.world_size, comparison.ep_size, built)
    return Need(sizes["expert_bytes"] + sizes["other_weight_bytes"], sizes["cache_bytes"] + sizes["row_bytes"])


def _footprint(experiment: Experiment, world_size: int, ep_size: int, num_layers: int | None = None) -> dict[str, int]:
    """``footprint`` of a config on so many ranks.

    A batch's tokens are in the cache; at decode so are ``whole.context_length`` tokens of each request before them.
    """
    workload, precision = experiment.workload, PRECISIONS[experiment.layer.dtype]
    tokens = -(-workload.total_tokens(world_size) // world_size)
    requests = -(-tokens // workload.request_tokens) if workload.request_tokens else 0
    context = requests * experiment.whole.context_length
    return footprint(
        experiment.model.spec(),
        ep_size,
        num_tokens=tokens,
        cached_tokens=tokens + context,
        value_bytes=precision.hidden_bytes,
        expert_value_bytes=precision.weight_bytes,
        peak_load=getattr(workload, "peak_load", None),
        num_layers=num_layers,
    )
