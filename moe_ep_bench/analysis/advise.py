"""``advise``: the pick, what it costs and why in a few lines, then all candidates.

The pick follows the rule of ``picks``. It is chosen and scored on the same traffic, so its speedup is slightly
optimistic: the answer says so, and gives the speedup's range over draws or layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.advice import (
    ADVICE,
    Advice,
    Answer,
    Candidate,
    Case,
    Growth,
    HeldOut,
    Note,
    Pass,
    RankTokens,
    Reason,
    Spread,
    Upkeep,
    Variant,
    Versus,
    advice_json,
    advice_lines,
    costs_answers,
    growth_words,
    is_said_first,
    note_lines,
    read_advices,
    write_advice,
)
from moe_ep_bench.analysis.cases import cases, comparisons, load_timed
from moe_ep_bench.analysis.columns import COSTS, Row, Table, interval, milliseconds, missing, number, render, text
from moe_ep_bench.analysis.notes import warnings
from moe_ep_bench.analysis.picks import BARRED, against, candidates, fastest
from moe_ep_bench.analysis.reduce import GROUPS
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.analysis.tables import View, table_of
from moe_ep_bench.analysis.turns import with_turns
from moe_ep_bench.bench.advise_config import OVERLAP, Bounds, Question
from moe_ep_bench.config.conditions import matching
from moe_ep_bench.facts import (
    NOT_EXECUTED,
    Assumption,
    Environment,
    JsonRecord,
    PeakLoads,
    Workload,
    has_assumed_traffic,
)
from moe_ep_bench.facts.words import assumption_words, title_words
from moe_ep_bench.placement import PLANS
from moe_ep_bench.timing.statistics import BELOW_MODEL

# ---- the answer ------------------------------------------------------------------------------------------------------


def advise(store: Store, bounds: Bounds, question: Question | None = None, versus: str | None = None) -> Advice:
    """The picks and what they cost, one comparison after another, and what may change them.

    Args:
        question: what was modelled; says what the user left open and which candidates were not tried.
        versus: the label of a candidate against which all others are set.

    Raises:
        UserError: there is no candidate of that label.
    """
    rows, about = _rows(store, bounds, versus), comparisons(store).set_index("comparison_id", drop=False)
    natives = matching(cases(store), "role == 'baseline'").set_index("comparison_id", drop=False)
    facts_of, native_of = ({str(name): row for name, row in frame.iterrows()} for frame in (about, natives))
    answers, questions = [], _alike_but_for_overlap(about)
    for names in questions:
        own = {name: rows[rows["comparison_id"] == name] for name in names}
        first, *others = names
        differ = [name for name in others if _pick_of(own[name]) != _pick_of(own[first])]
        variants = tuple(
            Variant(overlap=facts_of[name]["facts"].overlap, native=_native(native_of[name]), pick=_picked(own[name]))
            for name in (() if differ else others)
        )
        for name in (first, *differ):
            answer = _answer(own[name], facts_of[name], native_of[name])
            if variants:
                point = {key: value for key, value in answer.point.items() if key != OVERLAP}
                answer = answer.model_copy(update={"variants": variants, "point": point})
            answers.append(answer)
    return Advice(
        max_dropped=bounds.max_dropped,
        min_retained=bounds.min_retained,
        versus=versus,
        answers=answers,
        assumptions=list(question.assumptions) if question else _said_first(store),
        notes=list(_notes(store, rows, about, natives)),
    )


def _said_first(store: Store) -> list[Assumption]:
    """What stands with the picks of results that are only read, as the answer beside them has it."""
    before = read_advices((one.folder for one in store.directories), [])
    return [one for advice in before for one in advice.assumptions if is_said_first(one)]


def _rows(store: Store, bounds: Bounds, versus: str | None) -> pd.DataFrame:
    """Candidates; set against one of them they have the columns of ``picks.against`` too."""
    rows = candidates(store, bounds)
    if versus is None:
        return rows
    return rows.join(pd.concat([against(store, own, versus) for _, own in rows.groupby("comparison_id", sort=False)]))


def advice_text(
    store: Store, bounds: Bounds, question: Question | None = None, *, versus: str | None = None, as_json: bool = False
) -> str:
    """The answer for people, the picks, then candidates and notes; or as ``advice.json`` has it."""
    advice = advise(store, bounds, question, versus)
    return advice_json(advice) if as_json else _text(advice, store, bounds)


def _text(advice: Advice, store: Store, bounds: Bounds) -> str:
    rows, tables = _rows(store, bounds, advice.versus), []
    for answer in () if has_assumed_traffic(advice.assumptions) else advice.answers:
        own, name = rows[rows["comparison_id"] == answer.comparison_id], advice.name_of(answer)
        tables += [_table(store, own, name and f"at {name}", advice.versus)] if len(own) else []
    assumed = [one for one in advice.assumptions if not is_said_first(one)]
    notes = "\n".join(f"  {note}" for note in (*map(assumption_words, assumed), *note_lines(advice)))
    return "\n\n".join([*advice_lines(advice), *([render(tables, "text")] if tables else []), notes])


def _alike_but_for_overlap(about: pd.DataFrame) -> list[list[str]]:
    """Comparisons that ask of the same point with one overlap and another, by id."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, facts in about.iterrows():
        point = {key: value for key, value in json.loads(facts["point"]).items() if key != OVERLAP}
        alike.setdefault((title_words(facts["facts"]), json.dumps(point)), []).append(str(name))
    return list(alike.values())


