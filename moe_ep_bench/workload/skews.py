"""Skews of real models by name: targets for synthetic workloads, each with what it was calibrated to.

A file of data/skews/ belongs to the preset of the same name and holds three:

``mixed``          traffic of several domains together, a layer of average skew
``single_domain``  one domain, a layer of average skew
``worst_layer``    one domain, the most skewed layer

A synthetic workload calibrated to a recording is not a recording: it has the targets' numbers, and the
rest of its shape is the generator's.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field

from moe_ep_bench.errors import UserError
from moe_ep_bench.presets import Preset, Strict


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
# Other benchmarks' patterns, of any model (``workload.synthetic``).
PATTERNS = (*(f"megatron_w{number}" for number in (0, 1, 2, 3, 5, 6, 7)), "power_law_1.01", "power_law_1.2")


def load_skew(preset: str, name: str) -> Skew:
    """Load a skew of a preset's file. Raises ValueError: the model has no file."""
    if preset not in Skews.names():
        raise UserError(f"there is no data/skews/{preset}.yaml to calibrate to; give peak_load and the like instead")
    return getattr(Skews.named(preset), name)
