"""``advise``: the pick and what it costs in three lines, then the candidates that explain it.

The pick is the fastest candidate within the bounds whose verdict is ``faster`` (``statistics.judge``). Within 2 % is a
tie; the candidate that keeps more score mass wins. Where there is none, native stays.

The fastest of many is in part the luckiest: what it gained where it was chosen is too much. So where traffic was drawn
several times the pick is judged on draws that did not choose it. Each draw is given the candidate that the others would
choose of those that pay, and what these gain together is what the answer promises; if that is not ``faster``, native
stays. Of one draw the answer says that its speedup is not so judged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.cases import CASE, COMPARISON, cases, comparisons, load, timings
from moe_ep_bench.analysis.columns import Row, milliseconds, number, percentage, short_labels, text
from moe_ep_bench.analysis.notes import MODEL_CAVEAT, OVERSUBSCRIBED, chance_words
from moe_ep_bench.analysis.origins import ELSEWHERE, is_elsewhere, is_same_model, modelled_line, scale_words
from moe_ep_bench.analysis.reading import ITERATION, ResultsError
from moe_ep_bench.analysis.render import Table, render
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.bench.question import Bounds, Question
from moe_ep_bench.cost_model.tables import MEASURED_ELSEWHERE
from moe_ep_bench.files import atomic_path
from moe_ep_bench.models.memory import Fit
from moe_ep_bench.schema import ALL
from moe_ep_bench.timing.statistics import BELOW_MODEL, NoiseFloor, estimate_median, judge

ADVICE = "advice.txt"
_TIE = 0.02
# Shares are sums of float32.
_DIGITS = 6
_ROUNDING = 10**-_DIGITS
_BEST = 5
_FEW_DRAWS = 4
_CANDIDATE = ["policy", "role", "policy_params"]  # labels may be shared
_RANGES = "by {0}: the least and the greatest of one; [brackets]: 95 % for the median over all"
RECORD_YOURS = """The peak load decides, and it is assumed. vLLM and SGLang return yours once they are started with
--enable-return-routed-experts: docs/servers.md has the request and `moe-ep-bench trace import`, which makes a file of
it. Then ask again with --trace FILE. Loads are yours then; scores are assumed equal, so bound the dropped pairs
(--max-dropped), not the mass."""


# ---- candidates and the pick -----------------------------------------------------------------------------------------


def candidates(store: Store, bounds: Bounds) -> pd.DataFrame:
    """A row per candidate and comparison: candidates best first, the comparisons of each in the sweep's order.

    Candidates are measured policies and replication; ``topk``, which is the model's own routing, is none.

    Returns:
        Columns of ``cases``, and: ``at``, the place in the sweep; ``within`` the bounds; ``fits`` the device's memory;
        ``pays`` (within the bounds, fits, and faster); ``is_pick``; ``more_gib`` of a rank's memory; ``over``, draws or
        layers, where a comparison has several, with the least and the greatest speedup of one (``least``, ``most``) and
        their number (``parts``). Of a pick ``judged``, its speedup on draws that did not choose it; ``chosen_by``, how
        many draws' others choose it; ``rival``, what most others choose instead; missing where traffic was drawn once.
    """
    rows = cases(store).merge(comparisons(store)[[*COMPARISON, "facts"]], on=COMPARISON)
    rows = rows[rows["role"].isin(["policy", "replication"]) & (rows["policy"] != "topk")]
    rows = rows[rows["speedup_median"].notna() & rows["dropped_share"].notna()].copy()  # of one piece
    within = rows["dropped_share"] <= bounds.max_dropped + _ROUNDING
    within &= rows["retained_mass"] >= bounds.min_retained - _ROUNDING
    fits = rows["fits"].fillna(True).astype(bool)
    rows = rows.assign(
        at=[_place(row) for row in rows.to_dict("records")],
        within=within,
        fits=fits,
        pays=within & fits & (rows["verdict"] == "faster"),
        more_gib=rows["extra_gib_per_rank"].astype(float),
        log_speed={index: _center(ratio) for index, ratio in _ratios(store, rows).items()},
        kept=rows["retained_mass"].clip(upper=1).round(_DIGITS),
    )
    rows = rows.join(pd.DataFrame(_parts(store, rows), rows.index, ["over", "least", "most", "parts"]))
    picks = [_pick(store, group) for _, group in rows[rows["pays"]].groupby(COMPARISON, sort=False)]
    found = pd.DataFrame(filter(None, picks), columns=["index", "judged", "chosen_by", "rival"]).set_index("index")
    chosen = found.astype({"judged": float, "chosen_by": float, "rival": object})
    by_candidate = rows.groupby(_CANDIDATE, sort=False)
    rows = rows.join(chosen).assign(
        is_pick=rows.index.isin(chosen.index),
        num_pays=by_candidate["pays"].transform("sum"),
        log_speed=by_candidate["log_speed"].transform("sum"),
        candidate=by_candidate.ngroup(),
    )
    order = ["num_pays", "log_speed", "candidate"]
    return rows.sort_values(order, ascending=[False, False, True], kind="stable")


def _ratios(store: Store, rows: pd.DataFrame) -> dict[int, pd.Series]:
    """Native's time over each row's, by launch, batch and iteration; by index of the row."""
    times = timings(store)
    speedups = times[times["quantity"] == ALL].set_index([*CASE, *ITERATION])["speedup"].sort_index()
    return {index: speedups.loc[key] for index, key in rows[CASE].apply(tuple, axis=1).items()}


def _center(ratio: pd.Series) -> float:
    """Mean over draws (or layers) of the log of their medians: a median of few draws would be that of one of them."""
    return float(np.log(ratio.groupby(level="launch").median()).mean())


def _parts(store: Store, rows: pd.DataFrame) -> Iterator[tuple[str | None, float, float, float]]:
    """What launches of a row stand for where nothing ran, and the least, the greatest and the number of their speedups.

    Draws of one traffic, or layers of a recording, were joined as launches of one comparison.
    """
    for index, ratio in _ratios(store, rows).items():
        by_launch = ratio.groupby(level="launch").median()
        is_drawn = rows.at[index, "num_draws"] > 1
        if len(by_launch) > 1 and (is_drawn or rows.at[index, "facts"].get("device") is not None):
            yield "draw" if is_drawn else "layer", by_launch.min(), by_launch.max(), len(by_launch)
        else:
            yield None, np.nan, np.nan, np.nan


def _pick(store: Store, paying: pd.DataFrame) -> tuple[int, float | None, int | None, str | None] | None:
    """The pick of one comparison: its index, the speedup by which it is judged, by how many draws it is chosen, and
    what most of the other draws choose.

    Where some choose another candidate its speedup would be that of several: it is judged by the lower of theirs and
    its own.
    """
    pick = _choice(paying["log_speed"], paying["kept"])
    row = paying.loc[pick]
    if row["num_draws"] == 1:
        return pick, None, None, None
    ratios, found, chosen = _ratios(store, paying), [], []
    for draw in ratios[pick].index.unique("launch"):
        others = {index: ratio[ratio.index.get_level_values("launch") != draw] for index, ratio in ratios.items()}
        centers = pd.Series({index: _center(ratio) for index, ratio in others.items()})
        chosen.append(_choice(centers, paying["kept"]))
        own = ratios[chosen[-1]]
        found.append(own[own.index.get_level_values("launch") == draw])
    judged = estimate_median(pd.concat(found))
    assert judged is not None
    is_modelled, floor = row["facts"].get("device") is not None, NoiseFloor(row["floor_low"], row["floor_high"])
    verdict = judge(judged, floor, is_modelled=is_modelled, is_oversubscribed=bool(row["oversubscribed"]))
    if verdict != "faster":
        return None
    others = [index for index in chosen if index != pick]
    rival = paying.at[max(others, key=others.count), "label"] if others else None
    return pick, min(judged.median, float(row["speedup_median"])), chosen.count(pick), rival


def _choice(log_speed: pd.Series, kept: pd.Series) -> int:
    """Within 2 % is a tie; the candidate that keeps more mass wins, of equals the faster: its index."""
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


def load_timed(directory: Path) -> Store:
    """One directory of times.

    Raises:
        ResultsError: it cannot be read, or holds none.
    """
    store = load(directory)
    if comparisons(store)["mode"].eq("route").any():
        raise ResultsError(f"{directory}: holds routing without times; expected what `run` or `emulate` wrote")
    return store


# ---- the answer ------------------------------------------------------------------------------------------------------


def advice_text(
    store: Store,
    bounds: Bounds,
    by_default: Sequence[str] = (),
    left_out: Sequence[str] = (),
    *,
    cautions: Sequence[str] = (),
    show_all: bool = False,
) -> str:
    """The pick and what it costs, one traffic after another where it differs; then candidates and notes.

    Args:
        by_default: what the user left open, each in a few words.
        left_out: candidates that were not tried, each with the reason.
        cautions: what is known of devices ahead of all results.
        show_all: every candidate in place of those that explain the pick.
    """
    rows, about = candidates(store, bounds), comparisons(store)
    natives = cases(store).query("role == 'baseline'").set_index(COMPARISON)
    names = list(about[COMPARISON].itertuples(index=False, name=None))
    places = dict(zip(names, [_place(row) for row in about.to_dict("records")], strict=True))

    def answer(name: tuple[str, str]) -> str:
        return _answer(rows[_of(rows, name)], about[_of(about, name)].iloc[0], natives.loc[name])

    groups = [(words, list(group)) for words, group in groupby(names, answer)]
    blocks, tables, is_model = [], [], bool(about["scope"].eq("model").any())
    for words, group in groups:
        own = rows[rows[COMPARISON].apply(tuple, axis=1).isin(group)] if len(rows) else rows
        where = _joined([places[name] for name in group])
        said = _said(words, own, natives.loc[group])
        blocks.append("\n".join([f"At {where}: {said[0]}", *said[1:]] if len(groups) > 1 else said))
        chosen = own if show_all else _instructive(own)
        tables.append(_table(chosen, f"at {where}" if len(groups) > 1 else "", is_model=is_model))
    how = modelled_line(one.facts for one in store.comparisons)
    blocks[-1] += f"\n{_for(about, bounds, by_default)}{how and ' '}{how}"
    shown = max((len(table.frame) for table in tables), default=0)
    hidden = len(rows.drop_duplicates(_CANDIDATE)) - shown
    more = [f"{hidden} more candidates: --all"] if hidden > 0 and not show_all else []
    notes = "\n".join(f"  {note}" for note in (*more, *cautions, *_notes(store, rows, about, natives, left_out)))
    parts = [*blocks, *(render([table], "text") for table in tables if len(table.frame)), notes]
    return "\n\n".join([*parts, *([RECORD_YOURS] if _peak_load_is_assumed(about) else [])])


def answer_text(questions: Mapping[str, Question], bounds: Bounds, *, show_all: bool = False) -> str:
    """The answers to questions by phase, and of several what their picks come to; each is written beside its results.

    ``advice.txt`` begins with the pick: a page of the directory shows it.
    """
    told, stores = [], {phase: load_timed(question.out) for phase, question in questions.items()}
    facts = [facts for store in stores.values() for facts in comparisons(store)["facts"]]
    has_rest = all(one.get("rest") is not None for one in facts)
    for phase, question in questions.items():
        known = {"by_default": question.assumed, "left_out": question.left_out, "cautions": question.tables}
        advice = advice_text(stores[phase], bounds, **known, show_all=show_all)
        whole = f"\n\n{picks_text({phase: stores[phase]}, bounds)}" if has_rest else ""
        with atomic_path(question.out / ADVICE) as temporary:
            temporary.write_text(f"{advice}{whole}\n")
        advice += whole if len(stores) == 1 else ""
        more = f"all of it: {question.out} (advice.txt; moe-ep-bench show {question.out}); config: {question.config}"
        told.append(f"{f'{phase.upper()}  ' if phase else ''}{advice}\n\n{more}")
    told = [words.replace(f"\n\n{RECORD_YOURS}", "") for words in told[:-1]] + told[-1:]
    return "\n\n".join([*([picks_text(stores, bounds)] if has_rest and len(stores) > 1 else []), *told])


def advice_lines(directory: Path) -> list[str]:
    """The answer that ``advise`` left beside its results, without its table and notes; none where it was not asked."""
    path = directory / ADVICE
    lines = path.read_text().splitlines() if path.is_file() else []
    end = next((place for place, line in enumerate(lines) if line.startswith("For ")), -1)
    return [line for line in lines[: end + 1] if line]


def _of(frame: pd.DataFrame, name: tuple[str, str]) -> pd.Series:
    return (frame["directory"] == name[0]) & (frame["comparison_id"] == name[1])


def _answer(rows: pd.DataFrame, facts: pd.Series, native: pd.Series) -> str:
    """What to do with one comparison's traffic, in words that are equal where the answer is."""
    fit = facts["facts"].get("fit")
    if native["status"] != "ok":
        return "Inconclusive: the baseline was not measured, so there are no speedups"
    if fit is not None and not Fit(**fit).holds():
        return f"None: the model does not fit on EP {facts['ep_size']}"
    if facts["oversubscribed"]:
        return f"Inconclusive: {OVERSUBSCRIBED}"
    if rows["is_pick"].any():
        return f"Use {rows.loc[rows['is_pick'], 'label'].iloc[0]}"
    if rows["pays"].any():
        return "Keep native: none is significantly faster on draws that did not choose it"
    return "Keep native: no candidate within the bounds is significantly faster"


