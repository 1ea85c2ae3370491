"""What the user says about a recording, because its file does not."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.models import ModelSpec, load_model
from moe_ep_bench.presets import Strict
from moe_ep_bench.workload.trace import MAX_EXPERTS


def _one_line(words: str) -> str:
    if not (words.strip() and words.isprintable()):
        raise UserError(f"expected words on one line, got {words!r}")
    return words


Words = Annotated[str, AfterValidator(_one_line)]


class ImportOptions(Strict):
    """Facts about a recording, as options of ``trace import`` give them."""

    preset: str = ""
    """The model: a preset's name, its config.json, or a YAML file of the form of a preset."""
    model: Words | None = None
    """Name of a model that has neither."""
    num_experts: int | None = Field(None, ge=2, le=MAX_EXPERTS)
    """Of such a model."""
    phase: Literal["prefill", "decode", "training"] | None = None
    domain: Words = "unstated"
    licence: Words = "unstated"
    micro_batch_size: PositiveInt = 1
    """Sequences interleaved in a forward pass."""
    assume_equal_scores: bool = False
    """Take a recording of ids alone: loads stay true; score mass and choices by score mean nothing."""

    @property
    def spec(self) -> ModelSpec:
        """The model of ``preset``. Raises ValueError: there is no such preset."""
        with naming("preset"):
            is_file = self.preset.endswith(".yaml")
            return ModelSpec.load(self.preset) if is_file else load_model(self.preset)
