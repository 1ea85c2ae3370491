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
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.cases import cases, comparisons, load_timed, timings
from moe_ep_bench.analysis.columns import Row, milliseconds, number, percentage, short_labels, text
from moe_ep_bench.analysis.notes import MODEL_CAVEAT, OVERSUBSCRIBED, WARNING, chance_words, notes
from moe_ep_bench.analysis.origins import NOTHING_RAN, is_same_model, modelled_line
from moe_ep_bench.analysis.reading import ITERATION
from moe_ep_bench.analysis.render import Table, render
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.bench.question import Bounds, Question
from moe_ep_bench.cost_model.tables import MEASURED_ELSEWHERE
from moe_ep_bench.files import atomic_path
from moe_ep_bench.models.memory import Fit
from moe_ep_bench.schema import ALL
from moe_ep_bench.timing.statistics import BELOW_MODEL, NoiseFloor, estimate_median, judge

ADVICE = "advice.txt"
# What a candidate is that may not be picked, in place of its verdict.
OUT_OF_BOUNDS, UNFIT = "out of bounds", "does not fit"
_TIE = 0.02
# Shares are sums of float32.
_DIGITS = 6
_ROUNDING = 10**-_DIGITS
_BEST = 5
_CANDIDATE = ["policy", "role", "policy_params"]  # labels may be shared
RECORD_YOURS = (
    "The peak load decides, and it is assumed: docs/servers.md says how vLLM and SGLang record yours. Then ask again "
    "with --trace FILE."
)


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
    words = ", ".join(f"{key.rpartition('.')[2].replace('_', ' ')} {value}" for key, value in point.items())
    return words or row["title"]


def _peak(peak_load: float | None) -> str:
    return "traffic without skew" if peak_load is None else f"peak load {peak_load:g}"


# ---- the answer ------------------------------------------------------------------------------------------------------


def advice_text(store: Store, bounds: Bounds, question: Question | None = None, *, show_all: bool = False) -> str:
    """The pick and what it costs, one traffic after another where it differs; then candidates and notes.

    Args:
        question: what was modelled; says what the user left open and which candidates were not tried.
        show_all: every candidate in place of those that explain the pick.
    """
    rows, about = candidates(store, bounds), comparisons(store).set_index("comparison_id", drop=False)
    natives = cases(store).query("role == 'baseline'").set_index("comparison_id")

    def answer(name: str) -> str:
        return _answer(rows[rows["comparison_id"] == name], about.loc[name], natives.loc[name])

    groups = [(words, list(names)) for words, names in groupby(about.index, answer)]
    blocks, tables = [], []
    for words, names in groups:
        own = rows[rows["comparison_id"].isin(names)]
        where = _joined([_place(row) for row in about.loc[names].to_dict("records")])
        first, *more = _said(words, own, natives, about)
        blocks.append("\n".join([f"At {where}: {first}" if len(groups) > 1 else first, *more]))
        tables.append(_table(own if show_all else _instructive(own), f"at {where}" if len(groups) > 1 else ""))
    how = modelled_line(one.facts for one in store.comparisons)
    blocks[-1] += f"\n{_for(about, bounds, question.assumed if question else ())}{how and ' '}{how}"
    hidden = len(rows.drop_duplicates(_CANDIDATE)) - max(len(table.frame) for table in tables)
    more = [f"{hidden} more candidates: --all"] if hidden > 0 and not show_all else []
    told = "\n".join(f"  {note}" for note in (*more, *_notes(store, rows, about, natives, question)))
    is_assumed = all(list(json.loads(point)) == ["workload.peak_load"] for point in about["point"])
    shown = [render([table], "text") for table in tables if len(table.frame)]
    return "\n\n".join([*blocks, *shown, told, *([RECORD_YOURS] if is_assumed else [])])


def write_answer(question: Question, bounds: Bounds, *, show_all: bool = False) -> str:
    """The answer to a question that was modelled, and where it lies; ``advice.txt`` has it for a page to show."""
    advice = advice_text(load_timed(question.out), bounds, question, show_all=show_all)
    with atomic_path(question.out / ADVICE) as temporary:
        temporary.write_text(f"{advice}\n")
    show = f"moe-ep-bench show {question.out}"
    return f"{advice}\n\nall of it: {question.out} ({ADVICE}; {show}); config: {question.config}"


