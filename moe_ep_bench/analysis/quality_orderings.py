"""Which of the papers' orderings hold on this model and text?

Papers compare policies by accuracy on their own models; what may carry over to another model is who comes before whom.
Each ordering names two kinds of cases and what must agree between them. They are compared sequence by sequence (loads
batch by batch): the mean difference with its 95 % interval over batches says that the ordering *holds*, *does not
hold*, or is *inconclusive* on these sequences. Nothing is said below ten batches.

A cost is the cross-entropy that a case adds to the unpatched model's. Where two policies cannot be made to drop
alike, it is divided by the share of top-k pairs that the case drops, and cases that drop nearly as much are compared;
where they activate other numbers of experts, the cost at as many is read off between two cases.

Comparisons that differ in the checkpoint alone, seeds of one training say, are put together: before each one's verdict
stands that over checkpoints, by Student's t over their mean differences; it speaks of this text, however few its
batches.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.quality_frames import (
    Quality,
    costs_by_sequence,
    half_interval,
    half_over_batches,
    text_costs,
)
from moe_ep_bench.analysis.render import Row
from moe_ep_bench.policies import POLICIES

PEAK_LOAD, PER_SHARE = "fullest expert over native's mean", "nats per token and share of pairs dropped"


class Ordering(NamedTuple):
    """A claim: cases of one kind cost less than cases of another.

    Attributes:
        better, worse: policy and fields of either kind; a field's value, or what says whether a value is meant. Fields
            that both policies have and that neither names must be equal, and so must the phase.
        at_equal: what else is made equal. ``dropped``: costs are per share of dropped pairs, no field has to agree,
            and of the better kind the case counts that drops most nearly what the worse one does, where that is
            between half and twice as much. ``activated``: the better kind's cost at the worse case's activated experts,
            on the line between its cases of other ``along``.
        along: the field in which those cases differ.
        share: of the worse kind's cost, with which the better kind's is compared.
        unit: of what is compared: a cost, or of ``PEAK_LOAD`` the loads.
    """

    words: str
    source: str
    better: dict[str, Any]
    worse: dict[str, Any]
    at_equal: Literal["fields", "dropped", "activated"] = "fields"
    along: str = "k0"
    share: float = 1.0
    unit: str = "nats per token"


def _is_set(value: Any) -> bool:
    return value is not None


def _beyond(holds: Callable[[int], bool]) -> dict[str, Any]:
    """OEA with a k_max whose distance from the model's top-k is as asked; see ``_suits``."""
    return {"k_max": _is_set, "beyond_top_k": holds}


_DROPPING, _OEA_PAPER, _LASER_PAPER = "arXiv 2503.05066", "arXiv 2511.02237", "arXiv 2510.03293"
_DROP = {"name": "token_drop", "metric": "score"}
_PER_EXPERT = {**_DROP, "granularity": "expert"}
_EXPANDED = {"name": "expanded_drop", "metric": "score", "num_candidates": None, "max_experts_per_token": None}
_OEA = {"name": "oea", "p": 1.0, "k_max": None, "max_rank": None}
_LASER, _LOAD_ONLY = {"name": "laser"}, {"name": "load_only"}

