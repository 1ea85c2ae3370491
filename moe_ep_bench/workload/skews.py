"""Skews of real models by name: targets for synthetic workloads, each with what it was calibrated to.

A file of configs/skews/ belongs to the preset of the same name and holds three:

``mixed``          traffic of several domains together, a layer of average skew
``single_domain``  one domain, a layer of average skew
``worst_layer``    one domain, the most skewed layer

A synthetic workload calibrated to a recording is not a recording: it has the targets' numbers, and the
rest of its shape is the generator's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

SKEW_DIR = Path(__file__).resolve().parents[2] / "configs" / "skews"
SKEWS = ("mixed", "single_domain", "worst_layer")


class RankLoad(BaseModel):
    """A load of the fullest of ``ep_size`` contiguous ranks, over the mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ep_size: int = Field(ge=2)
    load: float = Field(ge=1)


class Skew(BaseModel):
    """Targets for ``SyntheticWorkload``; None = not known, left to the generator."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    basis: Literal["recorded", "published", "assumed"]
    """What the numbers were taken from: a recording of this model, a publication on it, or another model's."""
    source: str
    peak_load: float = Field(ge=1)
    rank_load: RankLoad | None = None
    topk_share: float | None = Field(None, gt=0, lt=1)
    neighbour_overlap: float | None = Field(None, gt=0)

    def targets(self) -> dict[str, Any]:
        """The targets that are known, by key of a synthetic workload."""
        return self.model_dump(exclude={"basis", "source"}, exclude_none=True)


def load_skew(preset: str, name: str) -> Skew:
    """Load a skew of a preset's file.

    Raises:
        ValueError: the model has no file, or there is no such skew; the message says what there is.
    """
    path = SKEW_DIR / f"{preset}.yaml"
    if name not in SKEWS:
        raise ValueError(f"expected one of {', '.join(SKEWS)}; got {name!r}")
    if not path.is_file():
        raise ValueError(
            f"there is no configs/skews/{preset}.yaml to calibrate to; give peak_load and the like instead"
        )
    return Skew(**yaml.safe_load(path.read_text())[name])
