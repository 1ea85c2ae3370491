"""``advise``: a table of candidates, best first, and one sentence with the pick.

The pick is the fastest candidate within the bounds whose verdict is ``faster`` (``statistics.judge``). Of those within
2 % of the fastest it is the one that keeps most score mass. Where there is none, native stays.

The fastest of many is in part the luckiest: what it gained where it was chosen is too much. So where traffic was drawn
several times the pick is judged on draws that did not choose it. Each draw is given the candidate that the others would
choose of those that pay, and what these gain together is what the answer promises; if that is not ``faster``, native
stays. Of one draw the answer says that its speedup is not so judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.draws import LAYERS, over_draws
from moe_ep_bench.analysis.frames import speedups
from moe_ep_bench.analysis.load import CASE, Comparison, Run
from moe_ep_bench.analysis.render import (
    Table,
    interval,
    milliseconds,
    number,
    percentage,
    render,
    terminal_width,
    text,
)
from moe_ep_bench.analysis.tables import PASS, STEP
from moe_ep_bench.analysis.timing import layer_time_us
from moe_ep_bench.analysis.whole import PASS_PARTS
from moe_ep_bench.analysis.words import (
    MODEL_CAVEAT,
    OVERSUBSCRIBED,
    chance_words,
    device_words,
    mode_words,
    modelled_line,
    origin,
    rest_words,
    scale_words,
)
from moe_ep_bench.bench.question import Bounds
from moe_ep_bench.timing.statistics import Estimate, NoiseFloor, Verdict, estimate_median, judge, paired_ratios

# What is no slower than the fastest by more than this is as fast; what it loses decides.
_AS_FAST = 0.02
# Shares are sums of float32.
_DIGITS = 6
_ROUNDING = 10**-_DIGITS
_CANDIDATE = ["comparison_id", "policy", "role", "policy_params"]
# How a user gets what decides: documented with vLLM 0.21 (training/routed_experts_replay) and by SGLang's server.
RECORD_YOURS = """The peak load decides, and it is assumed. Your server returns yours, once it is started with
--enable-return-routed-experts; send it prompts of your own:
  vLLM:   curl -s -w '\\n' localhost:8000/v1/completions -H 'Content-Type: application/json' \\
            -d '{"model": "MODEL", "prompt": "...", "max_tokens": 1}' >> routes.jsonl
  SGLang: curl -s -w '\\n' localhost:30000/generate -H 'Content-Type: application/json' \\
            -d '{"text": "...", "sampling_params": {"max_new_tokens": 1}, "return_routed_experts": true}' \\
            >> routes.jsonl
then: moe-ep-bench trace import vllm|sglang routes.jsonl mine.safetensors --preset MODEL --phase prefill \\
        --assume-equal-scores
