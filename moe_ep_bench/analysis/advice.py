"""``advise``: a table of candidates, best first, and one sentence with the pick.

The pick is the fastest candidate within the bounds whose verdict is ``faster``: the whole interval of its speedup lies
beyond the noise floor. Where there is none, native stays.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.load import Case, Comparison, Run, check_timed, is_whole, load_run
from moe_ep_bench.analysis.render import Column, Table, number, percentage, render, text
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.sweep import in_order
from moe_ep_bench.analysis.whole import WholeComparison, analyse_whole
from moe_ep_bench.analysis.words import (
    MODEL_CAVEAT,
    OVERSUBSCRIBED,
    device_words,
    estimate_words,
    mode_words,
    percent,
    scale_words,
)
from moe_ep_bench.bench.question import Bounds

# Shares are sums of float32.
_ROUNDING = 1e-6
_KEEP_NATIVE = "keep native: no policy within the bounds is significantly faster"
# So many points of a sweep are named one by one.
_MOST_NAMED = 4


@dataclass(frozen=True, eq=False)
class Answer:
    """What to do in one comparison.

    Attributes:
        best: what to use; None = native.
        others: what else is within the bounds, the fastest first.
        beyond: what is not, the fastest first.
        refusal: why nothing can be said at all; empty where something can.
    """

    comparison: ComparisonResult
    best: CaseResult | None
    others: tuple[CaseResult, ...]
    beyond: tuple[CaseResult, ...]
    refusal: str

    @property
    def words(self) -> str:
        if self.refusal:
            return "inconclusive"
        return "keep native" if self.best is None else self.best.case.label


def answer(comparison: ComparisonResult, bounds: Bounds) -> Answer:
    """Choose among measured policies and replication; ``topk``, which is the model's own routing, is no choice."""
    candidates = [
        result
        for result in (*comparison.policies, *comparison.replications)
        if result.case.policy != "topk" and result.speedup is not None and result.fidelity is not None
    ]
    candidates.sort(key=_speed, reverse=True)
    within = [result for result in candidates if _admits(bounds, result)]
    refusal = OVERSUBSCRIBED if comparison.comparison.oversubscribed else ""
    if comparison.of_role("baseline") is None:
        refusal = "the baseline was not measured, so there are no speedups"
    best = next((result for result in within if result.verdict == "faster" and not refusal), None)
    others = tuple(result for result in within if result is not best)
    return Answer(comparison, best, others, tuple(one for one in candidates if one not in within), refusal)


def how_words(run: Run, comparison: ComparisonResult) -> str:
    """No advice from a model goes without saying so."""
    if comparison.comparison.device is not None:
        return " (modelled)"
    return " (emulated)" if run.mode == "emulated" else ""


def advice_of(directory: Path, bounds: Bounds, by_default: Sequence[str] = (), left_out: Sequence[str] = ()) -> str:
    """``advice`` on a results directory.

    Raises:
        ResultsError: it cannot be read or trusted, or holds no times.
    """
    check_timed(directory)
    return advice(load_run(directory, whole=is_whole(directory)), bounds, by_default, left_out)


def advice(run: Run, bounds: Bounds, by_default: Sequence[str] = (), left_out: Sequence[str] = ()) -> str:
    """What is assumed, the table of candidates, best first, and the pick.

    Args:
        run: of layers, or of whole models, whose speedups are from end to end.
        by_default: what the user left open, each in a few words.
        left_out: candidates that were not tried, each with the reason.
    """
    models = analyse_whole(run) if run.scope == "model" else []
    comparisons = in_order([one.comparison for one in models] or analyse(run))
    answers = [answer(comparison, bounds) for comparison in comparisons]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    notes = [*(f"left out: {words}" for words in left_out), *_notes(answers, bounds, models)]
    table = render([_table(answers, bounds, models, notes)], "text", width=width)
    return "\n\n".join([_assumed(run, comparisons, by_default), table, _pick(run, answers)])