ORDERINGS = (
    *(
        Ordering(f"dropping by score costs less than by {words}", _DROPPING, _DROP, {**_DROP, "metric": metric})
        for metric, words in (("order", "order"), ("reverse_order", "reverse order"), ("random", "random"))
    ),
    Ordering("Expanded Drop costs less than Token Drop at the same capacity factor", _DROPPING, _EXPANDED, _DROP),
    Ordering(
        "Expanded Drop with all local candidates costs less than with fewer",
        f"{_DROPPING}, Table 11's m",
        _EXPANDED,
        {**_EXPANDED, "num_candidates": _is_set},
    ),
    Ordering(
        "Expanded Drop costs less than with a limit on a token's experts",
        f"{_DROPPING}, Table 11's max-k",
        _EXPANDED,
        {**_EXPANDED, "max_experts_per_token": _is_set},
    ),
    Ordering(
        "a device's capacity at factor 1 costs less than an expert's at 1.5",
        _DROPPING,
        {"name": "token_drop", "granularity": "device", "capacity_factor": 1.0},
        {"name": "token_drop", "granularity": "expert", "capacity_factor": 1.5},
    ),
    Ordering(
        "Token Drop costs less than Expert Drop, per pair that is dropped",
        _DROPPING,
        _PER_EXPERT,
        {"name": "expert_drop"},
        "dropped",
        unit=PER_SHARE,
    ),
    Ordering(
        "Token Drop at factor 2 costs less than Expert Drop of a tenth of the experts, though it drops more",
        f"{_DROPPING}, Table 2",
        {**_PER_EXPERT, "capacity_factor": 2.0},
        {"name": "expert_drop", "fraction": 0.1, "count": None},
    ),
    Ordering(
        "OEA costs less than pruning to the same k0, which activates the same experts for the same inputs",
        _OEA_PAPER,
        _OEA,
        {"name": "pruned", "p": 1.0},
    ),
    Ordering(
        "OEA with p = 1 costs less than with p < 1 at as many activated experts",
        _OEA_PAPER,
        _OEA,
        {**_OEA, "p": lambda p: p < 1},
        "activated",
    ),
    *(
        Ordering(words, _OEA_PAPER, _OEA, {**_OEA, **other})
        for other, words in (
            (_beyond(lambda more: more <= 0), "OEA that fills up to k_max = K costs less than with a smaller k_max"),
            (_beyond(lambda more: more > 0), "OEA that fills up to k_max = K costs less than with a larger k_max"),
            ({"max_rank": _is_set}, "OEA over all ranks of a token's list costs less than with max_rank below E"),
        )
    ),
    Ordering(
        "LASER evens the loads: its fullest expert has less than the model's own",
        _LASER_PAPER,
        _LASER,
        {"name": "native"},
        unit=PEAK_LOAD,
    ),
    Ordering("LASER costs less than balancing loads alone", _LASER_PAPER, _LASER, _LOAD_ONLY),
    Ordering(
        "LASER stays near the model's own: less than a tenth (ours) of what balancing loads alone costs",
        _LASER_PAPER,
        _LASER,
        _LOAD_ONLY,
        share=0.1,
    ),
    Ordering(
        "balancing loads alone is bad: Token Drop at factor 1, which bounds loads too, costs less",
        f"{_LASER_PAPER}; Token Drop is our measure",
        {**_PER_EXPERT, "capacity_factor": 1.0},
        _LOAD_ONLY,
    ),
    Ordering(
        "XShare with every token's best expert costs less than without, at the same budget",
        "arXiv 2602.07265",
        {"name": "xshare", "k0": 1},
        {"name": "xshare", "k0": 0},
    ),
    Ordering(
        "XShare with every token's best expert costs less than without, at as many activated experts",
        "arXiv 2602.07265",
        {"name": "xshare", "k0": 1},
        {"name": "xshare", "k0": 0},
        "activated",
        along="budget",
    ),
    *(
        Ordering(
            f"{policy}: {better.replace('_', ' ')} costs text less than {worse.replace('_', ' ')}, synthetic images",
            f"{_DROPPING}, Table 4",
            {"name": name, "modality": better},
            {"name": name, "modality": worse},
        )
        for name, policy in (("token_drop", "Token Drop"), ("expanded_drop", "Expanded Drop"))
        for better, worse in (("image_first", "uniform"), ("uniform", "text_first"))
    ),
)


def orderings(quality: Quality) -> pd.DataFrame:
    """A row per pair of cases that an ordering is about: over all checkpoints, then (``is_overall`` False) for each.

    Only pairs that all checkpoints have. ``worse_costs_more`` is that of ``worse``, times ``share``, over ``better``,
    and ``half_width`` half its 95 % interval (missing below ten batches), both in ``unit``; ``group`` is that of
    ``text_costs``.
    """
    costs = text_costs(quality)
    rows: list[Row] = []
    for number, group in enumerate(quality.groups):
        names = [str(quality.facts[comparison_id]["model"]) for comparison_id in group]
        about = {"group": number, "comparison": quality.title(group), "is_overall": len(group) == 1}
        for place, (name, comparison_id) in enumerate(zip(names, group, strict=True), 1):
            # Folders of one name may stand in different places.
            checkpoint = name if names.count(name) == 1 else f"{name}, number {place}"
            cases = costs[costs["comparison_id"] == comparison_id].to_dict("records")
            rows += [{**about, "checkpoint": checkpoint, **p} for p in _pairs(quality, comparison_id, cases)]
    frame = pd.DataFrame(rows)
    if frame.empty:
        return frame
    pair = frame.groupby(["group", "ordering", "alike", "worse"], sort=False)
    num_checkpoints = frame["group"].map({number: len(group) for number, group in enumerate(quality.groups)})
    frame["pair"] = pair.ngroup()
    frame = frame[pair["worse"].transform("size") == num_checkpoints]
    of_several = frame[~frame["is_overall"]].groupby("pair")
    if len(of_several):
        overall = of_several.first().assign(
            is_overall=True,
            checkpoint="all",
            better=of_several["better"].agg(lambda better: " or ".join(dict.fromkeys(better))),
            worse_costs_more=of_several["worse_costs_more"].mean(),
            half_width=of_several["worse_costs_more"].agg(half_interval),
        )
        frame = pd.concat([overall.reset_index()[list(frame)], frame]).sort_values("pair", kind="stable")
    frame = frame[frame["half_width"].notna() | ~frame["is_overall"]]
    more, half = frame["worse_costs_more"], frame["half_width"]
    frame["verdict"] = np.select([more > half, more < -half], ["holds", "does not hold"], "inconclusive")
    return frame.drop(columns=["pair", "alike"]).reset_index(drop=True)


