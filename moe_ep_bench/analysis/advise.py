"""``advise``: the pick and what it costs in a few lines, then the candidates that explain it.

The pick is the fastest candidate within the bounds whose verdict is ``faster`` (``statistics.judge``). Within 2 % is a
tie; the candidate that keeps more score mass wins. Where there is none, native stays.

The fastest of many is in part the luckiest: what it gained where it was chosen is too much. So where traffic was drawn
several times the pick is judged on draws that did not choose it. Each draw is given the candidate that the others would
choose of those that pay, and what these gain together is what the answer promises; if that is not ``faster``, native
stays. Of one draw the answer says that its speedup is not so judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.cases import cases, comparisons, load_timed, point_words, timings
from moe_ep_bench.analysis.columns import Row, interval, milliseconds, missing, number, percentage, short_labels, text
from moe_ep_bench.analysis.notes import FEW_BATCHES, MODEL_CAVEAT, OVERSUBSCRIBED, chance_words, warnings
from moe_ep_bench.analysis.origins import NOTHING_RAN, is_same_model, modelled_line, said_once
from moe_ep_bench.analysis.render import Table, render
from moe_ep_bench.analysis.store import ITERATION, Store
from moe_ep_bench.bench.question import Bounds, Question
from moe_ep_bench.files import write_text
from moe_ep_bench.models.memory import Fit
from moe_ep_bench.schema import ALL
from moe_ep_bench.timing.statistics import BELOW_MODEL, NoiseFloor, estimate_median, judge

ADVICE = "advice.txt"
# What a candidate is that may not be picked, in place of its verdict.
OUT_OF_BOUNDS, UNFIT = _BARRED = ("out of bounds", "does not fit")
_TIE = 0.02
# Shares are sums of float32.
_DIGITS = 6
_ROUNDING = 10**-_DIGITS
_BEST = 5


# ---- candidates and the pick -----------------------------------------------------------------------------------------


def candidates(store: Store, bounds: Bounds) -> pd.DataFrame:
    """A row per candidate and comparison: measured policies and replication. ``topk`` is the model's own routing.

    Returns:
        Columns of ``cases``, by case id, and: ``at``, the place in the sweep; ``standing``, the verdict, or why it may
        not be picked; ``log_speed``, the mean over draws or layers of the log of their medians; of these, where a
        comparison has several, the least and the greatest speedup (``least``, ``most``); ``is_pick``; of a pick
        ``promised``, its speedup, on draws that did not choose it where there are several, and ``chosen_by``, how many
        draws' others choose it.
    """
    rows = cases(store)
    rows = rows[rows["role"].isin(["policy", "replication"]) & (rows["policy"] != "topk")]
    rows = rows[rows["speedup_median"].notna() & rows["dropped_share"].notna()]  # of one piece
    rows = rows.set_index("case_id", drop=False).rename_axis(None)
    times = timings(store)
    ratios = times[times["quantity"] == ALL].set_index(["case_id", *ITERATION])["speedup"]
    logs = np.log(ratios.groupby(["case_id", "launch"]).median()).unstack().reindex(rows.index)
    is_out = rows["dropped_share"] > bounds.max_dropped + _ROUNDING
    is_out |= rows["retained_mass"] < bounds.min_retained - _ROUNDING
    several = (logs.count(axis=1) > 1) & ((rows["num_draws"] > 1) | rows["origin"].isin(NOTHING_RAN))
    rows = rows.assign(
        at=[_place(row) for row in rows.to_dict("records")],
        standing=rows["verdict"].mask(is_out, OUT_OF_BOUNDS).mask(rows["fits"].eq(False), UNFIT),
        log_speed=logs.mean(axis=1),
        least=np.exp(logs.min(axis=1)).where(several),
        most=np.exp(logs.max(axis=1)).where(several),
        kept=rows["retained_mass"].clip(upper=1).round(_DIGITS),
    )
    picks: dict[str, tuple[float, float]] = {}
    for _, group in rows[rows["standing"] == "faster"].groupby("comparison_id", sort=False):
        picks |= _pick(group, logs.loc[group.index].dropna(axis=1), ratios)
    found = pd.DataFrame.from_dict(picks, orient="index", columns=["promised", "chosen_by"], dtype=float)
    return rows.join(found).assign(is_pick=rows.index.isin(found.index))


def _pick(rows: pd.DataFrame, logs_CD: pd.DataFrame, ratios: pd.Series) -> dict[str, tuple[float, float]]:
    """The pick of one comparison: what it promises, and by how many draws it is chosen; nothing where native stays.

    Where some draws choose another candidate the judged speedup would be that of several: the lower of it and the
    pick's own counts.
    """
    pick = _choice(logs_CD.mean(axis=1), rows["kept"])
    row = rows.loc[pick]
    if row["num_draws"] == 1:
        return {pick: (row["speedup_median"], np.nan)}
    chosen = {draw: _choice(logs_CD.drop(columns=draw).mean(axis=1), rows["kept"]) for draw in logs_CD}
    judged = estimate_median(pd.concat([ratios.xs(case_id).loc[[draw]] for draw, case_id in chosen.items()]))
    assert judged is not None
    how = {"is_modelled": row["origin"] in NOTHING_RAN, "is_oversubscribed": bool(row["oversubscribed"])}
    if judge(judged, NoiseFloor(row["floor_low"], row["floor_high"]), **how) != "faster":
        return {}
    return {pick: (min(judged.median, row["speedup_median"]), [*chosen.values()].count(pick))}


def _choice(log_speed: pd.Series, kept: pd.Series) -> str:
    """Within 2 % is a tie; the candidate that keeps more mass wins, of equals the faster: its id."""
    tied = pd.DataFrame({"kept": kept, "log_speed": log_speed})[log_speed >= log_speed.max() - np.log1p(_TIE)]
    return tied.sort_values(["kept", "log_speed"], kind="stable").index[-1]


def _place(row: Row) -> str:
    """A comparison's place in the sweep, or its title where there is none."""
    point = json.loads(row["point"])
    if list(point) == ["workload.peak_load"]:
        return _peak(point["workload.peak_load"])
    return point_words(point) or row["title"]