def _said(words: str, rows: pd.DataFrame, natives: pd.DataFrame) -> list[str]:
    """The answer to one group of comparisons in two lines: the pick with its gain, and what it costs."""
    picks = rows[rows["is_pick"]]
    if picks.empty:
        best = rows[rows["within"] & rows["fits"]].sort_values("speedup_median").tail(1)
        fastest = [
            f"The fastest within the bounds is {row.label}: {row.speedup_median:.3f} times native ({row.verdict})."
            for row in best.itertuples()
        ]
        return [f"{words}.", *fastest]
    is_judged = picks["judged"].notna().all()
    speedup = picks["judged" if is_judged else "speedup_median"]
    what = "a pass" if picks["scope"].iloc[0] == "model" else "a layer"
    how = [str(picks["origin"].iloc[0])]
    if (over := picks["over"].iloc[0]) is not None:
        how.append(f"{picks['least'].min():.2f} to {picks['most'].max():.2f} by {over}")
    how += ["on draws that did not choose it"] if is_judged else []
    dropped, kept, memory = picks["dropped_share"].max(), picks["retained_mass"].min(), picks["more_gib"].max()
    costs = [f"at most {100 * dropped:.1f} % of the pairs are dropped, at least {100 * kept:.1f} % of the mass is kept"]
    if dropped == 0 and kept > 1 - _ROUNDING:
        costs = ["nothing is dropped"]
    costs += [f"{memory:.3g} GiB more memory on each rank"] if memory > 0 else []
    names = pd.MultiIndex.from_frame(picks[COMPARISON])
    native = natives.reindex(names).reset_index(drop=True)
    pick_ms = native["median_ms"].array / speedup.array if is_judged else picks["median_ms"]  # judged: as others' gain
    taken = [
        f"{milliseconds(own_ms)} in place of {milliseconds(ms)} ms{f' at {at}' if len(picks) > 1 else ''}"
        for at, own_ms, ms in zip(picks["at"], pick_ms, native["median_ms"], strict=True)
    ]
    gains = f"{what} is {_ends(speedup, '{:.3f}'.format)} times as fast as native, {', '.join(taken)}"
    return [f"{words}: {gains} ({'; '.join(how)}).", f"It costs: {', '.join(costs)}."]


