"""Hold emulated ranks against real ones: one table of both runs' speedups, and whether these are equivalent.

``validate`` runs a config twice on the same batches with the same routing. The emulated run sets its ranks side by side
itself and models what moves between them. The ratio of both speedups is taken batch by batch, as ``compare`` takes a
change between jobs; ``statistics.equivalence`` judges it. An error that all cases share cancels in a speedup, so both
runs' times stand beside it. A whole pass dilutes the error of its MoE layers, which therefore have rows of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from moe_ep_bench.analysis.cases import CASE, cases, comparisons, jobs, load, routing
from moe_ep_bench.analysis.columns import interval, milliseconds, number, percentage, text
from moe_ep_bench.analysis.compare import ALL, MOE, Times, times_of
from moe_ep_bench.analysis.notes import OVERSUBSCRIBED
from moe_ep_bench.analysis.origins import scale_words
from moe_ep_bench.analysis.reading import ResultsError
from moe_ep_bench.analysis.render import Table, render
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.files import atomic_path
from moe_ep_bench.results import ValidationDirectory
from moe_ep_bench.timing.statistics import equivalence, estimate_change, paired_ratios

_RUNS = ("real", "emulated")
# What names a case in both runs; ids differ, for they say how it was measured.
_KEY = ["comparison", "role", "policy", "policy_params", "quantity"]
_FACTS = ["label", "case_id", "status", "reason"]
_NUMBERS = ["median_ms", *(f"speedup_{end}" for end in ("median", "low", "high", "is_interval"))]
_CLAIMS = ("policy", "ceiling")  # native's own speedup claims nothing


class Validation(NamedTuple):
    """Both runs of a directory side by side.

    Attributes:
        cases: a row per case and ``quantity`` (all: the layer or the pass; MoE layers of a pass). Columns of either run
            end in ``_real`` and ``_emulated``; ``ratio_*`` is emulated over real speedup with its interval; ``verdict``
            is of policies and the ceiling; ``unmeasured`` says why a row has no numbers.
        notes: by title of the comparison, what its table needs to be read.
        margin: by which equivalent speedups differ at most.
    """

    cases: pd.DataFrame
    notes: dict[str, list[str]]
    margin: float


def load_validation(directory: Path) -> Validation:
    """Read both runs and set them against each other.

    Raises:
        ResultsError: one line: a file is missing or cannot be trusted, or one run has a case that the other lacks.
    """
    files = ValidationDirectory(directory)
    try:
        pairs, links, margin = files.read_pairs()
    except ValueError as error:
        raise ResultsError(str(error)) from None
    roots = {"real": files.real, "emulated": files.emulated}
    stores = {run: load(root, join_draws=False) for run, root in roots.items()}
    about = {run: comparisons(store).set_index("comparison_id") for run, store in stores.items()}
    ids = dict(zip(_RUNS, zip(*pairs, strict=True), strict=True))
    for run in _RUNS:
        if unknown := [name for name in ids[run] if name not in about[run].index]:
            raise ResultsError(f"{roots[run]}: holds no comparison {unknown[0]}, which {files.pairs} names")
    scope, other = (about[run]["scope"].iloc[0] for run in _RUNS)
    if scope != other:
        raise ResultsError(f"{roots['emulated']}: expected times of a {scope}, as in {roots['real']}; got {other}")
    titles = [about["real"].at[name, "title"] for name in ids["real"]]
    frames = {run: _rows(cases(stores[run]), dict(zip(ids[run], titles, strict=True))) for run in _RUNS}
    routed = ["dropped_share", "retained_mass"]
    rows = frames["real"].merge(frames["emulated"].drop(columns=routed), "left", _KEY, suffixes=("_real", "_emulated"))
    if len(lost := rows["label_real"][rows["case_id_emulated"].isna()]):
        raise ResultsError(f"the emulated run has no case {lost.iloc[0]}, which the real one has")
    times = {run: _by_id(times_of(store)) for run, store in stores.items()}
    loads = {run: _loads(store) for run, store in stores.items()}
    threads = [jobs(store)["environment"].iloc[-1].get("threads_per_rank") for store in stores.values()]
    notes, judged = {}, []
    for name, title in zip(ids["real"], titles, strict=True):
        group, facts = rows[rows["comparison"] == title], about["real"].loc[name]
        both = group[(group["quantity"] == ALL) & (group["status_real"] == "ok") & (group["status_emulated"] == "ok")]
        other = [
            row["label_real"]
            for row in both.to_dict("records")
            if not loads["real"][row["case_id_real"]].equals(loads["emulated"][row["case_id_emulated"]])
        ]
        reasons = [
            *([OVERSUBSCRIBED] if facts["oversubscribed"] else []),
            *([_THREADS.format(*threads)] if threads[0] != threads[1] else []),
            *([f"routing is not the same in both runs: {', '.join(other)}"] if other else []),
        ]
        ranks = f"real ranks: {facts['ran_on']}, {facts['dtype']}, {scale_words(facts['scale'])}"
        notes[title] = [ranks, f"links: {links}", *(f"warning: not comparable: {reason}" for reason in reasons)]
        judged.append(_judged(group, times, margin, is_sound=not reasons))
    joined = pd.concat(judged, ignore_index=True).drop(columns="label_emulated")
    return Validation(joined.rename(columns={"label_real": "label"}), notes, margin)


_THREADS = "each real rank computed with {} thread(s), the emulated one with {}"


def _rows(frame: pd.DataFrame, titles: dict[str, str]) -> pd.DataFrame:
    """A row per case and quantity of one run; ``comparison`` is the real run's title."""
    frame = frame[frame["comparison_id"].isin(titles)].assign(quantity=ALL)
    if frame["scope"].eq("model").any():
        moe = {"moe_ms": "median_ms", **{f"moe_{name}": name for name in _NUMBERS[1:]}}
        layers = frame[frame["role"].isin(_CLAIMS)].drop(columns=_NUMBERS).rename(columns=moe).assign(quantity=MOE)
        frame = pd.concat([frame, layers], ignore_index=True)
    columns = [*_KEY, *_FACTS, *_NUMBERS, "dropped_share", "retained_mass"]
    return frame.assign(comparison=frame["comparison_id"].map(titles))[columns]