def _pick_of(rows: pd.DataFrame) -> str | None:
    """What is picked; None = native stays."""
    return next(iter(rows.loc[rows["is_pick"], "label"]), None)


def _picked(rows: pd.DataFrame) -> Candidate | None:
    return _candidate(rows[rows["is_pick"]].iloc[0]) if rows["is_pick"].any() else None


def write_answer(question: Question, bounds: Bounds, *, versus: str | None = None, as_json: bool = False) -> str:
    """Write the answer to a question that was modelled as ``advice.json``; return the same, or it for people."""
    store, before = load_timed(question.out), read_advices([question.out], [])  # none of an older version
    advice = with_turns(advise(store, bounds, question, versus), question, bounds, store, *before)
    write_advice(question.out, advice)
    if as_json:
        return advice_json(advice)
    show = f"moe-ep-bench show {question.out}"
    where = f"all of it: {question.out} ({ADVICE}; {show}); config: {question.config}"
    return f"{_text(advice, store, bounds)}\n\n{where}"


def _answer(rows: pd.DataFrame, about: pd.Series, native: pd.Series) -> Answer:
    """What to do with one comparison's traffic."""
    facts, pick = about["facts"], _picked(rows)
    reasons: dict[Reason, bool] = {
        "no_baseline": native["status"] != "ok",
        "does_not_fit": facts.fit is not None and not facts.fit.holds(),
        "oversubscribed": about["oversubscribed"],
        "few_batches": len(rows) > 0 and not rows["speedup_is_interval"].eq(True).any(),
        "little_gain": bool(rows["standing"].eq("faster").any()),
        "no_gain": True,
    }
    within = rows[~rows["standing"].isin(BARRED)].sort_values("speedup_median")
    return Answer(
        comparison_id=about["comparison_id"],
        facts=facts,
        environment=about["run"].environment.model_dump(include=set(Environment.model_fields)),
        point=json.loads(about["point"]),
        scope=about["scope"],
        native=_native(native),
        pick=pick,
        reason=None if pick else next(name for name, holds in reasons.items() if holds),
        fastest=None if pick or within.empty else _candidate(within.iloc[-1]),
        beside=(beside := _beside(rows) if pick else None),
        next_best=_next_best(within, pick, beside) if pick else None,
        candidates=tuple(_candidate(row) for _, row in _in_order(rows).iterrows()),
        peaks=PeakLoads.of(facts.workload, float(native["fullest_expert"])),
        tokens_of_ranks=_rank_tokens(about),
        held_out=_held_out(rows) if facts.workload.order == "arrival" else None,
        plans=tuple(_upkeep(row, native) for _, row in rows[rows["rearrange_ms"].notna()].iterrows()),
    )


def _rank_tokens(about: pd.Series) -> RankTokens | None:
    """Tokens of ranks of a recording whose sequences stay whole; None of other traffic."""
    workload, held = about["facts"].workload, about["facts"].rank_tokens
    if workload.recording is None or workload.tokens_per_request is not None or held is None:
        return None
    return RankTokens(least=held[0], most=held[1], mean=about["num_tokens"] / about["world_size"])


def _beside(rows: pd.DataFrame) -> Candidate | None:
    """The best without loss beside a pick that loses, else the fastest that loses; None where none is faster."""
    pick = rows[rows["is_pick"]].iloc[0]
    others = rows[(rows["standing"] == "faster") & (rows["costs"] != pick["costs"])]
    return None if others.empty else _candidate(fastest(others))


