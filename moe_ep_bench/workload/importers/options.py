"""What the user says about a recording, because its file does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.models import ScoreFunction, load_model
from moe_ep_bench.workload.importers.arrays import MAX_ARRAY_BYTES
from moe_ep_bench.workload.trace import MAX_EXPERTS

ASSUMED = "assumed equal over the top-k: the source holds expert ids only"
CHOICES = {
    "phase": ("prefill", "decode", "prefill and decode", "training"),
    "score_function": get_args(ScoreFunction),
}
_OF_MODEL = ("model", "num_experts", "score_function")


@dataclass(frozen=True)
class ImportOptions:
    """Facts about a recording, as options of ``trace import`` give them.

    Attributes:
        preset: gives all facts of the model, with which the recording must agree.
        top_k, num_layers: follow from the preset; its layers include the dense ones.
        moe_layers: follow from the preset: those that route.
        micro_batch_size: sequences interleaved in a forward pass.
        prompt_start: position of a request's first recorded token, where the server was asked to leave some out.
        leave_out_cached: tokens that the prefix cache held are left out, where the source says which.
        max_bytes: of the source's largest array.
    """

    preset: str | None = None
    model: str | None = None
    num_experts: int | None = None
    top_k: int | None = None
    num_layers: int | None = None
    domain: str | None = None
    phase: str | None = None
    licence: str | None = None
    score_function: str | None = None
    moe_layers: tuple[int, ...] = ()
    micro_batch_size: int = 1
    prompt_start: int = 0
    leave_out_cached: bool = False
    assume_equal_scores: bool = False
    max_bytes: int = MAX_ARRAY_BYTES

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in (None, *choices):
                raise UserError(f"{name}: expected one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.num_experts is not None and not 2 <= self.num_experts <= MAX_EXPERTS:
            raise UserError(f"num_experts: expected 2 to {MAX_EXPERTS}, got {self.num_experts}")
        for name, least in (("micro_batch_size", 1), ("max_bytes", 1), ("prompt_start", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        for name in ("model", "domain", "licence"):
            words = getattr(self, name)
            if words is not None and not (words.strip() and words.isprintable()):
                raise UserError(f"{name}: expected words on one line, got {words!r}")

    def with_preset(self) -> ImportOptions:
        """Add the facts of ``preset``, where there is one.

        Raises:
            ValueError: no such preset, or a fact given beside it.
        """
        if self.preset is None:
            return self
        for name in _OF_MODEL:
            if getattr(self, name) is not None:
                raise UserError(f"{name}: expected none beside preset, which says it; got {getattr(self, name)!r}")
        with naming("preset"):
            spec = load_model(self.preset)
        facts = {name: getattr(spec, name) for name in ("num_experts", "top_k", "num_layers", "score_function")}
        return replace(self, model=spec.name, moe_layers=spec.moe_layers, **facts)

    def metadata(self) -> dict[str, str]:
        """The trace's metadata as far as the user gives it."""
        stated = {name: getattr(self, name) or "unstated" for name in ("domain", "licence")}
        return stated | {name: value for name in ("model", "phase") if (value := getattr(self, name)) is not None}

    def need(self, name: str, why: str) -> Any:
        """Return the option of that name. Raises ValueError: it was not given."""
        value = getattr(self, name)
        if value is None:
            raise UserError(f"{name}: needed, because {why}{' (or preset)' if name in _OF_MODEL else ''}")
        return value

    def accept_no_scores(self, where: str, remedy: str = "") -> str:
        """Return the ``score`` of a trace made from ids alone. Raises ValueError: the user has not accepted that."""
        if not self.assume_equal_scores:
            raise UserError(
                f"{where}: no scores, only expert ids: {remedy}set assume_equal_scores to give all of a token's top-k "
                "the same score (loads stay true; score mass and choices by score then mean nothing)"
            )
        return ASSUMED