def _joined(places: Sequence[str]) -> str:
    *others, last = places
    if len(places) > 2 and all(place.startswith("peak load ") for place in places):
        return f"{places[0]} to {last.removeprefix('peak load ')}"
    if others and all(place.startswith("peak load ") for place in places):
        last = last.removeprefix("peak load ")
    return f"{', '.join(others)} and {last}" if others else last


def _for(about: pd.DataFrame, bounds: Bounds, by_default: Sequence[str]) -> str:
    """For what the answer holds: model, sizes, device, traffic and whose it is, and the bounds; one line."""
    first = about.iloc[0]
    parts = [
        " / ".join(dict.fromkeys(about["model"])),
        *about["sizes"].dropna().unique(),
        *(scale_words(scale) for scale in about["scale"].unique() if scale != 1),
        *(_ran_on(words) for words in about["ran_on"].unique()),
        *(f"links {_ran_on(words)}" for words in about["links_words"].dropna().unique()),
    ]
    skews = list(dict.fromkeys(map(_skew, about["facts"])))
    workload = first["facts"]["workload"]
    is_known = workload.get("recording") or workload.get("skew") or "expert_loads" in workload["targets"]
    assumed = "" if is_known else f", assumed, not {first['model']}'s own"
    lost = 100 * (1 - bounds.min_retained)
    limits = [f"{100 * bounds.max_dropped:g} % of the pairs dropped"] if bounds.max_dropped < 1 else []
    limits += [f"{lost:g} % of the score mass lost"] if lost < 100 else []
    within = f"at most {' and '.join(limits)}" if limits else "no bounds"
    default = f"; by default {', '.join(by_default)}" if by_default else ""
    return f"For {', '.join(dict.fromkeys(parts))}; {_joined(skews)}{assumed}; {within}{default}."


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
    if (named := workload.get("skew")) is not None:
        is_assumed = f", not {model}'s own" if named["basis"] == "assumed" else ""
        return f"{named['name']} skew ({named['basis']}: {named['source']}){is_assumed}"
    targets = workload["targets"]
    if "expert_loads" in targets:
        return "experts' loads as counted"
    return _peak(targets["peak_load"]) if "peak_load" in targets else workload["description"]