and ask again with --trace mine.safetensors."""
# So many points of a sweep are named one by one.
_MOST_NAMED = 4


def candidates(run: Run, bounds: Bounds) -> pd.DataFrame:
    """A row per candidate and comparison: candidates best first, the comparisons of each in the sweep's order.

    Candidates are measured policies and replication; ``topk``, which is the model's own routing, is none.

    Returns:
        Columns of ``frames.speedups``, and: ``at`` (the traffic, or what else is swept), ``within`` the bounds,
        ``fits`` the device's memory, ``pays`` (within the bounds, fits, and faster), ``is_pick``, ``more_gib`` of a
        rank's memory, and ``limit``, the longest phase or part of a pass. Of a pick ``judged``, its speedup on draws
        that did not choose it, and ``chosen_by``, how many draws' others choose it; missing where traffic was drawn
        once.
    """
    run = over_draws(run)[0]
    rows = speedups(run)
    rows = rows[rows["role"].isin(["policy", "replication"]) & (rows["policy"] != "topk")]
    rows = rows[rows["speedup_median"].notna() & rows["dropped_share"].notna()]
    extra = {key: case.extra_bytes_per_rank for key, case in run.by_key.items()}
    if run.scope == "model":
        parts = rows[[f"mean_rank_{part}_ms" for part in PASS_PARTS]].set_axis(list(PASS_PARTS), axis=1).astype(float)
        limit = parts.fillna(0.0).idxmax(axis=1).where(parts.notna().any(axis=1))
    else:
        limit = rows["breakdown_slowest_phase"]
    fits = {
        key: (fit := run.comparisons[key[0]].fit) is None or fit.holds(extra_bytes or 0)
        for key, extra_bytes in extra.items()
    }
    keys = rows[CASE].apply(tuple, axis=1)
    within = rows["dropped_share"] <= bounds.max_dropped + _ROUNDING
    within &= rows["retained_mass"] >= bounds.min_retained - _ROUNDING
    rows = rows.assign(
        at=[_where(run.comparisons[name]) for name in rows["comparison_id"]],
        within=within,
        fits=keys.map(fits).astype(bool),
        more_gib=keys.map(extra).astype(float) / 2**30,
        limit=limit,
        log_speed=np.log(rows["speedup_median"].astype(float)),
    )
    pays = rows["within"] & rows["fits"] & (rows["verdict"] == "faster")
    rows = rows.assign(
        pays=pays, kept=rows["retained_mass"].clip(upper=1).round(_DIGITS), judged=np.nan, chosen_by=np.nan
    )
    picked = []
    for name, paying in rows[pays].groupby("comparison_id"):
        pick = _choice(paying["log_speed"], paying["kept"])
        if run.comparisons[name].draws > 1:
            judged, chosen = _judged_elsewhere(run, paying)
            if _verdict(judged, run.comparisons[name], paying.loc[pick]) != "faster":
                continue
            rows.loc[pick, ["judged", "chosen_by"]] = judged.median, chosen.count(pick)
        picked.append(pick)
    # Labels may be shared, parameters are not.
    by_candidate = rows.groupby(["policy", "role", "policy_params"], sort=False)
    rows = rows.assign(
        is_pick=rows.index.isin(picked),
        num_pays=by_candidate["pays"].transform("sum"),
        log_speed=by_candidate["log_speed"].transform("sum"),
        candidate=by_candidate.ngroup(),
    )
    order = ["num_pays", "log_speed", "candidate"]
    return rows.sort_values(order, ascending=[False, False, True], kind="stable")


def _choice(log_speed: pd.Series, kept: pd.Series) -> int:
    """Of those as fast as the fastest the one that keeps most score mass, of equals the faster: its index."""
    as_fast = pd.DataFrame({"kept": kept, "log_speed": log_speed})[log_speed >= log_speed.max() - np.log1p(_AS_FAST)]
    return as_fast.sort_values(["kept", "log_speed"], kind="stable").index[-1]


def _judged_elsewhere(run: Run, paying: pd.DataFrame) -> tuple[Estimate, list[int]]:
    """The speedup, over all draws, of what a draw's others choose of the candidates that pay; and what each chose."""
    (name,) = paying["comparison_id"].unique()
    native_us = next(layer_time_us(c) for c in run.cases if (c.comparison_id, c.role) == (name, "baseline"))
    ratios = {
        row: paired_ratios(native_us, layer_time_us(run.by_key[name, case_id]))
        for row, case_id in paying["case_id"].items()
    }
    found, chosen = [], []
    for draw in range(run.comparisons[name].draws):
        others = {row: one[one.index.get_level_values("launch") != draw].median() for row, one in ratios.items()}
        chosen.append(_choice(np.log(pd.Series(others)), paying["kept"]))
        own = ratios[chosen[-1]]
        found.append(own[own.index.get_level_values("launch") == draw])
    judged = estimate_median(pd.concat(found))
    assert judged is not None
    return judged, chosen


