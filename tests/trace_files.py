"""Write small recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TRACE = {"format": "moe-trace-v1", "model": "tiny", "phase": "prefill", "domain": "words", "source": "a test"}


def trace_parts(
    *,
    length_S=(5, 1, 7),
    num_layers=2,
    num_experts=8,
    top_k=3,
    normalised=False,
    equal=False,
    full=False,
    sharpness=1.5,
    popularity=0.0,
    decimals=None,
    seed=0,
    **metadata,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors and metadata of random choices, with repetition between neighbours, as routers have it.

    Args:
        popularity: how much more some experts are wanted than others.
        decimals: to which scores are rounded, so that some tie.
    """
    random = np.random.default_rng(seed)
    num_tokens = sum(length_S)
    logits_LTE = random.normal(size=(num_layers, num_tokens, num_experts)) * sharpness
    logits_LTE[:, 1:] += logits_LTE[:, :-1]
    if popularity:
        logits_LTE += popularity * random.normal(size=num_experts)
    scores_LTE = np.exp(logits_LTE) / np.exp(logits_LTE).sum(axis=2, keepdims=True)
    ids_LTK = np.argsort(-scores_LTE, axis=2)[..., :top_k]
    scores_LTK = np.take_along_axis(scores_LTE, ids_LTK, axis=2)
    if normalised:
        scores_LTK /= scores_LTK.sum(axis=2, keepdims=True)
    if equal:
        scores_LTK[:] = 1 / top_k
    position_T = np.concatenate([np.arange(1, 1 + sum(length_S[at : at + 2])) for at in range(0, len(length_S), 2)])
    tensors = {
        "expert_ids": ids_LTK.astype(np.uint8),
        "scores": (scores_LTK if decimals is None else scores_LTK.round(decimals)).astype(np.float16),
        # The ids do not start at 0, and the positions of every other sequence go on where the one before it ends.
        "sequence_id": np.repeat(np.arange(len(length_S)) * 3 + 7, length_S).astype(np.int32),
        "position": position_T.astype(np.int32),
    }
    if full:
        tensors["full_scores"] = scores_LTE.astype(np.float32)
    sizes = {"num_experts": str(num_experts), "top_k": str(top_k), "licence": "MIT"}
    score = "softmax over the top-k" if normalised else "softmax, not renormalised"
    return tensors, {**TRACE, **sizes, "score": score, **metadata}


def write_parts(path: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> Path:
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, metadata)
    return path


def write_trace(path: Path, **of) -> Path:
    """A recording of ``trace_parts``."""
    return write_parts(path, *trace_parts(**of))


def tokens_of(workload: Any, index: int) -> Any:
    """Which recorded tokens make up a batch, counted through all recordings, one after the other."""
    spans = zip(*workload._spans[index + workload.num_history], strict=True)
    return np.concatenate([np.arange(first, first + length) for first, length in spans])
