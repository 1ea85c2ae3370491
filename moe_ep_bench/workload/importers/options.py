"""What the user says about a recording, because its file does not."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.models import ModelSpec, load_model


@dataclass(frozen=True)
class ImportOptions:
    """Facts about a recording, as options of ``trace import`` give them.

    Attributes:
        preset: the model: a preset's name, its config.json, or a YAML file of the form of a preset.
        model: name of a model that has neither.
        num_experts: of such a model.
        phase: prefill, decode or training.
        micro_batch_size: sequences interleaved in a forward pass.
        assume_equal_scores: take ids alone: loads stay true; score mass and choices by score mean nothing.
    """

    preset: str = ""
    model: str = ""
    num_experts: int = 0
    phase: str | None = None
    domain: str = "unstated"
    licence: str = "unstated"
    micro_batch_size: int = 1
    assume_equal_scores: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise UserError(f"micro_batch_size: expected at least 1, got {self.micro_batch_size}")

    @property
    def spec(self) -> ModelSpec:
        """The model of ``preset``. Raises ValueError: there is no such preset."""
        with naming("preset"):
            is_file = self.preset.endswith(".yaml")
            return ModelSpec.load(self.preset) if is_file else load_model(self.preset)
