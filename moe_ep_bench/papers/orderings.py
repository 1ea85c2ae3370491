"""What papers say of two policies' answers, as data: the first keeps at least as much of them as the second.

Papers compare policies by accuracy on their own models; what may carry over to another model is who comes before whom.
``quality`` holds each row against every pair of cases that has the fields: it is a claim in the table of claims.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SET: Any = ...  # a field's value, whatever it is but null


class Ordering(NamedTuple):
    """Cases of one kind cost the answers no more than cases of another.

    Attributes:
        better, worse: policy and fields of either kind. Fields that both policies have and that neither names must be
            equal, and so must the phase.
    """

    words: str
    source: str
    better: dict[str, Any]
    worse: dict[str, Any]


_DROPPING, _OEA_PAPER, _LASER_PAPER = "arXiv 2503.05066", "arXiv 2511.02237", "arXiv 2510.03293"
_DROP = {"name": "token_drop", "metric": "score"}
_PER_EXPERT = {**_DROP, "granularity": "expert"}
_EXPANDED = {"name": "expanded_drop", "metric": "score", "num_candidates": None, "max_experts_per_token": None}
_OEA = {"name": "oea", "p": 1.0, "k_max": None, "max_rank": None}
_LOAD_ONLY = {"name": "load_only"}

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
        {**_EXPANDED, "num_candidates": SET},
    ),
    Ordering(
        "Expanded Drop costs less than with a limit on a token's experts",
        f"{_DROPPING}, Table 11's max-k",
        _EXPANDED,
        {**_EXPANDED, "max_experts_per_token": SET},
    ),
    Ordering(
        "a device's capacity at factor 1 costs less than an expert's at 1.5",
        _DROPPING,
        {"name": "token_drop", "granularity": "device", "capacity_factor": 1.0},
        {"name": "token_drop", "granularity": "expert", "capacity_factor": 1.5},
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
        "OEA that fills up to k_max = K costs less than with another k_max", _OEA_PAPER, _OEA, {**_OEA, "k_max": SET}
    ),
    Ordering(
        "OEA over all ranks of a token's list costs less than with max_rank below E",
        _OEA_PAPER,
        _OEA,
        {**_OEA, "max_rank": SET},
    ),
    Ordering("LASER costs less than balancing loads alone", _LASER_PAPER, {"name": "laser"}, _LOAD_ONLY),
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
)