def _peak_load_is_assumed(about: pd.DataFrame) -> bool:
    """Whether several peak loads were assumed because none is known."""
    return all(list(json.loads(point)) == ["workload.peak_load"] for point in about["point"])


# ---- candidates as a table -------------------------------------------------------------------------------------------


def _instructive(rows: pd.DataFrame) -> pd.DataFrame:
    """The five best that may be picked, the fastest that may not, and of the others the one that loses most time."""
    keys = rows[_CANDIDATE].apply(tuple, axis=1)
    allowed = rows[rows["within"] & rows["fits"]].sort_values(["is_pick", "pays", "speedup_median"], ascending=False)
    best, by_speed = list(dict.fromkeys(keys[allowed.index])), list(keys[rows.sort_values("speedup_median").index])
    barred = [key for key in by_speed if key not in best]
    return rows[keys.isin([*best[:_BEST], *barred[-1:], *by_speed[:1]])] if len(rows) else rows


def _table(rows: pd.DataFrame, title: str, *, is_model: bool) -> Table:
    """A row per candidate, within 100 characters; of several comparisons ranges."""
    found = []
    known = {"picked": rows["is_pick"], "allowed": rows["within"] & rows["fits"]}
    rows = rows.assign(**{name: mask.groupby(rows["candidate"]).transform("any") for name, mask in known.items()})
    order = ["picked", "allowed", "log_speed"]
    rows = rows.sort_values([*order, "candidate"], ascending=[False, False, False, True], kind="stable")
    rows = rows.assign(label=short_labels(rows["label"]))
    for _, group in rows.groupby(_CANDIDATE, sort=False):
        first, speedup = group.iloc[0], group["speedup_median"]
        ends = f" [{first['speedup_low']:.2f}, {first['speedup_high']:.2f}]" if first["speedup_is_interval"] else ""
        verdicts = group["verdict"].where(group["within"], "out of bounds").where(group["fits"], "does not fit")
        if verdicts.nunique() > 1:
            verdicts += group["at"].map(lambda at: f" at {at.removeprefix('peak load ').removeprefix('traffic ')}")
        found.append(
            {
                "label": first["label"],
                "speedup": f"{speedup.min():.3f}{ends}" if len(group) == 1 else _ends(speedup, "{:.3f}".format),
                "median_ms": first["median_ms"] if len(group) == 1 else np.nan,
                "dropped_share": group["dropped_share"].max(),
                "retained_mass": group["retained_mass"].min(),
                "more_gib": group["more_gib"].max(),
                "verdict": " / ".join(dict.fromkeys(verdicts)).replace(BELOW_MODEL, "below model"),
            }
        )
    frame = pd.DataFrame(found, columns=found[0] if found else [])
    columns = [
        text("label", "candidate"),
        text("speedup", "end to end" if is_model else "speedup"),
        number("median_ms", "ms", milliseconds),
        percentage("dropped_share", "drop"),
        percentage("retained_mass", "kept"),
        number("more_gib", "GiB", "{:.2g}"),
        text("verdict"),
    ]
    return Table(frame, [column for column in columns if len(frame) == 0 or frame[column.name].notna().any()], title)


