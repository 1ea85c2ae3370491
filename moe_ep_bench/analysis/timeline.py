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

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from moe_ep_bench.analysis.cases import samples
from moe_ep_bench.analysis.columns import milliseconds
from moe_ep_bench.analysis.drawing import case_rows
from moe_ep_bench.analysis.reading import ITERATION
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.analysis.style import INK, MUTED
from moe_ep_bench.errors import UserError
from moe_ep_bench.schema import LAYER_PHASES, PHASES, TOTAL, UNACCOUNTED, WAITING_PHASES, phase_groups

_MAX_LANES, _SHOWN_LANES = 24, 16
# Of the top-k's pairs and score mass: what the policy that is shown may cost, as ``advise`` has it.
_MOST_DROPPED, _LEAST_KEPT = 0.10, 0.95


def timeline_rows(store: Store, asked: str | None = None) -> pd.DataFrame:
    """A row per bar: a phase of a rank that took time, of native and of the case that is chosen.

    Columns: those of the case; ``ITERATION``, ``rank``, ``is_critical``, ``phase``, its ``group``, ``begin_us``,
    ``time_us``; ``end_us``, of the slowest rank; ``subtitle``; ``heading``, of the panel; ``bar``, ``begin_ms``,
    ``time_ms`` and ``longest_ms``, of ``marks.bars``. None where no case has its native beside it.

    Args:
        asked: a label or an id; None = the fastest policy that is significantly faster and within the usual bounds.

    Raises:
        UserError: there is no case of the name that was asked for.
    """
    rows = case_rows(store).query("scope == 'layer' and status == 'ok' and waiting_ms.notna()")
    native, case, why = _chosen(rows[rows["world_size"] > rows["num_replicas"]], asked)
    if case is None:
        return pd.DataFrame()
    measured = [_broken_down(store, row) for row in (native, case)]
    native_us, case_us = (times_us[TOTAL].groupby(level=ITERATION).max() for times_us in measured)
    key = (case_us - case_us.median()).abs().idxmin()
    beside_us = native_us[native_us.index.droplevel("iteration") == key[:2]]
    if beside_us.empty:
        return pd.DataFrame()
    keys = (beside_us - native_us.median()).abs().idxmin(), key
    # Ranks that meet in the same experts as the slowest one.
    size = int(case["world_size"] // case["num_replicas"])
    shown = [times_us.xs(at) for times_us, at in zip(measured, keys, strict=True)]
    shown = [times_us[times_us.index // size == times_us[TOTAL].idxmax() // size] for times_us in shown]
    critical = [critical_rank(times_us) for times_us in shown]
    ranks = _lanes(shown[0], set(critical))
    how = f"{case['name']} beside native; {case['title']}; {why}; launch {key[0]}, batch {key[1]}; phases are laid end "
    how += "to end, and the critical rank is the one that waits least."
    how += f" {len(ranks)} of {len(shown[0])} ranks." if len(ranks) < len(shown[0]) else ""
    replicas = f" Of {case['num_replicas']:.0f} replicas the one with the slowest rank."
    how += replicas if case["num_replicas"] > 1 else ""
    parts = []
    panels = zip((native, case), shown, keys, critical, (native_us.median(), case_us.median()), strict=True)
    for row, times_us, at, rank, median_us in panels:
        phases_us = times_us.loc[ranks, [*LAYER_PHASES, UNACCOUNTED]]
        begins_us = phases_us.cumsum(axis=1) - phases_us
        bars = pd.DataFrame({"time_us": phases_us.stack(), "begin_us": begins_us.stack()}).reset_index()
        bars = bars[bars["time_us"] > 0].assign(is_critical=lambda rows, rank=rank: rows["rank"] == rank)
        about = {"facet": row["case_id"], "heading": _title(row, times_us, median_us), "subtitle": how}
        about |= {"end_us": times_us[TOTAL].max(), **dict(zip(ITERATION, at, strict=True))}
        of_case = row.drop([*bars, *about], errors="ignore").to_frame().T.infer_objects().copy()  # of one piece again
        parts.append(bars.merge(of_case, how="cross").assign(**about))
    rows = pd.concat(parts, ignore_index=True)
    groups = rows["phase"].map({name: phase.group for name, phase in PHASES.items()}).fillna(UNACCOUNTED)
    lane = "rank " + rows["rank"].astype("str")
    return rows.assign(
        group=pd.Categorical(groups, [*phase_groups("layer"), UNACCOUNTED]),
        bar=lane.mask(rows["is_critical"], "critical: " + lane),
        begin_ms=rows["begin_us"] / 1e3,
        time_ms=rows["time_us"] / 1e3,
        longest_ms=rows["end_us"].max() / 1e3,
    )


def _chosen(rows: pd.DataFrame, asked: str | None) -> tuple[pd.Series | None, pd.Series | None, str]:
    """Native, the case that is shown, and in words why it is this one; None where none has its native beside it."""
    native = rows[rows["role"] == "baseline"].drop_duplicates("facet").set_index("facet", drop=False)
    others = rows[rows["facet"].isin(native.index) & (rows["role"] != "baseline")]
    policies = others[others["role"] == "policy"]
    faster = policies[policies["verdict"] == "faster"].sort_values("speedup_median", ascending=False, kind="stable")
    cheap = faster[(faster["dropped_share"] <= _MOST_DROPPED) & (faster["retained_mass"] >= _LEAST_KEPT)]
    bounds = f"{_MOST_DROPPED:.0%} dropped and {1 - _LEAST_KEPT:.0%} of the score mass lost"
    choices = (
        (cheap, f"the fastest policy within {bounds}"),
        (faster, f"the fastest policy; none within {bounds} is faster than native"),
        (policies, "the first policy: none is faster beyond the noise"),
    )
    if asked is not None:
        named = others[(others["label"] == asked) | (others["case_id"] == asked)]
        if named.empty:
            labels = ", ".join(others["label"].unique()) or "none"
            raise UserError(f"--case: expected a measured case's label or id, one of {labels}; got {asked!r}")
        choices = ((named, "as chosen"),)
    for found, why in choices:
        if len(found):
            return native.loc[found["facet"].iloc[0]], found.iloc[0], why
    return None, None, ""


def _broken_down(store: Store, row: pd.Series) -> pd.DataFrame:
    """Breakdown iterations of a case, indexed by ``ITERATION`` and rank, a column per phase; us."""
    rows = samples(store, row.to_frame().T).query("kind == 'breakdown'")
    times_us = rows.pivot_table("time_us", [*ITERATION, "rank"], "phase", aggfunc="sum")
    return times_us.reindex(columns=[*LAYER_PHASES, UNACCOUNTED, TOTAL]).fillna(0.0)


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
    layer_us, waits_us = times_us[TOTAL].max(), times_us[list(WAITING_PHASES)].to_numpy().sum()
    shown, median = (milliseconds(time_us / 1e3, digits=3) for time_us in (layer_us, median_us))
    words = [f"{case['name']}: layer {shown} ms (median {median})"]
    words += [] if np.isnan(case["speedup_median"]) else [f"speedup {case['speedup_median']:.3f}"]
    words += [f"{100 * case['dropped_share']:.1f} % dropped"] if case["role"] == "policy" else []
    # As if each rank held its device until the slowest is done.
    return ", ".join([*words, f"{100 * waits_us / (layer_us * len(times_us)):.1f} % waiting"])


def mark_critical(axes: Axes, rows: pd.DataFrame) -> None:
    """A box round the critical rank's lane, and a line where the slowest rank ends."""
    critical, lanes = rows[rows["is_critical"]], list(rows["bar"].unique())
    lane, end_ms = lanes.index(critical["bar"].iloc[0]), critical["time_ms"].sum()
    look = {"fill": False, "edgecolor": INK, "linewidth": 1.8, "zorder": 4, "clip_on": False}
    axes.add_patch(Rectangle((0, lane - 0.42), end_ms, 0.84, label="critical rank", **look))
    look = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (4, 2)), "zorder": 3}
    axes.axvline(rows["end_us"].iloc[0] / 1e3, label="end of the slowest rank", **look)
    axes.get_yticklabels()[lane].set_fontweight("bold")
    if len(lanes) > 8:
        axes.tick_params(axis="y", labelsize="x-small")
