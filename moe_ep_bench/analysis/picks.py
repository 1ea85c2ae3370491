"""Candidates of ``advise`` and the rule by which one of them is picked.

The pick is a candidate within the bounds whose verdict is ``faster`` (``statistics.judge``): the fastest without loss,
unless one that drops or reroutes is faster by more than 5 % and beyond its range. Within 2 % is a tie; the candidate
that keeps more score mass wins. Where there is none, native stays, which loses nothing either.
"""

from __future__ import annotations

from functools import lru_cache

import pandas as pd

from moe_ep_bench.analysis.advice import DIGITS, ROUNDING, costs_answers
from moe_ep_bench.analysis.cases import ESTIMATE, cases, differs_from_topk, timings
from moe_ep_bench.analysis.columns import missing, short_labels
from moe_ep_bench.analysis.notes import MOST_DROPPED
from moe_ep_bench.analysis.store import ITERATION, Store
from moe_ep_bench.bench.advise_config import Bounds
from moe_ep_bench.errors import UserError
from moe_ep_bench.facts import NOT_EXECUTED
from moe_ep_bench.schema import ALL, LAYER_PHASES, WAITING_PHASES
from moe_ep_bench.timing.statistics import LEAST_MODELLED, NoiseFloor, estimate_median, judge, paired_ratios

# What a candidate is that may not be picked, in place of its verdict.
OUT_OF_BOUNDS, UNFIT = BARRED = ("out of bounds", "does not fit")
_TIE = 0.02
# By how much, and beyond its range, what costs answers must be faster than what does not.
_WORTH = 0.05
# What a phase takes longer by is named from here on.
_LEAST_GROWTH_US = 1.0


def judged(rows: pd.DataFrame, bounds: Bounds) -> pd.DataFrame:
    """Rows that drop few enough pairs to be candidates, with ``standing``, ``kept`` and ``costs`` of ``candidates``.

    Read are ``verdict``, ``fits``, ``dropped_share``, ``missing_share`` and ``retained_mass``.
    """
    rows = rows[~(rows["dropped_share"] > MOST_DROPPED)]
    # What does not tell dropped from rerouted pairs is held to the bound by both.
    is_out = rows["dropped_share"].fillna(rows["missing_share"]) > bounds.max_dropped + ROUNDING
    is_out |= rows["retained_mass"] < bounds.min_retained - ROUNDING
    return rows.assign(
        standing=rows["verdict"].mask(is_out, OUT_OF_BOUNDS).mask(rows["fits"].eq(False), UNFIT),
        kept=rows["retained_mass"].clip(upper=1).round(DIGITS),
        costs=costs_answers(rows["missing_share"], rows["retained_mass"]),
    )


@lru_cache(maxsize=2)
def candidates(store: Store, bounds: Bounds) -> pd.DataFrame:
    """A row per candidate and comparison: measured policies and replication. ``topk`` is the model's own routing.

    Left out is what drops more than 95 % of the pairs.

    Returns:
        Columns of ``cases``, by case id, and: ``standing``, the verdict, or why it may not be picked; ``is_pick``; the
        least and the greatest speedup of draws or layers (``least``, ``most``), where a comparison has several; in how
        many of them the median speedup is above 1 (``num_gaining``); the median over the first half of the batches and
        over the others (``earlier``, ``later``); ``differs_from_topk``; ``costs``: it loses pairs or score mass;
        ``growth_phase``, ``growth_us`` and ``growth_is_summed`` of what is hardly faster (``advice.Growth``);
        ``same_as``, the label of an earlier one of the same policy whose capacity comes to as many rows.
    """
    rows = cases(store)
    rows = rows[rows["role"].isin(["policy", "replication"]) & (rows["policy"] != "topk")]
    rows = rows[rows["speedup_median"].notna() & rows["missing_share"].notna()]  # of one piece
    rows = judged(rows.set_index("case_id", drop=False).rename_axis(None), bounds)
    times = timings(store)
    ratios = times[times["quantity"] == ALL].set_index(["case_id", *ITERATION])["speedup"]
    speedup_CD = ratios.groupby(["case_id", "launch"]).median().unstack().reindex(rows.index)
    batch, of_draw = ratios.index.get_level_values("batch").to_series(index=ratios.index), ["case_id", "launch"]
    first, last = (batch.groupby(of_draw).transform(end) for end in ("min", "max"))
    is_early, of_case = 2 * (batch - first) < last - first + 1, ratios.index.get_level_values("case_id")
    several = (speedup_CD.count(axis=1) > 1) & ((rows["num_draws"] > 1) | rows["origin"].isin(NOT_EXECUTED))
    rows = rows.assign(
        least=speedup_CD.min(axis=1).where(several),
        most=speedup_CD.max(axis=1).where(several),
        num_gaining=(speedup_CD > 1).sum(axis=1),
        earlier=ratios.where(is_early).groupby(of_case).median(),
        later=ratios.where(~is_early).groupby(of_case).median(),
        differs_from_topk=differs_from_topk(rows),
    )
    rows = rows.join(_growths(store).where(rows["speedup_median"] < 1 + _TIE))
    alike = ["comparison_id", "family", "median_ms", "dropped_share", "retained_mass"]
    first = rows[rows["dropped_share"] > 0].groupby(alike)["label"].transform("first").reindex(rows.index)
    rows = rows.assign(same_as=first.where(first.ne(rows["label"]), None))
    faster = rows[rows["standing"] == "faster"]
    picks = [_best(own) for _, own in faster.groupby("comparison_id")]
    return rows.assign(is_pick=rows.index.isin([best.name for best in picks if best is not None]))