def _verdict(speedup: Estimate, facts: Comparison, row: pd.Series) -> Verdict:
    floor = NoiseFloor(row["floor_low"], row["floor_high"])
    return judge(speedup, floor, is_modelled=facts.device is not None, is_oversubscribed=facts.oversubscribed)


def advice_of(run: Run, bounds: Bounds, by_default: Sequence[str] = (), left_out: Sequence[str] = ()) -> str:
    """What is assumed, the table of candidates, best first, and the pick.

    Args:
        run: of layers, or of whole models, whose speedups are from end to end.
        by_default: what the user left open, each in a few words.
        left_out: candidates that were not tried, each with the reason.
    """
    each_draw = run
    joined_by = _joined_by(run)
    run, part_of = over_draws(run)
    rows = candidates(run, bounds)
    if len(run.comparisons) < len(part_of):
        rows = rows.join(_by_draw(each_draw, part_of), on=_CANDIDATE)
    facts = list(run.comparisons.values())
    is_step = any(one.rest is not None and one.rest.context_length for one in facts)
    shown = rows["verdict"].where(rows["within"], "out of bounds").where(rows["fits"], "does not fit")
    rows = rows.assign(shown=shown)
    columns = [
        text("label", "policy"),
        *(
            [text("at", "traffic" if list(facts[0].point) == ["workload.peak_load"] else "at")]
            if len(facts) > 1
            else []
        ),
        interval("speedup", "end to end" if run.scope == "model" else "speedup"),
        *([text("by_draw", f"by {joined_by}")] if "by_draw" in rows else []),
        number("median_ms", "pass ms" if run.scope == "model" else "layer ms", milliseconds),
        *((STEP if is_step else PASS)[run.scope == "model" :] if rows["tokens_per_s_per_rank"].notna().any() else []),
        *([interval("moe_speedup", "MoE layers")] if run.scope == "model" else []),
        text("shown", "verdict"),
        percentage("dropped_share", "drop %"),
        percentage("retained_mass", "kept %"),
        number("more_gib", "GiB", "{:.2g}"),
        text("limit"),
    ]
    notes = [*(f"left out: {words}" for words in left_out), *_notes(run, rows, bounds, joined_by)]
    table = render([Table(rows, columns if len(rows) else (), notes=notes)], "text", width=terminal_width())
    unfit = dict.fromkeys(one.fit.words for one in facts if one.fit is not None and one.fit.words)
    first = "\n".join([*filter(None, [modelled_line(run)]), _assumed(run, facts, by_default)])
    parts = [first, *(f"The model {words}." for words in unfit), table, _pick(run, rows, joined_by)]
    return "\n\n".join([*parts, *([RECORD_YOURS] if _peak_load_decides(run, rows) else [])])


def _peak_load_decides(run: Run, rows: pd.DataFrame) -> bool:
    """Whether the pick differs between peak loads that were assumed because none is known."""
    if any(list(one.point) != ["workload.peak_load"] for one in run.comparisons.values()):
        return False
    picked = rows[rows["is_pick"]].set_index("comparison_id")["label"]
    return len({picked.get(name) for name in run.comparisons}) > 1


def _joined_by(run: Run) -> str:
    """What comparisons are joined over: draws of the traffic, or layers."""
    return "layer" if any(key in facts.point for facts in run.comparisons.values() for key in LAYERS) else "draw"


def _by_draw(run: Run, part_of: Mapping[str, str]) -> pd.DataFrame:
    """Of each candidate the least and the greatest speedup over draws, and in words; indexed by ``_CANDIDATE``."""
    rows = speedups(run).dropna(subset="speedup_median")
    found = rows.assign(comparison_id=rows["comparison_id"].map(part_of)).groupby(_CANDIDATE)["speedup_median"]
    found = found.agg(least_draw="min", most_draw="max", num_draws="size")
    ends = zip(found["least_draw"], found["most_draw"], strict=True)
    return found.assign(by_draw=[f"{least:.2f} to {most:.2f}" for least, most in ends])


