"""Model shapes: what of a model decides how its MoE layers behave under expert parallelism.

A preset is a YAML file in configs/models/, each figure with its source. ``scale`` shrinks the
hidden sizes, and with them the work per token, so that CPU ranks can run a layer; experts,
top-k and routing stay as they are, and every result says that it was scaled.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

PRESET_DIR = Path(__file__).resolve().parents[1] / "configs" / "models"

# Hidden sizes are kept multiples of this, as kernels want them.
_SIZE_MULTIPLE = 16


class ModelSpec(BaseModel):
    """One MoE layer's shape, and where in the model such layers stand."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    source: str
    num_layers: int = Field(ge=1)
    first_dense_layers: int = Field(0, ge=0)
    hidden_size: int = Field(ge=1)
    num_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1)
    """Width of one routed expert's gated FFN."""
    shared_ffn_hidden_size: int = Field(0, ge=0)
    """Width of all shared experts together; 0 = none."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool
    """Weights of the selected experts are divided by their sum (norm_topk_prob)."""
    routed_scale: float = 1.0
    """Factor on the combine weights (routed_scaling_factor)."""
    scale: float = Field(1.0, gt=0, le=1)
    """Hidden sizes as a share of the true ones."""

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k: expected at most num_experts={self.num_experts}, got {self.top_k}")
        return self

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.first_dense_layers

    def scaled(self, scale: float) -> ModelSpec:
        """Return this model with its hidden sizes multiplied by ``scale`` (rounded to multiples of 16)."""
        if scale == 1.0:
            return self
        sizes = {
            key: max(_SIZE_MULTIPLE, round(getattr(self, key) * scale / _SIZE_MULTIPLE) * _SIZE_MULTIPLE)
            for key in ("hidden_size", "ffn_hidden_size", "shared_ffn_hidden_size")
            if getattr(self, key)
        }
        return self.model_copy(update={**sizes, "scale": scale})


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESET_DIR.glob("*.yaml"))


def load_model(name: str) -> ModelSpec:
    """Load a preset of configs/models/ by name.

    Raises:
        ValueError: there is no such preset; the message lists those there are.
    """
    path = PRESET_DIR / f"{name}.yaml"
    if not path.is_file():
        close = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"expected one of {', '.join(preset_names())}; got {name!r}{hint}")
    return ModelSpec(**yaml.safe_load(path.read_text()))