def _ends(values: pd.Series, form: Callable[[float], str]) -> str:
    """The least and the greatest value, or the one that there is."""
    return " to ".join(dict.fromkeys(form(value) for value in (values.min(), values.max())))


# ---- notes -----------------------------------------------------------------------------------------------------------


def _notes(
    store: Store, rows: pd.DataFrame, about: pd.DataFrame, natives: pd.DataFrame, left_out: Sequence[str]
) -> Iterator[str]:
    """What has to be known to trust the answer."""
    yield from (f"left out: {words}" for words in left_out)
    facts = list(about["facts"])
    yield from dict.fromkeys(
        f"the model {Fit(**one['fit']).words}" for one in facts if one.get("fit") and not Fit(**one["fit"]).holds()
    )
    for _, group in rows[~rows["fits"] & (rows["more_gib"] > 0)].groupby(COMPARISON, sort=False):
        fit = Fit(**group["facts"].iloc[0]["fit"])
        if fit.holds():
            labels = ", ".join(f"{row.label} ({row.more_gib:.3g} GiB)" for row in group.itertuples())
            left_gib = (fit.device_bytes - fit.num_bytes) / 2**30
            yield f"does not fit beside the model, which leaves {left_gib:.3g} GiB of {fit.device}: {labels}"
    yield from dict.fromkeys(words for words in about["how"] if "MIXED" in words)
    yield from chance_words(int(rows["speedup_is_interval"].eq(True).sum()))
    if any(one.get("links") and one.get("transport") == "pairs" and one["num_ranks"] > 1 for one in facts):
        yield "servers with DeepEP send fewer bytes, which can change the pick: ask with --transport copies for these"
    allowed = rows[rows["pays"]]
    if (
        allowed["is_pick"]
        & (allowed["speedup_median"] < allowed.groupby(COMPARISON)["speedup_median"].transform("max"))
    ).any():
        yield "within 2 % is a tie, which the candidate that keeps more mass wins"
    yield from _draw_notes(rows, about, natives)
    if rows["policy_params"].str.contains('"solve_us"').any():
        yield (
            "us to solve: assumed, and in the speedup (LPLB says about 100 us in a node, over nodes longer; UltraEP "
            "within 100 us at EP 64)"
        )
    tails = set(about["tail_model"].dropna())
    looking = sorted(set(rows["label"][rows["looks_past_top_k"].eq(True)]))
    if tails and looking:
        yield f"scores past the recorded top-k are modelled ({', '.join(sorted(tails))} tail): {', '.join(looking)}"
    frame = cases(store)
    ceilings = frame[(frame["role"] == "ceiling") & frame["speedup_median"].notna()]
    if len(ceilings):
        gains = ", ".join(f"{row['speedup_median']:.3f} at {_place(row)}" for row in ceilings.to_dict("records"))
        copies = any(one.get("transport") == "copies" for one in facts)
        also = "; skewed traffic sends fewer copies than balanced, so that replicas may gain more" if copies else ""
        yield f"perfect balance: {gains}; dropping also saves work{also}"
    if about["scope"].eq("model").any():
        most = frame["most_by_amdahl"].dropna().unique()
        yield from (f"no policy exceeds {bound:.3f} end to end (Amdahl)" for bound in most)
    else:
        yield "speedups are of one MoE layer: a whole model gains less (docs/model.md); score mass is no accuracy"
    if any(one.get("device") is not None for one in facts):
        yield "times are modelled or measured elsewhere, as said above; drops and mass are counted by routing"
        yield MODEL_CAVEAT
    yield "EPLB comes with vLLM, SGLang and TensorRT-LLM; who drops or reroutes changes a server's router"


