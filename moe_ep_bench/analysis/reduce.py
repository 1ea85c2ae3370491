"""The only place where ranks are joined and ratios formed: times, phases and routing of cases.

*Layer time.* Ranks of an EP group meet in every layer, so the slowest one's time is the layer's: the maximum over ranks
of ``total``, per iteration, from plain iterations (nothing is read inside them).

*EP groups.* Where the world has several, they never meet: each is reduced by itself, then comes the mean over groups.
The slowest group's numbers have columns of their own, named ``slowest_group_*``.

*Phases* come from breakdown iterations, which hold extra clock readings and barriers; what these cost and what no
phase covers are reported too. A mean over ranks shows what ranks lose to waiting, the slowest rank shows what they
wait *for*. On GPUs each wait of each layer is less what its probe costs when nobody waits (``probe_floor_us``).

*Routing.* Each rank reports its own tokens. A batch is one thing to the model, so ranks are joined first (counts and
score mass are summed), every batch of every layer for itself, and only then batches are averaged. Averaging the ranks'
own peaks would miss the very thing: an expert that is busy on every rank.

*Whole models.* A pass is the slowest rank's. With the share f of the MoE layers in native's pass, waiting included, and
their speedup s, Amdahl's law (AFIPS 1967) says 1 / (1 - f + f / s) for the pass.

Functions take long frames of a store, whose column ``case`` says which case a row is of, and return frames by case.
Shapes: U = batches of layers, Z = source ranks, R = expert ranks, E = experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.store import ITERATION, MISSING, TIMES
from moe_ep_bench.facts import Conditions, RoutedFacts, TimedFacts
from moe_ep_bench.metrics import imbalance, mass_kept
from moe_ep_bench.schema import (
    HOST,
    HOST_BUSY,
    LAYER_PHASES,
    MOE_REST,
    PHASES,
    TOTAL,
    UNACCOUNTED,
    WAITING_PHASES,
    phase_groups,
)

# Groups of a layer's phases, and what no phase covers.
MODEL_GROUPS = phase_groups("model")
GROUPS = {**phase_groups("layer"), UNACCOUNTED: (UNACCOUNTED,)}
# Phases of an MoE layer's time in a model.
MOE_PHASES = [*LAYER_PHASES, MOE_REST]
# Parts of a pass, in the order in which figures stack them: those that no policy changes, then the MoE layers.
PASS_PARTS = {
    "attention": MODEL_GROUPS["attention"],
    "rest": MODEL_GROUPS["rest"],
    "policy": ("policy",),
    "gate": tuple(phase for phase in GROUPS["gate"] if phase != "policy"),
    **{name: phases for name, phases in GROUPS.items() if name not in ("gate", UNACCOUNTED)},
    UNACCOUNTED: (*MODEL_GROUPS[UNACCOUNTED], UNACCOUNTED),
}
# Columns of phases whose sum is a layer's time, or a pass's, with what each is of.
OF_LAYER, OF_PASS = {f"{group}_ms": group for group in GROUPS}, {f"mean_rank_{part}_ms": part for part in PASS_PARTS}
# Time of probes when nobody waits, a column like the phases.
PROBES = "probes"
# Which iteration of which case.
KEY = ["case", *ITERATION]


# ---- times -----------------------------------------------------------------------------------------------------------


def groups_of(index: pd.Index, ep_size: pd.Series) -> pd.Index:
    """The EP group of each row, of levels ``case`` and ``rank``: ranks stand in their groups one after another."""
    return index.get_level_values("rank") // ep_size.loc[index.get_level_values("case")].to_numpy()


def layer_times(samples: pd.DataFrame, ep_size: pd.Series) -> pd.DataFrame:
    """Time of the slowest rank in each plain iteration, and for how long its host was busy; by ``KEY``, us.

    Args:
        ep_size: by case, ranks of an EP group.

    Returns:
        ``time_us`` and ``host_us``, means over EP groups; ``slowest_group_us``.
    """
    totals = samples[samples["kind"].eq("plain") & samples[TOTAL].notna()]
    host_us = totals[HOST_BUSY].fillna(totals[HOST])  # where the busy time was not recorded
    totals = totals.assign(time_us=totals[TOTAL], host_us=host_us)
    times_us = totals.set_index([*KEY, "rank"])[["time_us", "host_us"]].sort_index()
    slowest_group_us = times_us["time_us"].groupby(level=KEY).max()
    return on_slowest(times_us, ep_size, "time_us").assign(slowest_group_us=slowest_group_us)


def phase_times(samples: pd.DataFrame, floor_us: pd.Series) -> pd.DataFrame:
    """Phases of each rank in each breakdown iteration, summed over layers; by ``KEY`` and rank, us.

    Args:
        floor_us: by case what a probe costs when nobody waits; taken off the wait of every layer, where there is one.

    Returns:
        Columns ``PHASES``, ``unaccounted``, ``total``, null where one did not occur; ``PROBES``, what was taken off.
    """
    rows = samples[samples["kind"].eq("breakdown")]
    waits_us = rows[[*WAITING_PHASES]].astype(float)
    off_us = waits_us.clip(upper=rows["case"].map(floor_us), axis=0)
    waits_us -= off_us
    rows = rows.assign(**{name: waits_us[name] for name in WAITING_PHASES}, **{PROBES: off_us.sum(axis=1)})
    return rows.groupby([*KEY, "rank"])[[*TIMES, PROBES]].sum(min_count=1).astype(float)


def moe_times(times_us: pd.DataFrame) -> pd.Series:
    """Time in MoE layers of a pass, waiting and its probes included."""
    return times_us[[*MOE_PHASES, PROBES]].sum(axis=1)


def on_slowest(times_us: pd.DataFrame, ep_size: pd.Series, total: str = TOTAL) -> pd.DataFrame:
    """Rows of the rank with the longest total in each iteration, of equal ones the first; by ``KEY``.

    Of several EP groups the mean over these ranks.
    """
    group = groups_of(times_us.index, ep_size)
    unit = [*(times_us.index.get_level_values(name) for name in KEY), group]
    is_slowest = times_us[total] == times_us.groupby(unit)[total].transform("max")
    slowest_us = times_us[is_slowest].groupby([one[is_slowest.to_numpy()] for one in unit]).head(1)
    slowest_us = slowest_us.droplevel("rank").fillna(0.0)
    return slowest_us.groupby(level=KEY).mean() if (group > 0).any() else slowest_us


def longest(times_us: pd.DataFrame, ep_size: pd.Series) -> pd.DataFrame:
    """The longest rank of an EP group by column and iteration, mean over groups; by ``KEY``."""
    group = groups_of(times_us.index, ep_size)
    unit = [*(times_us.index.get_level_values(name) for name in KEY), pd.Index(group, name="group")]
    return times_us.groupby(unit).max().groupby(level=KEY).mean()


def mean_ms(times_us: pd.DataFrame, groups: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Milliseconds of groups of phases: mean over ranks, then median over iterations; by case."""
    means_us = times_us.fillna(0.0).groupby(level=KEY).mean()
    sums_us = pd.DataFrame({name: means_us[list(phases)].sum(axis=1) for name, phases in groups.items()})
    return sums_us.groupby(level="case").median() / 1e3


