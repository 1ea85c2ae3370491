"""What figures share: the frame that they draw, where its comparisons stand, references, limits and legends.

``case_rows`` is the frame: ``frames.speedups`` with a figure's names and units, and a row for each noise floor. Of a
sweep over more than ``MOST`` numbers some are drawn, evenly spaced from the first to the last; the CSV holds all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from moe_ep_bench.analysis.frames import speedups
from moe_ep_bench.analysis.load import CASE, Run
from moe_ep_bench.analysis.speedups import analyse, family_key, family_labels
from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    GAMMA,
    NATIVE_LINE,
    NOISE_FILL,
    Legend,
    Looks,
    Sheet,
    fit_label,
    is_narrow,
    looks_of,
    panel_title,
    sheet,
)
from moe_ep_bench.analysis.sweep import key_words, sweeps_along, swept_keys
from moe_ep_bench.analysis.words import NOT_FUSED, OVERSUBSCRIBED, Footer, footer_lines, origin

MOST = 4
SPEEDUP_LABEL = "speedup (native = 1)"
SPEEDUP = ["speedup", "speedup_low", "speedup_high", "speedup_spread"]
COST = ["dropped_percent", "retained_mass_percent"]
OF_COMPARISON = ["comparison_id", "comparison", "model", "num_ranks", "num_tokens", "origin", "workload"]
OF_CASE = ["comparison", "model", "num_ranks", "num_tokens", "policy", "role", "capacity_factor"]
_DODGE = 0.06  # inches between lines at one value
_WIDTHS = {1: 8.5, 2: 10.0, 3: 11.0, 4: 11.5}  # inches of a sheet with so many panels side by side


# ---- the frame -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def run_looks(run: Run) -> Looks:
    """How each policy family of a run is drawn."""
    return looks_of(family_labels(analyse(run)))


@lru_cache(maxsize=2)
def case_rows(run: Run) -> pd.DataFrame:
    """A row per case in reading order, after those of a comparison its noise floor. Not to be written to.

    Columns: those of ``frames.speedups`` under the names that the CSV beside a figure has (``policy`` is the label,
    ``policy_name`` the policy), and ``family`` (of policies), ``name`` (of a case in all figures), ``layer_time_us``,
    ``origin``, ``workload``, ``is_floor``.
    """
    rows, looks = speedups(run), run_looks(run)
    facts = [run.comparisons[one] for one in rows["comparison_id"]]
    is_policy, has_cost = rows["role"] == "policy", rows["role"] != "ceiling"  # its scores are not the model's
    spread = np.where(rows["speedup_is_interval"] == True, "95 % interval", "smallest and largest pair")  # noqa: E712
    keys = rows[CASE].itertuples(index=False, name=None)
    family = pd.Series([family_key(run.by_key[key]) for key in keys], rows.index, object).where(is_policy)
    factor = pd.Series([json.loads(one).get("capacity_factor") for one in rows["policy_params"]], rows.index, float)
    names = [looks[key].label if key in looks else label for key, label in zip(family, rows["label"], strict=True)]
    named_factor = factor.map(lambda value: f", {GAMMA} {value:g}", na_action="ignore")
    rows = rows.rename(
        columns={"title": "comparison", "policy": "policy_name", "label": "policy", "speedup_median": "speedup"}
    ).assign(
        capacity_factor=factor,
        speedup_spread=pd.Series(spread, rows.index, object).where(rows["speedup_median"].notna()),
        dropped_percent=(100 * rows["dropped_share"].astype(float)).where(has_cost),
        retained_mass_percent=(100 * rows["retained_mass"].astype(float)).where(has_cost),
        layer_time_us=1e3 * rows["median_ms"].astype(float),
        family=family,
        name=names + named_factor.where(family.isin(looks), "").fillna(""),
        origin=[origin(run, one) for one in facts],
        workload=[one.workload.kind for one in facts],
        is_floor=False,
    )
    floors = rows[rows["floor_low"].notna()].drop_duplicates("comparison_id")
    ends = {"speedup_low": floors["floor_low"], "speedup_high": floors["floor_high"]}
    about = {"policy": "native again", "role": "noise", "speedup_spread": "noise floor", "is_floor": True}
    rows = pd.concat([rows, floors[OF_COMPARISON].assign(**ends, **about)], ignore_index=True)
    numbers = dict.fromkeys([*SPEEDUP[:3], *COST], float)
    order = rows["comparison_id"].map({one: place for place, one in enumerate(run.comparisons)})
    return rows.astype(numbers).loc[order.sort_values(kind="stable").index].reset_index(drop=True)


def of_policies(rows: pd.DataFrame) -> pd.DataFrame:
    """Measured policies."""
    return rows[(rows["role"] == "policy") & (rows["status"] == "ok")]


def smallest_factors(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each family in a comparison the smallest capacity factor: in reading order factors ascend."""
    return rows[~rows.duplicated(["comparison_id", "family"]) | (rows["role"] != "policy")]