def _draw_notes(rows: pd.DataFrame, about: pd.DataFrame, natives: pd.DataFrame) -> Iterator[str]:
    """What choosing the best of many, and chance in the traffic, do to what is said."""
    picks = rows[rows["is_pick"]]
    judged = picks[picks["judged"].notna()]
    if len(judged):
        yield "the pick is judged on each draw by what the other draws would choose"
        several = rows.groupby(COMPARISON).ngroups > 1
        for row in judged[judged["rival"].notna()].itertuples():
            where = f"at {row.at} " if several else ""
            yield (
                f"{where}only {row.chosen_by:.0f} of {row.num_draws} draws would choose it; others choose {row.rival}: "
                "too near to call"
            )
    elif len(picks) and rows.groupby(COMPARISON).size().max() > 1:
        yield "the pick is judged by the traffic that chose it: its speedup is a little too high"
    parts = rows["parts"].max()
    overs = set(rows["over"].dropna())
    if "layer" in overs:
        yield f"the traffic is that of {parts:.0f} layers; {_RANGES.format('layer')}"
    elif "draw" in overs:
        if parts < _FEW_DRAWS:
            yield f"{parts:.0f} draws rarely reach a verdict; without --draws there are more"
        yield (
            f"the traffic is drawn {parts:.0f} times: by chance other experts are busy and share a rank; yours is one "
            f"more draw; workload.rank_load sets how full a rank is; {_RANGES.format('draw')}"
        )
    else:
        set_loads = {"rank_load", "expert_loads"}
        by_chance = [
            one["workload"]["kind"] == "synthetic" and not set_loads & one["workload"]["targets"].keys()
            for one in about["facts"]
        ]
        loads = natives["fullest_rank"][np.array(by_chance) & (about["num_ranks"] > 1).to_numpy()].dropna()
        if len(loads):
            fullest = f"native's fullest rank has {_ends(loads, '{:.2f}'.format)} x the mean load"
            yield f"the traffic is one draw: {fullest} by chance; workload.rank_load sets it"
    recordings = [one["workload"]["recording"] for one in about["facts"] if one["workload"].get("recording")]
    dealt = [one for one in recordings if one["sources"] and one["arrangement"] == "sequences"]
    passes = max((one["sources"][0]["passes_per_batch"] for one in dealt), default=0)
    if passes > 1:
        yield f"a batch uses the recording {passes:.2f} times, so that batches are alike: record more, or ask for fewer"


