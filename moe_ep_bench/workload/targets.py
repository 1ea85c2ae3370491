"""Targets of synthetic traffic: skews of real models by name, and counts of how often each expert was chosen.

A file of data/skews/ belongs to the preset of the same name and holds three skews, each with what it was calibrated to:

``mixed``          traffic of several domains together, a layer of average skew
``single_domain``  one domain, a layer of average skew
``worst_layer``    one domain, the most skewed layer

A synthetic workload calibrated to a recording is not a recording: it has the targets' numbers, and the
rest of its shape is the generator's.

Counts (``workload.skew_from``) are no routing either. A file may be

* JSON with ``logical_count`` [layers][experts], or [passes][layers][experts]: what SGLang takes for its own plan
  (``--init-expert-location``), and what its recorder dumps in mode ``stat``, converted;
* JSON with such a list alone.

Shapes: L = layers, E = experts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import read_json
from moe_ep_bench.presets import Preset, Strict

# ---- skews -----------------------------------------------------------------------------------------------------------


class RankLoad(Strict):
    """A load of the fullest of ``ep_size`` contiguous ranks, over the mean."""

    ep_size: int = Field(ge=2)
    """Number of ranks."""
    load: float = Field(ge=1)
    """Load of the fullest of them, over the mean."""


class Skew(Strict):
    """Targets for ``SyntheticWorkload``; None = not known, left to the generator."""

    basis: Literal["recorded", "published", "assumed"]
    """What the numbers were taken from: a recording of this model, a publication on it, or another model's."""
    source: str
    peak_load: float = Field(ge=1)
    rank_load: RankLoad | None = None
    topk_share: float | None = Field(None, gt=0, lt=1)
    neighbour_overlap: float | None = Field(None, gt=0)

    @property
    def of(self) -> str | None:
        """Whose numbers these are, where they are another model's: the source begins "as MODEL"."""
        return re.split("[;,]", self.source.removeprefix("as "))[0] if self.source.startswith("as ") else None

    def targets(self) -> dict[str, Any]:
        """The targets that are known, by key of a synthetic workload."""
        return self.model_dump(include=set(TARGETS), exclude_none=True)


class Skews(Preset):
    """The file of one model."""

    FOLDER = "skews"

    mixed: Skew
    single_domain: Skew
    worst_layer: Skew


TARGETS = ("peak_load", "rank_load", "topk_share", "neighbour_overlap")
SKEWS = tuple(Skews.model_fields)
# Another benchmark's patterns, of any model (``workload.synthetic``).
PATTERNS = ("power_law_1.01", "power_law_1.2")


def load_skew(preset: str, name: str) -> Skew:
    """Load a skew of a preset's file. Raises ValueError: the model has no file."""
    if preset not in Skews.names():
        raise UserError(f"there is no data/skews/{preset}.yaml to calibrate to; give peak_load and the like instead")
    return getattr(Skews.named(preset), name)


# ---- counts ----------------------------------------------------------------------------------------------------------

COUNT = "logical_count"
CONVERT = (
    "python -c \"import sys, json, torch; d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "json.dump({'logical_count': d['logical_count'].tolist()}, open(sys.argv[2], 'w'))\" dump.pt counts.json"
)


def read_counts(path: Path) -> NDArray[np.float64]:
    """Read the counts of every layer that has some: float64 [L, E]. Dense layers, which count nothing, have none.

    Raises:
        ValueError: no such file, or it holds no counts; one line that names the file.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix == ".pt":
        raise UserError(f"{path}: a pickle, which is not read; convert it where it was made: {CONVERT}")
    content = read_json(path)
    return _counts(content.get(COUNT) if isinstance(content, dict) else content, path)


def _counts(value: Any, path: Path) -> NDArray[np.float64]:
    """Check counts [layers, experts] or [passes, layers, experts]."""
    expected = f"{path}: expected {COUNT}, a number from 0 by layer and expert in lists of equal length"
    try:
        count = np.array(value, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{expected}; got {brief(value)}") from None
    if count.ndim not in (2, 3) or not (np.isfinite(count) & (count >= 0)).all():
        raise UserError(f"{expected}; got {brief(value)}")
    count_LE = count.reshape(-1, *count.shape[-2:]).sum(axis=0)
    if not count_LE.any():
        raise UserError(f"{path}: expected some count above 0, got none")
    return count_LE[count_LE.any(axis=1)]


def layer_loads(path: Path, layer: int) -> list[float]:
    """Counts of one layer's experts. Raises ValueError: as ``read_counts``; or no such layer."""
    load_LE = read_counts(path)
    if layer >= len(load_LE):
        raise UserError(f"layer: expected 0 to {len(load_LE) - 1} (the counted layers of {path}), got {layer}")
    return load_LE[layer].tolist()
