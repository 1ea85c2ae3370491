"""Breakdown iterations as a trace for Perfetto or chrome://tracing: one process per rank, phases as bars.

Records hold how long each phase took on each rank, not when it began. The starts are reconstructed: all ranks begin an
iteration together (an all-reduce aligns them before the start is stamped), and a rank's phases follow one another in
the layer's order, ``PHASES``, without gaps. So every bar is as long as measured, but phases that the layer enters
several times (permutation, shared experts, metadata) stand once, and the ends of a wait, one moment on all ranks, come
to lie apart by what of these really ran later: ``meeting_spread_us`` beside each iteration. Time that no phase covers
stands last. Of a whole model the bar of a pass holds one for every layer, and that its phases: norms and residual
additions first, which stand once, then attention, then the MoE layer's own or the dense layer.

The format is Chrome's trace event format: complete events (``ph`` X) with ``ts`` and ``dur`` in microseconds. Phases
have the names that ``--profile`` gives them, where what is real is the order too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.choice import ITERATION, IterationChoice
from moe_ep_bench.analysis.load import Case, ResultsError, Run
from moe_ep_bench.analysis.words import mode_words
from moe_ep_bench.schema import LAYER_PHASES, MOE_REST, TOTAL, UNACCOUNTED, WAITING_PHASES

# Between iterations, so that they can be told apart at a glance.
_GAP_SHARE = 0.05
# Reserved colours of chrome://tracing; Perfetto colours by name, and finds waiting by its category.
_COLOURS = {"waiting": "grey", "unaccounted": "white"}
_HOW = (
    "Durations are measured; starts are reconstructed: ranks begin each iteration together, and phases follow one "
    "another in the layer's order without gaps. Phases that the layer enters several times (permute, metadata, shared) "
    "stand once. meeting_spread_us: how far apart the ends of one wait, one moment in truth, come to lie that way."
)
_HOW_WHOLE = (
    "Whole models: a pass holds its layers one after the other, a layer its phases; norms and residual additions "
    "(rest) stand once in each layer, before all others."
)
_HOW_EMULATED = (
    "Emulated: ranks ran one after another on one device; waiting, dispatch and combine are computed from a model of "
    "the links. Starts are reconstructed likewise."
)
# Of a pass, what is in no layer: before and after all of them.
_BEFORE, _AFTER = ("embedding",), ("rest", "output")
_IN_LAYER = ("rest", "attention", "dense", *LAYER_PHASES, MOE_REST)


def perfetto_trace(run: Run, cases: Sequence[Case], choices: Sequence[IterationChoice]) -> str:
    """The trace of these cases' iterations, one after the other, as JSON; ValueError where there are no such ones."""
    events: list[dict[str, Any]] = []
    begin_us = 0.0
    for case in cases:
        total_us, bars_us = _times(run, case)
        layer_us = total_us.groupby(level=ITERATION).max()
        for key in dict.fromkeys(key for choice in choices for key in choice.of(layer_us, case.label)):
            of_ranks_us = total_us.xs(key, level=ITERATION)
            events += _iteration(run, case, key, of_ranks_us, bars_us.xs(key, level=ITERATION), begin_us)
            begin_us += float(of_ranks_us.max()) * (1 + _GAP_SHARE)
    how = [_HOW_EMULATED] * (run.mode == "emulated") + [_HOW] + [_HOW_WHOLE] * (run.scope == "model")
    trace = {
        "traceEvents": [*_processes(sorted({bar["pid"] for bar in events}), run.scope), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": "moe-ep-bench show",
            "mode": run.mode,
            "scope": run.scope,
            "device": run.device_name,
            "run_id": run.run_id,
            "how": " ".join(how),
        },
    }
    return json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"


