"""Write small recordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_trace(
    path: Path,
    *,
    length_S=(5, 1, 7),
    num_layers=2,
    num_experts=8,
    top_k=3,
    phase="prefill",
    normalised=False,
    equal=False,
    full=False,
    seed=0,
    **metadata,
) -> Path:
    """A recording of random choices, with repetition between neighbours, as routers have it."""
    random = np.random.default_rng(seed)
    num_tokens = sum(length_S)
    logits_LTE = random.normal(size=(num_layers, num_tokens, num_experts)) * 1.5
    logits_LTE[:, 1:] += logits_LTE[:, :-1]
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
        "scores": scores_LTK.astype(np.float16),
        # The ids do not start at 0, and the positions of every other sequence go on where the one before it ends.
        "sequence_id": np.repeat(np.arange(len(length_S)) * 3 + 7, length_S).astype(np.int32),
        "position": position_T.astype(np.int32),
    }
    if full:
        tensors["full_scores"] = scores_LTE.astype(np.float32)
    facts = {
        "format": "moe-trace-v1",
        "model": "tiny",
        "num_experts": str(num_experts),
        "top_k": str(top_k),
        "score": "softmax over the top-k" if normalised else "softmax, not renormalised",
        "phase": phase,
        "domain": "words",
        "source": "a test",
        "licence": "MIT",
    }
    save_file({name: np.ascontiguousarray(of) for name, of in tensors.items()}, path, {**facts, **metadata})
    return path
