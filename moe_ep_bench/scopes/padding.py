"""Padding tokens of a workload: whether every rank keeps a valid one, and what is said of them.

A decode step that runs as a CUDA graph has the graph's number of tokens, whether requests fill them or not.
Megatron-Core's router, the baseline, routes what is left in the empty slots like any token; a policy that is told of
padding lets it select nothing (OEA, arXiv 2511.02237, names the need). So the baseline beside a masked ``topk`` shows
what padding costs, and beside one that is not told, what the path of policies costs by itself.

Shapes: B = batches, R = ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.config import RecordedConfig, SyntheticConfig
from moe_ep_bench.workload import Workload


def check_padding(config: SyntheticConfig | RecordedConfig, workload: Workload, num_ranks: int) -> None:
    """Raise ValueError where padding leaves a rank that has tokens no valid one, in any batch."""
    padding = config.padding_per_rank
    if not padding:
        return
    tokens_BR = _tokens_of_ranks(config, workload, num_ranks)
    for batch, rank in np.argwhere((tokens_BR > 0) & (tokens_BR <= padding)):
        raise ValueError(
            f"workload.padding_per_rank: expected less than the {tokens_BR[batch, rank]} tokens that rank {rank} has"
            f" in batch {batch}, got {padding}"
        )


def describe_padding(
    config: SyntheticConfig | RecordedConfig, workload: Workload, num_ranks: int
) -> dict[str, Any] | None:
    """Padding tokens of a rank, the fewest and most tokens that a rank has, and who knows; None without padding."""
    if not config.padding_per_rank:
        return None
    tokens_BR = _tokens_of_ranks(config, workload, num_ranks)
    some = tokens_BR[tokens_BR > 0]
    found = {"per_rank": config.padding_per_rank, "of": [int(some.min()), int(some.max())]}
    return {**found, "masked": config.mask_padding}


def padding_words(padding: dict[str, Any]) -> str:
    """``describe_padding`` as a clause."""
    least, most = padding["of"]
    tokens = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    known = "masked from policies" if padding["masked"] else "of which policies are not told"
    return f"{padding['per_rank']:,} of {tokens} tokens a rank are padding, {known}"


def padding_in_title(config: SyntheticConfig | RecordedConfig) -> str:
    """What a title says of padding, behind a comma; empty without any."""
    known = "masked" if config.mask_padding else "not masked"
    return f", {config.padding_per_rank:,} padding a rank ({known})" if config.padding_per_rank else ""


def _tokens_of_ranks(config: SyntheticConfig | RecordedConfig, workload: Workload, num_ranks: int) -> NDArray[np.int64]:
    """Tokens that every rank has in every batch: int64 [B, R]."""
    batches = range(workload.num_batches)
    return np.stack([workload.tokens_of_ranks(index, num_ranks, config.rank_shares) for index in batches])
