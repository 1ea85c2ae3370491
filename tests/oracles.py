"""Oracles: every rule once more, slow and obvious, written from the published rules and not from the code.

An oracle loops over tokens and experts in plain Python, sorts whole lists with every tie spelled
out, and computes capacities as fractions. What it shares with the package is the vocabulary
(RoutingContext, Routing, a policy's fields) and nothing else, so that a mistake has to be made
twice to stay hidden.

Some things are arithmetic rather than logic and are therefore agreed here:

- *Preference.* The selection bias is added in float32, as a model adds it: two experts whose
  biased scores round to the same float32 are tied.
- *Random keys.* ``metric: random`` and ``trim: random`` draw ``torch.rand([T, E], generator=...)`` once per
  route, one key per (token, expert), and keep the largest. An oracle draws the same numbers from a copy of the
  context's generator, which it leaves where it stands: call it before or after the policy, but
  with a generator in the state that the policy sees.
- *Group values.* A group's value is a sum of float32 numbers. The oracle adds exactly; tests that
  restrict the top-k to groups use scores whose sums are exact in float32 too (multiples of 2**-20).
- *Shares and sums* are exact here (fractions, or a sum rounded once) and float64 there: they decide alike
  unless a share comes within rounding of its threshold without meeting it. A share of nothing is 0.
- *Products with a score* (``beta``, ``t_fix``) are float64 products.

Shapes: T = local tokens, E = experts, K = top_k, R = EP ranks, L = E / R experts per rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_ep_bench.policies import Routing, RoutingContext, make_policy

Selection = list[set[int]]  # per token, its experts


def expected_routing(spec: Mapping[str, Any], scores_TE: Tensor, context: RoutingContext) -> Routing:
    """Route by the oracle of the policy that ``spec`` names; the weights are float64."""
    policy = make_policy(dict(spec))
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    return ORACLES[policy.name](scores_TE, context, **fields)


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
    capacity_factor: float,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    num_shared: int,
    rounding: str,
) -> int:
    """n * gamma * T * K / E for n experts, rounded, gamma being the decimal as written."""
    exact = Fraction(str(capacity_factor)) * num_shared * num_tokens * top_k / num_experts
    return {"floor": math.floor, "ceil": math.ceil}[rounding](exact)


def within_capacity(
    candidates: Selection,
    scores_TE: Tensor,
    context: RoutingContext,
    *,
    capacity_factor: float,
    metric: str,
    granularity: str,
    modality: str,
    rounding: str,
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
    room = capacity(capacity_factor, num_valid, context.top_k, num_experts, len(groups[0]), rounding)
    kept: Selection = [set() for _ in range(num_tokens)]
    for group in groups:
        pairs = [(token, expert) for token in range(num_tokens) for expert in group if expert in candidates[token]]
        pairs.sort(key=lambda pair: (modality_T[pair[0]] == dropped_first, first_is_best(*pair), pair))
        for token, expert in pairs[:room]:
            kept[token].add(expert)
    return kept


def token_drop(scores_TE: Tensor, context: RoutingContext, **rule: Any) -> Routing:
    top_k = model_top_k(scores_TE, context)
    kept = within_capacity(top_k, scores_TE, context, **rule)
    return weigh(kept, top_k, scores_TE, context)


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
    num_candidates: int | None,
    scope: str,
    max_experts_per_token: int | None,
    **rule: Any,
) -> Routing:
    preference_TE = preferences(scores_TE, context)
    candidates = expanded_candidates(scores_TE, context, num_candidates, scope)
    kept = within_capacity(candidates, scores_TE, context, **rule)
    if max_experts_per_token is not None:
        kept = [set(best(experts, preference_TE[token], max_experts_per_token)) for token, experts in enumerate(kept)]
    top_k = model_top_k(scores_TE, context)
    return weigh(kept, top_k, scores_TE, context)


# --- expert_drop, lynx, dynamic_skip ---------------------------------------------------------------


def loads(selection: Selection, num_experts: int) -> list[int]:
    """Pairs per expert."""
    return [sum(expert in experts for experts in selection) for expert in range(num_experts)]


def expert_drop(scores_TE: Tensor, context: RoutingContext, *, fraction: float) -> Routing:
    num_experts = scores_TE.shape[1]
    top_k = model_top_k(scores_TE, context)
    load_E = loads(top_k, num_experts)
    count = max(1, math.floor(Fraction(str(fraction)) * num_experts))
    skipped = sorted(range(num_experts), key=lambda expert: (load_E[expert], expert))[:count]
    return weigh([experts - set(skipped) for experts in top_k], top_k, scores_TE, context)


def lynx(scores_TE: Tensor, context: RoutingContext, *, num_dropped: int) -> Routing:
    num_experts = scores_TE.shape[1]
    top_k = model_top_k(scores_TE, context)
    load_E = loads(top_k, num_experts)
    activated = [expert for expert in range(num_experts) if load_E[expert] > 0]
    closed = sorted(activated, key=lambda expert: (load_E[expert], expert))[:num_dropped]
    return weigh([experts - set(closed) for experts in top_k], top_k, scores_TE, context)


def dynamic_skip(scores_TE: Tensor, context: RoutingContext, *, beta: float) -> Routing:
    scores = scores_TE.double().tolist()
    kept: Selection = []
    for token, experts in enumerate(model_top_k(scores_TE, context)):
        best_score = max((scores[token][expert] for expert in experts), default=0.0)
        kept.append({expert for expert in experts if not scores[token][expert] < beta * best_score})
    return weigh(kept, kept, scores_TE, context)


# --- pruned and oea --------------------------------------------------------------------------------


def preference_lists(scores_TE: Tensor, context: RoutingContext) -> list[list[int]]:
    """All experts in each token's order: the model's top-k, then the others; each part by preference."""
    everyone = RoutingContext(**{**vars(context), "token_mask_T": None})
    preference_TE = preferences(scores_TE, context)
    num_experts = scores_TE.shape[1]
    lists = []
    for token, top_k in enumerate(model_top_k(scores_TE, everyone)):
        others = set(range(num_experts)) - top_k
        lists.append(
            [*best(top_k, preference_TE[token], num_experts), *best(others, preference_TE[token], num_experts)]
        )
    return lists


def share(part: Iterable[float], whole: Iterable[float]) -> Fraction:
    """sum(part) / sum(whole), exactly; a share of nothing is 0."""
    total = sum(map(Fraction, whole))
    return sum(map(Fraction, part), Fraction(0)) / total if total else Fraction(0)


def pruned_selection(scores_TE: Tensor, context: RoutingContext, k0: int, p: float) -> Selection:
    """The first experts of every token's list: k0, or the fewest that hold share p."""
    scores = scores_TE.tolist()
    valid_T = is_valid(context, len(scores))
    selection: Selection = []
    for token, experts in enumerate(preference_lists(scores_TE, context)):
        chosen: list[int] = []
        total, held = sum(map(Fraction, scores[token])), Fraction(0)
        for expert in experts[:k0]:
            chosen.append(expert)
            held += Fraction(scores[token][expert])
            if p < 1 and total and held / total >= Fraction(str(p)):
                break
        selection.append(set(chosen) if valid_T[token] else set())
    return selection


