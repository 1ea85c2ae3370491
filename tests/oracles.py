"""Oracles: every rule once more, slow and obvious, written from the published rules and not from the code.

An oracle loops over tokens and experts in plain Python, sorts whole lists with every tie spelled
out, and computes capacities as fractions. What it shares with the package is the vocabulary
(RoutingContext, Routing, a policy's fields) and nothing else, so that a mistake has to be made
twice to stay hidden.

Three things are arithmetic rather than logic and are therefore agreed here:

- *Preference.* The selection bias is added in float32, as a model adds it: two experts whose
  biased scores round to the same float32 are tied.
- *Random keys.* ``metric: random`` draws ``torch.rand([T, E], generator=...)`` once per route, one key
  per (token, expert), and keeps the largest. An oracle draws the same numbers from a copy of the
  context's generator, which it leaves where it stands: call it before or after the policy, but
  with a generator in the state that the policy sees.
- *Group values.* A group's value is a sum of float32 numbers. The oracle adds exactly; tests that
  restrict the top-k to groups use scores whose sums are exact in float32 too (multiples of 2**-20).

Shapes: T = local tokens, E = experts, K = top_k, R = EP ranks, L = E / R experts per rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.policies import Routing, RoutingContext

Selection = list[set[int]]  # per token, its experts


def expected_routing(spec: Mapping[str, Any], scores_TE: Tensor, context: RoutingContext) -> Routing:
    """Route by the oracle of the policy that ``spec`` names; the weights are float64."""
    fields = dict(spec)
    return ORACLES[fields.pop("name")](scores_TE, context, **fields)


# --- What the context says, as plain lists ---------------------------------------------------------


def is_valid(context: RoutingContext, num_tokens: int) -> list[bool]:
    """Per token: is it a token (True) or padding (False)?"""
    return [True] * num_tokens if context.token_mask_T is None else context.token_mask_T.tolist()


def preferences(scores_TE: Tensor, context: RoutingContext) -> list[list[float]]:
    """What the model orders experts by: the scores, plus the selection bias where there is one."""
    return (scores_TE if context.bias_E is None else scores_TE + context.bias_E).tolist()


def random_keys(scores_TE: Tensor, context: RoutingContext) -> list[list[float]]:
    """The keys that ``metric: random`` is about to draw; the context's generator does not move."""
    assert context.generator is not None
    copy = torch.Generator().set_state(context.generator.get_state())
    return torch.rand(scores_TE.shape, generator=copy).tolist()


def best(experts: Iterable[int], preference_E: list[float], count: int) -> list[int]:
    """The ``count`` most preferred of ``experts``, best first; the lower index wins a tie."""
    return sorted(experts, key=lambda expert: (-preference_E[expert], expert))[:count]


# --- topk ------------------------------------------------------------------------------------------


def model_top_k(scores_TE: Tensor, context: RoutingContext) -> Selection:
    """Every token's own top-k; padding has none."""
    num_tokens, num_experts = scores_TE.shape
    preference_TE = preferences(scores_TE, context)
    valid_T = is_valid(context, num_tokens)
    selection = []
    for token in range(num_tokens):
        preference_E = preference_TE[token]
        allowed = list(range(num_experts))
        if context.num_groups is not None and context.top_groups is not None:
            size = num_experts // context.num_groups
            groups = [range(group * size, (group + 1) * size) for group in range(context.num_groups)]
            counted = context.top_k // context.top_groups
            values = [sum(preference_E[expert] for expert in best(group, preference_E, counted)) for group in groups]
            chosen = best(range(len(groups)), values, context.top_groups)
            allowed = [expert for group in chosen for expert in groups[group]]
        selection.append(set(best(allowed, preference_E, context.top_k)) if valid_T[token] else set())
    return selection


def weigh(selection: Selection, norm_selection: Selection, scores_TE: Tensor, context: RoutingContext) -> Routing:
    """Score, over the sum of ``norm_selection`` where the model normalises (0/0 is 0), times the scale."""
    scores = scores_TE.double().tolist()
    weights = [[0.0] * scores_TE.shape[1] for _ in selection]
    for token, experts in enumerate(selection):
        total = sum(scores[token][expert] for expert in norm_selection[token]) if context.normalize else 1.0
        for expert in experts:
            weights[token][expert] = context.scale * scores[token][expert] / total if total > 0 else 0.0
    selected = [[expert in experts for expert in range(scores_TE.shape[1])] for experts in selection]
    return Routing(
        map_TE=torch.tensor(selected, dtype=torch.bool).view(scores_TE.shape),
        weights_TE=torch.tensor(weights, dtype=torch.float64).view(scores_TE.shape),
    )