def _table(answers: Sequence[Answer], bounds: Bounds, models: Sequence[WholeComparison], notes: Sequence[str]) -> Table:
    """A row for each candidate; of several comparisons each has columns of its own, side by side."""
    whole = {each.result.case.case_id: each for one in models for each in one.results}
    rows: dict[str, dict[str, Any]] = {}
    for place, one in enumerate(answers):
        for result in (*filter(None, [one.best]), *one.others, *one.beyond):
            case, fidelity, within = result.case, result.fidelity, _admits(bounds, result)
            assert fidelity is not None
            row = rows.setdefault(_identity(case), {"label": case.label, "pays": 0, "log_speed": 0.0, "limits": {}})
            row["pays"] += within and result.verdict == "faster"
            row["log_speed"] += math.log(_speed(result))
            row["memory"] = case.extra_bytes_per_rank and case.extra_bytes_per_rank / 2**30
            if case.case_id in whole:
                parts_ms = whole[case.case_id].parts_ms or {}
                row["limits"][max(parts_ms, key=parts_ms.__getitem__, default="-")] = None
                row[f"moe_{place}"] = estimate_words(whole[case.case_id].moe_speedup)
            elif result.breakdown is not None:
                row["limits"][result.breakdown.slowest_phase] = None
            row[f"speedup_{place}"] = estimate_words(result.speedup)
            row[f"verdict_{place}"] = result.verdict if within else f"({result.verdict})"
            row[f"dropped_{place}"], row[f"kept_{place}"] = fidelity.dropped_share, fidelity.retained_mass
    columns: list[Column] = [text("label", "policy")]
    for place, one in enumerate(answers):
        where = f"{_where(one.comparison.comparison)}: " if len(answers) > 1 else ""
        columns.append(text(f"speedup_{place}", f"{where}{'end to end' if models else 'speedup'}"))
        columns += [text(f"moe_{place}", "MoE layers")] if models else []
        columns += [text(f"verdict_{place}", "verdict"), percentage(f"dropped_{place}", "dropped %")]
        columns.append(percentage(f"kept_{place}", "mass kept %"))
    columns += [number("memory", "more GiB", "{:.3g}"), text("limits", "limited by")]
    best_first = sorted(rows.values(), key=lambda row: (row["pays"], row["log_speed"]), reverse=True)
    frame = pd.DataFrame([row | {"limits": ", ".join(row["limits"]) or None} for row in best_first])
    return Table(frame, columns if rows else (), notes=notes)


def _identity(case: Case) -> str:
    """What makes two cases one candidate; labels may be shared."""
    return json.dumps([case.policy, case.role, case.policy_params], sort_keys=True)


def _notes(answers: Sequence[Answer], bounds: Bounds, models: Sequence[WholeComparison]) -> list[str]:
    """What has to be known to read the table; a line each."""
    notes = [
        f"verdicts in brackets: out of bounds, which are at most {100 * bounds.max_dropped:g} % of top-k pairs dropped "
        f"and at least {100 * bounds.min_retained:g} % of the top-k's score mass kept, which is no accuracy",
        "more GiB: memory of a rank for replicas of experts, in all layers",
    ]
    if any(one.comparison.comparison.device is not None for one in answers):
        notes.append(MODEL_CAVEAT)
    notes += _modelled_tails(answers)
    if any(_kept(result) > 1 + _ROUNDING for one in answers for result in one.comparison.policies):
        notes.append("mass kept above 100 %: the policy adds experts to the top-k")
    for one in answers:
        ceiling = one.comparison.of_role("ceiling")
        if ceiling is not None and ceiling.speedup is not None:
            where = f" at {_where(one.comparison.comparison)}" if len(answers) > 1 else ""
            notes.append(f"perfect balance{where}: {estimate_words(ceiling.speedup)}; dropping also saves work")
    if not models:
        return [*notes, "speedups are of one MoE layer: a whole model gains less (scope: model)"]
    return [
        *notes,
        *(f"no policy exceeds {one.most:.3f} end to end (Amdahl)" for one in models if one.most is not None),
    ]


def _modelled_tails(answers: Sequence[Answer]) -> list[str]:
    """Which candidates rest on scores that a recording lacks."""
    found: dict[str, list[str]] = {}
    for one in answers:
        tail = one.comparison.comparison.workload.tail_model
        looking = [result.case.label for result in one.comparison.policies if result.case.looks_past_top_k]
        if tail is not None and looking:
            found.setdefault(tail, []).extend(looking)
    return [
        f"scores past the recorded top-k are modelled ({tail} tail): {', '.join(dict.fromkeys(labels))} rest on them"
        for tail, labels in found.items()
    ]