def _peak(peak_load: float | None) -> str:
    return "traffic without skew" if peak_load is None else f"peak load {peak_load:g}"


# ---- the answer ------------------------------------------------------------------------------------------------------


def advice_text(store: Store, bounds: Bounds, question: Question | None = None, *, show_all: bool = False) -> str:
    """The pick and what it costs, one comparison after another; then candidates and notes.

    Args:
        question: what was modelled; says what the user left open and which candidates were not tried.
        show_all: every candidate in place of those that explain the pick.
    """
    rows, about = candidates(store, bounds), comparisons(store).set_index("comparison_id", drop=False)
    natives = cases(store).query("role == 'baseline'").set_index("comparison_id")
    blocks, tables, hidden = [], [], 0
    for name, facts in about.iterrows():
        own, where = rows[rows["comparison_id"] == name], _place(facts) if len(about) > 1 else ""
        answer = "\n".join(_answer(own, facts, natives.loc[name]))
        blocks.append(f"At {where}: {answer}" if where else answer)
        shown = own if show_all else _instructive(own)
        tables += [_table(shown, where and f"at {where}")] if len(shown) else []
        hidden = max(hidden, len(own) - len(shown))
    how = modelled_line(one.facts for one in store.comparisons)
    blocks[-1] += f"\n{_for(about, bounds)}{how and ' '}{how}"
    more = [f"{hidden} more candidates: --all"] if hidden else []
    told = "\n".join(f"  {note}" for note in (*more, *_notes(store, rows, about, natives, question)))
    shown = [render(tables, "text")] if tables else []
    return "\n\n".join([*blocks, *shown, told])


def write_answer(question: Question, bounds: Bounds, *, show_all: bool = False) -> str:
    """The answer to a question that was modelled, and where it lies; ``advice.txt`` has it for a page to show."""
    advice = advice_text(load_timed(question.out), bounds, question, show_all=show_all)
    write_text(question.out / ADVICE, f"{advice}\n")
    show = f"moe-ep-bench show {question.out}"
    return f"{advice}\n\nall of it: {question.out} ({ADVICE}; {show}); config: {question.config}"