def picks(run: Run, bounds: Bounds) -> pd.DataFrame:
    """The pick of each comparison and what it comes to in a whole model, by Amdahl's law; of runs with a ``rest``.

    Returns:
        A row per comparison, in order: ``at``, ``label`` of the pick or native, ``layer_speedup`` (1 for native),
        ``moe_share`` of a native pass, where every MoE layer takes what this one does, ``end_to_end``, ``native_ms``
        and ``pass_ms`` of such a pass or step, ``tokens_per_s`` and rank with the pick,
        ``dropped_share``, ``retained_mass``, ``more_gib``.
    """
    run = over_draws(run)[0]
    chosen = candidates(run, bounds)
    chosen = chosen[chosen["is_pick"]].set_index("comparison_id")
    native_ms = speedups(run).query("role == 'baseline'").set_index("comparison_id")["median_ms"]
    kept = {
        "label": "native",
        "speedup_median": 1.0,
        "judged": np.nan,
        "dropped_share": 0.0,
        "retained_mass": 1.0,
        "more_gib": np.nan,
    }
    rows = []
    for name, facts in run.comparisons.items():
        pick = chosen.loc[name] if name in chosen.index else kept
        assert facts.rest is not None
        layer_us = 1e3 * native_ms[name]
        share = layer_us / (layer_us + facts.rest.us_per_moe_layer)
        speedup = float(pick["speedup_median"] if np.isnan(pick["judged"]) else pick["judged"])
        native, faster = facts.rest.pass_ms(native_ms[name]), facts.rest.pass_ms(native_ms[name] / speedup)
        rows.append(
            {"at": _where(facts), "layer_speedup": speedup, "moe_share": share}
            | {"end_to_end": native / faster, "native_ms": native, "pass_ms": faster}
            | {"tokens_per_s": facts.num_tokens / facts.world_size / faster * 1e3}
            | {column: pick[column] for column in ("label", "dropped_share", "retained_mass", "more_gib")}
        )
    return pd.DataFrame(rows)


def picks_text(phases: Mapping[str, Run], bounds: Bounds) -> str:
    """One table of every phase's picks, from end to end."""
    rows = pd.concat([picks(run, bounds).assign(phase=phase) for phase, run in phases.items()])
    columns = [
        text("phase"),
        text("at", "traffic"),
        text("label", "pick"),
        number("layer_speedup", "MoE layer"),
        percentage("moe_share", "MoE % of a pass"),
        number("end_to_end", "end to end"),
        number("native_ms", "native ms", milliseconds),
        number("pass_ms", "pick ms", milliseconds),
        number("tokens_per_s", "tokens/s/GPU", "{:,.0f}"),
        percentage("dropped_share", "drop %"),
        percentage("retained_mass", "kept %"),
        number("more_gib", "GiB", "{:.2g}"),
    ]
    notes = [
        "modelled: end to end by Amdahl's law; ms of a pass through all layers, at decode of a step, tokens/s with the "
        "pick (docs/model.md)",
        *dict.fromkeys(rest_words(one) for run in phases.values() for one in run.comparisons.values() if one.rest),
    ]
    title = "Prefill and decode, from end to end"
    return render([Table(rows.reset_index(drop=True), columns, title, notes)], "text")


