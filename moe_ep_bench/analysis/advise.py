"""``advise``: the pick and what it costs in a few lines, then all candidates.

The pick is the fastest candidate within the bounds whose verdict is ``faster`` (``statistics.judge``). Within 2 % is a
tie; the candidate that keeps more score mass wins. Where there is none, native stays. The fastest of many is in part
the luckiest, on the traffic that chose it: the answer says so, and gives the range of its speedup over draws or layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.cases import cases, comparisons, differs_from_topk, load_timed, point_words, timings
from moe_ep_bench.analysis.columns import (
    SAME_KERNELS,
    Row,
    Table,
    cost_words,
    interval,
    lost_columns,
    milliseconds,
    missing,
    number,
    percentage,
    render,
    short_labels,
    text,
)
from moe_ep_bench.analysis.notes import (
    FEW_BATCHES,
    MODEL_CAVEAT,
    MOST_DROPPED,
    OVERSUBSCRIBED,
    chance_words,
    layers_words,
    warnings,
)
from moe_ep_bench.analysis.store import ITERATION, Store
from moe_ep_bench.bench.question import OVERLAP, Bounds, Question
from moe_ep_bench.config.conditions import matching
from moe_ep_bench.facts import NOT_EXECUTED
from moe_ep_bench.facts.words import OVERLAP_WORDS, fit_words, modelled_line, said_once
from moe_ep_bench.files import write_text
from moe_ep_bench.models.memory import Fit
from moe_ep_bench.schema import ALL
from moe_ep_bench.timing.statistics import BELOW_MODEL

ADVICE = "advice.txt"
# What a candidate is that may not be picked, in place of its verdict.
OUT_OF_BOUNDS, UNFIT = _BARRED = ("out of bounds", "does not fit")
_TIE = 0.02
# Shares are sums of float32.
_DIGITS = 6
_ROUNDING = 10**-_DIGITS


# ---- candidates and the pick -----------------------------------------------------------------------------------------


def candidates(store: Store, bounds: Bounds) -> pd.DataFrame:
    """A row per candidate and comparison: measured policies and replication. ``topk`` is the model's own routing.

    Left out is what drops more than 95 % of the pairs.

    Returns:
        Columns of ``cases``, by case id, and: ``standing``, the verdict, or why it may not be picked; ``is_pick``; the
        least and the greatest speedup of draws or layers (``least``, ``most``), where a comparison has several;
        ``differs_from_topk``.
    """
    rows = cases(store)
    rows = rows[rows["role"].isin(["policy", "replication"]) & (rows["policy"] != "topk")]
    rows = rows[rows["speedup_median"].notna() & rows["missing_share"].notna()]  # of one piece
    rows = rows[~(rows["dropped_share"] > MOST_DROPPED)]
    rows = rows.set_index("case_id", drop=False).rename_axis(None)
    times = timings(store)
    ratios = times[times["quantity"] == ALL].set_index(["case_id", *ITERATION])["speedup"]
    speedup_CD = ratios.groupby(["case_id", "launch"]).median().unstack().reindex(rows.index)
    # What does not tell dropped from rerouted pairs is held to the bound by both.
    is_out = rows["dropped_share"].fillna(rows["missing_share"]) > bounds.max_dropped + _ROUNDING
    is_out |= rows["retained_mass"] < bounds.min_retained - _ROUNDING
    several = (speedup_CD.count(axis=1) > 1) & ((rows["num_draws"] > 1) | rows["origin"].isin(NOT_EXECUTED))
    rows = rows.assign(
        standing=rows["verdict"].mask(is_out, OUT_OF_BOUNDS).mask(rows["fits"].eq(False), UNFIT),
        least=speedup_CD.min(axis=1).where(several),
        most=speedup_CD.max(axis=1).where(several),
        kept=rows["retained_mass"].clip(upper=1).round(_DIGITS),
        differs_from_topk=differs_from_topk(rows),
    )
    allowed = rows[rows["standing"] == "faster"]
    fastest = allowed.groupby("comparison_id")["speedup_median"].transform("max")
    tied = allowed[allowed["speedup_median"] >= fastest / (1 + _TIE)]
    picks = tied.sort_values(["kept", "speedup_median"], kind="stable").groupby("comparison_id")["case_id"].last()
    return rows.assign(is_pick=rows.index.isin(picks))


# ---- the answer ------------------------------------------------------------------------------------------------------


def advice_text(store: Store, bounds: Bounds, question: Question | None = None) -> str:
    """The pick and what it costs, one comparison after another; then candidates and notes.

    Args:
        question: what was modelled; says what the user left open and which candidates were not tried.
    """
    rows, about = candidates(store, bounds), comparisons(store).set_index("comparison_id", drop=False)
    natives = matching(cases(store), "role == 'baseline'").set_index("comparison_id")
    blocks, tables = [], []
    questions = _alike_but_for_overlap(about)
    for names in questions:
        own = {name: rows[rows["comparison_id"] == name] for name in names}
        first, *others = names
        differ = [name for name in others if _pick_of(own[name]) != _pick_of(own[first])]
        for name in (first, *differ):
            point = json.loads(about.loc[name, "point"])
            overlap = point.pop(OVERLAP, None) if not differ else None
            where = (point_words(point) or about.loc[name, "title"]) if len(questions) > 1 or differ else ""
            lines = _answer(own[name], about.loc[name], natives.loc[name])
            if overlap is not None:
                lines += [_also(own[other], about.loc[other], natives.loc[other]) for other in others]
            answer = "\n".join(lines)
            blocks.append(f"At {where}: {answer}" if where else answer)
            tables += [_table(own[name], where and f"at {where}")] if len(own[name]) else []
    how = modelled_line(one.facts for one in store.comparisons)
    blocks[-1] += f"\n{_for(about, bounds)}{how and ' '}{how}"
    notes = "\n".join(f"  {note}" for note in _notes(store, rows, about, natives, question))
    return "\n\n".join([*blocks, *([render(tables, "text")] if tables else []), notes])


def _alike_but_for_overlap(about: pd.DataFrame) -> list[list[str]]:
    """Comparisons that ask of the same point with one overlap and another, by id."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, facts in about.iterrows():
        point = {key: value for key, value in json.loads(facts["point"]).items() if key != OVERLAP}
        alike.setdefault((facts["facts"]["title"], json.dumps(point)), []).append(name)
    return list(alike.values())