def csv(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """What a figure shows of ``case_rows``."""
    return rows[list(dict.fromkeys([*OF_CASE, *columns, "origin", "workload"]))]


def footer(run: Run, rows: pd.DataFrame, notes: Sequence[str] = (), *, timed: bool = True) -> Footer:
    """How, on what and with which workload the comparisons of the rows came about, and what weakens their times."""
    facts = [run.comparisons[one] for one in rows["comparison_id"].unique()]
    # What a model of a device or of links is made of stands behind a colon, and in run.json.
    names = [{"links": one.links, "device": one.device} for one in facts]
    names = [{key: words and words.partition(":")[0] for key, words in one.items()} for one in names]
    facts = [one.model_copy(update=own) for one, own in zip(facts, names, strict=True)]
    warnings = [OVERSUBSCRIBED] if timed and any(one.oversubscribed for one in facts) else []
    is_by_phase = any(name in rows for name in ("phases", "phase", "part"))
    if is_by_phase and any(one.permute.is_unfused_permutation for one in facts):
        warnings.append(NOT_FUSED)
    return footer_lines(run, facts, [*warnings, *notes])


# ---- where comparisons stand ---------------------------------------------------------------------------------------


def drawn_part(run: Run, rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The rows of those comparisons that are drawn, and a note on those that are not."""
    ids = {id(result): name for name, result in zip(run.comparisons, analyse(run), strict=True)}
    present = set(rows["comparison_id"])
    having = [result for result in analyse(run) if ids[id(result)] in present]
    keys, left_out, notes = swept_keys(having), set(), {}
    for sweep in sweeps_along(keys[0], having) if keys else ():
        number = len(sweep.comparisons)
        if sweep.is_numeric and number > MOST:
            kept = set(np.linspace(0, number - 1, MOST).round())
            left_out |= {ids[id(one)] for place, one in enumerate(sweep.comparisons) if place not in kept}
            notes[f"of {number} values of {key_words(sweep.key)} {MOST} are drawn; the CSV has all."] = None
    return rows[~rows["comparison_id"].isin(left_out)], list(notes)


def sheet_of_panels(
    header: tuple[str, str, Sequence[str], Legend],
    titles: Sequence[str],
    ratios: Sequence[float],
    height: float,
    *,
    beside: bool = False,
    most: int = 2,
    left: float = 1.15,
) -> tuple[Sheet, list[list[Axes]]]:
    """A sheet with a group of panels per title, one panel per quantity.

    Args:
        header: title, subtitle, footer and legend.
        ratios: of the quantities' heights, or widths where they stand ``beside`` each other.
        height: inches of a group.
        most: groups side by side.
        left: inches that labels take left of a panel.

    Returns:
        The sheet, and of each title its panels.
    """
    number, per_group = len(titles), len(ratios)
    if is_narrow():
        columns, height, beside = 1, height * (0.8 * per_group if beside else 1), False
    else:
        columns = min(most, number)
    rows = -(-number // columns)
    figure = sheet(*header, width=_WIDTHS[min(4, columns * (per_group if beside else 1))], body=rows * height)
    if beside:
        grid = figure.add_gridspec(rows, columns * per_group, width_ratios=[*ratios] * columns)
    else:
        grid = figure.add_gridspec(rows * per_group, columns, height_ratios=[*ratios] * rows)
    room = figure.get_figwidth() / columns - left
    if beside:  # the layout widens a panel until the middle of its title stands over it
        room *= min(1.0, 1.8 * ratios[0] / sum(ratios))
    found = []
    for at, title in enumerate(titles):
        row, column = divmod(at, columns)
        cells = [
            grid[row, column * per_group + n] if beside else grid[row * per_group + n, column] for n in range(per_group)
        ]
        group = [figure.add_subplot(cell) for cell in cells]
        panel_title(group[0], title, room)
        found.append(group)
    return figure, found


# ---- what is drawn in them -----------------------------------------------------------------------------------------


def draw_references(axes: Axes, rows: pd.DataFrame, *, upright: bool = False) -> None:
    """Native at 1, the noise floor and the ceiling of one comparison; ``upright``: speedup runs along the bottom."""
    span, line = (axes.axvspan, axes.axvline) if upright else (axes.axhspan, axes.axhline)
    for floor in floors_of(rows).itertuples():
        span(floor.speedup_low, floor.speedup_high, color=NOISE_FILL, linewidth=0, zorder=0.5)
    line(1, **NATIVE_LINE)
    for ceiling in rows.loc[rows["role"] == "ceiling", "speedup"].dropna():
        line(ceiling, **CEILING_LINE, zorder=1)


def floors_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Noise floors that have a width; a model repeats itself exactly, and has none to draw."""
    return rows[rows["is_floor"] & (rows["speedup_low"] < rows["speedup_high"])]


def reference_legend(rows: pd.DataFrame, *, native: bool = True) -> Legend:
    """What ``draw_references`` draws."""
    legend: list = [("native", Line2D([], [], **NATIVE_LINE))] if native else []
    if len(floors_of(rows)):
        legend.append(("noise floor", Patch(facecolor=NOISE_FILL)))
    if (rows["speedup"].notna() & (rows["role"] == "ceiling")).any():
        legend.append(("perfect balance", Line2D([], [], **CEILING_LINE)))
    return legend


def family_legend(rows: pd.DataFrame, looks: Looks) -> Legend:
    """Families of the rows; with their capacity factor where they are drawn at one alone."""
    named = rows.drop_duplicates(["family", "name"]).groupby("family")["name"]
    names = {family: own.iloc[0] if len(own) == 1 else looks[family].label for family, own in named}
    return [(names[family], Line2D([], [], **look.marks)) for family, look in looks.items() if family in names]


def draw_along(
    axes: Axes, rows: pd.DataFrame, looks: Mapping[Any, dict[str, Any]], by: str, column: str = "speedup"
) -> None:
    """Draw a line over the column ``value`` for each look of the column ``by``; of speedups also what bounds them.

    Lines stand a little beside each other: intervals at one value would lie on one another.
    """
    is_speedup, num_values = column == "speedup", rows["value"].nunique()
    if is_speedup:
        floors = floors_of(rows).groupby("value").agg({"speedup_low": "min", "speedup_high": "max"})
        ends = floors["speedup_low"], floors["speedup_high"]
        if num_values == 1:
            draw_references(axes, rows[rows["is_floor"]])
        axes.fill_between(floors.index, *ends, color=NOISE_FILL, linewidth=0, zorder=0.5)
        axes.axhline(1, **NATIVE_LINE)
        axes.set_ylabel(SPEEDUP_LABEL)
        axes.set_ylim(speedup_limits(rows))
    dodge = _DODGE if num_values > 1 else min(0.4, 5 / len(looks))
    for number, (key, look) in enumerate(looks.items()):
        own = rows[(rows[by] == key) & rows[column].notna()].sort_values("value")
        if own.empty:
            continue
        aside = ScaledTranslation(dodge * (number - (len(looks) - 1) / 2), 0, axes.figure.dpi_scale_trans)
        beside = {"transform": axes.transData + aside, "zorder": 3}
        axes.plot(own["value"], own[column], **beside, **look)
        if is_speedup:
            ends = own["speedup_low"], own["speedup_high"]
            axes.vlines(own["value"], *ends, color=look["color"], linewidth=1.3, **beside)


def name_values(above: Axes, below: Axes, values: Sequence[float], labels: Sequence[str], words: str) -> None:
    """Tick two panels that share their bottom axis at the values, logarithmic where they span enough."""
    is_log = values[0] > 0 and values[-1] / values[0] >= 4
    ends = np.log2([values[0], values[-1]]) if is_log else np.array([values[0], values[-1]], dtype=float)
    pad = 0.08 * (ends[1] - ends[0]) or 0.5 * abs(ends[0]) or 0.5
    ends += [-pad, pad]
    for axes in (above, below):
        if is_log:
            axes.set_xscale("log", base=2)
        axes.set_xticks(values, labels)
        axes.minorticks_off()
        axes.set_xlim(*(2**ends if is_log else ends))
        axes.grid(False, axis="x")
        axes.tick_params(labelbottom=axes is below)
    below.set_xlabel(words)


def limits(values: Iterable[float], least: float) -> tuple[float, float]:
    """Limits about finite values, at least ``least`` apart, so that noise is not blown up to fill a panel."""
    found = np.array(list(values), dtype=float)
    low, high = np.nanmin(found), np.nanmax(found)
    missing = max(0.0, least - (high - low)) / 2
    pad = 0.07 * max(high - low, least)
    return low - missing - pad, high + missing + pad


def speedup_limits(rows: pd.DataFrame) -> tuple[float, float]:
    """Limits about all speedups, their spreads, the noise floor and native."""
    return limits([1.0, *rows[SPEEDUP[:3]].to_numpy(dtype=float).ravel()], least=0.1)


def name_rows(axes: Axes, labels: Sequence[str], *, is_named: bool = True) -> None:
    """One row per label, the first at the top; names only where no panel beside it has them."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, labelleft=is_named or is_narrow())
    axes.grid(False, axis="y")


def write_ends(axes: Axes, ends: Iterable[float], texts: Iterable[str]) -> None:
    """Write beside the ends of bars."""
    for place, (end, text) in enumerate(zip(ends, texts, strict=True)):
        axes.annotate(text, (end, place), (4, 0), textcoords="offset points", va="center", fontsize="small")


def cost_words(row: pd.Series) -> str:
    """``5.0 % dropped, 97.3 % kept``; nothing where neither is known."""
    dropped, kept = row[COST]
    return "" if np.isnan(dropped) else f"{dropped:.1f} % dropped, {kept:.1f} % kept"


def bar_label(row: pd.Series) -> str:
    """Name a case and what it costs, so that a short bar is not read as a gift."""
    cost = cost_words(row) if row["role"] == "policy" else ""
    return "\n".join(fit_label(part, 2.4) for part in (row["name"], cost) if part)