def pruned(scores_TE: Tensor, context: RoutingContext, *, k0: int, p: float) -> Routing:
    selection = pruned_selection(scores_TE, context, k0, p)
    return weigh(selection, selection, scores_TE, context)


def batch_sums(scores_TE: Tensor, tokens: Iterable[int]) -> list[float]:
    """Every expert's score over these tokens, rounded once."""
    scores = scores_TE.double().tolist()
    tokens = list(tokens)
    return [math.fsum(scores[token][expert] for token in tokens) for expert in range(scores_TE.shape[1])]


def valid_tokens(scores_TE: Tensor, context: RoutingContext) -> list[int]:
    return [token for token, valid in enumerate(is_valid(context, scores_TE.shape[0])) if valid]


def hosted(num_experts: int, num_ranks: int) -> list[list[int]]:
    """The experts of every rank."""
    return capacity_groups("device", num_experts, num_ranks)


def oea(
    scores_TE: Tensor,
    context: RoutingContext,
    *,
    k0: int,
    p: float,
    k_max: int | None,
    max_rank: int | None,
) -> Routing:
    num_experts = scores_TE.shape[1]
    base = pruned_selection(scores_TE, context, k0, p)
    activated = set().union(*base)
    selection: Selection = []
    for experts, own in zip(preference_lists(scores_TE, context), base, strict=True):
        held = set(own)
        for expert in experts[: num_experts if max_rank is None else max_rank] if own else []:
            if len(held) < (context.top_k if k_max is None else k_max) and expert in activated:
                held.add(expert)
        selection.append(held)
    return weigh(selection, selection, scores_TE, context)


# --- laser and load_only ---------------------------------------------------------------------------