def advice_lines(directory: Path) -> list[str]:
    """The answer that ``advise`` left beside its results, without its table and notes; none where it was not asked."""
    path = directory / ADVICE
    lines = path.read_text().splitlines() if path.is_file() else []
    end = next((place for place, line in enumerate(lines) if line.startswith("For ")), -1)
    return [line for line in lines[: end + 1] if line]


def _answer(rows: pd.DataFrame, about: pd.Series, native: pd.Series) -> str:
    """What to do with one comparison's traffic, in words that are equal where the answer is."""
    fit = about["facts"].get("fit")
    if native["status"] != "ok":
        return "Inconclusive: the baseline was not measured, so there are no speedups"
    if fit is not None and not Fit(**fit).holds():
        return f"None: the model {Fit(**fit).words}"
    if about["oversubscribed"]:
        return f"Inconclusive: {OVERSUBSCRIBED}"
    if rows["is_pick"].any():
        return f"Use {rows.loc[rows['is_pick'], 'label'].iloc[0]}"
    if rows["standing"].eq("faster").any():
        return "Keep native: none is significantly faster on draws that did not choose it"
    return "Keep native: no candidate within the bounds is significantly faster"


def _said(words: str, rows: pd.DataFrame, natives: pd.DataFrame, about: pd.DataFrame) -> list[str]:
    """The answer to one group of comparisons: the pick with its gain, what it costs, and what it makes of a pass."""
    picks = rows[rows["is_pick"]]
    if picks.empty:
        best = rows[~rows["standing"].isin([OUT_OF_BOUNDS, UNFIT])].sort_values("speedup_median").tail(1)
        fastest = "The fastest within the bounds is {0.label}: {0.speedup_median:.3f} times native ({0.verdict})."
        return [f"{words}.", *map(fastest.format, best.itertuples())]
    native = natives.loc[picks["comparison_id"]].set_index(picks.index)
    pick_ms = native["median_ms"] / picks["promised"]
    is_judged, over = picks["chosen_by"].notna().all(), "draw" if (picks["num_draws"] > 1).any() else "layer"
    how = [picks["origin"].iloc[0]]
    how += (
        [f"{picks['least'].min():.2f} to {picks['most'].max():.2f} by {over}"] if picks["least"].notna().any() else []
    )
    how += ["on draws that did not choose it"] if is_judged else []
    what = "a pass" if picks["scope"].iloc[0] == "model" else "a layer"
    gains = (
        f"{what} is {_ends(picks['promised'])} times as fast as native, {_taken(pick_ms, native['median_ms'], picks)}"
    )
    dropped, kept, memory = (
        picks["dropped_share"].max(),
        picks["retained_mass"].min(),
        picks["extra_gib_per_rank"].max(),
    )
    costs = [f"at most {100 * dropped:.1f} % of the pairs are dropped, at least {100 * kept:.1f} % of the mass is kept"]
    if dropped == 0 and kept > 1 - _ROUNDING:
        costs = ["nothing is dropped"]
    costs += [f"{memory:.3g} GiB more memory on each rank"] if memory > 0 else []
    lines = [f"{words}: {gains} ({'; '.join(how)}).", f"It costs: {', '.join(costs)}."]
    if "pass_ms" not in native or native["pass_ms"].isna().any():
        return lines
    layers = [about.at[name, "facts"]["rest"]["num_moe_layers"] for name in picks["comparison_id"]]
    pass_ms = native["pass_ms"] - layers * (native["median_ms"] - pick_ms)
    speed = native["tokens_per_s_per_rank"] * native["pass_ms"] / pass_ms
    end_to_end = f"{_ends(native['pass_ms'] / pass_ms)} times as fast, {_taken(pass_ms, native['pass_ms'], picks)}"
    rate = f"{_ends(speed, '{:,.0f}')} in place of {_ends(native['tokens_per_s_per_rank'], '{:,.0f}')} tokens/s a GPU"
    return [*lines, f"The whole model, all such layers beside a modelled rest: {end_to_end}, {rate}."]