def _notes(run: Run, rows: pd.DataFrame, bounds: Bounds, joined_by: str) -> Iterator[str]:
    """What has to be known to read the table."""
    yield (
        f"bounds: at most {100 * bounds.max_dropped:g} % of top-k pairs dropped, at least "
        f"{100 * bounds.min_retained:g} % of the top-k's score mass kept (more: experts were added), which is no "
        "accuracy; GiB: more memory of a rank, for replicas in all layers; limit: what takes longest"
    )
    yield from _choice_notes(run, rows)
    yield from _draw_notes(run, rows, joined_by)
    too_large = rows[~rows["fits"] & (rows["more_gib"] > 0)]
    for name, group in too_large.groupby("comparison_id", sort=False):
        fit = run.comparisons[name].fit
        if fit.holds():
            left_gib = (fit.device_bytes - fit.num_bytes) / 2**30
            labels = ", ".join(f"{one.label} ({one.more_gib:.3g} GiB)" for one in group.itertuples())
            yield f"does not fit beside the model, which leaves {left_gib:.3g} GiB of {fit.device}: {labels}"
    if any(case.policy_params.get("balancer") == "lp" for case in run.cases):
        yield (
            "LP: every batch's pairs split over replicas by a linear program; the time to solve it, assumed, is in the "
            "speedup (LPLB's README: about 100 us inside a node, longer beyond)"
        )
    if any(facts.device is not None for facts in run.comparisons.values()):
        yield MODEL_CAVEAT
    tails = {facts.workload.tail_model for facts in run.comparisons.values()} - {None}
    looking = {case.label for case in run.cases if case.looks_past_top_k and case.label in set(rows["label"])}
    if tails and looking:
        words = f"scores past the recorded top-k are modelled ({', '.join(sorted(tails))} tail)"
        yield f"{words}: {', '.join(sorted(looking))} rest on them"
    frame = speedups(run)
    ceilings = frame[(frame["role"] == "ceiling") & frame["speedup_median"].notna()]
    found = zip(ceilings["speedup_median"], ceilings["comparison_id"], strict=True)
    if len(ceilings):
        gains = ", ".join(f"{speedup:.3f} at {_where(run.comparisons[name])}" for speedup, name in found)
        yield f"perfect balance: {gains}; dropping also saves work"
    yield from _native_notes(run, frame)
    if run.scope == "model":
        most = frame["most_by_amdahl"].dropna().unique()
        yield from (f"no policy exceeds {one:.3f} end to end (Amdahl)" for one in most)
    else:
        yield "speedups are of one MoE layer: a whole model gains less (scope: model)"


def _native_notes(run: Run, frame: pd.DataFrame) -> Iterator[str]:
    """What native takes, in milliseconds and tokens per second, and what these are made of."""
    natives = frame[(frame["role"] == "baseline") & frame["median_ms"].notna()]
    said = []
    for row in natives.to_dict("records"):
        what = "a pass" if run.scope == "model" else "a layer"
        words = f"{milliseconds(row['median_ms'])} ms {what}"
        if not pd.isna(row["tokens_per_s_per_rank"]):
            words += f", {row['tokens_per_s_per_rank']:,.0f} tokens/s per GPU"
        said.append(f"{words} at {_where(run.comparisons[row['comparison_id']])}")
    yield from ([f"native: {'; '.join(said)}"] if said else [])
    yield from dict.fromkeys(rest_words(one) for one in run.comparisons.values() if one.rest is not None)


def _choice_notes(run: Run, rows: pd.DataFrame) -> Iterator[str]:
    """What choosing the best of many does to what is said of it."""
    yield from chance_words(int(rows["speedup_is_interval"].eq(True).sum()))
    picks = rows[rows["is_pick"]]
    judged = picks[picks["judged"].notna()]
    if len(judged):
        draws = run.comparisons[judged["comparison_id"].iloc[0]].draws
        counts = " / ".join(dict.fromkeys(f"{count:.0f} of {draws}" for count in judged["chosen_by"]))
        yield f"the pick is judged on each draw by what the other draws would choose; {counts} would choose it"
    elif len(picks) and rows.groupby("comparison_id").size().max() > 1:
        yield (
            "the pick is judged by the traffic that chose it, so that its speedup is a little too high: the fastest of "
            f"{rows.groupby('comparison_id').size().max()} is in part the luckiest"
        )