# ---- prefill and decode ----------------------------------------------------------------------------------------------


def picks(store: Store, bounds: Bounds) -> pd.DataFrame:
    """The pick of each comparison and what it comes to in a whole model, by Amdahl's law; of runs with a ``rest``.

    Returns:
        A row per comparison, in order: ``at``, ``label`` of the pick or native, ``layer_speedup`` (1 for native),
        ``moe_share`` of a native pass, where every MoE layer takes what this one does, ``end_to_end``, ``native_ms``
        and ``pass_ms`` of such a pass or step, ``native_tokens_per_s`` and ``tokens_per_s`` of a rank likewise,
        ``dropped_share``, ``retained_mass``, ``more_gib``.
    """
    rows, about = candidates(store, bounds), comparisons(store)
    kept = ["label", "speedup_median", "judged", "dropped_share", "retained_mass", "more_gib"]
    chosen = about[COMPARISON].merge(rows.loc[rows["is_pick"], [*COMPARISON, *kept]], "left", COMPARISON)
    native = {"label": "native", "speedup_median": 1.0, "dropped_share": 0.0, "retained_mass": 1.0}
    chosen = chosen.fillna({**native}).astype({"speedup_median": float})
    rest = pd.DataFrame([facts["rest"] for facts in about["facts"]])
    natives = cases(store).query("role == 'baseline'").set_index(COMPARISON)["median_ms"]
    layer_ms = natives.reindex(pd.MultiIndex.from_frame(chosen[COMPARISON])).to_numpy()
    speedup = chosen["judged"].astype(float).fillna(chosen["speedup_median"])
    rest_ms = rest["us_per_moe_layer"] / 1e3
    native_ms, pass_ms = (rest["num_moe_layers"] * (ms + rest_ms) for ms in (layer_ms, layer_ms / speedup))
    tokens = (about["num_tokens"] / about["world_size"]).to_numpy()
    return chosen.drop(columns=["judged", "speedup_median"]).assign(
        at=[_place(row) for row in about.to_dict("records")],
        layer_speedup=speedup,
        moe_share=layer_ms / (layer_ms + rest_ms),
        end_to_end=native_ms / pass_ms,
        native_ms=native_ms,
        pass_ms=pass_ms,
        native_tokens_per_s=tokens / native_ms * 1e3,
        tokens_per_s=tokens / pass_ms * 1e3,
    )