def _times(run: Run, case: Case) -> tuple[pd.Series, pd.DataFrame]:
    """The total, and a column for each bar in the order of time: its layer (-1 = none) and its phase.

    A row per (launch, batch, iteration, rank); a phase that did not occur took no time.
    """
    key = [*ITERATION, "rank"]
    rows = case.timings[case.timings["kind"] == "breakdown"]
    if rows.empty:
        raise ResultsError(f"{run.directory}: {case.label}: no breakdown iterations; expected some to draw phases of")
    times_us = rows.pivot(index=key, columns="phase", values="time_us").fillna(0.0).sort_index()
    if case.layers is None:
        bars = [(-1, phase) for phase in LAYER_PHASES]
        rows = rows.assign(layer=-1)
    else:
        rows = case.layers.assign(layer=case.layers["layer"].fillna(-1).astype(int))
        layers = sorted(set(rows["layer"]) - {-1})
        bars = [(-1, phase) for phase in _BEFORE]
        bars += [*itertools.product(layers, _IN_LAYER), *((-1, phase) for phase in _AFTER)]
    bars_us = rows.pivot(index=key, columns=["layer", "phase"], values="time_us")
    bars_us = bars_us.reindex(index=times_us.index, columns=pd.MultiIndex.from_tuples(bars)).fillna(0.0)
    bars_us[-1, UNACCOUNTED] = times_us.get(UNACCOUNTED, 0.0)
    return times_us[TOTAL], bars_us


def _iteration(
    run: Run, case: Case, key: tuple[int, int, int], total_us: pd.Series, bars_us: pd.DataFrame, begin_us: float
) -> list[dict[str, Any]]:
    """The bars of one iteration: on every rank one for the whole, inside it each layer's of a model, and the phases."""
    facts = run.comparisons[case.comparison_id]
    about = {
        "case_id": case.case_id,
        "comparison": facts.title,
        "how": mode_words(run, facts),
        **{name: int(number) for name, number in zip(ITERATION, key, strict=True)},
        "layer_us" if facts.whole is None else "pass_us": _rounded(total_us.max()),
        "slowest_rank": int(total_us.idxmax()),
        "meeting_spread_us": _rounded(_meeting_spread_us(bars_us)),
    }
    events = []
    for rank, row in bars_us.iterrows():
        name = f"{case.label}, batch {key[1]}, iteration {key[2]}"
        events.append(_bar(name, "iteration", int(rank), begin_us, total_us[rank]) | {"args": about})
        now_us = begin_us
        for layer, group in itertools.groupby(row[row > 0].items(), key=lambda item: item[0][0]):
            phases = [(phase, time_us) for (_, phase), time_us in group]
            if layer >= 0:
                events.append(_bar(f"layer {layer}", "layer", int(rank), now_us, sum(time for _, time in phases)))
            for phase, time_us in phases:
                waits = "waiting" if phase in WAITING_PHASES else "phase"
                category = "unaccounted" if phase == UNACCOUNTED else waits
                events.append(_bar(phase, category, int(rank), now_us, time_us))
                now_us += time_us
    return events


def _meeting_spread_us(bars_us: pd.DataFrame) -> float:
    """Of the waits that occurred, the widest spread of their reconstructed ends over ranks."""
    ends_us = bars_us.cumsum(axis=1)
    waits = ends_us.loc[:, [bar[1] in WAITING_PHASES and (bars_us[bar] > 0).any() for bar in bars_us.columns]]
    return float((waits.max() - waits.min()).max()) if waits.shape[1] else 0.0


def _bar(name: str, category: str, rank: int, start_us: float, duration_us: float) -> dict[str, Any]:
    start, end = _rounded(start_us), _rounded(start_us + duration_us)
    bar = {"name": name, "cat": category, "ph": "X", "ts": start, "dur": _rounded(end - start), "pid": rank, "tid": 0}
    return bar | ({"cname": _COLOURS[category]} if category in _COLOURS else {})


def _rounded(time_us: float) -> float:
    """Nanoseconds, which is what Perfetto keeps: bars inside one another stay inside."""
    return round(float(time_us), 3)


def _processes(ranks: Iterable[int], scope: str) -> list[dict[str, Any]]:
    """The names of all tracks."""
    return [
        {"name": what, "ph": "M", "ts": 0, "pid": rank, "tid": 0, "args": args}
        for rank in ranks
        for what, args in (
            ("process_name", {"name": f"rank {rank}"}),
            ("process_sort_index", {"sort_index": rank}),
            ("thread_name", {"name": "layer" if scope == "layer" else "pass"}),
        )
    ]