def _growths(store: Store) -> pd.DataFrame:
    """In which phase each case takes longer than native by most, by how much, and whether ranks sum ahead of it."""
    times = timings(store)
    phases_us = times[times["quantity"].isin(LAYER_PHASES)].groupby(["case_id", "quantity"])["time_us"].median()
    phases_us = phases_us.unstack().reindex(columns=list(LAYER_PHASES))
    about = cases(store).set_index("case_id").loc[phases_us.index]
    natives = about[about["role"] == "baseline"].reset_index().set_index("comparison_id")["case_id"]
    spent_us = phases_us.drop(columns=list(WAITING_PHASES)).fillna(0.0)
    more_us = spent_us - spent_us.reindex(about["comparison_id"].map(natives)).to_numpy()
    phase, most_us = more_us.fillna(0.0).idxmax(axis=1), more_us.max(axis=1)
    is_summed = phases_us["wait_policy"].notna() & (phase == "policy")
    phase = phase.mask((phase == "policy") & (about["role"] == "replication"), "solving")
    found = pd.DataFrame({"phase": phase, "us": most_us, "is_summed": is_summed}).where(most_us > _LEAST_GROWTH_US)
    return found.add_prefix("growth_").rename_axis(None)


def _best(rows: pd.DataFrame) -> pd.Series | None:
    """The pick of candidates of one comparison that are all faster; None = native, which no lossless one beats."""
    first, lossless = fastest(rows), rows[~rows["costs"]]
    if lossless.empty:
        return first if first["speedup_median"] > 1 + _WORTH else None
    kept = fastest(lossless)
    is_worth = first["speedup_median"] > (1 + _WORTH) * kept["speedup_median"]
    return first if is_worth and first["speedup_low"] > kept["speedup_high"] else kept


def fastest(rows: pd.DataFrame) -> pd.Series:
    """The fastest candidate; of those that tie with it the one that keeps most score mass."""
    tied = rows[rows["speedup_median"] >= rows["speedup_median"].max() / (1 + _TIE)]
    return tied.sort_values(["kept", "speedup_median"], kind="stable").iloc[-1]


def against(store: Store, rows: pd.DataFrame, label: str) -> pd.DataFrame:
    """Candidates of one comparison set against one of them, paired: what lies between two of which neither is native.

    Args:
        rows: of ``candidates``.
        label: of the other, whole or as tables shorten it.

    Returns:
        By case id ``versus_median``, ``_low``, ``_high`` and ``_is_interval`` of the other's time over the candidate's
        in the same iteration, and ``versus_verdict``, held against the comparison's noise floor; nothing of the other.

    Raises:
        UserError: there is none of that label.
    """
    is_other = rows["label"].eq(label) | short_labels(rows).eq(label)
    if not is_other.any():
        raise UserError(f"--versus {label}: expected one of {', '.join(rows['label'])}")
    times = timings(store)
    times = times[(times["quantity"] == ALL) & times["case_id"].isin(rows.index)].set_index(["case_id", *ITERATION])
    times_us, other = times["time_us"], rows.index[is_other][0]
    found = {}
    for row in rows[~is_other].to_dict("records"):
        estimate = estimate_median(paired_ratios(times_us.loc[other], times_us.loc[row["case_id"]]))
        floor = None if missing(row["floor_low"]) else NoiseFloor(row["floor_low"], row["floor_high"])
        how = {"is_modelled": row["origin"] in NOT_EXECUTED, "is_oversubscribed": row["oversubscribed"]}
        found[row["case_id"]] = {name: getattr(estimate, name, None) for name in ESTIMATE}
        found[row["case_id"]]["verdict"] = judge(estimate, floor, **how)
    return pd.DataFrame.from_dict(found, orient="index").reindex(rows.index).add_prefix("versus_")


def choice(rows: pd.DataFrame, chosen: str | None) -> str | None:
    """What is picked of candidates of one comparison by their medians alone, of which no interval is asked.

    Args:
        chosen: the label of what stays while no other is clearly better; None = native.

    Returns:
        A label; None = native.
    """
    faster = rows[~rows["standing"].isin(BARRED) & (rows["speedup_median"] > 1 + LEAST_MODELLED)]
    if faster.empty:
        return None
    best, own = _best(faster), faster[faster["label"] == chosen]
    if best is None:
        return None
    is_alike = len(own) and own["costs"].iloc[0] == best["costs"]
    is_tie = is_alike and best["speedup_median"] <= (1 + _TIE) * own["speedup_median"].iloc[0]
    return chosen if is_tie else best["label"]