def picks_text(phases: Mapping[str, Store], bounds: Bounds) -> str:
    """One table of every phase's picks, from end to end."""
    rows = pd.concat([picks(store, bounds).assign(phase=phase) for phase, store in phases.items()], ignore_index=True)
    columns = [
        text("phase"),
        text("at", "traffic"),
        text("label", "pick"),
        number("layer_speedup", "MoE layer x"),
        percentage("moe_share", "MoE"),
        number("end_to_end", "end to end x"),
        number("native_ms", "native ms", milliseconds),
        number("pass_ms", "pick ms", milliseconds),
        number("native_tokens_per_s", "native tok/s", "{:,.0f}"),
        number("tokens_per_s", "pick tok/s", "{:,.0f}"),
    ]
    note = (
        "by Amdahl's law: as if each MoE layer took what this one does, beside a roofline of the rest; ms of "
        "a pass, at decode of a step; tok/s of a GPU (docs/model.md)"
    )
    elsewhere = any(is_elsewhere(one.facts) for store in phases.values() for one in store.comparisons)
    note = f"{ELSEWHERE if elsewhere else 'modelled'}, {note}"
    rows["label"] = short_labels(rows["label"])
    alike = {name for name in ("phase", "at") if rows[name].nunique() == 1}
    columns = [column for column in columns if column.name not in alike]
    return render([Table(rows, columns, "The whole model, from end to end", [note])], "text")