def _pick_of(rows: pd.DataFrame) -> str | None:
    """What is picked; None = native stays."""
    return next(iter(rows.loc[rows["is_pick"], "label"]), None)


def _also(rows: pd.DataFrame, about: pd.Series, native: pd.Series) -> str:
    """That another overlap has the same pick, in one sentence."""
    words = f"With {OVERLAP_WORDS[about['facts']['overlap']]}"
    if missing(native["median_ms"]):
        return f"{words} nothing was modelled."
    if not rows["is_pick"].any():
        return f"{words} the answer is the same: native takes {milliseconds(native['median_ms'])} ms."
    pick = rows[rows["is_pick"]].iloc[0]
    taken = _taken(pick["median_ms"], native["median_ms"])
    return f"{words} the pick is the same: {pick['speedup_median']:.3f} times as fast as native, {taken}."


def write_answer(question: Question, bounds: Bounds) -> str:
    """The answer to a question that was modelled, and where it lies; ``advice.txt`` has it for a page to show."""
    advice = advice_text(load_timed(question.out), bounds, question)
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
    fit = about["facts"].get("fit")
    words = "Keep native: no candidate within the bounds is significantly faster"
    if native["status"] != "ok":
        words = "Inconclusive: the baseline was not measured, so there are no speedups"
    elif fit is not None and not Fit(**fit).holds():
        words = f"None: the model {fit_words(Fit(**fit))}"
    elif about["oversubscribed"]:
        words = f"Inconclusive: {OVERSUBSCRIBED}"
    elif len(rows) and not rows["speedup_is_interval"].eq(True).any():
        words = f"Inconclusive: {FEW_BATCHES}"
    best = rows[~rows["standing"].isin(_BARRED)].sort_values("speedup_median").tail(1)
    fastest = "The fastest within the bounds is {0.label}: {0.speedup_median:.3f} times native ({0.verdict})."
    return [f"{words}.", *map(fastest.format, best.itertuples()), *_of_native(native)]


def _of_native(native: pd.Series) -> Iterator[str]:
    """What native takes, and a pass of the whole model."""
    if not missing(native["median_ms"]):
        words = f"Native takes {milliseconds(native['median_ms'])} ms ({native['origin']})"
        if not missing(native.get("pass_ms")):
            whole = f"{milliseconds(native['pass_ms'])} ms, {native['tokens_per_s_per_rank']:,.0f} tokens/s a GPU"
            words += f"; the whole model beside a modelled rest: {whole}"
        yield f"{words}."


def _said(pick: pd.Series, about: pd.Series, native: pd.Series) -> list[str]:
    """What a pick gains and costs, and what a pass comes to."""
    speedup, native_ms, pick_ms, how = pick["speedup_median"], native["median_ms"], pick["median_ms"], pick["origin"]
    if not missing(pick["least"]):
        how += f"; {pick['least']:.2f} to {pick['most']:.2f} by {'draw' if pick['num_draws'] > 1 else 'layer'}"
    what = "a pass" if pick["scope"] == "model" else "a layer"
    over = f" ({pick['over_topk_median']:.3f} times topk, {SAME_KERNELS})" if pick["differs_from_topk"] else ""
    gain = f"{what} is {speedup:.3f} times as fast as native{over}, {_taken(pick_ms, native_ms)}"
    costs = ["nothing is dropped"]
    if _costs_answers(pick):
        costs = [cost_words(pick, " of the pairs are"), f"{100 * pick['retained_mass']:.1f} % of the mass is kept"]
    if not missing(memory := pick["extra_gib_per_rank"]) and memory > 0:
        costs.append(f"{memory:.3g} GiB more memory on each rank")
    lines = [f"Use {pick['label']}: {gain} ({how}).", f"It costs: {', '.join(costs)}."]
    if missing(native.get("pass_ms")):
        return lines
    pass_ms, of_native_ms = pick["pass_ms"], native["pass_ms"]
    end_to_end = f"{of_native_ms / pass_ms:.3f} times as fast, {_taken(pass_ms, of_native_ms)}"
    rates = "{:,.0f} in place of {:,.0f} tokens/s a GPU".format(
        *(one["tokens_per_s_per_rank"] for one in (pick, native))
    )
    of = about["facts"]["rest"]["of"]
    rest = f"a modelled rest{of and f' of {of}'}"
    return [*lines, f"The whole model, all such layers beside {rest}: {end_to_end}, {rates}."]