def topk(scores_TE: Tensor, context: RoutingContext) -> Routing:
    top_k = model_top_k(scores_TE, context)
    return weigh(top_k, top_k, scores_TE, context)


# --- token_drop and expanded_drop ------------------------------------------------------------------


def capacity_groups(granularity: str, num_experts: int, num_ranks: int) -> list[list[int]]:
    """The experts that share a capacity: each alone, or the L neighbours on a device."""
    size = {"expert": 1, "device": num_experts // num_ranks}[granularity]
    return [list(range(first, first + size)) for first in range(0, num_experts, size)]


def capacity(
    capacity_factor: float, num_tokens: int, top_k: int, num_experts: int, num_shared: int, min_capacity: int
) -> int:
    """max(n * min_capacity, floor(n * gamma * T * K / E)) for n experts, gamma being the decimal as written."""
    exact = Fraction(str(capacity_factor)) * num_shared * num_tokens * top_k / num_experts
    return max(num_shared * min_capacity, math.floor(exact))


def within_capacity(
    candidates: Selection,
    scores_TE: Tensor,
    context: RoutingContext,
    *,
    capacity_factor: float,
    metric: str = "score",
    granularity: str = "expert",
    modality: str = "uniform",
    min_capacity: int = 0,
) -> Selection:
    """Every expert (or device) sorts its candidate pairs and keeps the first C."""
    num_tokens, num_experts = scores_TE.shape
    preference_TE = preferences(scores_TE, context)
    random_TE = random_keys(scores_TE, context) if metric == "random" else None
    modality_T = [0] * num_tokens if context.modality_T is None else context.modality_T.tolist()
    dropped_first = {"uniform": None, "image_first": 1, "text_first": 0}[modality]

    def first_is_best(token: int, expert: int) -> float:
        if metric == "score":
            return -preference_TE[token][expert]
        if metric == "order":
            return token
        if metric == "reverse_order":
            return -token
        assert metric == "random"
        assert random_TE is not None
        return -random_TE[token][expert]

    groups = capacity_groups(granularity, num_experts, context.num_ranks)
    num_valid = sum(is_valid(context, num_tokens))
    room = capacity(capacity_factor, num_valid, context.top_k, num_experts, len(groups[0]), min_capacity)
    kept: Selection = [set() for _ in range(num_tokens)]
    for group in groups:
        pairs = [(token, expert) for token in range(num_tokens) for expert in group if expert in candidates[token]]
        pairs.sort(key=lambda pair: (modality_T[pair[0]] == dropped_first, first_is_best(*pair), pair))
        for token, expert in pairs[:room]:
            kept[token].add(expert)
    return kept


def token_drop(scores_TE: Tensor, context: RoutingContext, **rule: Any) -> Routing:
    top_k = model_top_k(scores_TE, context)
    return weigh(within_capacity(top_k, scores_TE, context, **rule), top_k, scores_TE, context)


def expanded_candidates(
    scores_TE: Tensor, context: RoutingContext, num_candidates: int | None, scope: str
) -> Selection:
    """The top-k, and the m best on the token's own rank or the m next best anywhere."""
    num_experts = scores_TE.shape[1]
    num_local = num_experts // context.num_ranks
    local = range(context.rank * num_local, (context.rank + 1) * num_local)
    preference_TE = preferences(scores_TE, context)
    valid_T = is_valid(context, len(preference_TE))
    candidates = []
    for token, top_k in enumerate(model_top_k(scores_TE, context)):
        if not valid_T[token]:
            candidates.append(set())
        elif scope == "local":
            count = num_local if num_candidates is None else num_candidates
            candidates.append(top_k | set(best(local, preference_TE[token], count)))
        else:
            assert scope == "global"
            assert num_candidates is not None
            others = set(range(num_experts)) - top_k
            candidates.append(top_k | set(best(others, preference_TE[token], num_candidates)))
    return candidates


def expanded_drop(
    scores_TE: Tensor,
    context: RoutingContext,
    *,
    num_candidates: int | None = None,
    scope: str = "local",
    max_experts_per_token: int | None = None,
    **rule: Any,
) -> Routing:
    preference_TE = preferences(scores_TE, context)
    candidates = expanded_candidates(scores_TE, context, num_candidates, scope)
    kept = within_capacity(candidates, scores_TE, context, **rule)
    if max_experts_per_token is not None:
        kept = [set(best(experts, preference_TE[token], max_experts_per_token)) for token, experts in enumerate(kept)]
    return weigh(kept, model_top_k(scores_TE, context), scores_TE, context)


ORACLES: dict[str, Callable[..., Routing]] = {
    "topk": topk,
    "token_drop": token_drop,
    "expanded_drop": expanded_drop,
}


# --- routing_metrics -------------------------------------------------------------------------------


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def expected_metrics(
    map_TE: Tensor,
    scores_TE: Tensor,
    context: RoutingContext,
    *,
    capacity_factor: float = 1.0,
    single_head: float = 0.5,
    plateau: float = 0.8,
) -> dict[str, Any]:
    """Every routing metric by counting, one pair at a time."""
    num_experts = scores_TE.shape[1]
    num_local = num_experts // context.num_ranks
    scores = scores_TE.double().tolist()
    top_k = model_top_k(scores_TE, context)
    tokens = [token for token, valid in enumerate(is_valid(context, len(scores))) if valid]

    load_E = [0] * num_experts
    load_R = [0] * context.num_ranks
    selected_mass = top_k_mass = all_mass = 0.0
    dropped = without_expert = crossing_pairs = crossing_copies = 0
    shares, entropies = [], []
    regimes = {"single_head": 0, "smooth": 0, "plateau": 0}
    for token in tokens:
        chosen = {expert for expert in range(num_experts) if map_TE[token, expert]}
        for expert in chosen:
            load_E[expert] += 1
            load_R[expert // num_local] += 1
        row = scores[token]
        row_mass, token_mass = sum(row), sum(row[expert] for expert in top_k[token])
        selected_mass += sum(row[expert] for expert in chosen)
        top_k_mass += token_mass
        all_mass += row_mass
        dropped += len(top_k[token] - chosen)
        without_expert += not chosen
        other_ranks = [expert // num_local for expert in chosen if expert // num_local != context.rank]
        crossing_pairs += len(other_ranks)
        crossing_copies += len(set(other_ranks))
        shares.append(_ratio(token_mass, row_mass))
        terms = [score / row_mass * math.log(score / row_mass) for score in row if score / (row_mass or 1.0) > 0]
        entropies.append(-sum(terms) / math.log(num_experts) if num_experts > 1 else 0.0)
        ordered = sorted((row[expert] for expert in top_k[token]), reverse=True)
        if token_mass > 0 and ordered[0] >= single_head * token_mass:
            regimes["single_head"] += 1
        elif ordered[-1] >= plateau * ordered[0]:
            regimes["plateau"] += 1
        else:
            regimes["smooth"] += 1

    num_tokens, num_pairs = len(tokens), sum(load_E)
    num_topk_pairs = sum(len(experts) for experts in top_k)
    mean = num_pairs / num_experts
    peak = _ratio(max(load_E), mean)
    allowed = Fraction(str(capacity_factor)) * num_tokens * context.top_k / num_experts
    experts_R = [load_E[rank * num_local : (rank + 1) * num_local] for rank in range(context.num_ranks)]
    activated_R = [sum(load > 0 for load in loads) for loads in experts_R]
    return {
        "num_tokens": num_tokens,
        "load_E": load_E,
        "load_R": load_R,
        "num_pairs": num_pairs,
        "num_topk_pairs": num_topk_pairs,
        "num_dropped_pairs": dropped,
        "dropped_fraction": _ratio(dropped, num_topk_pairs),
        "retained_mass_topk": _ratio(selected_mass, top_k_mass),
        "retained_mass_all": _ratio(selected_mass, all_mass),
        "peak_load": peak,
        "max_violation": peak - 1 if num_pairs else 0.0,
        "load_cv": _ratio(math.sqrt(sum((load - mean) ** 2 for load in load_E) / num_experts), mean),
        "excess_load": _ratio(float(sum(max(load - allowed, 0) for load in load_E)), num_pairs),
        "tokens_without_expert": without_expert,
        "experts_per_token": _ratio(num_pairs, num_tokens),
        "activated_experts": sum(activated_R),
        "activated_experts_fullest_rank": max(activated_R),
        "crossing_pairs": crossing_pairs,
        "crossing_copies": crossing_copies,
        "topk_share": _ratio(sum(shares), num_tokens),
        "entropy": _ratio(sum(entropies), num_tokens),
        **{f"regime_{name}": _ratio(count, num_tokens) for name, count in regimes.items()},
    }