def _pairs(quality: Quality, comparison_id: str, cases: Sequence[Row]) -> Iterator[Row]:
    """All pairs of a comparison, by their short labels; ``alike`` tells those of one ordering and worse case apart.

    Args:
        cases: its rows of ``text_costs``.
    """
    added = costs_by_sequence(quality, comparison_id)["added"]
    routing = quality.routing[quality.routing["comparison_id"] == comparison_id]
    routing = routing.assign(load=routing["peak_load"] * routing["num_pairs"] / routing["num_topk_pairs"])
    peaks = routing.pivot_table(index="batch", columns=["case_id", "phase"], values="load")

    def values(case: Row, ordering: Ordering) -> pd.Series:
        """Costs by sequence, or loads by batch."""
        if ordering.unit == PEAK_LOAD:
            return peaks[case["case_id"], case["phase"]]
        return added[case["case_id"]] / (case["dropped_fraction"] if ordering.unit == PER_SHARE else 1.0)

    top_k = round(cases[0]["experts_per_token"])
    for ordering in ORDERINGS:
        for worse in (case for case in cases if _suits(case, ordering.worse, top_k)):
            better = [case for case in cases if _suits(case, ordering.better, top_k) and _agree(case, worse, ordering)]
            for blend in _blends(ordering.at_equal, better, worse):
                of_better = sum(weight * values(case, ordering) for case, weight in blend)
                difference = (ordering.share * values(worse, ordering) - of_better).dropna()
                if difference.empty:
                    continue
                label = " to ".join(short_label(case["label"]) for case, _ in blend)
                yield {
                    "ordering": ordering.words,
                    "source": ordering.source,
                    "better": label,
                    "worse": short_label(worse["label"]),
                    "share": ordering.share,
                    "unit": ordering.unit,
                    "worse_costs_more": float(difference.mean()),
                    "half_width": half_over_batches(difference),
                    # What drops or activates as much may be another case in each checkpoint.
                    "alike": label if ordering.at_equal == "fields" else "",
                }


def _blends(at_equal: str, better: list[Row], worse: Row) -> list[list[tuple[Row, float]]]:
    """What to set ``worse`` against: single cases, or a place on the line between two, as cases with weights."""
    if at_equal == "dropped":
        dropped = worse["dropped_fraction"]
        near = [case for case in better if 0 < dropped / 2 <= case["dropped_fraction"] <= 2 * dropped]
        better = sorted(near, key=lambda case: abs(case["dropped_fraction"] - dropped))[:1]
    if at_equal != "activated":
        return [[(case, 1.0)] for case in better]
    wanted = worse["activated_experts"]
    for fewer, more in itertools.pairwise(sorted(better, key=lambda case: case["activated_experts"])):
        low, high = fewer["activated_experts"], more["activated_experts"]
        if low <= wanted < high:
            share = (wanted - low) / (high - low)
            return [[(fewer, 1 - share), (more, share)]]
    return []


def _suits(case: Row, wanted: dict[str, Any], top_k: int) -> bool:
    """Whether a case has the wanted fields; ``beyond_top_k`` is how far its k_max lies above the model's top-k."""
    fields = {"name": case["policy"], **json.loads(case["policy_params"])}
    if fields.get("k_max") is not None:
        fields["beyond_top_k"] = fields["k_max"] - top_k
    return all(
        key in fields and (value(fields[key]) if callable(value) else fields[key] == value)
        for key, value in wanted.items()
    )


def _agree(better: Row, worse: Row, ordering: Ordering) -> bool:
    """Fields that both have, and that are not what the ordering is about, are equal; so is the phase."""
    if better["phase"] != worse["phase"] or ordering.at_equal == "dropped":
        return better["phase"] == worse["phase"]
    about = (
        ordering.better.keys()
        | ordering.worse.keys()
        | ({ordering.along} if ordering.at_equal == "activated" else set())
    )
    ours, theirs = _params(better), _params(worse)
    return all(ours[key] == theirs[key] for key in (ours.keys() & theirs.keys()) - about)


def _params(case: Row) -> dict[str, Any]:
    """A case's fields, those included that it leaves out because they have their default."""
    policy = POLICIES.get(case["policy"])
    fields = dataclasses.fields(policy) if policy else ()
    left_out = {one.name: one.default for one in fields if one.name in policy.optional}
    return left_out | json.loads(case["policy_params"])


def short_label(label: str) -> str:
    """A case's label with shorter names of fields."""
    for key, short in (("granularity=", "per "), ("metric=", ""), ("modality=", ""), ("num_candidates", "m")):
        label = label.replace(key, short)
    return re.sub(r"(capacity_factor=\d+)\.0\b", r"\1", label)