def advice_lines(directory: Path) -> list[str]:
    """The answer that ``advise`` left beside its results, without its table and notes; none where it was not asked."""
    path = directory / ADVICE
    lines = path.read_text().splitlines() if path.is_file() else []
    end = next((place for place, line in enumerate(lines) if line.startswith("For ")), -1)
    return [line for line in lines[: end + 1] if line]


def _answer(rows: pd.DataFrame, about: pd.Series, native: pd.Series) -> list[str]:
    """What to do with one comparison's traffic: the pick with its gain, what it costs, and what it makes of a pass."""
    if rows["is_pick"].any():
        return _said(rows[rows["is_pick"]].iloc[0], about, native)
    fit, is_faster = about["facts"].get("fit"), rows["standing"].eq("faster").any()
    words = "Keep native: no candidate within the bounds is significantly faster"
    if native["status"] != "ok":
        words = "Inconclusive: the baseline was not measured, so there are no speedups"
    elif fit is not None and not Fit(**fit).holds():
        words = f"None: the model {Fit(**fit).words}"
    elif about["oversubscribed"]:
        words = f"Inconclusive: {OVERSUBSCRIBED}"
    elif len(rows) and not rows["speedup_is_interval"].eq(True).any():
        words = f"Inconclusive: {FEW_BATCHES}"
    elif is_faster:
        words = "Keep native: none is significantly faster on draws that did not choose it"
    best = rows[~rows["standing"].isin(_BARRED)].sort_values("speedup_median").tail(1)
    fastest = "The fastest within the bounds is {0.label}: {0.speedup_median:.3f} times native ({0.verdict})."
    return [f"{words}.", *map(fastest.format, best.itertuples())]


def _said(pick: pd.Series, about: pd.Series, native: pd.Series) -> list[str]:
    """What a pick gains and costs, and what a pass comes to."""
    pick_ms = native["median_ms"] / pick["promised"]
    how = [pick["origin"]]
    if not missing(pick["least"]):
        how.append(f"{pick['least']:.2f} to {pick['most']:.2f} by {'draw' if pick['num_draws'] > 1 else 'layer'}")
    how += [] if missing(pick["chosen_by"]) else ["on draws that did not choose it"]
    what = "a pass" if pick["scope"] == "model" else "a layer"
    gain = f"{what} is {pick['promised']:.3f} times as fast as native, {_taken(pick_ms, native['median_ms'])}"
    costs = ["nothing is dropped"]
    if pick["dropped_share"] > 0 or pick["retained_mass"] <= 1 - _ROUNDING:
        dropped, kept = 100 * pick["dropped_share"], 100 * pick["retained_mass"]
        costs = [f"{dropped:.1f} % of the pairs are dropped, {kept:.1f} % of the mass is kept"]
    if not missing(memory := pick["extra_gib_per_rank"]) and memory > 0:
        costs.append(f"{memory:.3g} GiB more memory on each rank")
    lines = [f"Use {pick['label']}: {gain} ({'; '.join(how)}).", f"It costs: {', '.join(costs)}."]
    if missing(native.get("pass_ms")):
        return lines
    pass_ms = native["pass_ms"] - about["facts"]["rest"]["num_moe_layers"] * (native["median_ms"] - pick_ms)
    times, rate = native["pass_ms"] / pass_ms, native["tokens_per_s_per_rank"]
    end_to_end = f"{times:.3f} times as fast, {_taken(pass_ms, native['pass_ms'])}"
    rates = f"{rate * times:,.0f} in place of {rate:,.0f} tokens/s a GPU"
    return [*lines, f"The whole model, all such layers beside a modelled rest: {end_to_end}, {rates}."]


def _taken(ours_ms: float, native_ms: float) -> str:
    return f"{milliseconds(ours_ms)} in place of {milliseconds(native_ms)} ms"


def _for(about: pd.DataFrame, bounds: Bounds) -> str:
    """For what the answer holds: model, sizes, device, traffic and whose it is, and the bounds; one line."""
    parts = [said_once(about[name]) for name in ("model", "sizes", "ran_on")]
    links = said_once(about["links_words"])
    parts += [f"links {links}"] if links else []
    lost = 100 * (1 - bounds.min_retained)
    limits = [f"{100 * bounds.max_dropped:g} % of the pairs dropped"] if bounds.max_dropped < 1 else []
    limits += [f"{lost:g} % of the score mass lost"] if lost < 100 else []
    within = f"at most {' and '.join(limits)}" if limits else "no bounds"
    skews = said_once(map(_skew, about["facts"]))
    workload = about["facts"].iloc[0]["workload"]
    if not (workload.get("recording") or workload.get("skew") or "expert_loads" in workload["targets"]):
        skews += f", assumed, not {about['model'].iloc[0]}'s own"
    return f"For {', '.join(filter(None, parts))}; {skews}; {within}."


