"""What a paper says of policies, so that it can be set beside what a layer, or a whole model, does here.

A config lists claims under ``claims``: of one of its policies, where a number stands in papers/published, or the
number itself. They decide nothing that is measured; ``papers`` reads them. The data also names the traffic that is
primary for an item, which was chosen before ours was known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic import Field, field_validator, model_validator

from moe_ep_bench.errors import UserError
from moe_ep_bench.papers import Number, Primary, load, numbers
from moe_ep_bench.presets import Strict
from moe_ep_bench.schema import ALL, MOE


class Metric(NamedTuple):
    """What a claim's number is, and how ours comes about.

    Attributes:
        value: from ``of`` of the claim's case and of the one that it is set against, which mostly is native: the case's
            own ``share`` or ``number``, the ``ratio`` of case over native, or its ``inverse``.
        of: a quantity of ``analysis.cases.timings``, whose pairs are divided, or a column of ``analysis.cases.cases``.
    """

    words: str
    value: Literal["share", "number", "ratio", "inverse"]
    of: str


CLAIMED = {
    "speedup": Metric("speedup", "inverse", ALL),
    "moe_speedup": Metric("speedup of all MoE layers in a pass", "inverse", MOE),
    "time": Metric("relative time", "ratio", ALL),
    # Means over ranks of breakdown iterations.
    "permute_time": Metric("relative time of permutation", "ratio", "permute_ms"),
    "comm_time": Metric("relative time of communication", "ratio", "comm_ms"),
    "activated_experts": Metric("relative number of activated experts", "ratio", "activated"),
    "imbalance_cut": Metric("fullest expert, native over policy", "inverse", "fullest_expert"),
    # What papers call dropped: top-k pairs that are not computed, whatever is computed in their place.
    "missing_share": Metric("missing share", "share", "missing_share"),
    "rank_imbalance": Metric("fullest rank over the mean", "number", "rank_imbalance"),
    "time_us": Metric("time (us)", "number", ALL),
    "num_activated": Metric("activated experts", "number", "activated"),
}
# Of names that are data: a checker cannot list them.
MetricName: TypeAlias = Literal[*CLAIMED]  # pyright: ignore[reportInvalidTypeForm]
SHARES, NUMBERS = (
    tuple(name for name, metric in CLAIMED.items() if metric.value == value) for value in ("share", "number")
)


class Claim(Strict):
    """One published number, or what a publication says of a number."""

    source: str = Field(min_length=1)
    """Figure, table or section."""
    policy: dict[str, Any] | str | None = None
    """One of the config's policies (a list: a claim each), or a label; null = native."""
    metric: MetricName = "speedup"
    """``speedup`` (time of a layer or pass) and ``imbalance_cut`` (fullest expert): native over the policy; times and
    activated experts: the policy over native; all others: the policy's own value."""
    paper: tuple[float | None, float | None] | None = None
    """A number, or a range [from, to] (null: open); null: not stated."""
    published: dict[str, Any] | None = None
    """Or ``paper``, ``item`` and settings of papers/published; ``$k0`` is the policy's."""
    of: Literal["layer", "end_to_end", "not_stated"] = "layer"
    """What the paper measured; ours is ``scope``."""
    versus: dict[str, Any] | str | None = None
    """Another policy, in place of native."""
    where: dict[str, Any] = Field(default={})
    """Keys that a comparison must have."""
    note: str = Field(min_length=1)
    """Why ours may differ."""

    @field_validator("paper", mode="before")
    @classmethod
    def _as_range(cls, value: object) -> object:
        if isinstance(value, list):
            return tuple(value)
        return (value, value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check(self) -> Claim:
        if self.policy is None and self.metric not in NUMBERS:
            raise UserError(f"expected one of the config's with {self.metric}, got none", "policy")
        if self.versus is not None and self.metric in (*SHARES, *NUMBERS):
            raise UserError(f"expected none with {self.metric}, which is of one case by itself", "versus")
        if self.published is not None and (self.paper is not None or not {"paper", "item"} <= self.published.keys()):
            raise UserError("expected paper and item, and no number under paper beside it", "published")
        return self

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
        paper = str(wanted.pop("paper"))
        found = numbers(paper, **wanted)
        if not found:
            words = ", ".join(f"{key} {value}" for key, value in wanted.items())
            raise UserError(f"expected a number of {paper}; there is none with {words}", "published")
        values, bounds = [round(_as_metric(self.metric, one), 4) for one in found], {one.bound for one in found}
        ends = (None if "below" in bounds else min(values), None if "above" in bounds else max(values))
        return self.model_copy(update={"paper": ends})

    def primaries(self) -> list[Primary]:
        """Traffics that were chosen for the item beforehand; the first that a config has counts."""
        if self.published is None:
            return []
        item, model = self.published["item"], self.published.get("model")
        chosen = load(str(self.published["paper"])).primary
        return [one for one in chosen if item in (one.items or (item,)) and one.model in (None, model)]


def _as_metric(metric: str, number: Number) -> float:
    """A published number by a claim's metric: shares for per cent, ratios for changes, speedups for times."""
    value = number.value
    if number.unit == "%":
        value /= 100
        if "change" in number.metric or "over native" in number.metric:
            value += 1
        # A change of throughput is no change of time.
        return 1 / value if metric == "time" and "latency" not in number.metric else value
    return 1 / value if number.metric == "layer time over vanilla" and metric.endswith("speedup") else value


def claims_path(directory: Path) -> Path:
    """What ``papers`` writes beside a directory's results."""
    return directory / "claims.json"
