"""Measure what a routing does to load, traffic and fidelity.

A routing policy trades fidelity for time. Time under expert parallelism follows from loads. In prefill the expert (or
rank) with the most pairs finishes last; in decode the rank that reads the most experts' weights. Each pair whose expert
lives elsewhere crosses the network. Fidelity is estimated from the scores: the share of the router's mass that is still
computed. ``routing_metrics`` reports both sides for one source rank's tokens. Loads and counts may be summed over
source ranks; ratios may not. Metrics of several ranks, batches or layers together stand below.

Padding is work where a map selects it, and never fidelity: loads, activated experts and traffic count each pair that
is computed; masses, drops and means over tokens count valid tokens alone. A share of nothing is 0, never NaN.

Shapes: T = local tokens, E = experts, K = top_k, R = EP ranks, L = E / R experts per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_ep_bench.policies.contract import Routing, RoutingContext
from moe_ep_bench.policies.lazy import Tensor
from moe_ep_bench.policies.selection import top_k_map
from moe_ep_bench.policies.steps import TORCH
from moe_ep_bench.schema import ROUTING_METRICS

if TYPE_CHECKING:
    import pandas as pd


# GPUs of a node where no links say another number.
RANKS_PER_NODE = 8


@dataclass(frozen=True, eq=False)
class ScoreMetrics:
    """What all routings of the same scores share.

    Attributes:
        top_k_TE: the model's own choice, bool [T, E], padding rows empty.
        num_topk_pairs, top_k_mass, mass, topk_share, entropy: sums over valid tokens; see ``routing_metrics``.
    """

    top_k_TE: Tensor
    num_topk_pairs: int
    top_k_mass: float
    mass: float
    topk_share: float
    entropy: float


def score_metrics(scores_TE: Tensor, context: RoutingContext) -> ScoreMetrics:
    """The part of ``routing_metrics`` that no policy changes; arguments as there."""
    from moe_ep_bench.kernels.counting import score_sums

    top_k_TE, scores = chosen_experts(scores_TE, context), _array(scores_TE)
    log_TE = np.log(np.maximum(scores, np.finfo(scores.dtype).tiny), dtype=np.float64)  # by numpy several at once
    return ScoreMetrics(top_k_TE, *score_sums(_bytes(top_k_TE), scores, log_TE, _valid(context)))


def routing_metrics(
    routing: Routing,
    scores_TE: Tensor,
    context: RoutingContext,
    of_scores: ScoreMetrics | None = None,
    ranks_per_node: int = RANKS_PER_NODE,
) -> dict[str, Any]:
    """Measure one routing of one source rank's tokens.

    A *pair* is a (token, expert) that is computed; *top-k* is the model's own choice, with its
    selection bias and groups; *mass* is router score, without bias.

    Load (of all that is computed, padding included; expert e lives on rank e // L)

    - ``load_E``, ``load_R``: pairs per expert and per expert rank; ``num_pairs``: their sum; ``padding_pairs``: those
      of padding tokens, whose results nobody reads.
    - ``peak_load``: imbalance, the fullest expert over the mean load num_pairs / E; 1 is balance, E is collapse.
      (MaxVio of arXiv 2408.15664 is this less 1.)
    - ``activated_experts``: experts with at least one pair, each of which costs a read of its weights (arXiv
      2511.02237); ``activated_experts_fullest_rank``: on the rank with the most of them.

    Traffic (of all that is computed)

    - ``crossing_pairs``: pairs whose expert is not on the source rank, as Megatron-Core's all-to-all sends them.
      ``crossing_copies``: distinct (token, other rank), as DeepEP sends a token once per rank;
      ``crossing_node_copies``: distinct (token, other node), as it sends a token once between nodes.
    - ``copies_R``, ``copies_N``: distinct tokens with a pair on each rank and on each node, the source's own included.

    Fidelity (of valid tokens)

    - ``num_topk_pairs``: T * K, what the model would compute. Of a token's *missing* ones as many are *rerouted* as it
      has added other experts (``num_rerouted_pairs``); the rest is *dropped* (``num_dropped_pairs``): computed by
      nobody. ``rerouted_share``, ``dropped_share``: over all top-k pairs.
    - ``retained_mass_topk``, ``retained_mass_all``: selected mass over top-k mass (more than 1 when a policy adds
      experts) and over all mass.
    - ``tokens_without_expert``: tokens that compute nothing. ``experts_per_token``: mean.

    Scores (means over valid tokens)

    - ``topk_share``: the top-k's share of the token's row sum; 0 for a row of zeros.
    - ``entropy``: of the row as a distribution, over log E: 0 is certainty, 1 indifference. 0 for a row of zeros and
      where E = 1.

    Args:
        routing: what a policy returned; only its map is read.
        scores_TE: float32 [T, E], the scores that it routed.
        context: what is so of these tokens; ``top_k``, ``num_ranks``, ``rank``, the bias, the groups and the
            token mask are read. The mask says which tokens are valid, also where what routed was not told.
        of_scores: ``score_metrics`` of the same scores and context, where several routings share them.
        ranks_per_node: rank r is on node r // ranks_per_node.

    Returns:
        ``schema.ROUTING_METRICS`` in their order: plain ints and floats, loads as int64 arrays.
    """
    return metrics_of_parts(routing.map_TE, scores_TE, context, of_scores, ranks_per_node)[0]


def metrics_of_parts(
    map_TE: Tensor,
    scores_TE: Tensor,
    context: RoutingContext,
    of_scores: ScoreMetrics | None = None,
    ranks_per_node: int = RANKS_PER_NODE,
    num_parts: int = 1,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """``routing_metrics`` of a map, and what each of several micro-batches sends (``placement.Slots.parts``)."""
    from moe_ep_bench.kernels.counting import routing_counts

    of_scores = score_metrics(scores_TE, context) if of_scores is None else of_scores
    num_tokens = len(scores_TE)
    least, more = divmod(num_tokens, num_parts)
    tokens_M = [least + (part < more) for part in range(num_parts)]
    of_tokens = _bytes(map_TE), _bytes(of_scores.top_k_TE), _array(scores_TE), _valid(context)
    counts = routing_counts(*of_tokens, context.num_ranks, ranks_per_node, np.cumsum(tokens_M))
    by_part, of_valid, parts = counts[:3], counts[3:], list[dict[str, Any]]()
    if num_parts == 1:
        whole = [values[0] for values in by_part]
    else:
        whole = [values.sum(axis=0) for values in by_part]
        names = "slot_load_P", "copies_R", "copies_N"
        for number, *of_part in zip(tokens_M, *by_part, strict=True):
            parts.append({"num_tokens": number, **dict(zip(names, of_part, strict=True))})
    return _metrics([*whole, *of_valid], num_tokens, context, of_scores, ranks_per_node), parts


def metrics_by_rank(
    maps_TE: Sequence[tuple[Tensor, Tensor]],
    scores_TE: Tensor,
    context: RoutingContext,
    of_scores: ScoreMetrics,
    ranks: Sequence[int],
    ranks_per_node: int = RANKS_PER_NODE,
) -> Iterator[tuple[dict[str, Any], list[tuple[NDArray[np.int64], ...]]]]:
    """``routing_metrics`` of the same tokens on each of some ranks, where only pairs of a rank's own experts differ.

    Args:
        maps_TE: of each micro-batch, in order, pairs with experts of other ranks, and with a rank's own.

    Yields:
        Of each rank its metrics, and of each micro-batch ``load_E``, ``copies_R`` and ``copies_N``.
    """
    from moe_ep_bench.kernels.counting import counts_by_rank

    cut = np.cumsum([len(map_TE) for map_TE, _ in maps_TE])[:-1]
    of_tokens = (_bytes(of_scores.top_k_TE), _array(scores_TE), _valid(context))
    cut_T = zip(
        *(np.split(values, cut) if len(values) else [values] * len(maps_TE) for values in of_tokens), strict=True
    )
    sizes = context.num_ranks, ranks_per_node, np.array(ranks)
    parts = [
        counts_by_rank(_bytes(others_TE), _bytes(own_TE), top_k_TE, part_TE, valid_T, *sizes)
        for (others_TE, own_TE), (top_k_TE, part_TE, valid_T) in zip(maps_TE, cut_T, strict=True)
    ]
    whole = [np.sum(counts, axis=0) for counts in zip(*parts, strict=True)]
    for place, rank in enumerate(ranks):
        counts = [*(values[place] for values in whole[:3]), *(values[place].item() for values in whole[3:])]
        metrics = _metrics(counts, len(scores_TE), replace(context, rank=rank), of_scores, ranks_per_node)
        yield metrics, [tuple(values[place] for values in part[:3]) for part in parts]


def _metrics(
    counts: Sequence[Any], num_tokens: int, context: RoutingContext, of_scores: ScoreMetrics, ranks_per_node: int
) -> dict[str, Any]:
    load_E, copies_R, copies_N, num_valid_pairs, num_kept, num_rerouted, num_served, mass = counts
    num_experts, num_tokens = len(load_E), context.num_valid(num_tokens)
    load_R = load_E.reshape(context.num_ranks, -1).sum(axis=1)
    crossing = crossing_metrics(load_R, copies_R, copies_N, context.rank, ranks_per_node)
    activated_R = (load_E > 0).reshape(context.num_ranks, -1).sum(axis=1)
    num_pairs = int(load_E.sum())
    num_dropped = of_scores.num_topk_pairs - num_kept - num_rerouted
    values = {
        "num_tokens": num_tokens,
        "load_E": load_E,
        "load_R": load_R,
        "num_pairs": num_pairs,
        "padding_pairs": num_pairs - num_valid_pairs,
        "num_topk_pairs": of_scores.num_topk_pairs,
        "num_dropped_pairs": num_dropped,
        "num_rerouted_pairs": num_rerouted,
        "dropped_share": _ratio(num_dropped, of_scores.num_topk_pairs),
        "rerouted_share": _ratio(num_rerouted, of_scores.num_topk_pairs),
        "retained_mass_topk": _ratio(mass, of_scores.top_k_mass),
        "retained_mass_all": _ratio(mass, of_scores.mass),
        "peak_load": _ratio(int(load_E.max()), num_pairs / num_experts),
        "tokens_without_expert": num_tokens - num_served,
        "experts_per_token": _ratio(num_valid_pairs, num_tokens),
        "activated_experts": int(activated_R.sum()),
        "activated_experts_fullest_rank": int(activated_R.max()),
        **crossing,
        "copies_R": copies_R,
        "copies_N": copies_N,
        "topk_share": _ratio(of_scores.topk_share, num_tokens),
        "entropy": _ratio(of_scores.entropy, num_tokens),
    }
    return {name: values[name] for name in ROUTING_METRICS}


def crossing_metrics(
    load_R: NDArray[np.int64],
    copies_R: NDArray[np.int64],
    copies_N: NDArray[np.int64],
    rank: int | NDArray[np.int64],
    ranks_per_node: int = RANKS_PER_NODE,
) -> dict[str, Any]:
    """Pairs and copies of a source rank that go to others (``routing_metrics``): ints, or lists of some ranks."""
    return {
        "crossing_pairs": (load_R.sum() - load_R[rank]).tolist(),
        "crossing_copies": (copies_R.sum() - copies_R[rank]).tolist(),
        "crossing_node_copies": (copies_N.sum() - copies_N[rank // ranks_per_node]).tolist(),
    }


def chosen_experts(scores_TE: Tensor, context: RoutingContext) -> Tensor:
    """The model's own choice of K experts per token: bool [T, E], padding rows empty."""
    from moe_ep_bench.kernels import numba_steps  # Imports torch, for which reading results does not wait.

    return top_k_map(scores_TE, context, numba_steps("cpu") if scores_TE.is_cpu else TORCH)


def _array(values: Tensor) -> NDArray[Any]:
    """On the host and in order, as compiled forms take it."""
    return values.cpu().contiguous().numpy()


def _bytes(map_TE: Tensor) -> NDArray[np.uint8]:
    return _array(map_TE).view(np.uint8)


def _valid(context: RoutingContext) -> NDArray[np.bool_]:
    """Which tokens are valid: bool [T]; empty = all."""
    return np.empty(0, np.bool_) if context.token_mask_T is None else _array(context.token_mask_T)


def _ratio(numerator: float, denominator: float) -> float:
    """numerator / denominator, where a share of nothing is 0."""
    return numerator / denominator if denominator else 0.0


# --- Of several tokens, layers or batches together -------------------------------------------------


def mass_kept(routing: pd.DataFrame, unit_N: ArrayLike) -> NDArray[np.float64]:
    """Score mass computed over that of the top-k, each summed over the rows of a unit: a batch, or a layer of one.

    A mean of the rows' own ratios would count a rank by its tokens, whatever mass they have. Scores of every token sum
    to 1, so that a row's top-k mass is its tokens times ``topk_share``.

    Args:
        routing: rows with ``num_tokens``, ``retained_mass_topk`` and ``topk_share``.
        unit_N: which unit each row is of.

    Returns:
        Of each unit, ascending; NaN where it has no mass.
    """
    tokens_N, kept_N, share_N = routing[["num_tokens", "retained_mass_topk", "topk_share"]].to_numpy(dtype=float).T
    mass_N = np.where(tokens_N > 0, tokens_N * share_N, 0.0)  # a rank without tokens has no shares
    place_N = np.unique(np.asarray(unit_N), return_inverse=True)[1]
    mass_U = np.bincount(place_N, mass_N)
    kept_U = np.bincount(place_N, np.where(mass_N > 0, mass_N * kept_N, 0.0))
    return np.divide(kept_U, mass_U, out=np.full_like(mass_U, np.nan), where=mass_U > 0)


def imbalance(load_NE: ArrayLike) -> NDArray[np.float64]:
    """The fullest of the last axis (experts or ranks) over its mean: [..., E] -> [...]; 1 where nothing is loaded.

    A layer waits for *its* fullest expert or rank, in *this* batch. Reduce loads here first, one batch of one layer at
    a time, and average only the results: sums of loads over layers or batches cancel hot spots in different places.
    """
    load_NE = np.asarray(load_NE, dtype=np.float64)
    mean_N = load_NE.mean(axis=-1)
    return np.divide(load_NE.max(axis=-1), mean_N, out=np.ones_like(mean_N), where=mean_N > 0)


def shared_by_neighbours(map_TE: Tensor, sequence_id_T: Tensor) -> tuple[int, float]:
    """Pairs of adjacent tokens of a sequence, and how many experts of ``map_TE`` they share in all."""
    adjacent_T = sequence_id_T[1:] == sequence_id_T[:-1]
    return int(adjacent_T.sum()), float((map_TE[1:] & map_TE[:-1])[adjacent_T].sum())