def _next_best(rows: pd.DataFrame, *named: Candidate | None) -> Candidate | None:
    """The fastest of those within the bounds, in order, that is faster than native and not named yet."""
    labels = [one.label for one in named if one is not None]
    others = rows[~rows["label"].isin(labels) & (rows["speedup_median"] > 1)]
    return None if others.empty else _candidate(others.iloc[-1])


def _held_out(rows: pd.DataFrame) -> HeldOut | None:
    """What the first half of the batches would have chosen, and its speedup on the others; None where it is native."""
    allowed = rows[~rows["standing"].isin(BARRED) & (rows["earlier"] > 1) & rows["later"].notna()]
    if allowed.empty:
        return None
    chosen = allowed.nlargest(1, "earlier").iloc[0]
    return HeldOut(label=chosen["label"], earlier=chosen["earlier"], later=chosen["later"])


def _upkeep(row: pd.Series, native: pd.Series) -> Upkeep:
    return Upkeep.judged(
        native_ms=native["median_ms"],
        median_ms=row["median_ms"],
        verdict=row["verdict"],
        every=json.loads(row["policy_params"]).get("every"),
        label=row["label"],
        speedup=row["speedup_median"],
        low=row["speedup_low"],
        high=row["speedup_high"],
        num_batches=row["num_batches"],
        layers=(row["num_gaining"], num_layers) if (num_layers := row["facts"].layers) > 1 else None,
        rearrange_ms=row["rearrange_ms"],
        rearranged_gib=row["rearranged_gib"],
    )


def _native(row: pd.Series) -> Case:
    return Case(**_values(row, Case), **_shown(row))


def _shown(row: pd.Series) -> dict[str, Any]:
    """Facts of a case that are of several columns."""
    phases: dict[str, Any] = {group: row.get(f"{group}_ms") for group in GROUPS}
    return {"whole": _pass(row), "phases_ms": {group: max(0, ms) for group, ms in phases.items() if not missing(ms)}}


def _candidate(row: pd.Series) -> Candidate:
    spread = None
    if not missing(row["least"]):
        spread = Spread(least=row["least"], most=row["most"], over="draw" if row["num_draws"] > 1 else "layer")
    over_topk = row["over_topk_median"] if row["differs_from_topk"] else None
    speedup = {"speedup": row["speedup_median"], "low": row["speedup_low"], "high": row["speedup_high"]}
    versus = None if missing(row.get("versus_verdict")) else Versus(**_values(row, Versus, "versus_"))
    shown = {**speedup, "versus": versus, "over_topk": over_topk, "spread": spread, "growth": _growth(row)}
    return Candidate(**_values(row, Candidate), **_shown(row), **shown, **_redundant_experts(row))


def _redundant_experts(row: pd.Series) -> dict[str, Any]:
    """A plan's slots for replicas, as servers count them; of a budget for all layers, or a balancer, they have none."""
    params = json.loads(row["policy_params"] or "{}")
    if row["policy"] not in PLANS or "balancer" in params or not missing(row["spare_by_layer"]):
        return {}
    return {"redundant_experts": params["spare_per_rank"] * row["ep_size"], "is_eplb": row["policy"] == "eplb"}


def _values(row: Row | pd.Series, kind: type[JsonRecord], prefix: str = "") -> dict[str, Any]:
    """Fields that are columns, whose names may begin with a prefix; null where a row has none."""
    named = {name: f"{prefix}{name}" for name in kind.model_fields}
    return {name: None if missing(row[column]) else row[column] for name, column in named.items() if column in row}


def _pass(row: pd.Series) -> Pass | None:
    if missing(row.get("pass_ms")):
        return None
    return Pass(ms=row["pass_ms"], tokens_per_s_per_rank=row["tokens_per_s_per_rank"])


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """The pick first, and last those that may not be."""
    rows = rows.assign(is_barred=rows["standing"].isin(BARRED))
    return rows.sort_values(["is_pick", "is_barred", "speedup_median"], ascending=[False, True, False])


def _growth(row: Row | pd.Series) -> Growth | None:
    """Why a candidate is hardly faster than native; None where it is, or where nothing takes longer."""
    return None if missing(row["growth_us"]) else Growth(**_values(row, Growth, "growth_"))