def in_order(
    scores_TE: Tensor,
    context: RoutingContext,
    carry_loads: bool,
    pools: Callable[[int], tuple[bool, set[int]]],
) -> Routing:
    """Route token by token; ``pools`` says of each whether its pool is final, or to be chosen from by load."""
    num_tokens, num_experts = scores_TE.shape
    load_E = [0.0] * num_experts
    if carry_loads and context.load_E is not None:
        load_E = [float(load) for load in context.load_E]
    lists = preference_lists(scores_TE, context)
    selection: Selection = [set() for _ in range(num_tokens)]
    for token in valid_tokens(scores_TE, context):
        is_final, pool = pools(token)
        if not is_final:
            place = {expert: place for place, expert in enumerate(lists[token])}
            order = sorted(pool, key=lambda expert: (load_E[expert], place[expert]))
            pool = set(order[: context.top_k])
        selection[token] = pool
        for expert in pool:
            load_E[expert] += 1
    return weigh(selection, selection, scores_TE, context)


def laser(scores_TE: Tensor, context: RoutingContext, *, carry_loads: bool, **rule: Any) -> Routing:
    scores = scores_TE.double().tolist()
    lists = preference_lists(scores_TE, context)
    random_TE = random_keys(scores_TE, context) if rule["trim"] == "random" else None

    def pools(token: int) -> tuple[bool, set[int]]:
        row, top_k = scores[token], lists[token][: context.top_k]
        if share([row[expert] for expert in top_k], row) >= Fraction(str(rule["eps_high"])):
            return True, set(top_k)
        near_best = [expert for expert in range(len(row)) if row[expert] >= rule["t_fix"] * max(row)]
        pool = set(near_best) | set(top_k)
        if len(pool) > rule["c"] and random_TE is not None:
            pool = set(best(pool, random_TE[token], rule["c"]))
        elif len(pool) > rule["c"]:
            pool = set([expert for expert in lists[token] if expert in pool][: rule["c"]])
        return False, pool

    return in_order(scores_TE, context, carry_loads, pools)


def load_only(scores_TE: Tensor, context: RoutingContext, *, carry_loads: bool) -> Routing:
    everyone = set(range(scores_TE.shape[1]))
    return in_order(scores_TE, context, carry_loads, lambda token: (False, everyone))


# --- xshare ----------------------------------------------------------------------------------------


def gating_values(scores_TE: Tensor, lists: list[list[int]]) -> Tensor:
    """Section 2.2: a token's scores over the sum of its top-k, zero outside; to the nearest multiple of 2**-24."""
    values = [[0.0] * scores_TE.shape[1] for _ in lists]
    for row, own, experts in zip(values, scores_TE.double().tolist(), lists, strict=True):
        total = math.fsum(own[expert] for expert in experts)
        for expert in experts:
            row[expert] = round(own[expert] / total * 2**24) / 2**24 if total else 0.0
    return torch.tensor(values, dtype=torch.float32).view(scores_TE.shape)


def xshare(
    scores_TE: Tensor,
    context: RoutingContext,
    *,
    k0: int,
    budget: int | None,
    mass_threshold: float | None,
    scope: str,
    request_budget: int | None,
    rank_budget: int | None,
    scores: str,
) -> Routing:
    num_experts = scores_TE.shape[1]
    everyone = set(range(num_experts))
    tokens = valid_tokens(scores_TE, context)
    lists, router_TE = preference_lists(scores_TE, context), scores_TE
    if scores == "topk":
        lists = [experts[: context.top_k] for experts in lists]
        scores_TE = gating_values(scores_TE, lists)
    sums_E = batch_sums(scores_TE, tokens)
    shared = {expert for token in tokens for expert in lists[token][:k0]}

    if scope == "request":
        assert context.request_id_T is not None
        assert request_budget is not None
        request_T = context.request_id_T.tolist()
        for request in {request_T[token] for token in tokens}:
            members = [token for token in tokens if request_T[token] == request]
            own = {expert for token in members for expert in lists[token][:k0]}
            shared |= own | set(best(everyone - own, batch_sums(scores_TE, members), request_budget))
    if scope == "rank":
        assert rank_budget is not None
        while len(shared) < rank_budget * context.num_ranks and shared < everyone:
            for experts in hosted(num_experts, context.num_ranks):
                shared |= set(best(set(experts) - shared, sums_E, 1))
    elif mass_threshold is not None:
        while shared < everyone and share((sums_E[e] for e in shared), sums_E) < Fraction(str(mass_threshold)):
            shared |= set(best(everyone - shared, sums_E, 1))
    else:
        shared |= set(best(everyone - shared, sums_E, budget or 0))

    valid_T = is_valid(context, len(lists))
    selection = [
        set([expert for expert in experts if expert in shared][: context.top_k]) if valid else set()
        for experts, valid in zip(lists, valid_T, strict=True)
    ]
    return weigh(selection, selection, router_TE, context)


