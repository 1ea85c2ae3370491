"""Routing metrics: counting in one pass beside plain loops, and ranks together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from oracles import is_valid, model_top_k
from policy_cases import cases, context_of, selected

from moe_ep_bench.metrics import mass_kept, routing_metrics
from moe_ep_bench.policies import Routing, RoutingContext, make_policy
from moe_ep_bench.schema import ROUTING_SCHEMA

_NAMES = ROUTING_SCHEMA.names
METRICS = _NAMES[_NAMES.index("num_tokens") : _NAMES.index("entropy") + 1]


def assert_metrics(metrics: dict[str, Any], expected: dict[str, Any]) -> None:
    """Counts exactly, floats up to rounding."""
    assert list(metrics) == list(expected)
    metrics = {name: list(value) if isinstance(value, np.ndarray) else value for name, value in metrics.items()}
    for name, value in expected.items():
        assert metrics[name] == (pytest.approx(value, rel=1e-9, abs=1e-12) if type(value) is float else value), name


@pytest.mark.parametrize("is_padding", [False, True])
def test_no_tokens_give_zeros_never_nan(is_padding: bool) -> None:
    scores_TE = torch.full([5 * is_padding, 8], 0.125)
    context = RoutingContext(
        top_k=1, num_ranks=4, token_mask_T=torch.zeros(5, dtype=torch.bool) if is_padding else None
    )
    routing = make_policy({"name": "topk"}).route(scores_TE, context)
    metrics = routing_metrics(routing, scores_TE, context)
    assert (metrics.pop("load_E").tolist(), metrics.pop("load_R").tolist()) == ([0] * 8, [0] * 4)
    assert (metrics.pop("copies_R").tolist(), metrics.pop("copies_N").tolist()) == ([0] * 4, [0])
    assert set(metrics.values()) == {0}


def test_the_mass_that_ranks_keep_together_is_what_all_their_tokens_keep() -> None:
    context = RoutingContext(top_k=2)
    policy = make_policy({"name": "pruned", "k0": 1})
    scores_TE = torch.rand([30, 8], generator=torch.Generator().manual_seed(0)).pow(torch.linspace(0, 4, 30)[:, None])
    scores_TE /= scores_TE.sum(dim=1, keepdim=True)
    parts = [scores_TE[:10], scores_TE[10:], scores_TE[:0]]
    rows = pd.DataFrame([routing_metrics(policy.route(part, context), part, context) for part in parts])
    together = routing_metrics(policy.route(scores_TE, context), scores_TE, context)["retained_mass_topk"]
    assert mass_kept(rows, [7, 7, 7]) == pytest.approx([together])
    assert np.average(rows["retained_mass_topk"], weights=rows["num_tokens"]) != pytest.approx(together, rel=1e-3)
    assert mass_kept(rows, [1, 2, 3])[:2] == pytest.approx(rows["retained_mass_topk"][:2].to_list())


# --- Shape of the answer ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 9])
def test_metrics_are_those_of_the_record_schema_in_its_types(num_tokens: int) -> None:
    scores_TE = torch.rand([num_tokens, 8], generator=torch.Generator().manual_seed(0))
    context = RoutingContext(top_k=2, num_ranks=4, rank=1)
    metrics = routing_metrics(make_policy({"name": "topk"}).route(scores_TE, context), scores_TE, context)
    assert list(metrics) == METRICS
    for name, value in metrics.items():
        kind = ROUTING_SCHEMA.field(name).type
        if pa.types.is_list(kind):
            assert value.dtype == np.int64, name
        else:
            assert type(value) is (int if pa.types.is_integer(kind) else float), name


# --- Against plain loops ---------------------------------------------------------------------------


@settings(max_examples=15)
@given(cases())
def test_every_metric_is_what_plain_loops_find(case) -> None:
    scores_TE, arguments = case
    context = context_of(arguments)
    num_tokens, num_experts = scores_TE.shape
    map_TE = torch.rand(scores_TE.shape, generator=torch.Generator().manual_seed(arguments["seed"])) < 0.2
    valid = [token for token, counts in enumerate(is_valid(context, num_tokens)) if counts]
    rows, experts_T = scores_TE.double().tolist(), selected(Routing(map_TE, map_TE))
    top_k_T = model_top_k(scores_TE, context)
    size = num_experts // context.num_ranks
    pairs = [(token, expert) for token, experts in enumerate(experts_T) for expert in experts]
    load_E = [sum(expert == other for _, other in pairs) for expert in range(num_experts)]
    load_R = [sum(load_E[first : first + size]) for first in range(0, num_experts, size)]
    copies = {(token, expert // size) for token, expert in pairs}
    node_copies = {(token, rank // 2) for token, rank in copies}
    nodes = -(-context.num_ranks // 2)
    top_k_mass, mass = (sum(rows[token][expert] for token in valid for expert in kept[token]) for kept in
                        (top_k_T, [range(num_experts)] * num_tokens))  # fmt: skip
    kept = sum(rows[token][expert] for token in valid for expert in experts_T[token])
    shares = [[score / sum(rows[token]) for score in rows[token]] for token in valid if sum(rows[token]) > 0]
    top_k_share = sum(
        sum(rows[token][expert] for expert in top_k_T[token]) / sum(rows[token]) for token in valid if sum(rows[token])
    )
    entropy = sum(-sum(share * math.log(share) for share in row if share) / math.log(num_experts) for row in shares)
    num_topk = sum(len(top_k_T[token]) for token in valid)
    lacks = [len(set(top_k_T[token]) - set(experts_T[token])) for token in valid]
    adds = [len(set(experts_T[token]) - set(top_k_T[token])) for token in valid]
    rerouted = sum(min(lack, added) for lack, added in zip(lacks, adds, strict=True))
    of_valid = sum(len(experts_T[token]) for token in valid)

    def ratio(part: float, whole: float) -> float:
        return part / whole if whole else 0.0

    expected = {
        "num_tokens": len(valid),
        "load_E": load_E,
        "load_R": load_R,
        "num_pairs": len(pairs),
        "padding_pairs": len(pairs) - of_valid,
        "num_topk_pairs": num_topk,
        "num_dropped_pairs": sum(lacks) - rerouted,
        "num_rerouted_pairs": rerouted,
        "dropped_share": ratio(sum(lacks) - rerouted, num_topk),
        "rerouted_share": ratio(rerouted, num_topk),
        "retained_mass_topk": ratio(kept, top_k_mass),
        "retained_mass_all": ratio(kept, mass),
        "peak_load": ratio(max(load_E) * num_experts, len(pairs)),
        "tokens_without_expert": sum(not experts_T[token] for token in valid),
        "experts_per_token": ratio(of_valid, len(valid)),
        "activated_experts": sum(load > 0 for load in load_E),
        "activated_experts_fullest_rank": max(
            sum(load > 0 for load in load_E[first : first + size]) for first in range(0, num_experts, size)
        ),
        "crossing_pairs": len(pairs) - load_R[context.rank],
        "crossing_copies": sum(rank != context.rank for _, rank in copies),
        "crossing_node_copies": sum(node != context.rank // 2 for _, node in node_copies),
        "copies_R": [sum(rank == other for _, rank in copies) for other in range(context.num_ranks)],
        "copies_N": [sum(node == other for _, node in node_copies) for other in range(nodes)],
        "topk_share": ratio(top_k_share, len(valid)),
        "entropy": ratio(entropy, len(valid)),
    }
    assert_metrics(routing_metrics(Routing(map_TE, map_TE), scores_TE, context, ranks_per_node=2), expected)