def _taken(pick_ms: pd.Series, native_ms: pd.Series, picks: pd.DataFrame) -> str:
    """The pick's and native's milliseconds; of several comparisons those of the first and the last."""
    ends = slice(None, None, max(1, len(picks) - 1))
    at = picks["at"][ends] if len(picks) > 1 else [""]
    return ", ".join(
        f"{milliseconds(ours)} in place of {milliseconds(theirs)} ms{place and f' at {place}'}"
        for ours, theirs, place in zip(pick_ms[ends], native_ms[ends], at, strict=True)
    )


def _joined(places: Sequence[str]) -> str:
    """``peak load 1.2 and 2``, or first to last of more."""
    first, *others = places
    if others and all(place.startswith("peak load ") for place in places):
        last = others[-1].removeprefix("peak load ")
        return f"{first} {'to' if len(others) > 1 else 'and'} {last}"
    return f"{', '.join(places[:-1])} and {places[-1]}" if others else first


def _for(about: pd.DataFrame, bounds: Bounds, assumed: Sequence[str]) -> str:
    """For what the answer holds: model, sizes, device, traffic and whose it is, and the bounds; one line."""
    parts = [
        " / ".join(about["model"].unique()),
        *about["sizes"].dropna().unique(),
        *map(_ran_on, about["ran_on"].unique()),
        *(f"links {_ran_on(words)}" for words in about["links_words"].dropna().unique()),
    ]
    lost = 100 * (1 - bounds.min_retained)
    limits = [f"{100 * bounds.max_dropped:g} % of the pairs dropped"] if bounds.max_dropped < 1 else []
    limits += [f"{lost:g} % of the score mass lost"] if lost < 100 else []
    within = f"at most {' and '.join(limits)}" if limits else "no bounds"
    default = f"; by default {', '.join(assumed)}" if assumed else ""
    skews = _joined(list(dict.fromkeys(map(_skew, about["facts"]))))
    workload = about["facts"].iloc[0]["workload"]
    if not (workload.get("recording") or workload.get("skew") or "expert_loads" in workload["targets"]):
        skews += f", assumed, not {about['model'].iloc[0]}'s own"
    return f"For {', '.join(dict.fromkeys(parts))}; {skews}; {within}{default}."


def _ran_on(words: str) -> str:
    """On what the layers ran or were modelled, without what a model is made of."""
    short = words.partition(": ")[0]
    return f"{short}, the rest modelled" if f"experts {MEASURED_ELSEWHERE} (" in short else short


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
    keys = rows[_CANDIDATE].apply(tuple, axis=1)
    by_speed = rows.assign(key=keys, is_barred=rows["standing"].isin([OUT_OF_BOUNDS, UNFIT]))
    by_speed = by_speed.sort_values(["is_pick", "speedup_median"], ascending=False)
    best = by_speed["key"][~by_speed["is_barred"]].unique()
    barred = by_speed["key"][by_speed["is_barred"] & ~by_speed["key"].isin(best)].unique()
    slowest = by_speed.sort_values("speedup_median")["key"].head(1)
    return rows[keys.isin([*best[:_BEST], *barred[:1], *slowest])]


