"""What the published numbers imply together: MoE shares, peak loads, bandwidths, and limits that some of them break.

All is computed from the data of ``published``, and from limits that need no data: a token activates an expert at most
once, so that B tokens activate at most B K experts (``most_activated``), and the fullest of N experts has at most N / K
times the mean (``most_imbalance``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moe_ep_bench.papers.claims import most_gain
from moe_ep_bench.papers.published import Number, numbers

H100_TBPS = 3.35  # HBM3: H100 datasheet, SXM
_BYTES = 2  # of a bfloat16


class Share(NamedTuple):
    """What part of a model's time its MoE layers take, by Amdahl's law; the range is what rounding leaves open."""

    model: str
    method: str
    setting: str
    layer: float
    end_to_end: float
    share: float
    low: float
    high: float


class Expert(NamedTuple):
    """What one more activated expert costs, of a line through the averages over data sets.

    Attributes:
        per_expert_us, base_us: slope and intercept.
        megabytes: of its weights that a GPU reads.
        tbps: with which bandwidth it would have to read them.
        within_us: slope through the data sets of vanilla alone, without OEA.
    """

    model: str
    per_expert_us: float
    base_us: float
    megabytes: float
    tbps: float
    within_us: float


def moe_share(layer: float, end_to_end: float) -> float:
    """The MoE layers' share of a model's time, if they alone are faster: 1 - 1/e = share * (1 - 1/layer)."""
    return (1 - 1 / end_to_end) / (1 - 1 / layer)


def layer_speedup(share: float, end_to_end: float) -> float:
    """The layers' speedup that a model's speedup takes, at this share."""
    return 1 / (1 - (1 - 1 / end_to_end) / share)


def moe_shares() -> list[Share]:
    """The share by model and method, where a layer's and a model's speedup stand at one setting (arXiv 2503.05066).

    Figures 4 and 5; Mixtral with one expert a GPU, as Figure 4 has it. Qwen3-MoE: section 5.2.
    """
    layers = numbers("capacity", kind="layer", metric="speedup")
    found = []
    for model in numbers("capacity", kind="end_to_end", metric="speedup"):
        assert model.model is not None
        one = "granularity" in model.where or model.where["experts_per_gpu"] == _experts_per_gpu(model.model)
        for layer in layers if one else []:
            same = all(layer.where.get(key) == model.where.get(key) for key in ("method", "gamma", "granularity"))
            if same and str(layer.model).startswith(model.model):
                found.append(_share(layer, model))
    return found


def _experts_per_gpu(family: str) -> str:
    per_gpu = numbers("capacity", item="Figure 4", what="routed experts per GPU")
    return next("single" if n.value == 1 else "multiple" for n in per_gpu if str(n.model).startswith(family))


def _share(layer: Number, model: Number) -> Share:
    low = moe_share(layer.value + layer.rounding, model.value - model.rounding)
    high = moe_share(layer.value - layer.rounding, model.value + model.rounding)
    where = model.where
    method = str(where.get("method", f"{where.get('granularity')} capacity"))
    share = moe_share(layer.value, model.value)
    return Share(str(model.model), method, f"{where['gamma']:g}", layer.value, model.value, share, low, min(high, 1.0))


def single_expert_peaks() -> dict[tuple[str, float], float]:
    """Mixtral's peak load by method and capacity factor: factor times speedup of the layer (Figure 4).

    With one expert a GPU, a capacity cuts the fullest rank from the peak to the factor. Holds where the peak is above
    the factor and a layer's time grows with its fullest rank.
    """
    bars = numbers("capacity", item="Figure 4", metric="speedup", model="Mixtral-8x7B-Instruct")
    return {(str(n.where["method"]), float(n.where["gamma"])): n.value * float(n.where["gamma"]) for n in bars}


def gain_of_dropped_share() -> tuple[float, float]:
    """Mixtral at 1.5: what its dropped share lets the layer gain at most, and what Figure 4 says that it gains."""
    (dropped,) = numbers("capacity", metric="dropped share", model="Mixtral-8x7B-Instruct")
    (bar,) = numbers(
        "capacity", item="Figure 4", metric="speedup", model="Mixtral-8x7B-Instruct", method="Token Drop", gamma=1.5
    )
    return most_gain(dropped.value / 100, 1.5, 8), bar.value


def expert_costs() -> list[Expert]:
    """What an activated expert costs under OEA (arXiv 2511.02237): Tables 3 and 4, and Tables 5 and 10."""
    return [
        _expert("Qwen3-30B-A3B", "Table 3", "Table 4", _size("Section 4"), 1),
        _expert("Qwen3-235B-A22B", "Table 5", "Table 10", _size("Section 4.2"), 8),
    ]


def _size(item: str) -> int:
    """Weights of one expert."""
    hidden, ffn = (numbers("oea", item=item, what=what)[0].value for what in ("hidden size", "expert hidden size"))
    matrices = numbers("oea", item="Section 4", what="matrices per expert")[0].value
    return int(matrices * hidden * ffn)


def _expert(model: str, times: str, counts: str, weights: int, num_gpus: int) -> Expert:
    us, experts = numbers("oea", item=times, unit="us"), numbers("oea", item=counts, metric="activated experts")
    assert [n.where for n in us] == [n.where for n in experts]
    pairs = [(x.value, y.value, x.where) for x, y in zip(experts, us, strict=True)]
    per_expert_us, base_us = _line([(x, y) for x, y, where in pairs if where["task"] == "average"])
    alone = [(x, y) for x, y, where in pairs if where["task"] != "average" and where["routing"] == "vanilla"]
    num_bytes = weights * _BYTES / num_gpus
    tbps = num_bytes / per_expert_us / 1e6
    return Expert(model, per_expert_us, base_us, num_bytes / 1e6, tbps, _line(alone)[0])


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    slope, intercept = np.polyfit(*zip(*points, strict=True), deg=1)
    return float(slope), float(intercept)


def significantly_worse(item: str) -> list[Number]:
    """Accuracies of a table of OEA's that are worse than vanilla's by the paper's criterion (section 4.2, footnote 3).

    Worse: accuracy + standard error below vanilla's accuracy - its standard error.
    """
    cells = numbers("oea", item=item)
    vanilla = {n.where["task"]: n for n in cells if n.where["routing"] == "vanilla"}
    return [n for n in cells if n.value + (n.stderr or 0) < (v := vanilla[n.where["task"]]).value - (v.stderr or 0)]


def expected_activated(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Experts that tokens activate, each choosing uniformly: N (1 - (1 - K / N)^B).

    Independent tokens of one distribution activate no more than that on average.
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def most_activated(num_experts: int, top_k: int, num_tokens: int) -> int:
    """The most experts that tokens can activate."""
    return min(num_experts, num_tokens * top_k)


def most_imbalance(num_experts: int, top_k: int) -> float:
    """The most that the fullest expert can have over the mean."""
    return num_experts / top_k