def _why(row: Row) -> str:
    """What a row has to say for itself: why it loses, and whether it is the same as another."""
    same = "" if missing(row["same_as"]) else f"capacity as of {row['same_as']}"
    return "; ".join(filter(None, (growth_words(_growth(row)), same)))


def _table(store: Store, rows: pd.DataFrame, title: str, versus: str | None) -> Table:
    """A row per candidate, the pick first and those last that may not be."""
    why = [_why(row) or None for row in rows.to_dict("records")]
    rows = _in_order(rows).assign(why=pd.Series(why, rows.index, dtype=object))
    rows = rows.assign(standing=rows["standing"].replace(BELOW_MODEL, "below model"))
    over_topk = ["over_topk_median"] if rows["differs_from_topk"].any() else []
    times = (number("median_ms", "ms", milliseconds), "tokens_per_s_per_rank")
    costs = (*COSTS, number("extra_gib_per_rank", "GiB", "{:.2g}"))
    words = (text("standing", "verdict"), text("why"))
    others = (interval("versus", f"over {versus}"), text("versus_verdict", "verdict on that")) if versus else ()
    is_model = (rows["scope"] == "model").any()
    view = View(
        (text("label", "candidate"), "speedup_median", *over_topk, *times, *costs, *words, *others),
        headers={"speedup_median": "end to end" if is_model else "speedup", "retained_mass": "kept"},
        title=lambda *_: title,
        notes=(),
        label_width=math.inf,
    )
    return table_of(store, view, rows)


def _is_assumed(workload: Workload) -> bool:
    """Whether somebody said how busy experts are, where nobody counted or recorded them."""
    known = workload.recording or workload.skew or workload.targets.get("expert_loads")
    return not known and bool({"peak_load", "batch_peak_load"} & workload.targets.keys())


# ---- notes -----------------------------------------------------------------------------------------------------------


# Draws that are few, and from which ratio of its ends on an interval is wide.
_FEW_DRAWS, _WIDE = 4, 1.25


def _wide(rows: pd.DataFrame) -> set[str]:
    """Comparisons of which a candidate's interval is wide."""
    is_wide = rows["speedup_is_interval"].eq(True) & (rows["speedup_high"] > _WIDE * rows["speedup_low"])
    return set(rows.loc[is_wide, "comparison_id"])


def _notes(store: Store, rows: pd.DataFrame, about: pd.DataFrame, natives: pd.DataFrame) -> Iterator[Note]:
    """What may change the decision: what was not tried, chance, whose data and how far times may be trusted."""
    if any(facts.mixes_machines for facts in about["facts"]):
        yield Note(kind="mixed_machines")
    picks, origins = rows[rows["is_pick"]], about["origin"]
    plans = rows.loc[rows["rearrange_ms"].notna(), "policy_params"].map(json.loads)
    few = about["num_draws"].between(2, _FEW_DRAWS) & about["comparison_id"].isin(_wide(rows))
    num_verdicts = int(rows["speedup_is_interval"].eq(True).sum())
    has_passes = "pass_ms" in natives and natives["pass_ms"].notna().all()
    if any(_is_assumed(facts.workload) for facts in about["facts"]):
        yield Note(kind="skew_is_assumed")
    if any(getattr(facts.workload.skew, "layers", None) for facts in about["facts"]):
        yield Note(kind="layers_differ")
    if any(one.get("plan_ms") is None and one.get("rearrange") != "beside" for one in plans):
        yield Note(kind="plan_time_of_this_cpu")
    if len(picks) and rows.groupby("comparison_id").size().max() > 1:
        yield Note(kind="scored_where_chosen")
    if few.any():
        yield Note(kind="few_draws", number=int(about.loc[few, "num_draws"].min()))
    if num_verdicts > 1:
        yield Note(kind="chance", number=num_verdicts)
    if about["scope"].eq("layer").all() and not has_passes:
        yield Note(kind="one_layer")
    if costs_answers(picks["missing_share"], picks["retained_mass"]).any():
        yield Note(kind="mass_is_not_accuracy")
    if origins.isin(NOT_EXECUTED).any():
        if labels := ", ".join(dict.fromkeys(rows.loc[rows["by_torch"].eq(True), "label"])):
            yield Note(kind="as_if_compiled", text=labels)
        yield Note(kind="of_traffic_alone")
    yield from (Note(kind="warning", text=line.text) for line in warnings(store))
