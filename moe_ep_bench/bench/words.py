"""Describe a comparison and its workload in a few words: for titles, ``run.json`` and its figures.

Shapes: B = batches, R = ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.config import Experiment, RecordedConfig, SyntheticConfig
from moe_ep_bench.models import LatentAttention, ModelSpec
from moe_ep_bench.workload import RecordedWorkload, Workload
from moe_ep_bench.workload.formatting import tokens_words
from moe_ep_bench.workload.skews import PATTERNS, load_skew


def title(comparison: Any) -> str:
    """Model, sizes and workload of a ``Comparison``."""
    experiment, model, subject = comparison.experiment, comparison.model, comparison.subject
    slices = f" x TP {subject.num_slices}" if subject.num_slices > 1 else ""
    sizes = f"EP {comparison.ep_size}{slices}, {tokens_words(subject.num_tokens)}"
    if comparison.backend == "routing":
        layer = "" if comparison.layer is None else f", layer {comparison.layer}"
        return f"{model.name}, {sizes}, {traffic(experiment, comparison.workload)}{layer}"
    scaled = f" x {model.scale:g}" if model.scale != 1 else ""
    ending = padding_in_title(experiment) + (", CUDA graph" if comparison.parts.cuda_graph else "")
    return f"{model.name}{scaled}, {subject.extent}{sizes}, {subject.workload_in_short}{ending}"


def describe_workload(experiment: Experiment, workload: Workload, tokens_BR: NDArray[np.int64]) -> dict[str, Any]:
    """The workload's own words and numbers, its padding, and what a named skew was calibrated to."""
    config, described = experiment.workload, {**workload.describe(), "padding": None, "seed": experiment.workload.seed}
    if config.padding_per_rank:
        some = tokens_BR[tokens_BR > 0]
        of = [int(some.min()), int(some.max())]
        described["padding"] = {"per_rank": config.padding_per_rank, "of": of, "masked": config.mask_padding}
        tokens = " to ".join(f"{number:,}" for number in sorted(set(of)))
        known = "masked from policies" if config.mask_padding else "of which policies are not told"
        described["description"] += f"; {config.padding_per_rank:,} of {tokens} tokens a rank are padding, {known}"
    if isinstance(config, SyntheticConfig) and config.skew_from is not None:
        described["description"] = (
            f"synthetic, peak load counted in {config.skew_from.name}; {described['description']}"
        )
        return described
    if isinstance(config, SyntheticConfig) and config.skew in PATTERNS:
        return described
    if isinstance(config, SyntheticConfig) and experiment.model.preset is None:
        described["description"] += "; the skew is assumed: nothing was recorded of this model"
    if isinstance(config, SyntheticConfig) and config.skew is not None:
        assert experiment.model.preset is not None
        skew = load_skew(experiment.model.preset, config.skew)
        calibrated = f"synthetic, calibrated to {config.skew} ({skew.basis}: {skew.source})"
        described["description"] = f"{calibrated}; {described['description']}"
        described["skew"] = {"name": config.skew, **skew.model_dump(mode="json", exclude_none=True)}
    return described


def padding_in_title(experiment: Experiment) -> str:
    """Padding in a title, behind a comma; empty where there is none."""
    config = experiment.workload
    known = "masked" if config.mask_padding else "not masked"
    return f", {config.padding_per_rank:,} padding a rank ({known})" if config.padding_per_rank else ""


def workload_in_short(experiment: Experiment) -> str:
    """Skew or recording, in the title of a timed layer."""
    config = experiment.workload
    if isinstance(config, RecordedConfig):
        step = " decode," if config.arrangement == "decode" else ""
        return f"recorded, layer {config.layer},{step} {config.tail_words}"
    if config.skew is not None:
        return config.skew.replace("_", " ")
    if config.skew_from is not None:
        return f"peak load of {config.skew_from.name}"
    return "unskewed" if config.peak_load is None else f"peak load {config.peak_load:g}"


def traffic(experiment: Experiment, workload: Workload) -> str:
    """Where tokens come from, without layer and size, in the title of routing."""
    config = experiment.workload
    if isinstance(config, RecordedConfig):
        assert isinstance(workload, RecordedWorkload)
        domains = " + ".join(trace.metadata["domain"] for trace in workload.traces)
        source = f"{domains}, {phase(experiment, workload)}, {config.tail_words}"
    else:
        is_uniform = config.family == "uniform" and config.skew is None and config.peak_load is None
        source = f"synthetic, {'uniform' if is_uniform else workload_in_short(experiment)}"
    return source + padding_in_title(experiment)


def modelled_attention(model: ModelSpec, context_length: int) -> str:
    """What is modelled of attention, in a few words."""
    if not context_length:
        return "modelled"
    if isinstance(model.attention, LatentAttention):
        return "modelled as absorbed MLA, which engines serve"
    return "modelled on Megatron-Core's static cache, whose keys get their positions anew in every step"


def phase(experiment: Experiment, workload: Workload) -> str:
    """``decode`` where a batch is one step of many requests or was recorded in decoding, else ``prefill``."""
    config = experiment.workload
    if isinstance(config, SyntheticConfig):
        return "decode" if config.sequence_length == 1 else "prefill"
    assert isinstance(workload, RecordedWorkload)
    recorded = {trace.metadata["phase"] for trace in workload.traces}
    return "decode" if config.arrangement == "decode" or recorded == {"decode"} else "prefill"
