"""Fields of policies derived from a recording, so that nobody has to guess them.

**Capacity factors** for a budget of lost score mass, derived on one half, judged on the other. A recording is cut into
batches of whole sequences, which are dealt to source ranks as ``run`` deals them. Factors are derived from every second
batch. A pair is kept by ``token_drop`` if it is among the best floor(gamma * T * K / E) of its expert (of a device's
group: floor(gamma * L * T * K / E)), so the pair at place n is lost below gamma = n * E / (L * T * K). Sorting pairs by
this gamma gives the lost mass for every factor at once, and the smallest factor within the budget exactly. The other
batches say what such factors lose there, beside ``budget_drop``, which derives nothing, and the frontier.

**LASER's thresholds.** LASER (arXiv 2510.03293) leaves a token alone whose top-k holds at least ``eps_high`` of its
score mass, and lets any other choose among experts that score at least ``t_fix`` times its best one. Both depend on how
a model's scores are shaped, and that changes with depth; the paper sets them by layer from statistics of its prefill.
The rule here is our own: for each third of the depth, over all tokens of its layers:

- ``eps_high``: the quantile of the top-k share above which a share ``keep`` of the tokens lies. So ``keep`` is what
  it says: the surest quarter of the tokens, say, keep their own choice.
- ``t_fix``: the median of the K-th best score over the best. So the pool holds experts that come as near to
  the best one as the last of the model's own choices does in the median token.

Shapes: T = tokens of a source rank, E = experts, K = top_k, R = ranks, L = E / R.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies import Policy, RoutingContext, make_policy
from moe_ep_bench.policies.selection import top_k_map
from moe_ep_bench.workload.batch import deal_pieces
from moe_ep_bench.workload.frontier import Frontier, joint, top_k_pairs
from moe_ep_bench.workload.trace import Trace, open_trace

# Factors are rounded up to so many decimals, thresholds rounded: what is printed is what was meant.
_DECIMALS = 3

Batch = list[Tensor]
"""float32 [T, E] of every source rank, 0 outside the top-k."""


@dataclass(frozen=True)
class Setting:
    """How a recording is cut.

    Attributes:
        num_ranks: source ranks, and expert ranks with contiguous experts.
        num_tokens: of a batch over all ranks, at least; sequences are whole.
        granularity: of ``token_drop``.
    """

    num_ranks: int = 8
    num_tokens: int = 2048
    granularity: str = "device"

    def opened(self, path: Path | str) -> Trace:
        """Open a recording. Raises ValueError: it does not fit the setting."""
        trace = open_trace(path)
        if trace.scores_are_assumed:
            raise UserError(f"{trace.path}: score: expected recorded scores, got scores that are assumed")
        if self.num_ranks < 1 or trace.num_experts % self.num_ranks:
            raise UserError(f"ep: expected a divisor of the {trace.num_experts} experts, got {self.num_ranks}")
        if len(self.batches(trace)) < 2:
            expected = f"at most half of the {trace.num_tokens} recorded"
            raise UserError(f"tokens: expected {expected}, for two batches of whole sequences, got {self.num_tokens}")
        return trace

    def batches(self, trace: Trace) -> list[list[NDArray[np.int64]]]:
        """Of every batch each source rank's tokens; what is left at the end is no batch."""
        batches, first = [], 0
        for last in range(1, trace.num_sequences + 1):
            start = trace.start_S[first : last + 1]
            if start[-1] - start[0] >= self.num_tokens:
                start_P, rank_P = deal_pieces(np.diff(start), self.num_ranks)
                rank_T = np.repeat(rank_P, np.diff(start_P))
                batches.append([start[0] + np.flatnonzero(rank_T == rank) for rank in range(self.num_ranks)])
                first = last
        return batches

    def layers(self, trace: Trace) -> Iterator[list[Batch]]:
        """The batches of every layer."""
        batches = self.batches(trace)
        for layer in range(trace.num_layers):
            ids_TK, scores_TK = trace.read_layer(layer)
            all_TE = torch.zeros(len(ids_TK), trace.num_experts)
            all_TE.scatter_(1, torch.from_numpy(ids_TK.astype(np.int64)), torch.from_numpy(scores_TK).float())
            yield [[all_TE[torch.from_numpy(rows_T)] for rows_T in batch] for batch in batches]

    def context(self, trace: Trace, rank: int = 0, layer: int = 0) -> RoutingContext:
        sizes = {"top_k": trace.top_k, "num_ranks": self.num_ranks, "rank": rank}
        return RoutingContext(**sizes, layer_fraction=layer / trace.num_layers)


# ---- factors ---------------------------------------------------------------------------------------------------------