def _table(rows: pd.DataFrame, title: str) -> Table:
    """A row per candidate, within 100 characters, the pick first and those last that may not be; of several comparisons
    ranges.
    """
    rows = rows.assign(label=short_labels(rows["label"]), is_barred=rows["standing"].isin([OUT_OF_BOUNDS, UNFIT]))
    found = []
    for _, group in rows.groupby(_CANDIDATE, sort=False):
        first, speedup, is_one = group.iloc[0], group["speedup_median"], len(group) == 1
        ends = f" [{first['speedup_low']:.2f}, {first['speedup_high']:.2f}]" if first["speedup_is_interval"] else ""
        standings = group["standing"].str.replace(BELOW_MODEL, "below model")
        if standings.nunique() > 1:
            standings += group["at"].map(lambda at: f" at {at.removeprefix('peak load ').removeprefix('traffic ')}")
        found.append(
            {
                "label": first["label"],
                "speedup": f"{speedup.iloc[0]:.3f}{ends}" if is_one else _ends(speedup),
                "median_ms": first["median_ms"] if is_one else np.nan,
                "dropped_share": group["dropped_share"].max(),
                "retained_mass": group["retained_mass"].min(),
                "more_gib": group["extra_gib_per_rank"].astype(float).max(),
                "standing": " / ".join(standings.unique()),
                "order": (not group["is_pick"].any(), group["is_barred"].all(), -group["log_speed"].sum()),
            }
        )
    found.sort(key=lambda row: row["order"])
    frame = pd.DataFrame(found, columns=list(found[0]) if found else [])
    columns = (
        text("label", "candidate"),
        text("speedup", "end to end" if (rows["scope"] == "model").any() else "speedup"),
        number("median_ms", "ms", milliseconds),
        percentage("dropped_share", "drop"),
        percentage("retained_mass", "kept"),
        number("more_gib", "GiB", "{:.2g}"),
        text("standing", "verdict"),
    )
    return Table(
        frame, [column for column in columns if column.name in frame and frame[column.name].notna().any()], title
    )


def _ends(values: pd.Series, form: str = "{:.3f}") -> str:
    """The least and the greatest value, or the one that there is."""
    return " to ".join(dict.fromkeys(form.format(value) for value in (values.min(), values.max())))


# ---- notes -----------------------------------------------------------------------------------------------------------


def _notes(
    store: Store, rows: pd.DataFrame, about: pd.DataFrame, natives: pd.DataFrame, question: Question | None
) -> Iterator[str]:
    """What may change the decision: what was not tried, chance, whose data and how far times may be trusted."""
    if question is not None:
        yield from (f"left out: {words}" for words in question.left_out)
        yield from question.cautions
    yield from (words for words in about["how"].unique() if "MIXED" in words)
    picks, many = rows[rows["is_pick"]], rows.groupby("comparison_id").size().max() > 1
    for row in picks[picks["chosen_by"] < picks["num_draws"]].itertuples():
        yield f"at {row.at} only {row.chosen_by:.0f} of {row.num_draws} draws would choose it: too near to call"
    if len(picks) and many and picks["chosen_by"].isna().any():
        yield "the pick is judged by the traffic that chose it: its speedup is a little too high"
    yield from chance_words(int(rows["speedup_is_interval"].eq(True).sum()))
    if rows["least"].notna().any():
        parts = "draws" if (about["num_draws"] > 1).any() else "layers"
        yield f"by {parts[:-1]}: the least and the greatest of one of several; [brackets]: 95 % for the median over all"
    is_drawn = (about["num_draws"] == 1) & (about["num_ranks"] > 1) & about["facts"].map(_is_drawn).astype(bool)
    loads = natives["fullest_rank"].reindex(about.index[is_drawn])
    if len(loads.dropna()):
        fullest = f"native's fullest rank has {_ends(loads, '{:.2f}')} x the mean load"
        yield f"the traffic is one draw: {fullest} by chance; workload.rank_load sets it"
    if about["scope"].eq("layer").all() and ("pass_ms" not in natives or natives["pass_ms"].isna().any()):
        yield "speedups are of one MoE layer: a whole model gains less (docs/model.md)"
    if picks["dropped_share"].gt(0).any():
        yield "score mass is no accuracy: evaluate the model first (docs/quality.md)"
    yield from [MODEL_CAVEAT] if about["origin"].isin(NOTHING_RAN).any() else []
    warnings = [line for one in store.comparisons for line in notes(store, one.directory, one.comparison_id)]
    yield from dict.fromkeys(line for line in warnings if line.startswith(WARNING))


def _is_drawn(facts: Row) -> bool:
    """Whether chance decides how full ranks are."""
    workload = facts["workload"]
    return workload["kind"] == "synthetic" and not {"rank_load", "expert_loads"} & workload["targets"].keys()