def _draw_notes(run: Run, rows: pd.DataFrame, joined_by: str) -> Iterator[str]:
    """What of the traffic is chance, and where batches are alike."""
    facts = run.comparisons.values()
    # A peak load says nothing of which experts share a rank.
    set_loads = {"rank_load", "expert_loads"}
    by_chance = [one.workload.kind == "synthetic" and not set_loads & one.workload.targets.keys() for one in facts]
    names = [name for name, is_so in zip(run.comparisons, by_chance, strict=True) if is_so]
    frame = speedups(run)
    frame = frame[(frame["role"] == "baseline") & (frame["num_ranks"] > 1) & frame["comparison_id"].isin(names)]
    loads = frame["fullest_rank"].dropna().astype(float)
    if "by_draw" in rows and joined_by == "layer":
        yield (
            f"the traffic is that of {rows['num_draws'].max()} layers: speedups and intervals are over all of them, by "
            "layer: the least and the greatest speedup"
        )
    elif "by_draw" in rows:
        yield (
            f"the traffic is drawn {rows['num_draws'].max()} times: by chance other experts are busy and share a rank; "
            "intervals are over draws, by draw: the least and the greatest speedup; yours is one more draw; "
            "workload.rank_load sets how full a rank is"
        )
    elif len(loads):
        found = f"{loads.min():.2f}" + (f" to {loads.max():.2f}" if len(loads) > 1 else "")
        yield (
            f"the traffic is one draw: native's fullest rank has {found} x the mean load by chance; another "
            "workload.seed gives another, and speedups that differ by more than the intervals; workload.rank_load "
            "sets it"
        )
    recordings = [one.workload.recording for one in facts if one.workload.recording is not None]
    passes = [one.sources[0].passes_per_batch for one in recordings if one.sources and one.arrangement == "sequences"]
    if passes and max(passes) > 1:
        yield (
            f"a batch uses the recording {max(passes):.2f} times, so that all batches are alike: intervals "
            "say nothing of other traffic, and replicas are planned on the traffic that they meet; record more, or ask "
            "for fewer tokens"
        )


def _assumed(run: Run, facts: Sequence[Comparison], by_default: Sequence[str]) -> str:
    """How the numbers came about, on what, and whose skew they have; one line."""
    how = mode_words(run, facts[0])
    parts = [
        f"{how[0].upper()}{how[1:]}",
        " / ".join(dict.fromkeys(one.model for one in facts)),
        *dict.fromkeys(one.sizes for one in facts if one.sizes is not None),
        *dict.fromkeys(scale_words(one.scale) for one in facts if one.scale != 1),
        *dict.fromkeys(device_words(run, one).partition(": ")[0] for one in facts),
        *dict.fromkeys(one.links.partition(": ")[0] for one in facts if one.links is not None),
    ]
    skews = list(dict.fromkeys(map(_skew, facts)))
    if len(skews) > _MOST_NAMED:
        skews = [skews[0], f"{len(skews) - 2} more", skews[-1]]
    counted = "expert_loads" in facts[0].workload.targets
    is_known = facts[0].workload.recording or facts[0].workload.skew or counted
    assumed = "" if is_known else f", assumed, not {facts[0].model}'s own"
    default = f"; by default {', '.join(by_default)}" if by_default else ""
    return f"{', '.join(parts)}; {', '.join(skews)}{assumed}{default}."


def _skew(facts: Comparison) -> str:
    """Whose skew a comparison has."""
    workload = facts.workload
    if workload.recording is not None:
        recorded, model = (
            "".join(filter(str.isalnum, name.rpartition("/")[2].lower()))
            for name in (workload.recording.model, facts.model)
        )
        same = recorded in model or model in recorded
        return f"skew of {workload.recording.model}'s recording" + ("" if same else f", not {facts.model}'s")
    if workload.skew is not None:
        named = workload.skew
        not_its = f", not {facts.model}'s own" if named["basis"] == "assumed" else ""
        return f"{named['name']} skew ({named['basis']}: {named['source']}){not_its}"
    if "expert_loads" in workload.targets:
        return "experts' loads as counted"
    return _peak(workload.targets["peak_load"]) if "peak_load" in workload.targets else workload.description