def needed_factors(batch: Batch, setting: Setting, top_k: int) -> pd.DataFrame:
    """A row per pair of a batch: the ``factor`` below which it is lost, and its ``share`` of the batch's mass."""
    frames = []
    num_experts = batch[0].shape[1]
    size = num_experts // setting.num_ranks if setting.granularity == "device" else 1
    for part_TE in batch:
        score_N, expert_N = top_k_pairs(part_TE, top_k_map(part_TE, RoutingContext(top_k=top_k)))
        pairs = pd.DataFrame({"score": score_N.double().numpy(), "group": expert_N.numpy() // size})
        pairs = pairs.sort_values("score", ascending=False, kind="stable")
        place_N = pairs.groupby("group").cumcount() + 1
        frames.append(pairs.assign(factor=place_N * num_experts / (size * max(len(part_TE), 1) * top_k)))
    pairs = pd.concat(frames)
    return pairs[["factor"]].assign(share=pairs["score"] / max(pairs["score"].sum(), 1e-300))


def least_factor(needed: pd.DataFrame, num_batches: int, budget: float) -> float:
    """The smallest factor whose mean loss over batches (and layers) is within the budget, rounded up."""
    needed = needed.sort_values("factor", ascending=False)
    num_lost = int((needed["share"].cumsum() / num_batches <= budget).sum())
    factor = needed["factor"].iloc[num_lost] if num_lost < len(needed) else 0.0
    return math.ceil(round(factor * 10**_DECIMALS, 6)) / 10**_DECIMALS


class Factors(NamedTuple):
    """What one half of a recording says of a budget: one factor for all layers, and one for each."""

    common: float
    layers: list[float]


def derive_factors(path: Path | str, budget: float, setting: Setting) -> Factors:
    """Derive capacity factors from every second batch, beginning with the first.

    Raises:
        ValueError: a recording that does not fit the setting.
    """
    trace = setting.opened(path)
    used = [batches[::2] for batches in setting.layers(trace)]
    needed = [pd.concat([needed_factors(batch, setting, trace.top_k) for batch in batches]) for batches in used]
    common = least_factor(pd.concat(needed), len(used) * len(used[0]), budget)
    return Factors(common, [least_factor(of_layer, len(used[0]), budget) for of_layer in needed])


# ---- judged on the other half ----------------------------------------------------------------------------------------


def judge(path: Path | str, budget: float, setting: Setting, policies: Mapping[str, Policy]) -> pd.DataFrame:
    """Hold policies against the frontier on the batches from which nothing was derived.

    Returns:
        A row for each policy, then the frontier where each batch of each layer loses the budget (``frontier``), and
        where losses may be spread over batches and layers (``frontier, spread``). Means over batches and layers of
        ``lost`` (share of the top-k mass), ``fullest`` (rank over the mean before anything is dropped),
        ``frontier`` (the least fullest rank for the same loss in the same batch); ``above`` = fullest / frontier - 1;
        ``most_lost``, of any batch and layer.
    """
    trace = setting.opened(path)
    rank_E = torch.arange(trace.num_experts) // (trace.num_experts // setting.num_ranks)
    rows, curves = [], []
    for layer, batches in enumerate(setting.layers(trace)):
        contexts = [setting.context(trace, rank, layer) for rank in range(setting.num_ranks)]
        for batch in batches[1::2]:
            frontier = Frontier.of([top_k_pairs(part, top_k_map(part, contexts[0])) for part in batch], rank_E)
            mean = frontier.num_pairs / setting.num_ranks
            for name, policy in policies.items():
                kept, fullest = _routed(policy, batch, contexts, rank_E)
                share = min(kept / frontier.mass, 1.0)
                # What a policy keeps is a sum in another order.
                rows.append((name, 1 - share, fullest / mean, frontier.least_load(share - 1e-9) / mean))
            least = frontier.least_load(1 - budget)
            rows.append(("frontier", 1 - frontier.kept(least), least / mean, least / mean))
            curves.append(frontier.curve())
    judged = pd.DataFrame(rows, columns=["method", "lost", "fullest", "frontier"])
    means = judged.groupby("method", sort=False).mean().assign(most_lost=judged.groupby("method")["lost"].max())
    load_N, kept_N = joint(curves)
    least = float(np.interp(1 - budget, kept_N.numpy(), load_N.numpy()))
    means.loc["frontier, spread"] = {"lost": budget, "most_lost": math.nan, "fullest": least, "frontier": least}
    means = means[["lost", "most_lost", "fullest", "frontier"]]
    return means.assign(above=means["fullest"] / means["frontier"] - 1).rename_axis("method").reset_index()


def _routed(policy: Policy, batch: Batch, contexts: Sequence[RoutingContext], rank_E: Tensor) -> tuple[float, int]:
    """The mass that a policy keeps of a batch, and the pairs of the fullest rank."""
    here = policy.in_layer(contexts[0].layer_fraction)
    stats = [here.batch_stats(part, context) for part, context in zip(batch, contexts, strict=True)]
    known = [part_SE for part_SE in stats if part_SE is not None]
    total = torch.stack(known).sum(dim=0) if known else None
    maps = [here.route(part, context, total).map_TE for part, context in zip(batch, contexts, strict=True)]
    kept = sum(float((part * map_TE).sum(dtype=torch.float64)) for part, map_TE in zip(batch, maps, strict=True))
    load_E = torch.stack([map_TE.sum(dim=0) for map_TE in maps]).sum(dim=0)
    return kept, int(torch.zeros(len(contexts), dtype=torch.int64).index_add(0, rank_E, load_E).max())


def compared_policies(budget: float, factors: Factors, setting: Setting) -> dict[str, Policy]:
    """One factor, factors by layer, and ``budget_drop``."""
    drop = {"name": "token_drop", "granularity": setting.granularity}
    return {
        "native": make_policy({"name": "topk"}),
        "one factor": make_policy({**drop, "capacity_factor": factors.common}),
        "by layer": make_policy({**drop, "capacity_factor": factors.layers}),
        "budget_drop": make_policy({"name": "budget_drop", "max_lost_mass": budget}),
    }


def budget_text(path: Path | str, budget: float, setting: Setting) -> str:
    """``token_drop`` with factors by layer as an entry of a config, below comments that say what it does elsewhere."""
    factors = derive_factors(path, budget, setting)
    rows = judge(path, budget, setting, compared_policies(budget, factors, setting))
    num_batches = len(setting.batches(open_trace(path)))
    entry = {"name": "token_drop", "granularity": setting.granularity, "capacity_factor": [factors.layers]}
    percents = {"lost": "mass lost %", "most_lost": "at most %", "above": "above frontier %"}
    shown = rows.assign(**{name: (100 * rows[name]).round(2) for name in percents}, fullest=rows["fullest"].round(3))
    shown = shown.set_index("method").rename_axis(None)[["lost", "most_lost", "fullest", "above"]]
    shown = shown.rename(columns={**percents, "fullest": "fullest rank"})
    lines = [
        f"Factors by layer for {100 * budget:g} % of the score mass, from {(num_batches + 1) // 2} of {num_batches} "
        f"batches of at least {setting.num_tokens:,} tokens, EP {setting.num_ranks}.",
        f"One factor for all layers: {factors.common:g}. The other batches, means over batches and layers:",
        "",
        *shown.to_string(na_rep="-").splitlines(),
        "",
        "Fullest rank: pairs over the mean before anything is dropped. Above frontier: over the least possible for",
        "the same loss in the same batch; spread: over batches and layers, by who knows all of them.",
    ]
    entries = yaml.safe_dump([entry], sort_keys=False, default_flow_style=None, width=110).rstrip()
    return "\n".join([*(f"# {line}".rstrip() for line in lines), entries])


# ---- LASER -----------------------------------------------------------------------------------------------------------


def laser_thresholds(path: str | Path, keep: float = 0.25) -> dict[str, Any]:
    """Derive LASER's fields from a recording.

    Args:
        path: a ``moe-trace-v1`` file, of prefill as the paper has it.
        keep: share of tokens that are to keep their top-k, 0 to 1.

    Returns:
        ``eps_high`` and ``t_fix`` by ranges of layers, one for every third of the depth that has a layer: fields of the
        policy ``laser``, to be completed by ``c``.

    Raises:
        ValueError: ``keep`` out of range, or a recording whose scores do not say what share of the mass the top-k hold.
    """
    if not 0 <= keep <= 1:
        raise UserError(f"keep: expected 0 to 1, got {keep:g}")
    trace = open_trace(path)
    if trace.scores_are_assumed or trace.scores_are_normalised:
        what = "assumed" if trace.scores_are_assumed else "normalised over the top-k"
        raise UserError(f"{path}: score: expected shares of a token's whole score mass, got scores that are {what}")
    thresholds: dict[str, dict[str, float]] = {"eps_high": {}, "t_fix": {}}
    third_L = np.arange(trace.num_layers) * 3 // trace.num_layers
    for third in np.unique(third_L):
        layers = np.flatnonzero(third_L == third).tolist()
        scores_NK = np.concatenate([trace.read_layer(layer)[1].astype(np.float64) for layer in layers])
        best_N = scores_NK[:, 0]
        # Float16 scores may sum to a little more than 1, which no threshold may be.
        eps_high = min(float(np.quantile(scores_NK.sum(axis=1), 1 - keep)), 1.0)
        t_fix = float(np.median(scores_NK[best_N > 0, -1] / best_N[best_N > 0]))
        band = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
        thresholds["eps_high"][band] = round(eps_high, _DECIMALS)
        thresholds["t_fix"][band] = round(t_fix, _DECIMALS)
    return thresholds
