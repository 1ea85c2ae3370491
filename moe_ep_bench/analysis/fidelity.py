"""What a policy changes in the routing, which is what its speed is paid with.

Each rank reports its own tokens. A batch is one thing to the model, so ranks are joined first (counts and score
mass are summed) and only then batches are averaged. Averaging the ranks'
own peaks would miss the very thing: an expert that is busy on every rank.

Shapes: B = batches, U = batches, or layers of them, R = EP ranks, E = experts, L = experts of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.load import Case, Comparison
from moe_ep_bench.metrics import mass_kept


@dataclass(frozen=True, eq=False)
class Fidelity:
    """Routing of one case, mean over batches (of a whole model: and layers) of what all ranks do together.

    Attributes:
        dropped_share: top-k pairs that are not computed, of all top-k pairs.
        retained_mass: selected score mass over the model's top-k mass (``metrics.mass_kept``); above 1 where a policy
            adds experts.
        output_error: |layer - native layer| / |native layer|, worst rank; NaN where it was not taken.
        expert_load, rank_load: pairs per expert and per expert rank over the model's mean, T*K/E and T*K/R: the same
            yardstick for every policy, so that dropping shows as less load.
        fullest_expert, fullest_rank: fullest expert and rank, on the same yardstick.
        below_frontier, below_frontier_experts: what dropping alone keeps at most (``policies.frontier``) at the same
            fullest rank, or with as many activated experts, less what the case keeps: shares of the top-k mass. Below
            0 where a policy that reroutes keeps more; None where it was not computed.
    """

    dropped_share: float
    retained_mass: float
    output_error: float
    expert_load: np.ndarray
    rank_load: np.ndarray
    fullest_expert: float
    fullest_rank: float
    below_frontier: float | None
    below_frontier_experts: float | None


def fidelity(case: Case) -> Fidelity | None:
    """Reduce the routing rows of a case; None when it was not measured."""
    rows = case.routing
    if rows.empty:
        return None
    by_layer = layers_apart(rows)
    topk_N, dropped_N, error_N = rows[["num_topk_pairs", "num_dropped_pairs", "output_error"]].to_numpy(dtype=float).T
    batches, batch_N = np.unique(rows["batch"], return_inverse=True)
    topk_B, dropped_B = (np.bincount(batch_N, values_N) for values_N in (topk_N, dropped_N))
    kept_U = mass_kept(by_layer, by_layer["batch"])
    worst_B = np.full(len(batches), np.nan)
    np.fmax.at(worst_B, batch_N, error_N)
    below = (None, None) if case.frontier is None else _below_frontier(kept_U, by_layer, case.frontier)
    load_BE, load_BR = _relative_load(by_layer, "load_E"), _relative_load(by_layer, "load_R")
    return Fidelity(
        dropped_share=_mean(dropped_B[topk_B > 0] / topk_B[topk_B > 0]),
        retained_mass=_mean(kept_U[~np.isnan(kept_U)]),
        output_error=_mean(worst_B[~np.isnan(worst_B)]),
        expert_load=load_BE.mean(axis=0),
        rank_load=load_BR.mean(axis=0),
        fullest_expert=float(load_BE.max(axis=1).mean()),
        fullest_rank=float(load_BR.max(axis=1).mean()),
        below_frontier=below[0],
        below_frontier_experts=below[1],
    )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else np.nan


def _below_frontier(kept_U: np.ndarray, rows: pd.DataFrame, frontier: pd.DataFrame) -> tuple[float, ...]:
    """Means over batches, of a whole model over layers of them, of what the frontier keeps beyond the case."""
    most = layers_apart(frontier).sort_values("batch") if "layer" in rows else frontier.sort_values("batch")
    return tuple(float((most[name].to_numpy() - kept_U).mean()) for name in ("kept_by_load", "kept_by_experts"))


def layers_apart(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of whole models with each layer's share of a batch as a batch: layers have busy experts of their own."""
    if "layer" not in rows.columns:
        return rows
    return rows.assign(batch=rows.groupby(["batch", "layer"]).ngroup())


def source_loads(routing: pd.DataFrame, column: str) -> tuple[pd.Index, np.ndarray]:
    """The batches, ascending, and their loads, source ranks in their order: [B, source ranks, E or R]."""
    batch_N = routing["batch"].to_numpy()
    order_N = np.lexsort((routing["rank"].to_numpy(), batch_N))
    batches = pd.Index(np.unique(batch_N), name="batch")
    load_NE = np.stack(routing[column].to_numpy()[order_N])
    return batches, load_NE.reshape(len(batches), -1, load_NE.shape[1])


def _relative_load(rows: pd.DataFrame, column: str) -> np.ndarray:
    """Loads summed over source ranks, over the mean that the model's own top-k pairs would give: [B, E or R]."""
    load_BN = source_loads(rows, column)[1].sum(axis=1)
    topk_pairs_B = np.bincount(np.unique(rows["batch"], return_inverse=True)[1], rows["num_topk_pairs"])
    return load_BN * load_BN.shape[1] / topk_pairs_B[:, None]


def pairs_by_rank(routing: pd.DataFrame, comparison: Comparison) -> tuple[pd.Index, np.ndarray]:
    """Pairs of each rank's own experts, all source ranks of its replica together; experts are placed contiguously.

    Returns:
        The batches, and the pairs [B, ranks, L].
    """
    batches, load_BRE = source_loads(routing, "load_E")
    replicas = load_BRE.reshape(len(batches), -1, comparison.num_together, comparison.num_experts).sum(axis=2)
    columns = replicas.reshape(len(batches), -1, comparison.num_experts // comparison.num_ranks)
    # All ranks that hold slices of an expert compute all of its pairs.
    return batches, columns.repeat(comparison.expert_tensor_parallel, axis=1)
