"""Shapes of models: ``spec`` says what a model is, ``hf_config`` reads one from a config.json, ``memory`` its bytes."""

from __future__ import annotations

from pathlib import Path

from moe_ep_bench.models.hf_config import load_hf_model, spec_of
from moe_ep_bench.models.spec import (
    Attention,
    LatentAttention,
    ModelSpec,
    ScoreFunction,
    logits_from_scores,
    scores_from_logits,
    shares,
)

__all__ = [
    "Attention",
    "LatentAttention",
    "ModelSpec",
    "ScoreFunction",
    "load_hf_model",
    "load_model",
    "logits_from_scores",
    "scores_from_logits",
    "shares",
    "spec_of",
]


def load_model(name_or_path: str) -> ModelSpec:
    """Load a preset by its name or Hugging Face id, or a config.json by path: a file that ends in .json, or its folder.

    Raises:
        ValueError: see ``ModelSpec.named`` and ``load_hf_model``.
    """
    path, preset = Path(name_or_path), ModelSpec.preset_of(name_or_path)
    if preset is None and (path.suffix == ".json" or path.exists()):
        return load_hf_model(path)
    return ModelSpec.named(preset or name_or_path, "a path of a config.json or ")