def probe_floor_us(facts: TimedFacts | RoutedFacts, conditions: Iterable[Conditions]) -> float:
    """Time of a probe on a GPU when nobody waits: median over launches and ranks; 0 where that is not known."""
    known = [rank.probe_floor_us for launch in conditions for rank in launch.ranks if rank.probe_floor_us is not None]
    return float(np.median(known)) if known and getattr(facts, "backend", "") == "nccl" else 0.0


def breakdown(times_us: pd.DataFrame, ep_size: pd.Series) -> pd.DataFrame:
    """Numbers of breakdown iterations, by case.

    Args:
        times_us: of ``phase_times``.
        ep_size: by case, ranks of an EP group.

    Returns:
        ``breakdown_slowest_phase``, which takes longest (median over iterations) on the rank that is slowest in each
        iteration, ``waiting (dispatch)`` and the like when it is a wait; ``breakdown_unaccounted_share``, time that no
        phase covers over total on the slowest rank, sum over sum within a batch, then the median over batches, and
        likewise ``breakdown_policy_share``; ``breakdown_layer_ms``, the median, probes included; ``<group>_ms``, mean
        over ranks, then median over iterations.
    """
    slowest_us = on_slowest(times_us, ep_size)
    median_us = slowest_us.groupby(level="case").median()
    per_batch_us = slowest_us.groupby(level=["case", "batch"]).sum()
    shares = per_batch_us.div(per_batch_us[TOTAL], axis=0).groupby(level="case").median()
    # Waiting is not the phase that it stands before.
    words = {name: f"waiting ({phase.meets})" for name, phase in PHASES.items() if phase.is_waiting}
    return pd.DataFrame(
        {
            "breakdown_slowest_phase": median_us[list(LAYER_PHASES)].rename(columns=words).idxmax(axis=1),
            "breakdown_unaccounted_share": shares[UNACCOUNTED],
            "breakdown_policy_share": shares["policy"],
            "breakdown_layer_ms": median_us[TOTAL] / 1e3,
            **mean_ms(times_us, GROUPS).add_suffix("_ms"),
        }
    )