def _costs_answers(of: Any) -> Any:
    """Whether a candidate, or each of several, leaves out pairs that the model would compute, or score mass."""
    return (of["missing_share"] > 0) | (of["retained_mass"] <= 1 - _ROUNDING)


def _taken(ours_ms: float, native_ms: float) -> str:
    return f"{milliseconds(ours_ms)} in place of {milliseconds(native_ms)} ms"


def _for(about: pd.DataFrame, bounds: Bounds) -> str:
    """For what the answer holds: model, sizes, traffic, device and links, and the bounds; one line."""
    swept = set().union(*map(json.loads, about["point"]))
    titles = about["facts"].map(itemgetter("title")) if swept == {OVERLAP} else about["title"]
    parts = [said_once(titles), *(said_once(about[name]) for name in ("ran_on_short", "links_short"))]
    lost = 100 * (1 - bounds.min_retained)
    limits = [f"{100 * bounds.max_dropped:g} % of the pairs dropped"] if bounds.max_dropped < 1 else []
    limits += [f"{lost:g} % of the score mass lost"] if lost < 100 else []
    within = f"at most {' and '.join(limits)}" if limits else "no bounds"
    return f"For {'; '.join(filter(None, parts))}; {within}."


def _table(rows: pd.DataFrame, title: str) -> Table:
    """A row per candidate, the pick first and those last that may not be."""
    rows = rows.assign(
        label=short_labels(rows["label"]),
        is_barred=rows["standing"].isin(_BARRED),
        extra_gib_per_rank=rows["extra_gib_per_rank"].astype(float),
        standing=rows["standing"].replace(BELOW_MODEL, "below model"),
    ).sort_values(["is_pick", "is_barred", "speedup_median"], ascending=[False, True, False])
    columns = (
        text("label", "candidate"),
        interval("speedup", "end to end" if (rows["scope"] == "model").any() else "speedup"),
        *([interval("over_topk", "over topk")] if rows["differs_from_topk"].any() else []),
        number("median_ms", "ms", milliseconds),
        *lost_columns(rows),
        percentage("retained_mass", "kept"),
        number("extra_gib_per_rank", "GiB", "{:.2g}"),
        text("standing", "verdict"),
    )
    return Table(rows, [column for column in columns if rows[column.name].notna().any()], title)


def _is_assumed(workload: Row) -> bool:
    """Whether somebody said how busy experts are, where nobody counted or recorded them."""
    known = workload.get("recording") or workload.get("skew") or workload["targets"].get("expert_loads")
    return not known and "peak_load" in workload["targets"]


# ---- notes -----------------------------------------------------------------------------------------------------------


def _notes(
    store: Store, rows: pd.DataFrame, about: pd.DataFrame, natives: pd.DataFrame, question: Question | None
) -> Iterator[str]:
    """What may change the decision: what was not tried, chance, whose data and how far times may be trusted."""
    yield from () if question is None else question.notes
    yield from (words for words in about["how"].unique() if "MIXED" in words)
    workloads = [facts["workload"] for facts in about["facts"]]
    if any(map(_is_assumed, workloads)):
        yield "the traffic's skew is assumed: a recording of your server may choose otherwise (docs/servers.md)"
    yield from dict.fromkeys(filter(None, (layers_words(one.facts) for one in store.comparisons)))
    picks = rows[rows["is_pick"]]
    if len(picks) and rows.groupby("comparison_id").size().max() > 1:
        yield "the pick is judged by the traffic that chose it: its speedup is a little too high"
    yield from chance_words(int(rows["speedup_is_interval"].eq(True).sum()))
    if about["scope"].eq("layer").all() and ("pass_ms" not in natives or natives["pass_ms"].isna().any()):
        yield "speedups are of one MoE layer: a whole model gains less (docs/model.md)"
    if _costs_answers(picks).any():
        yield "score mass is no accuracy: evaluate the model first (docs/quality.md)"
    yield from [MODEL_CAVEAT] if about["origin"].isin(NOT_EXECUTED).any() else []
    yield from warnings(store)