def _kept(result: CaseResult) -> float:
    return 0.0 if result.fidelity is None else result.fidelity.retained_mass


def _assumed(run: Run, comparisons: Sequence[ComparisonResult], by_default: Sequence[str]) -> str:
    """How the numbers came about, on what, and whose skew they have; one line."""
    facts = [one.comparison for one in comparisons]
    how = mode_words(run, facts[0])
    on = dict.fromkeys(device_words(run, one).partition(": ")[0] for one in facts)
    links = dict.fromkeys(one.links.partition(": ")[0] for one in facts if one.links is not None)
    models, skews = (list(dict.fromkeys(words)) for words in ([one.model for one in facts], map(_skew, facts)))
    if len(skews) > _MOST_NAMED:
        skews = [skews[0], f"{len(skews) - 2} more", skews[-1]]
    scales = dict.fromkeys(scale_words(one.scale) for one in facts if one.scale != 1)
    parts = [f"{how[0].upper()}{how[1:]}", " / ".join(models), *scales, *on, *links]
    assumed = "" if facts[0].workload.recording or facts[0].workload.skew else f", assumed, not {models[0]}'s own"
    default = f"; by default {', '.join(by_default)}" if by_default else ""
    return f"{', '.join(parts)}; {', '.join(skews)}{assumed}{default}."


def _skew(facts: Comparison) -> str:
    """Whose skew a comparison has."""
    workload = facts.workload
    if workload.recording is not None:
        recorded = workload.recording["model"]
        same = _plain(recorded) in _plain(facts.model) or _plain(facts.model) in _plain(recorded)
        return f"skew of {recorded}'s recording" + ("" if same else f", not {facts.model}'s")
    if workload.skew is not None:
        named = workload.skew
        not_its = f", not {facts.model}'s own" if named["basis"] == "assumed" else ""
        return f"{named['name']} skew ({named['basis']}: {named['source']}){not_its}"
    if "peak_load" not in workload.targets:
        return workload.description
    peak_load = workload.targets["peak_load"]
    return "unskewed traffic" if peak_load is None else f"peak load {peak_load:g}"


def _plain(name: str) -> str:
    """A model's name without its maker and its spelling."""
    return "".join(filter(str.isalnum, name.rpartition("/")[2].lower()))


def _where(facts: Comparison) -> str:
    """A comparison's place in the sweep, or its title where there is none."""
    if not facts.point:
        return facts.title
    if list(facts.point) == ["workload.peak_load"]:
        peak_load = facts.point["workload.peak_load"]
        return "unskewed traffic" if peak_load is None else f"peak load {peak_load:g}"
    return ", ".join(f"{key.rpartition('.')[2].replace('_', ' ')} {value}" for key, value in facts.point.items())


def _pick(run: Run, answers: Sequence[Answer]) -> str:
    """One sentence: what to use, and at which traffic."""
    parts = []
    for words, group in itertools.groupby(answers, _pick_words):
        places = [_where(one.comparison.comparison) for one in group]
        if len(places) > _MOST_NAMED:
            places = [f"{places[0]} to {places[-1]}"]
        parts.append(f"at {' and '.join(places)} {words}")
    return f"Pick{how_words(run, answers[0].comparison)}: {'; '.join(parts)}."


def _pick_words(one: Answer) -> str:
    if one.refusal:
        return f"inconclusive: {one.refusal}"
    if one.best is None:
        return _KEEP_NATIVE
    fidelity, extra = one.best.fidelity, one.best.case.extra_bytes_per_rank
    assert fidelity is not None
    cost = f"drops {percent(fidelity.dropped_share)} % and keeps {percent(fidelity.retained_mass)} % of the score mass"
    memory = "" if extra is None else f", {extra / 2**30:.3g} GiB more on each rank"
    return f"use {one.best.case.label}: {estimate_words(one.best.speedup)} x native, {cost}{memory}"


def _admits(bounds: Bounds, result: CaseResult) -> bool:
    assert result.fidelity is not None
    dropped, kept = result.fidelity.dropped_share, result.fidelity.retained_mass
    return dropped <= bounds.max_dropped + _ROUNDING and kept >= bounds.min_retained - _ROUNDING


def _speed(result: CaseResult) -> float:
    assert result.speedup is not None
    return result.speedup.median
