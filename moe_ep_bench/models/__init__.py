"""Shapes of models: ``spec`` says what a model is, ``hf_config`` reads one from a config.json, ``memory`` its bytes."""

from __future__ import annotations

from pathlib import Path

from moe_ep_bench.models.hf_config import load_hf_model, spec_of
from moe_ep_bench.models.spec import Attention, LatentAttention, ModelSpec, ScoreFunction

__all__ = [
    "Attention",
    "LatentAttention",
    "ModelSpec",
    "ScoreFunction",
    "load_hf_model",
    "load_model",
    "preset_of",
    "spec_of",
]


def preset_of(name: str) -> str | None:
    """The preset that a user means: its name, or the id on Hugging Face of the config.json that it was copied from.

    Capital letters do not count. None where it is neither.
    """
    wanted, names = name.lower(), ModelSpec.names()
    if wanted in names or "/" not in wanted:
        return wanted if wanted in names else None
    return next((known for known in names if ModelSpec.named(known).hub_id.lower() == wanted), None)


def load_model(name_or_path: str) -> ModelSpec:
    """Load a preset (``preset_of``), or a Hugging Face config.json by path: a file that ends in .json, or its folder.

    Raises:
        ValueError: see ``ModelSpec.named`` and ``load_hf_model``.
    """
    path, preset = Path(name_or_path), preset_of(name_or_path)
    if preset is None and (path.suffix == ".json" or path.exists()):
        return load_hf_model(path)
    return ModelSpec.named(preset or name_or_path, "a path of a config.json or ")