def _peak(peak_load: float | None) -> str:
    return "unskewed traffic" if peak_load is None else f"peak load {peak_load:g}"


def _where(facts: Comparison) -> str:
    """A comparison's place in the sweep, or its title where there is none."""
    if not facts.point:
        return facts.title
    if list(facts.point) == ["workload.peak_load"]:
        return _peak(facts.point["workload.peak_load"])
    return ", ".join(f"{key.rpartition('.')[2].replace('_', ' ')} {value}" for key, value in facts.point.items())


def _units(native: pd.Series, pick: pd.Series, is_model: bool) -> str:
    """Milliseconds, and where they are known tokens per second, of native and of the pick."""
    of = "pass" if is_model else "layer"
    words = f"; {milliseconds(pick['median_ms'])} in place of {milliseconds(native['median_ms'])} ms a {of}"
    rates = [one["tokens_per_s_per_rank"] for one in (pick, native)]
    return words + ("" if any(map(pd.isna, rates)) else f", {rates[0]:,.0f} of {rates[1]:,.0f} tokens/s per GPU")


def _pick(run: Run, rows: pd.DataFrame, joined_by: str) -> str:
    """One sentence: what to use, and at which traffic."""
    picks = rows[rows["is_pick"]].set_index("comparison_id")
    measured = {case.comparison_id for case in run.cases if case.role == "baseline" and case.is_ok}
    natives = speedups(run).query("role == 'baseline'").set_index("comparison_id")

    def choice(comparison_id: str) -> str:
        if comparison_id not in measured:
            return "inconclusive: the baseline was not measured, so there are no speedups"
        fit = run.comparisons[comparison_id].fit
        if fit is not None and fit.words:
            return f"none: the model does not fit on EP {fit.ep_size}"
        if run.comparisons[comparison_id].oversubscribed:
            return f"inconclusive: {OVERSUBSCRIBED}"
        if comparison_id not in picks.index:
            if rows["pays"][rows["comparison_id"] == comparison_id].any():
                return "keep native: none is significantly faster on draws that did not choose it"
            return "keep native: no policy within the bounds is significantly faster"
        return f"use {picks.at[comparison_id, 'label']}"

    parts = []
    for words, group in groupby(run.comparisons, choice):
        names = list(group)
        places = [_where(run.comparisons[name]) for name in names]
        where = " and ".join(places) if len(places) <= 2 else f"{places[0]} to {places[-1]}"
        if words.startswith("use "):
            own = picks.loc[names]
            units = _units(natives.loc[names[0]], own.iloc[0], run.scope == "model") if len(names) == 1 else ""
            speedup, dropped, kept = own["speedup_median"], own["dropped_share"].max(), own["retained_mass"].min()
            is_judged = own["judged"].notna().all()
            speedup = own["judged"] if is_judged else speedup
            words += f": {speedup.min():.3f}" + (f" to {speedup.max():.3f}" if len(own) > 1 else "") + " x native"
            words += " on draws that did not choose it" if is_judged else ""
            if "by_draw" in own:
                least, most, number_of = own["least_draw"].min(), own["most_draw"].max(), own["num_draws"].max()
                over = "layers" if joined_by == "layer" else "draws of the traffic"
                words += f" ({least:.2f} to {most:.2f} over {number_of} {over})"
            cost = f"at most {100 * dropped:.1f} % dropped, at least {100 * kept:.1f} % of the score mass kept"
            words += ", nothing dropped" if dropped == 0 and kept > 1 - _ROUNDING else f", {cost}"
            memory = own["more_gib"].max()
            words += f", {memory:.3g} GiB more on each rank" if memory > 0 else ""
            words += units
        parts.append(f"at {where} {words}")
    origins = {origin(run, facts) for facts in run.comparisons.values()} - {"measured"}
    how = f" ({', '.join(sorted(origins))})" if origins else ""
    return f"Pick{how}: {'; '.join(parts)}."
