"""What a policy changes in the routing, which is what its speed is paid with.

Each rank reports its own tokens. A batch is one thing to the model, so ranks are joined first (counts are
summed, shares of score mass weighted by tokens) and only then batches are averaged. Averaging the ranks'
own peaks would miss the very thing: an expert that is busy on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.load import Case
from moe_ep_bench.analysis.parts import source_loads


@dataclass(frozen=True, eq=False)
class Fidelity:
    """Routing of one case, mean over batches (of a whole model: and layers) of what all ranks do together.

    Attributes:
        dropped_share: top-k pairs that are not computed, of all top-k pairs.
        retained_mass: selected score mass over the model's top-k mass; above 1 where a policy adds experts.
        output_error: |layer - native layer| / |native layer|, worst rank; NaN where it was not taken.
        expert_load, rank_load: pairs per expert and per expert rank over the model's mean, T*K/E and T*K/R: the same
            yardstick for every policy, so that dropping shows as less load.
        fullest_expert, fullest_rank: fullest expert and rank, on the same yardstick.
    """

    dropped_share: float
    retained_mass: float
    output_error: float
    expert_load: np.ndarray
    rank_load: np.ndarray
    fullest_expert: float
    fullest_rank: float


def fidelity(case: Case) -> Fidelity | None:
    """Reduce the routing rows of a case; None when it was not measured."""
    rows = case.routing
    if rows.empty:
        return None
    counts = rows.groupby("batch")[["num_topk_pairs", "num_dropped_pairs"]].sum()
    by_layer = layers_apart(rows)
    load_BE, load_BR = _relative_load(by_layer, "load_E"), _relative_load(by_layer, "load_R")
    return Fidelity(
        dropped_share=float((counts["num_dropped_pairs"] / counts["num_topk_pairs"]).mean()),
        retained_mass=_weighted_by_tokens(rows, "retained_mass_topk"),
        output_error=float(rows.groupby("batch")["output_error"].max().mean()),
        expert_load=load_BE.mean(axis=0),
        rank_load=load_BR.mean(axis=0),
        fullest_expert=float(load_BE.max(axis=1).mean()),
        fullest_rank=float(load_BR.max(axis=1).mean()),
    )


def layers_apart(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of whole models with each layer's share of a batch as a batch: layers have busy experts of their own."""
    if "layer" not in rows.columns:
        return rows
    return rows.assign(batch=rows.groupby(["batch", "layer"]).ngroup())


def _relative_load(rows: pd.DataFrame, column: str) -> np.ndarray:
    """Loads summed over source ranks, over the mean that the model's own top-k pairs would give: [batches, E or R]."""
    load_BN = source_loads(rows, column)[1].sum(axis=1)
    topk_pairs_B = rows.groupby("batch")["num_topk_pairs"].sum().to_numpy()
    return load_BN * load_BN.shape[1] / topk_pairs_B[:, None]


def _weighted_by_tokens(rows: pd.DataFrame, column: str) -> float:
    """Mean over ranks, each weighing its tokens, then over batches. A rank without tokens has no value; NaN if none."""
    rows = rows[(rows["num_tokens"] > 0) & rows[column].notna()]
    weighted = (rows[column] * rows["num_tokens"]).groupby(rows["batch"]).sum()
    return float((weighted / rows.groupby("batch")["num_tokens"].sum()).mean())
