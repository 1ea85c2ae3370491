"""State what a recording holds: the facts of its header and of its sequences. ``route`` of ``topk`` says the rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_ep_bench.workload.trace import open_trace


def trace_info(path: Path) -> str:
    """A line per fact of a ``moe-trace-v1`` file.

    Raises:
        ValueError: the file cannot be used; the message names it and says what is wrong.
    """
    trace = open_trace(path)
    facts = trace.metadata
    length_S = np.diff(trace.start_S)
    gaps = len(trace.consecutive_starts()) - len(trace.start_S)
    scores = facts["score"]
    if trace.scores_are_assumed:
        scores += "; nobody recorded scores"
    elif trace.has_full_scores:
        scores += "; of all experts"
    elif trace.scores_are_normalised:
        scores += "; their share of all experts' mass is unknown"
    lines = {
        "file": path.name,
        "sha256": trace.sha256(),
        "model": facts["model"],
        "routing": f"{trace.num_layers} MoE layers, {trace.num_experts} experts, top-{trace.top_k}",
        "tokens": f"{trace.num_tokens:,} in {trace.num_sequences:,} sequences of {length_S.min():,} to "
        f"{length_S.max():,} (median {np.median(length_S):,.0f}){f', {gaps:,} gaps' if gaps else ''}",
        **{name: facts[name] for name in ("phase", "domain")},
        "scores": scores,
        **{name: facts[name] for name in ("source", "licence")},
    }
    width = max(map(len, lines))
    shown = [f"{name:<{width}}  {value}" for name, value in lines.items()]
    hint = "loads, drops and activated experts, layer by layer: moe-ep-bench route with workload.trace and policy topk"
    return "\n".join([*shown, "", hint])