def _skew(facts: Row) -> str:
    """Whose skew a comparison has."""
    workload, model = facts["workload"], facts["model"]
    if (recording := workload.get("recording")) is not None:
        is_own = is_same_model(recording["model"], model)
        return f"skew of {recording['model']}'s recording" + ("" if is_own else f", not {model}'s")
    targets, named = workload["targets"], workload.get("skew")
    if named is not None:
        is_assumed = f", not {model}'s own" if named["basis"] == "assumed" else ""
        return f"{named['name']} skew ({named['basis']}: {named['source']}){is_assumed}"
    if "expert_loads" in targets:
        return "experts' loads as counted"
    return _peak(targets["peak_load"]) if "peak_load" in targets else workload["description"]


# ---- candidates as a table -------------------------------------------------------------------------------------------


def _instructive(rows: pd.DataFrame) -> pd.DataFrame:
    """The five best that may be picked, the fastest that may not, and of the others the one that loses most time."""
    by_speed = rows.sort_values(["is_pick", "speedup_median"], ascending=False)
    is_barred = by_speed["standing"].isin(_BARRED)
    chosen = pd.concat([by_speed[~is_barred].head(_BEST), by_speed[is_barred].head(1), by_speed.tail(1)])
    return rows[rows.index.isin(chosen.index)]


def _table(rows: pd.DataFrame, title: str) -> Table:
    """A row per candidate, the pick first and those last that may not be."""
    rows = rows.assign(
        label=short_labels(rows["label"]),
        is_barred=rows["standing"].isin(_BARRED),
        extra_gib_per_rank=rows["extra_gib_per_rank"].astype(float),
        standing=rows["standing"].replace(BELOW_MODEL, "below model"),
    ).sort_values(["is_pick", "is_barred", "log_speed"], ascending=[False, True, False])
    columns = (
        text("label", "candidate"),
        interval("speedup", "end to end" if (rows["scope"] == "model").any() else "speedup"),
        number("median_ms", "ms", milliseconds),
        percentage("dropped_share", "drop"),
        percentage("retained_mass", "kept"),
        number("extra_gib_per_rank", "GiB", "{:.2g}"),
        text("standing", "verdict"),
    )
    return Table(rows, [column for column in columns if rows[column.name].notna().any()], title)


# ---- notes -----------------------------------------------------------------------------------------------------------


def _notes(
    store: Store, rows: pd.DataFrame, about: pd.DataFrame, natives: pd.DataFrame, question: Question | None
) -> Iterator[str]:
    """What may change the decision: what was not tried, chance, whose data and how far times may be trusted."""
    if question is not None:
        yield from (f"assumed: {words}" for words in question.assumed)
        yield from (f"left out: {words}" for words in question.left_out)
        yield from question.cautions
    yield from (words for words in about["how"].unique() if "MIXED" in words)
    picks, many = rows[rows["is_pick"]], rows.groupby("comparison_id").size().max() > 1
    for row in picks[picks["chosen_by"] < picks["num_draws"]].itertuples():
        yield f"at {row.at} only {row.chosen_by:.0f} of {row.num_draws} draws would choose it: too near to call"
    if len(picks) and many and picks["chosen_by"].isna().any():
        yield "the pick is judged by the traffic that chose it: its speedup is a little too high"
    yield from chance_words(int(rows["speedup_is_interval"].eq(True).sum()))
    if about["scope"].eq("layer").all() and ("pass_ms" not in natives or natives["pass_ms"].isna().any()):
        yield "speedups are of one MoE layer: a whole model gains less (docs/model.md)"
    if picks["dropped_share"].gt(0).any():
        yield "score mass is no accuracy: evaluate the model first (docs/quality.md)"
    yield from [MODEL_CAVEAT] if about["origin"].isin(NOTHING_RAN).any() else []
    yield from warnings(store)
