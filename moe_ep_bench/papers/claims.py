"""What a paper says of policies, so that it can be set beside what a layer, or a whole model, does here.

A config lists claims under ``claims``: of one of its policies, where a number stands in papers/published, or the
number itself. They decide nothing that is measured; ``papers`` reads them. The data also names the traffic that is
primary for an item, which was chosen before ours was known.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from moe_ep_bench.errors import UserError
from moe_ep_bench.papers.published import Number, Primary, load, numbers
from moe_ep_bench.presets import PolicyEntry, Strict
from moe_ep_bench.schema import ALL, MOE


class Metric(NamedTuple):
    """What a claim's number is, and how ours comes about.

    Attributes:
        value: from ``of`` of the policy's case and of the one that it is set against, which mostly is native: the
            policy's ``own`` share or ``plain`` number, ``native``'s own, the ``ratio`` of policy over native, or its
            ``inverse``.
        of: a quantity of ``analysis.cases.timings``, whose pairs are divided, or a column of ``analysis.cases.cases``.
        scopes: of comparisons that have such a number.
        is_pass: of a whole pass with ``scope: model``.
    """

    words: str
    value: Literal["own", "plain", "native", "ratio", "inverse"]
    of: str
    scopes: tuple[str, ...] = ("layer",)
    is_pass: bool = False


_BOTH = ("layer", "model")
CLAIMED = {
    "speedup": Metric("speedup", "inverse", ALL, _BOTH, is_pass=True),
    "dropped_fraction": Metric("dropped share", "own", "dropped_share", _BOTH),
    # Means over ranks of breakdown iterations.
    "permute_time": Metric("relative time of permutation", "ratio", "permute_ms"),
    "comm_time": Metric("relative time of communication", "ratio", "comm_ms"),
    "layer_time": Metric("relative time of the layer", "ratio", ALL),
    "activated_experts": Metric("relative number of activated experts", "ratio", "activated", _BOTH),
    "moe_speedup": Metric("speedup of all MoE layers in a pass", "inverse", MOE, ("model",)),
    "step_time": Metric("relative time of a decode step", "ratio", ALL, ("model",), is_pass=True),
    "rank_imbalance": Metric("fullest rank over the mean", "plain", "rank_imbalance", _BOTH),
    "imbalance_cut": Metric("fullest expert, native over policy", "inverse", "fullest_expert"),
    "native_layer_us": Metric("native's layer (us)", "native", ALL),
    "native_rank_imbalance": Metric("native's fullest rank over the mean", "native", "rank_imbalance", _BOTH),
    "native_activated_experts": Metric("native's activated experts", "native", "activated"),
}
# Shares of one policy. Numbers with a unit, and no policy.
OWN_METRICS, NATIVE_METRICS = (
    tuple(name for name, metric in CLAIMED.items() if metric.value == value) for value in ("own", "native")
)

_PAPER = "expected a number, [low, high] with null for an open end, or null where the paper states none"


class Claim(Strict):
    """One published number, or what a publication says of a number."""

    source: str = Field(min_length=1)
    """Publication, and its figure, table or section."""
    policy: PolicyEntry | None = None
    """One of the config's policies; a list in place of a value makes one claim for each. None for a native_ metric."""
    lossless: str | None = None
    """Label of one of ``emulate.replication`` or ``emulate.rebalance``, in place of a policy."""
    metric: Literal[*CLAIMED] = "speedup"
    """Time of native over the policy's, of a layer or, with scope model, of a pass; a share; the time of the layer or
    of a group of phases, or the activated experts of the rank with most, over native's; or native's own, in
    microseconds or experts; the fullest rank's load over the mean; the fullest expert's of native over the policy's.
    Of whole models alone: the speedup of all MoE layers in a pass, and a decode step's time over native's."""
    paper: tuple[float | None, float | None] | None = None
    """From and to; a number is both, null is an open end. null alone: the paper states none, and the note says so."""
    published: dict[str, Any] | None = None
    """In place of ``paper``: where the number stands in papers/published, by ``paper``, ``item`` and settings. ``$k0``
    is the policy's k0. ``over`` has the settings in which the number that it is divided by differs."""
    of: Literal["layer", "end_to_end", "not_stated"] = "layer"
    """What the paper measured; here it is what ``scope`` says."""
    versus: PolicyEntry | None = None
    """Another of the config's policies in place of native."""
    versus_lossless: str | None = None
    """A label as of ``lossless``, in place of native."""
    where: dict[str, Any] = Field({})
    """Dotted keys with values: only comparisons that have them."""
    note: str = Field(min_length=1)
    """Why our number may differ, and what was inferred."""

    @field_validator("paper", mode="before")
    @classmethod
    def _as_range(cls, value: object) -> object:
        if value is None:
            return None
        ends = list(value) if isinstance(value, list | tuple) else [value, value]
        numbers = [end for end in ends if end is not None]
        if len(ends) != 2 or not numbers or not all(_is_number(end) for end in numbers) or numbers != sorted(numbers):
            raise UserError(f"{_PAPER}; got {value!r}")
        return tuple(ends)

    @model_validator(mode="after")
    def _check(self) -> Claim:
        sides = (self.policy, self.lossless), (self.versus, self.versus_lossless)
        if self.metric in NATIVE_METRICS and any(one is not None for side in sides for one in side):
            raise UserError(f"policy, versus: expected none with {self.metric}, which is native's own")
        if self.metric not in NATIVE_METRICS and sides[0] == (None, None):
            raise UserError(f"policy: expected one of the config's with {self.metric}, got none")
        if any(None not in side for side in sides):
            raise UserError("lossless, versus_lossless: expected none beside policy and versus, got both")
        if self.published is not None and (self.paper is not None or not {"paper", "item"} <= self.published.keys()):
            raise UserError("published: expected paper and item, and no number under paper beside it")
        if sides[1] != (None, None) and self.metric == "dropped_fraction":
            raise UserError(f"versus: expected none with {self.metric}, which is of one policy alone")
        return self

    def check_scope(self, scope: str, *, decodes: bool) -> None:
        """Raise ValueError where what is timed here has no such number.

        Args:
            scope: ``layer`` or ``model``.
            decodes: whether a pass of the model is a decode step.
        """
        metric, is_model = CLAIMED[self.metric], scope == "model"
        known = ", ".join(name for name, one in CLAIMED.items() if scope in one.scopes)
        pass_of = f"of: expected end_to_end or not_stated with {self.metric}, a whole pass's; got layer"
        for is_wrong, words in (
            (scope not in metric.scopes, f"metric: expected one of {known} with scope: {scope}; got {self.metric}"),
            (is_model and metric.is_pass and self.of == "layer", f"{pass_of} (moe_speedup is the layers')"),
            (
                self.metric == "moe_speedup" and self.of == "end_to_end",
                "of: expected layer or not_stated with moe_speedup, got end_to_end",
            ),
            (
                self.metric == "step_time" and not decodes,
                "metric: expected whole.context_length above 0 with step_time, a decode step's; got 0",
            ),
        ):
            if is_wrong:
                raise UserError(words)

    def resolved(self, policy: Any) -> Claim:
        """The claim of one policy, with the number that ``published`` refers to; several are taken as a range.

        Raises:
            ValueError: no such number is published.
        """
        if self.published is None:
            return self
        wanted = {
            key: getattr(policy, value[1:]) if str(value).startswith("$") else value
            for key, value in self.published.items()
        }
        over, paper = wanted.pop("over", None), str(wanted.pop("paper"))
        found = [_as_metric(self.metric, one) for one in numbers(paper, **wanted)]
        if over is not None:
            (below,) = (one.value for one in numbers(paper, **wanted | over))
            found = [value / below for value in found]
        if not found:
            words = ", ".join(f"{key} {value}" for key, value in wanted.items())
            raise UserError(f"published: expected a number of {paper}; there is none with {words}")
        low, high = round(min(found), 4), round(max(found), 4)
        bounds = {one.bound for one in numbers(paper, **wanted)}
        ends = (None if "below" in bounds else low, None if "above" in bounds else high)
        return self.model_copy(update={"paper": ends, "published": None})

    def primary(self) -> Primary | None:
        """The traffic that was chosen for the item beforehand."""
        if self.published is None:
            return None
        item, model = self.published["item"], self.published.get("model")
        chosen = load(str(self.published["paper"])).primary
        return next((one for one in chosen if item in (one.items or (item,)) and one.model in (None, model)), None)


def _as_metric(metric: str, number: Number) -> float:
    """A published number by a claim's metric: shares for per cent, ratios for changes, speedups for times."""
    value = number.value
    if number.unit == "%":
        value /= 100
        if "change" in number.metric or "over native" in number.metric:
            value += 1
        # A change of throughput is no change of time.
        return 1 / value if metric.endswith("_time") and "latency" not in number.metric else value
    return 1 / value if number.metric == "layer time over vanilla" and metric.endswith("speedup") else value


def claims_path(directory: Path) -> Path:
    """What ``papers`` writes beside a directory's results."""
    return directory / "claims.json"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