# ---- routing ---------------------------------------------------------------------------------------------------------

# Summed over source ranks; weighted by their tokens; the worst rank's; means over batches, then over layers.
COUNTS = [
    "num_tokens", "num_pairs", "padding_pairs", "num_topk_pairs", MISSING, "tokens_without_expert", "crossing_pairs",
    "crossing_copies", "num_image_tokens",
]  # fmt: skip
# Unknown where ranks did not record them; then they are of the case.
UNKNOWN = ["num_dropped_pairs", "num_rerouted_pairs"]
LOST = ["dropped_share", "rerouted_share"]
SHARES = ["topk_share", "entropy"]
# Copies of a token to other ranks or nodes, by the unit that has one copy (``cost_model.exchanges``).
SENT = {
    "sent_pairs": "crossing_pairs",
    "sent_copies": "crossing_copies",
    "sent_node_copies": "crossing_node_copies",
}
# Of putting a plan in place; other cases have none.
OF_PLANS = ["rearrange_us", "rearranged_bytes"]
ERRORS = ["output_error", "reference_error"]
ROUTED = [
    "fullest_expert", "fullest_rank", "expert_imbalance", "rank_imbalance", *LOST, "missing_share", "retained_mass",
    "below_frontier", "below_frontier_experts", "experts_per_token", "activated_experts", "activated_fullest_rank",
    "moved_gib", "rearrange_ms", "rearranged_gib", *SENT,
]  # fmt: skip
# Columns of the fullest of several EP groups.
OF_SLOWEST = {name: f"slowest_group_{name}" for name in ("fullest_expert", "fullest_rank")}
# By what groups of unequal tokens count in a mean; of others each counts alike.
_WEIGHTS = {
    **dict.fromkeys([*LOST, "missing_share"], "num_topk_pairs"),
    **dict.fromkeys(["experts_per_token", *SHARES, *SENT], "num_tokens"),
    "retained_mass": "mass",
}


class Units(NamedTuple):
    """Rows of cases as units, each a layer, batch and EP group, which all source ranks have a row of.

    Attributes:
        rows: by case, layer, batch and rank (``bench.result`` writes a row of every unit for each source rank).
        num_sources: Z.
    """

    rows: pd.DataFrame
    num_sources: int

    def of(self, *names: str) -> np.ndarray:
        """Columns of numbers: [U, Z, columns]."""
        return self.rows[list(names)].to_numpy(dtype=float).reshape(-1, self.num_sources, len(names))

    def lists(self, name: str) -> np.ndarray:
        """A column of lists: [U, Z, entries]."""
        lists = self.rows[name].to_list()
        return np.concatenate(lists).reshape(-1, self.num_sources, len(lists[0]))

    def sums(self, *names: str) -> dict[str, np.ndarray]:
        """By column its sum over source ranks, [U]; null where a rank does not know it."""
        return dict(zip(names, self.of(*names).sum(axis=1).T, strict=True))


