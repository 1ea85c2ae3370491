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
from moe_ep_bench.workload.skews import PATTERNS


def title(comparison: Any) -> str:
    """Model, sizes and workload of a ``Comparison``."""
    experiment, model, subject = comparison.experiment, comparison.model, comparison.subject
    sizes = sizes_of(comparison)
    if comparison.backend == "routing":
        layer = "" if comparison.layer is None else f", layer {comparison.layer}"
        return f"{model.name}, {sizes}, {traffic(experiment, comparison.workload)}{layer}"
    scaled = f" x {model.scale:g}" if model.scale != 1 else ""
    by_chance = ", experts placed at random, one draw" if ranks_by_chance(experiment, comparison.ep_size) else ""
    ending = by_chance + padding_in_title(experiment) + (", CUDA graph" if comparison.parts.cuda_graph else "")
    return f"{model.name}{scaled}, {subject.extent}{sizes}, {subject.workload_in_short}{ending}"


def sizes_of(comparison: Any) -> str:
    """Ranks, tokens of all of them together, and those of a rank: in any batch, from the least to the most."""
    subject = comparison.subject
    sizes = f"EP {comparison.ep_size}, {tokens_words(subject.num_tokens)}"
    if subject.world_size == 1:
        return sizes
    least, most = int(subject.rank_tokens.min()), int(subject.rank_tokens.max())
    num_tokens = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    cut = ", sequences cut" if subject.cuts_sequences else ""
    return f"{sizes} ({num_tokens} a rank{cut})"


def ranks_by_chance(experiment: Experiment, ep_size: int) -> str:
    """Where a skew's load of the fullest rank is of another number of ranks, what stands in its place."""
    config = experiment.workload
    if not isinstance(config, SyntheticConfig) or config.skew in PATTERNS or ep_size == 1:
        return ""
    preset = experiment.model.preset
    known = config.targets(preset)["rank_load"]
    if known is None or config.targets(preset, ep_size)["rank_load"] is not None:
        return ""
    whose = "the skew's rank load" if config.rank_load is None else "rank_load"
    return f"experts placed at random, in one draw of the traffic: {whose} is of EP {known['ep_size']}"


def describe_workload(
    experiment: Experiment, workload: Workload, tokens_BR: NDArray[np.int64], ep_size: int
) -> dict[str, Any]:
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
        counted = "peak load" if config.skew_layer is None else f"loads of layer {config.skew_layer}"
        described["description"] = (
            f"synthetic, {counted} counted in {config.skew_from.name}; {described['description']}"
        )
        return described
    if isinstance(config, SyntheticConfig) and config.skew in PATTERNS:
        return described
    if isinstance(config, SyntheticConfig) and experiment.model.preset is None:
        described["description"] += "; the skew is assumed: nothing was recorded of this model"
    if isinstance(config, SyntheticConfig) and config.skew is not None:
        assert experiment.model.preset is not None
        skew = config.calibration(experiment.model.preset)
        calibrated = f"synthetic, calibrated to {config.skew} ({skew.basis}: {skew.source})"
        described["description"] = f"{calibrated}; {described['description']}"
        if by_chance := ranks_by_chance(experiment, ep_size):
            described["description"] += f"; {by_chance}"
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
        of = None if config.skew in PATTERNS else config.calibration(experiment.model.preset).of
        return config.skew.replace("_", " ") + (f" skew of {of}" if of else "")
    if config.skew_from is not None:
        counted = "peak load" if config.skew_layer is None else f"loads of layer {config.skew_layer}"
        return f"{counted} of {config.skew_from.name}"
    return "unskewed" if config.peak_load is None else f"peak load {config.peak_load:g}"


def traffic(experiment: Experiment, workload: Workload) -> str:
    """Where tokens come from, without layer and size, in the title of routing."""
    config = experiment.workload
    if isinstance(config, RecordedConfig):
        assert isinstance(workload, RecordedWorkload)
        domains = " + ".join(trace.metadata["domain"] for trace in workload.traces)
        source = f"{domains}, {phase(experiment, workload)}, {config.tail_words}"
    else:
        source = f"synthetic, {workload_in_short(experiment)}"
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