def _by_id(times: Times) -> dict[str, dict[str, pd.Series]]:
    return {case_id: of_case for (*_, case_id), of_case in times.items()}


def _loads(store: Store) -> dict[str, pd.Series]:
    """Of each case, how many pairs experts got and ranks sent, by batch and layer."""
    rows = routing(store)
    words = rows["load_E"].map(tuple) + rows["pairs_RR"].map(tuple)
    rows = rows.assign(loads=words, layer=rows["layer"].fillna(-1)).sort_values(["batch", "layer"])
    return {case_id: group["loads"].reset_index(drop=True) for case_id, group in rows.groupby(CASE[-1])}


def _judged(
    rows: pd.DataFrame, times: dict[str, dict[str, dict[str, pd.Series]]], margin: float, *, is_sound: bool
) -> pd.DataFrame:
    """The rows of a comparison with the ratio of both speedups, verdicts, and why a row has no numbers."""
    natives = rows[rows["role"] == "baseline"].iloc[:1].to_dict("records")
    found = []
    for row in rows.to_dict("records"):
        lost = next((run for run in _RUNS if row[f"status_{run}"] != "ok"), None)
        why = lost and f"{lost}: {row[f'status_{lost}']}: {row[f'reason_{lost}'] or 'no reason recorded'}"
        is_claim, speedup = row["role"] in _CLAIMS, []
        for run in _RUNS if natives and is_claim else ():
            native_us, case_us = (
                times[run].get(one[f"case_id_{run}"], {}).get(row["quantity"]) for one in (natives[0], row)
            )
            speedup += [] if native_us is None or case_us is None else [paired_ratios(native_us, case_us)]
        ratio = estimate_change(*speedup) if len(speedup) == 2 and all(map(len, speedup)) else None
        found.append(
            {f"ratio_{end}": getattr(ratio, end, None) for end in ("median", "low", "high", "is_interval")}
            | {"verdict": equivalence(ratio if is_sound else None, margin) if is_claim else None, "unmeasured": why}
        )
    numbers = pd.DataFrame(found, rows.index)
    return rows.join(numbers.astype({f"ratio_{end}": float for end in ("median", "low", "high")}))


# ---- the table -------------------------------------------------------------------------------------------------------

_COLUMNS = (
    text("label", "policy"),
    text("quantity", "of"),
    number("median_ms_real", "measured ms", milliseconds),
    number("median_ms_emulated", "emulated ms", milliseconds),
    number("speedup_median_real", "measured speedup"),
    number("speedup_median_emulated", "emulated"),
    interval("ratio", "emulated / measured"),
    text("verdict"),
    percentage("dropped_share", "dropped"),
    percentage("retained_mass", "mass kept"),
)


def validation_tables(validation: Validation) -> list[Table]:
    """A table per comparison: both runs' times and speedups, and the verdicts."""
    cases = validation.cases
    cases = cases.assign(verdict=cases["verdict"].fillna(cases["role"].map({"baseline": "native", "noise": "floor"})))
    has_layers = (cases["quantity"] == MOE).any()
    columns = [column for column in _COLUMNS if has_layers or column.header != "of"]
    rule = (
        f"equivalent: the whole 95 % interval of emulated over measured speedup lies within {100 * validation.margin:g}"
        " % (two one-sided tests at 2.5 %); different: all of it lies outside; the ratio is taken batch by batch"
    )
    return [
        Table(cases[cases["comparison"] == title], columns, title, [*notes, rule], "unmeasured")
        for title, notes in validation.notes.items()
    ]


def verdict_line(validation: Validation) -> str:
    """``k of n speedups are equivalent within m %; largest difference x %``; of MoE layers alone the same."""
    claims, parts = validation.cases[validation.cases["verdict"].notna()], []
    for quantity, rows in claims.groupby("quantity", sort=False):
        counts = rows["verdict"].value_counts()
        of = "speedups" if quantity == ALL else f"speedups of {quantity} alone"
        line = f"{counts.get('equivalent', 0)} of {len(rows)} {of} are equivalent within {100 * validation.margin:g} %"
        others = [f"{counts[verdict]} {verdict}" for verdict in ("different", "inconclusive") if verdict in counts]
        largest = (rows["ratio_median"] - 1).abs().max()
        line += f" ({', '.join(others)})" if others else ""
        parts.append(line + ("" if pd.isna(largest) else f", largest difference {100 * largest:.1f} %"))
    return "; ".join(parts)


def validation_text(validation: Validation) -> str:
    """The tables; the last line says how many speedups are equivalent."""
    return f"{render(validation_tables(validation), 'text')}\n\n{verdict_line(validation)}"


def write_validation(directory: Path) -> str:
    """Write ``validation.txt`` and ``validation.csv``; return the text."""
    files, validation = ValidationDirectory(directory), load_validation(directory)
    shown = validation_text(validation)
    for path, content in ((files.text, f"{shown}\n"), (files.table, render([Table(validation.cases, ())], "csv"))):
        with atomic_path(path) as temporary:
            temporary.write_text(content)
    return shown