def joined_routing(rows: pd.DataFrame, facts: TimedFacts | RoutedFacts, *, at_home: bool) -> pd.DataFrame:
    """A row per case, layer, batch and EP group, its source ranks joined; cases are of one comparison.

    Args:
        rows: of the table ``routing``.
        at_home: experts are at their homes where no slots say otherwise.

    Returns:
        ``case``, ``layer``, ``batch``, ``ep_group``, ``COUNTS``, ``UNKNOWN``, ``SHARES``, ``ERRORS``, ``ROUTED`` but
        the frontier's, and pairs as lists: ``load_E``, ``load_R``, ``pairs_RR`` (from each source rank to each rank's
        experts, row by row). ``fullest_*`` are over the model's mean, T*K/E and T*K/R, the same yardstick for every
        policy, so that dropping shows as less load; ``*_imbalance`` over the mean of the pairs that are computed;
        ``retained_mass`` is ``metrics.mass_kept``, above 1 where a policy adds experts.
    """
    unknown = {name: np.nan for name in (*SENT.values(), *OF_PLANS) if name not in rows}
    rows = rows.assign(ep_group=rows["rank"] // facts.num_ranks, **unknown)
    rows = rows.sort_values(["case", "layer", "batch", "rank"], kind="stable")
    units = Units(rows, rows["rank"].nunique() // rows["ep_group"].nunique())
    joined = rows[["case", "layer", "batch", "ep_group"]].iloc[:: units.num_sources].reset_index(drop=True)
    with warnings.catch_warnings(action="ignore"):  # of units without tokens, pairs or an error
        joined = joined.assign(**_counted(units))
    return joined.assign(**_loads(units, facts.num_ranks, at_home=at_home))


def _counted(units: Units) -> dict[str, np.ndarray]:
    """Counts, and shares of tokens and pairs: by column [U]."""
    counts = dict(zip(COUNTS, np.nansum(units.of(*COUNTS), axis=1).T, strict=True)) | units.sums(*UNKNOWN)
    topk_U, tokens_U = counts["num_topk_pairs"], counts["num_tokens"]
    weighted_US = np.nansum(units.of(*SHARES) * units.of("num_tokens"), axis=1)
    lost = dict(zip([*LOST, "missing_share"], [*UNKNOWN, MISSING], strict=True))
    rows = units.rows
    return {
        **counts,
        **dict(zip(SHARES, weighted_US.T / tokens_U, strict=True)),
        **dict(zip(ERRORS, np.nanmax(units.of(*ERRORS), axis=1).T, strict=True)),
        **{name: counts[count] / topk_U for name, count in lost.items()},
        "retained_mass": mass_kept(rows, np.arange(len(rows)) // units.num_sources),
        "experts_per_token": (counts["num_pairs"] - counts["padding_pairs"]) / tokens_U,
        **{name: units.sums(count)[count] / tokens_U for name, count in SENT.items()},  # null where not recorded
        "moved_gib": units.of("moved_weight_bytes").sum(axis=(1, 2)) / 2**30,
        "rearrange_ms": units.of("rearrange_us").max(axis=(1, 2)) / 1e3,
        "rearranged_gib": units.of("rearranged_bytes").sum(axis=(1, 2)) / 2**30,
    }


def _loads(units: Units, num_ranks: int, *, at_home: bool) -> dict[str, Any]:
    """Loads of experts and ranks: by column [U], and as lists."""
    load_UZE, load_UZR = units.lists("load_E"), units.lists("load_R")
    load_UE, load_UR = load_UZE.sum(axis=1), load_UZR.sum(axis=1)
    topk_U = np.nansum(units.of("num_topk_pairs"), axis=(1, 2))
    # Slots say where replicas and moved weights are; layers need not have as many.
    in_slots = units.rows["slot_load_P"].notna()
    of_sources = units.rows["slot_load_P"].where(in_slots, units.rows["load_E"]).to_list()
    units_S = [of_sources[first : first + units.num_sources] for first in range(0, len(of_sources), units.num_sources)]
    activated_U = np.array(
        [(np.sum(load_ZP, axis=0).reshape(num_ranks, -1) > 0).sum(axis=1).max() for load_ZP in units_S]
    )
    is_known_U = in_slots.groupby(units.rows["case"]).transform("any").to_numpy()[:: units.num_sources] | at_home
    return {
        "fullest_expert": load_UE.max(axis=1) * load_UE.shape[1] / topk_U,
        "fullest_rank": load_UR.max(axis=1) * num_ranks / topk_U,
        "expert_imbalance": imbalance(load_UE),
        "rank_imbalance": imbalance(load_UR),
        "activated_experts": (load_UE > 0).sum(axis=1),
        "activated_fullest_rank": activated_U if is_known_U.all() else np.where(is_known_U, activated_U, np.nan),
        "load_E": list(load_UE),
        "load_R": list(load_UR),
        "pairs_RR": list(load_UZR.reshape(len(load_UE), -1)),
    }


def with_frontier(routing: pd.DataFrame, frontier: pd.DataFrame) -> pd.DataFrame:
    """Joined routing with the most that dropping alone can keep, null where it was not computed.

    Columns: ``kept_by_load``, ``kept_by_experts``, ``curve_load``, ``curve_kept`` of the schema; ``below_frontier`` and
    ``below_frontier_experts``, what is kept at most at the same fullest rank, or with as many activated experts, less
    what the case keeps, below 0 where a policy that reroutes keeps more.
    """
    unit = ["case", "batch", "layer"]
    routing = routing.merge(frontier.astype(routing.dtypes[unit]), on=unit, how="left", validate="m:1")
    most = routing[["kept_by_load", "kept_by_experts"]].astype(float).sub(routing["retained_mass"], axis=0)
    return routing.assign(below_frontier=most["kept_by_load"], below_frontier_experts=most["kept_by_experts"])


def routing_means(routing: pd.DataFrame) -> pd.DataFrame:
    """``ROUTED`` by case, means over batches, then layers; of output errors first the worst layer of each batch.

    Several EP groups are averaged first, as over all their tokens; ``OF_SLOWEST`` are the fullest group's.
    """
    routing = _over_groups(routing)
    errors = routing.groupby(["case", "batch"])["output_error"].max()
    means = over_layers(routing, ["case"], [*ROUTED, *OF_SLOWEST.values()], UNKNOWN[0])
    return means.join(errors.groupby("case").mean())


def over_layers(routing: pd.DataFrame, case: list[str], columns: list[str], unknown: str) -> pd.DataFrame:
    """Means of columns over batches, then over layers, by case; no ``LOST`` where some batch's ``unknown`` is null."""
    means = routing.groupby([*case, "layer"], dropna=False)[columns].mean().groupby(case).mean()
    is_unknown = routing[unknown].isna().groupby([routing[key] for key in case]).any()
    means.loc[is_unknown, LOST] = np.nan  # a mean over the others would be none
    return means


def _over_groups(routing: pd.DataFrame) -> pd.DataFrame:
    """A row per case, layer and batch; ``OF_SLOWEST`` is null where there is one EP group alone."""
    if not (routing["ep_group"] > 0).any():
        return routing.assign(**dict.fromkeys(OF_SLOWEST.values(), np.nan))
    unit = ["case", "layer", "batch"]
    weights = routing.assign(mass=routing["num_tokens"] * routing["topk_share"])
    numbers = [*ROUTED, *UNKNOWN, *ERRORS]
    weight = pd.DataFrame({name: weights[_WEIGHTS[name]] if name in _WEIGHTS else 1.0 for name in numbers})
    weight = weight.where(routing[numbers].notna())
    keys = [routing[name] for name in unit]
    sums, totals = ((one.groupby(keys, dropna=False).sum(min_count=1)) for one in (weight * routing[numbers], weight))
    groups = routing.groupby(unit, dropna=False)
    slowest = groups[list(OF_SLOWEST)].max().rename(columns=OF_SLOWEST).where(groups.size() > 1)
    return (sums / totals).join(slowest).reset_index()
