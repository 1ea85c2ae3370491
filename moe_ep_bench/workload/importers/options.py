"""What a user tells an importer, because the source does not say it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_ep_bench.errors import UserError
from moe_ep_bench.models import load_model
from moe_ep_bench.workload.trace import MAX_EXPERTS

PHASES = ("prefill", "decode", "prefill and decode", "training")
ASSUMED = "assumed equal over the top-k: the source holds expert ids only"
_OF_MODEL = ("model", "num_experts", "score_function")


@dataclass(frozen=True)
class ImportOptions:
    """Facts about a recording.

    Attributes:
        preset: a model of data/models/, which gives ``model``, ``num_experts``, ``top_k`` and ``score_function``.
        model: name of the model, where there is no preset.
        num_experts: of one layer, 2 to 1,024.
        top_k: from the preset; the recording must agree.
        num_layers: from the preset: all of the model's, dense ones included.
        domain: part of a published recording; of others, the subject of the texts.
        phase: prefill, decode, both, or training; see the importer.
        licence: under which the recording may be used.
        score_function: softmax or sigmoid: turns recorded logits into scores.
        micro_batch_size: sequences that one forward pass interleaves.
        assume_equal_scores: accept a recording that has no scores; every one of the top-k then gets the same.
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
    micro_batch_size: int = 1
    assume_equal_scores: bool = False

    def __post_init__(self) -> None:
        if self.phase is not None and self.phase not in PHASES:
            raise UserError(f"phase: expected one of {', '.join(PHASES)}; got {self.phase!r}")
        if self.score_function not in (None, "softmax", "sigmoid"):
            raise UserError(f"score_function: expected softmax or sigmoid, got {self.score_function!r}")
        if self.num_experts is not None and not 2 <= self.num_experts <= MAX_EXPERTS:
            raise UserError(f"num_experts: expected 2 to {MAX_EXPERTS}, got {self.num_experts}")
        if self.micro_batch_size < 1:
            raise UserError(f"micro_batch_size: expected at least 1, got {self.micro_batch_size}")
        for name in ("model", "domain", "licence"):
            words = getattr(self, name)
            if words is not None and not (words.strip() and words.isprintable()):
                raise UserError(f"{name}: expected words on one line, got {words!r}")

    def with_preset(self) -> ImportOptions:
        """The same with the facts of ``preset``, where there is one.

        Raises:
            ValueError: no such preset, or a fact given beside it.
        """
        if self.preset is None:
            return self
        for name in _OF_MODEL:
            if getattr(self, name) is not None:
                raise UserError(f"{name}: expected none beside preset, which says it; got {getattr(self, name)!r}")
        try:
            spec = load_model(self.preset)
        except ValueError as error:
            raise UserError(f"preset: {error}") from None
        return replace(
            self,
            model=spec.name,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            num_layers=spec.num_layers,
            score_function=spec.score_function,
        )

    def metadata(self) -> dict[str, str]:
        """The trace's metadata as far as the user gives it."""
        stated = {name: getattr(self, name) or "unstated" for name in ("domain", "licence")}
        return stated | {name: getattr(self, name) for name in ("model", "phase") if getattr(self, name) is not None}

    def need(self, name: str, why: str) -> object:
        """The option of that name.

        Raises:
            ValueError: it was not given.
        """
        value = getattr(self, name)
        if value is None:
            raise UserError(f"{name}: needed, because {why}{' (or preset)' if name in _OF_MODEL else ''}")
        return value

    def check_top_k(self, top_k: int, where: str) -> None:
        """Hold a recording's top-k against the preset's."""
        if self.top_k not in (None, top_k):
            raise UserError(f"{where}: top_k: the model has {self.top_k}, the recording {top_k}")

    def accept_no_scores(self, where: str, remedy: str = "") -> str:
        """The ``score`` of a trace that is made from ids alone.

        Raises:
            ValueError: the user has not accepted that.
        """
        if not self.assume_equal_scores:
            raise UserError(
                f"{where}: no scores, only expert ids: {remedy}set assume_equal_scores to give all of a token's top-k "
                "the same score (loads stay true; score mass and choices by score then mean nothing)"
            )
        return ASSUMED
