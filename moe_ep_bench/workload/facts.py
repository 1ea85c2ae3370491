"""What a recording says of itself (``trace info``), and LASER's thresholds derived from it (``trace thresholds``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml

from moe_ep_bench.errors import UserError
from moe_ep_bench.workload.trace import open_trace


def trace_info(path: Path) -> str:
    """State what a recording holds, a line per fact; ``route`` of ``topk`` says the rest.

    Raises:
        ValueError: the file cannot be used; the message names it and says what is wrong.
    """
    trace = open_trace(path)
    facts, length_S = trace.metadata, np.diff(trace.start_S)
    rows = {
        "file": path.name,
        "sha256": trace.sha256(),
        "routing": f"{trace.num_layers} MoE layers, {trace.num_experts} experts, top-{trace.top_k}",
        "tokens": f"{trace.num_tokens:,} in {trace.num_sequences:,} sequences of {length_S.min():,} to "
        f"{length_S.max():,} (median {np.median(length_S):,.0f})",
        "scores": f"{facts['score']}{'; of all experts' * trace.has_full_scores}",
        **{name: facts[name] for name in ("model", "phase", "domain", "source", "licence", "note") if name in facts},
    }
    return "\n".join(f"{name:<8} {value}" for name, value in rows.items())


def thresholds_text(path: Path, keep: float) -> str:
    """``laser_thresholds`` as an entry of a config's policies."""
    entry = {"name": "laser", **laser_thresholds(path, keep)}
    return yaml.safe_dump([entry], sort_keys=False, default_flow_style=None).rstrip()


def laser_thresholds(path: Path, keep: float = 0.25) -> dict[str, dict[str, float]]:
    """Derive fields of the policy ``laser`` from a recording of prefill.

    LASER (arXiv 2510.03293) leaves a token alone whose top-k holds at least ``eps_high`` of its score mass, and lets
    any other choose among experts that score at least ``t_fix`` times its best one. The paper sets both by layer from
    statistics of its prefill. The rule here is our own, for each third of the depth, over all tokens of its layers:
    ``eps_high`` is the quantile of the top-k share above which a share ``keep`` of the tokens lies; ``t_fix`` is the
    median of the K-th best score over the best, so that the pool holds experts as near to the best one as the last of
    the model's own choices is in the median token.

    Args:
        keep: share of tokens that are to keep their top-k, 0 to 1.

    Returns:
        ``eps_high`` and ``t_fix`` by ranges of layers, one for every third of the depth that has a layer; ``c``
        completes them.

    Raises:
        ValueError: ``keep`` out of range, or a recording whose scores do not say what share of the mass the top-k hold.
    """
    if not 0 <= keep <= 1:
        raise UserError(f"keep: expected 0 to 1, got {keep:g}")
    trace = open_trace(path)
    if trace.scores_are_assumed or trace.scores_are_normalised:
        what = "assumed" if trace.scores_are_assumed else "normalised over the top-k"
        raise UserError(f"{path}: score: expected shares of a token's whole score mass, got scores that are {what}")
    thresholds: dict[str, dict[str, float]] = {"eps_high": {}, "t_fix": {}}
    third_L = np.arange(trace.num_layers) * 3 // trace.num_layers
    for third in np.unique(third_L):
        layers = np.flatnonzero(third_L == third).tolist()
        scores_NK = np.concatenate([trace.read_layer(layer)[1].astype(np.float64) for layer in layers])
        best_N = scores_NK[:, 0]
        band = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
        # Float16 scores may sum to a little more than 1, which no threshold may be.
        eps_high = min(float(np.quantile(scores_NK.sum(axis=1), 1 - keep)), 1.0)
        thresholds["eps_high"][band] = round(eps_high, 3)
        thresholds["t_fix"][band] = round(float(np.median(scores_NK[best_N > 0, -1] / best_N[best_N > 0])), 3)
    return thresholds
