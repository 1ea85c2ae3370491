"""What the user says about a recording, because its file does not."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt

from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.models import ModelSpec, ScoreFunction, load_model
from moe_ep_bench.presets import Strict
from moe_ep_bench.workload.trace import MAX_EXPERTS

ASSUMED = "assumed equal over the top-k: the source holds expert ids only"


def _one_line(words: str) -> str:
    if not (words.strip() and words.isprintable()):
        raise UserError(f"expected words on one line, got {words!r}")
    return words


Words = Annotated[str, AfterValidator(_one_line)]


class ImportOptions(Strict):
    """Facts about a recording, as options of ``trace import`` give them."""

    preset: str | None = None
    """The model, or its config.json: gives what the next three say, and its layers."""
    model: Words | None = None
    num_experts: int | None = Field(None, ge=2, le=MAX_EXPERTS)
    score_function: ScoreFunction | None = None
    phase: Literal["prefill", "decode", "training"] | None = None
    domain: Words = "unstated"
    licence: Words = "unstated"
    micro_batch_size: PositiveInt = 1
    """Sequences interleaved in a forward pass."""
    assume_equal_scores: bool = False
    """Take a recording of ids alone: loads stay true; score mass and choices by score mean nothing."""

    @property
    def spec(self) -> ModelSpec | None:
        """The model of ``preset``. Raises ValueError: there is no such preset."""
        with naming("preset"):
            return None if self.preset is None else load_model(self.preset)

    def with_model(self) -> ImportOptions:
        """Add the facts of ``preset``, where there is one. Raises ValueError: a fact is given beside it."""
        if (spec := self.spec) is None:
            return self
        facts = {"model": spec.name, "num_experts": spec.num_experts, "score_function": spec.score_function}
        for name in facts:
            if (value := getattr(self, name)) is not None:
                raise UserError(f"{name}: expected none beside preset, which says it; got {value!r}")
        return self.model_copy(update=facts)

    def need(self, name: str, why: str) -> Any:
        """Return the option of that name. Raises ValueError: it was not given."""
        if not (value := getattr(self, name)):
            hint = " (or preset)" if name in ("model", "num_experts", "score_function") else ""
            raise UserError(f"{name}: needed, because {why}{hint}")
        return value
