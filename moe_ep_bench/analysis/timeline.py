"""One case on every rank beside native, during one layer: who waits for whom.

A lane per rank; its phases are bars in the order in which the layer passes them, drawn from the durations that one
breakdown iteration measured, so that a lane is as long as its rank's time. Waiting is hatched. The *critical rank* is
the one for which the others wait: of the expert-parallel group with the slowest rank, the rank that itself waits least
(of equals the one that works longest). Both panels show the same batch on the same axis of time. The iteration shown is
typical, not chosen by eye: the one of the policy whose layer time is closest to the median of its breakdown iterations,
and of native, in the same launch and batch, likewise. Of more ranks than there is room for, those are shown that stand
evenly spaced from the most to the least native work, and both critical ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from moe_ep_bench.analysis.cases import samples
from moe_ep_bench.analysis.marks import milliseconds
from moe_ep_bench.analysis.reading import ITERATION
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.analysis.style import INK, MUTED, Look
from moe_ep_bench.errors import UserError
from moe_ep_bench.schema import LAYER_PHASES, TOTAL, UNACCOUNTED, WAITING_PHASES

_MAX_LANES, _SHOWN_LANES = 24, 16
# Of the top-k's pairs and score mass: what the policy that is shown may cost, as ``advise`` has it.
_MOST_DROPPED, _LEAST_KEPT = 0.10, 0.95


def timeline_rows(store: Store, cases: pd.DataFrame, asked: str | None = None) -> pd.DataFrame:
    """A row per bar: a phase of a rank that took time, of native and of the case that is chosen.

    Columns: those of the case; ``ITERATION``, ``rank``, ``is_critical``, ``phase``, ``begin_us``, ``time_us``;
    ``end_us``, of the slowest rank; ``subtitle``; ``heading``, of the panel. None where no case has its native beside
    it.

    Args:
        asked: a label or an id; None = the fastest policy that is significantly faster and within the usual bounds.
    """
    timed = cases[(cases["status"] == "ok") & (cases["world_size"] > cases["num_replicas"])]
    found = _chosen(timed[timed["waiting_ms"].notna()], asked)
    if found is None:
        return pd.DataFrame()
    case, native, why = found
    times = [_broken_down(store, one) for one in (native, case)]
    if any(part.empty for part in times):
        return pd.DataFrame()
    native_us, case_us = layer_us = [part[TOTAL].groupby(level=ITERATION).max() for part in times]
    key = (case_us - case_us.median()).abs().idxmin()
    beside = native_us[native_us.index.map(lambda other: other[:2] == key[:2])]
    if beside.empty:
        return pd.DataFrame()
    keys = [(beside - native_us.median()).abs().idxmin(), key]
    size = int(case["world_size"] // case["num_replicas"])
    shown = [_of_slowest_group(part.xs(one), size) for part, one in zip(times, keys, strict=True)]
    critical = [critical_rank(part) for part in shown]
    ranks = _lanes(shown[0], set(critical))
    fewer = f" {len(ranks)} of {len(shown[0])} ranks." if len(ranks) < len(shown[0]) else ""
    if case["num_replicas"] > 1:
        fewer += f" Of {case['num_replicas']:.0f} replicas the one with the slowest rank."
    how = (
        f"{case['name']} beside native; {case['title']}; {why}; launch {key[0]}, batch {key[1]}; phases are laid end "
        f"to end, and the critical rank is the one that waits least.{fewer}"
    )
    parts = []
    for row, part, one, rank, median_us in zip(
        (native, case), shown, keys, critical, [series.median() for series in layer_us], strict=True
    ):
        times_us = part.loc[ranks, [*LAYER_PHASES, UNACCOUNTED]]
        begins_us = times_us.cumsum(axis=1) - times_us
        bars = pd.DataFrame({"time_us": times_us.stack(), "begin_us": begins_us.stack()}).reset_index()
        bars = bars[bars["time_us"] > 0].assign(**dict(zip(ITERATION, one, strict=True)), is_critical=False)
        bars.loc[bars["rank"] == rank, "is_critical"] = True
        about = {"facet": row["case_id"], "heading": _title(row, part, median_us), "subtitle": how}
        about["end_us"] = part[TOTAL].max()
        of_case = row.drop([*bars, *about], errors="ignore").to_frame().T.infer_objects().copy()  # of one piece again
        parts.append(bars.merge(of_case, how="cross").assign(**about))
    return pd.concat(parts, ignore_index=True)


def _chosen(rows: pd.DataFrame, asked: str | None) -> tuple[pd.Series, pd.Series, str] | None:
    """The case that is shown, its native, and in words why it is this one; None where none has its native beside it.

    Raises:
        UserError: there is no case of the name that was asked for.
    """
    native = rows[rows["role"] == "baseline"].drop_duplicates("facet").set_index("facet", drop=False)
    others = rows[rows["facet"].isin(native.index) & (rows["role"] != "baseline")]
    policies = others[others["role"] == "policy"]
    faster = policies[policies["verdict"] == "faster"].sort_values("speedup_median", ascending=False, kind="stable")
    cheap = faster[(faster["dropped_share"] <= _MOST_DROPPED) & (faster["retained_mass"] >= _LEAST_KEPT)]
    bounds = f"{_MOST_DROPPED:.0%} dropped and {1 - _LEAST_KEPT:.0%} of the score mass lost"
    if asked is not None:
        found, why = others[(others["label"] == asked) | (others["case_id"] == asked)], "as chosen"
        if found.empty:
            labels = ", ".join(others["label"].unique()) or "none"
            raise UserError(f"--case: expected a measured case's label or id, one of {labels}; got {asked!r}")
    elif len(cheap):
        found, why = cheap, f"the fastest policy within {bounds}"
    elif len(faster):
        found, why = faster, f"the fastest policy; none within {bounds} is faster than native"
    else:
        found, why = policies, "the first policy: none is faster beyond the noise"
    return None if found.empty else (found.iloc[0], native.loc[found["facet"].iloc[0]], why)


def _broken_down(store: Store, row: pd.Series) -> pd.DataFrame:
    """Breakdown iterations of a case, indexed by ``ITERATION`` and rank, a column per phase; us."""
    rows = samples(store, row.to_frame().T).query("kind == 'breakdown'")
    times_us = rows.pivot_table("time_us", [*ITERATION, "rank"], "phase", aggfunc="sum")
    return times_us.reindex(columns=[*LAYER_PHASES, UNACCOUNTED, TOTAL]).fillna(0.0)


def _of_slowest_group(times_us: pd.DataFrame, size: int) -> pd.DataFrame:
    """Ranks that meet in the same experts as the slowest one."""
    return times_us[times_us.index // size == times_us[TOTAL].idxmax() // size]


def critical_rank(times_us: pd.DataFrame) -> int:
    """The rank that waits least; of equals the one that takes longest, then the lower."""
    waits_us = times_us[list(WAITING_PHASES)].sum(axis=1)
    return min((int(rank) for rank in times_us.index), key=lambda r: (waits_us[r], -times_us.loc[r, TOTAL], r))


def _lanes(times_us: pd.DataFrame, always: set[int]) -> list[int]:
    """The ranks to show, in order; or of many those evenly spaced by work, most work first."""
    ranks = [int(rank) for rank in times_us.index]
    if len(ranks) <= _MAX_LANES:
        return ranks
    work_us = times_us[TOTAL] - times_us[list(WAITING_PHASES)].sum(axis=1)
    by_work = [int(rank) for rank in work_us.sort_values(ascending=False, kind="stable").index]
    evenly = {by_work[int(place)] for place in np.linspace(0, len(by_work) - 1, _SHOWN_LANES).round()}
    return [rank for rank in by_work if rank in evenly | always]


def _title(case: pd.Series, times_us: pd.DataFrame, median_us: float) -> str:
    """A panel's title: the case, its time, what it costs, and how much of it is waiting."""
    layer_us = times_us[TOTAL].max()
    # As if each rank held its device until the slowest is done.
    waiting = times_us[list(WAITING_PHASES)].to_numpy().sum() / (layer_us * len(times_us))
    words = [f"{case['name']}: layer {milliseconds(layer_us / 1e3)} ms (median {milliseconds(median_us / 1e3)})"]
    words += [] if np.isnan(case["speedup_median"]) else [f"speedup {case['speedup_median']:.3f}"]
    words += [f"{100 * case['dropped_share']:.1f} % dropped"] if case["role"] == "policy" else []
    return ", ".join([*words, f"{100 * waiting:.1f} % waiting"])


def mark_critical(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    """A box round the critical rank's lane, and a line where the slowest rank ends."""
    del looks
    critical, lanes = rows[rows["is_critical"]], list(rows["bar"].unique())
    lane, end_ms = lanes.index(critical["bar"].iloc[0]), critical["time_ms"].sum()
    look = {"fill": False, "edgecolor": INK, "linewidth": 1.8, "zorder": 4, "clip_on": False}
    axes.add_patch(Rectangle((0, lane - 0.42), end_ms, 0.84, label="critical rank", **look))
    look = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (4, 2)), "zorder": 3}
    axes.axvline(rows["end_us"].iloc[0] / 1e3, label="end of the slowest rank", **look)
    axes.get_yticklabels()[lane].set_fontweight("bold")
    if len(lanes) > 8:
        axes.tick_params(axis="y", labelsize="x-small")
