"""Say in a few words what a workload is: for titles, ``run.json`` and its figures.

A decode step that runs as a CUDA graph has the graph's number of tokens; slots that no request fills are padding.
Megatron-Core's router routes padding like any token. A policy that is told of it lets it select nothing (OEA, arXiv
2511.02237, names the need). So the baseline beside a masked ``topk`` shows what padding costs.

Shapes: B = batches, R = ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.config import Experiment, RecordedConfig, SyntheticConfig
from moe_ep_bench.workload import RecordedWorkload, Workload
from moe_ep_bench.workload.skews import load_skew


def tokens_of_ranks(experiment: Experiment, workload: Workload, num_ranks: int) -> NDArray[np.int64]:
    """Tokens that every rank has in every batch: int64 [B, R]."""
    shares = experiment.workload.rank_shares
    return np.stack([workload.tokens_of_ranks(index, num_ranks, shares) for index in range(workload.num_batches)])


def describe_padding(experiment: Experiment, workload: Workload, num_ranks: int) -> dict[str, Any] | None:
    """Padding tokens of a rank, the fewest and most tokens that a rank has, and who knows; None without padding."""
    config = experiment.workload
    if not config.padding_per_rank:
        return None
    tokens_BR = tokens_of_ranks(experiment, workload, num_ranks)
    some = tokens_BR[tokens_BR > 0]
    found = {"per_rank": config.padding_per_rank, "of": [int(some.min()), int(some.max())]}
    return {**found, "masked": config.mask_padding}


def padding_in_title(experiment: Experiment) -> str:
    """What a title says of padding, behind a comma; empty without any."""
    config = experiment.workload
    known = "masked" if config.mask_padding else "not masked"
    return f", {config.padding_per_rank:,} padding a rank ({known})" if config.padding_per_rank else ""


def describe_workload(experiment: Experiment, workload: Workload, num_ranks: int) -> dict[str, Any]:
    """The workload's own words and numbers, its padding, and what a named skew was calibrated to."""
    config, padding = experiment.workload, describe_padding(experiment, workload, num_ranks)
    described = {**workload.describe(), "padding": padding}
    if padding is not None:
        described["description"] = f"{described['description']}; {_padding_words(padding)}"
    if not isinstance(config, SyntheticConfig) or config.skew is None:
        return described
    assert experiment.model.preset is not None
    skew = load_skew(experiment.model.preset, config.skew)
    return {
        **described,
        "description": (
            f"synthetic, calibrated to {config.skew} ({skew.basis}: {skew.source}); {described['description']}"
        ),
        "skew": {"name": config.skew, **skew.model_dump(mode="json", exclude_none=True)},
    }


def _padding_words(padding: dict[str, Any]) -> str:
    least, most = padding["of"]
    tokens = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    known = "masked from policies" if padding["masked"] else "of which policies are not told"
    return f"{padding['per_rank']:,} of {tokens} tokens a rank are padding, {known}"


def workload_in_short(experiment: Experiment) -> str:
    """Skew or recording, in the title of a timed layer."""
    config = experiment.workload
    if isinstance(config, RecordedConfig):
        step = " decode," if config.arrangement == "decode" else ""
        return f"recorded, layer {config.layer},{step} {config.tail_words}"
    if config.skew is not None:
        return config.skew.replace("_", " ")
    return "unskewed" if config.peak_load is None else f"peak load {config.peak_load:g}"


def traffic(experiment: Experiment, workload: Workload) -> str:
    """Where tokens come from, without layer and size, in the title of routing."""
    return _source(experiment, workload) + padding_in_title(experiment)


def _source(experiment: Experiment, workload: Workload) -> str:
    config = experiment.workload
    if isinstance(workload, RecordedWorkload):
        assert isinstance(config, RecordedConfig)
        domains = " + ".join(trace.metadata["domain"] for trace in workload.traces)
        return f"{domains}, {phase(experiment, workload)}, {config.tail_words}"
    assert not isinstance(config, RecordedConfig)
    if config.skew is not None:
        return f"synthetic, {config.skew.replace('_', ' ')}"
    if config.peak_load is not None:
        return f"synthetic, peak load {config.peak_load:g}"
    return "synthetic, uniform" if config.family == "uniform" else "synthetic, unskewed"


def phase(experiment: Experiment, workload: Workload) -> str:
    """``decode`` where a batch is one step of many requests or was recorded in decoding, else ``prefill``."""
    config = experiment.workload
    if isinstance(workload, RecordedWorkload):
        assert isinstance(config, RecordedConfig)
        recorded = {trace.metadata["phase"] for trace in workload.traces}
        return "decode" if config.arrangement == "decode" or recorded == {"decode"} else "prefill"
    assert not isinstance(config, RecordedConfig)
    return "decode" if config.sequence_length == 1 else "prefill"