# --- sere ------------------------------------------------------------------------------------------


def sere(
    scores_TE: Tensor, context: RoutingContext, *, k0: int, similarity: str, threshold: float, layer: int | None
) -> Routing:
    """Every token's secondary experts give way to the primary expert of the batch that is most like them."""
    matrices = load_file(similarity)["similarity"].tolist()
    if layer is None:
        layer = round(context.layer_fraction * len(matrices)) if len(matrices) > 1 else 0
    alike, valid_T = matrices[layer], is_valid(context, len(scores_TE))
    top_k = model_top_k(scores_TE, context)
    own = weigh(top_k, top_k, scores_TE, context)
    lists = preference_lists(scores_TE, context)
    primary = {expert for token, experts in enumerate(lists) if valid_T[token] for expert in experts[:k0]}
    map_TE, weights_TE = torch.zeros_like(own.map_TE), torch.zeros_like(own.weights_TE)
    for token, experts in enumerate(top_k):
        for expert in experts:
            target = expert
            if expert not in primary:
                nearest = min(primary, key=lambda other: (-alike[expert][other], other))
                target = nearest if alike[expert][nearest] >= threshold else expert
            map_TE[token, target] = True
            weights_TE[token, target] += own.weights_TE[token, expert]
    return Routing(map_TE=map_TE, weights_TE=weights_TE)


# --- budget_drop -----------------------------------------------------------------------------------


def score_bin(score: float) -> int:
    """Eighths of the octaves from 2**-16 to 1; all below is in the first bin, 1 and above in the last."""
    if score < 2**-16:
        return 0
    if score >= 1:
        return 16 * 8 - 1
    octave = next(n for n in range(16) if score < Fraction(2) ** (n - 15))
    return octave * 8 + int((Fraction(score) / Fraction(2) ** (octave - 16) - 1) * 8)


def budget_drop(
    scores_TE: Tensor, context: RoutingContext, max_dropped: float | None, max_lost_mass: float | None
) -> Routing:
    """The smallest load whose loss is within the budget, by trying all loads."""
    scores, num_experts = scores_TE.tolist(), scores_TE.shape[1]
    top_k = model_top_k(scores_TE, context)
    cells: dict[tuple[int, int], list[int]] = {}  # (expert, bin): its tokens
    for token, experts in enumerate(top_k):
        for expert in experts:
            cells.setdefault((expert, score_bin(scores[token][expert])), []).append(token)

    def mass(cell: tuple[int, int]) -> Fraction:
        return sum(
            (Fraction(round(Fraction(scores[token][cell[0]]) * 2**32), 2**32) for token in cells[cell]), Fraction()
        )

    size = num_experts // context.num_ranks
    groups = [
        sorted(
            (cell for cell in cells if cell[0] // size == group),
            key=lambda cell: (mass(cell) / len(cells[cell]), cell[1], cell[0]),
        )
        for group in range(num_experts // size)
    ]
    share = Fraction(str(max_dropped if max_lost_mass is None else max_lost_mass))
    lost = {cell: Fraction(len(cells[cell])) if max_lost_mass is None else mass(cell) for cell in cells}
    for most in range(sum(map(len, cells.values())) + 1):
        given_up = set()
        for group in groups:
            left = sum(len(cells[cell]) for cell in group)
            for cell in group:
                if left > most:
                    given_up.add(cell)
                    left -= len(cells[cell])
        if sum(lost[cell] for cell in given_up) <= share * sum(lost.values()):
            break
    gone = {(token, cell[0]) for cell in given_up for token in cells[cell]}
    kept = [{expert for expert in experts if (token, expert) not in gone} for token, experts in enumerate(top_k)]
    return weigh(kept, top_k, scores_TE, context)


ORACLES: dict[str, Callable[..., Routing]] = {
    "topk": topk,
    "token_drop": token_drop,
    "expanded_drop": expanded_drop,
    "expert_drop": expert_drop,
    "budget_drop": budget_drop,
    "pruned": pruned,
    "oea": oea,
    "laser": laser,
    "load_only": load_only,
    "xshare": xshare,
    "lynx": lynx,
    "dynamic_skip": dynamic_skip,
    "sere": sere,
}
