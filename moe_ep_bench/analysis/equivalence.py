"""Hold emulated ranks against real ones: one table of both runs' speedups, and whether these are equivalent.

``validate`` runs a config twice on the same batches with the same routing. The emulated run sets its ranks side by side
itself and models what moves between them. The ratio of both speedups is taken batch by batch, as ``compare`` takes a
change between jobs; ``statistics.equivalence`` judges it. An error that all cases share cancels in a speedup, so both
runs' times are in the table too. A whole pass dilutes the error of its MoE layers, which therefore have rows of their
own.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from moe_ep_bench.analysis.cases import ESTIMATE, cases, comparisons, load, routing, timings, values_of
from moe_ep_bench.analysis.columns import (
    COLUMNS,
    COSTS,
    Table,
    interval,
    lost_columns,
    milliseconds,
    number,
    render,
    text,
)
from moe_ep_bench.analysis.compare import side_by_side
from moe_ep_bench.analysis.notes import OVERSUBSCRIBED, WARNING
from moe_ep_bench.analysis.store import Store, jobs, read_document
from moe_ep_bench.facts import Pairs
from moe_ep_bench.facts.words import describe_links
from moe_ep_bench.files import write_text
from moe_ep_bench.results import ValidationDirectory
from moe_ep_bench.schema import ALL, MOE
from moe_ep_bench.timing.statistics import equivalence

_RUNS = {"real": "the real run", "emulated": "the emulated run"}
# Columns that name a case in both runs; ids differ, for they say how it was measured.
_KEY = ["comparison", "role", "policy", "policy_params", "quantity"]
_NUMBERS = ["median_ms", *(f"speedup_{end}" for end in ESTIMATE)]
_OF_EITHER = ["case_id", "status", "reason", *_NUMBERS, "oversubscribed", "threads"]
_CLAIMS = ("policy", "balanced")  # native's own speedup claims nothing


class Validation(NamedTuple):
    """Both runs of a directory side by side.

    Attributes:
        cases: a row per case and ``quantity`` (all: the layer or the pass; MoE layers of a pass). Columns of either run
            end in ``_real`` and ``_emulated``; ``ratio_*`` is emulated over real speedup with its interval; ``verdict``
            is of policies and the balanced case; ``why`` the runs are not comparable.
        notes: what the table needs to be read.
        margin: by which equivalent speedups differ at most.
    """

    cases: pd.DataFrame
    notes: list[str]
    margin: float


def load_validation(directory: Path) -> Validation:
    """Read both runs and set them against each other.

    Raises:
        ResultsError: one line: a file is missing or cannot be trusted.
    """
    files = ValidationDirectory(directory)
    written = read_document(files.pairs, Pairs)
    pairs = written.pairs
    stores = [load(root, join_draws=False) for root in (files.real, files.emulated)]
    about = comparisons(stores[0]).set_index("comparison_id")
    titles = {name: about.at[pair[0], "title"] for pair in pairs for name in pair}
    frames, iterations = zip(*(_rows_and_speedups(store, titles) for store in stores), strict=True)
    numbers = [*_OF_EITHER, "loads"]
    rows = side_by_side(frames, iterations, _RUNS, _KEY, ["label", *COSTS], numbers, "speedup")
    rows = rows[rows["case_id_real"].notna()]
    why = {title: _incomparable(group) for title, group in rows.groupby("comparison")}
    verdicts = [
        equivalence(None if why[title] else ratio, written.margin) if role in _CLAIMS else None
        for ratio, title, role in zip(rows["change"], rows["comparison"], rows["role"], strict=True)
    ]
    ends = pd.DataFrame([values_of("ratio_", ratio, ESTIMATE) for ratio in rows["change"]], rows.index)
    rows = rows.drop(columns=["loads_real", "loads_emulated", "change"]).join(ends)
    ran = about.loc[[first for first, _ in pairs]]
    notes = [f"real ranks: {words}" for words in (ran["ran_on"] + ", " + ran["dtype"]).unique()]
    notes += [f"links: {describe_links(written.links, written.exchange)}"]
    notes += [f"{WARNING}not comparable: {words}" for words in dict.fromkeys(why.values()) if words]
    return Validation(rows.assign(why=rows["comparison"].map(why), verdict=verdicts), notes, written.margin)


def _rows_and_speedups(store: Store, titles: dict[str, str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row per case and quantity of one run, and per iteration of its claims; ``comparison`` is the real title."""
    pairs = routing(store).sort_values(["batch", "layer"], na_position="first")
    loads = (pairs["load_E"].map(tuple) + pairs["pairs_RR"].map(tuple)).groupby(pairs["case_id"]).agg(tuple)
    frame = cases(store).assign(
        comparison=lambda rows: rows["comparison_id"].map(titles),
        quantity=ALL,
        loads=lambda rows: rows["case_id"].map(loads),
        threads=jobs(store)["environment"].iloc[-1].get("threads_per_rank"),
    )
    frame = frame[frame["comparison"].notna()]
    claims = frame[frame["role"].isin(_CLAIMS)]
    if frame["scope"].eq("model").any():
        moe = {"moe_ms": "median_ms", **{f"moe_{name}": name for name in _NUMBERS[1:]}}
        frame = pd.concat([frame, claims.drop(columns=_NUMBERS).rename(columns=moe).assign(quantity=MOE)])
    return frame, timings(store).merge(claims[["case_id", "comparison", "policy", "policy_params"]], on="case_id")


def _incomparable(rows: pd.DataFrame) -> str | None:
    """Why the runs of a comparison are not comparable; None where they are."""
    first, measured = rows.iloc[0], rows[(rows["status_real"] == "ok") & (rows["status_emulated"] == "ok")]
    rerouted = measured["label"][measured["loads_real"] != measured["loads_emulated"]].unique()
    if first["oversubscribed_real"]:
        return OVERSUBSCRIBED
    if first["threads_real"] != first["threads_emulated"]:
        threads = f"{first['threads_real']} thread(s), the emulated one with {first['threads_emulated']}"
        return f"each real rank computed with {threads}"
    return f"routing is not the same in both runs: {', '.join(rerouted)}" if len(rerouted) else None


# ---- the table -------------------------------------------------------------------------------------------------------

_COLUMNS = (
    text("label", "policy"),
    text("comparison"),
    text("quantity", "of"),
    number("median_ms_real", "measured ms", milliseconds),
    number("median_ms_emulated", "emulated ms", milliseconds),
    number("speedup_median_real", "measured speedup"),
    number("speedup_median_emulated", "emulated"),
    interval("ratio", "emulated / measured"),
    text("verdict"),
)


def validation_table(validation: Validation) -> Table:
    """Both runs' times and speedups, and the verdicts."""
    rows = validation.cases
    verdicts = rows["verdict"].fillna(rows["role"].map({"baseline": "native", "noise": "floor"}))
    shown = rows.assign(verdict=verdicts)
    alike = {name for name in ("comparison", "quantity") if rows[name].nunique() == 1}
    rule = (
        f"equivalent: the whole 95 % interval of emulated over measured speedup lies within {100 * validation.margin:g}"
        " % (two one-sided tests at 2.5 %); different: all of it lies outside; the ratio is taken batch by batch"
    )
    columns = [
        *(column for column in _COLUMNS if column.name not in alike),
        *lost_columns(rows),
        COLUMNS["retained_mass"],
    ]
    title = rows["comparison"].iloc[0] if "comparison" in alike else "Emulated and real ranks"
    return Table(shown, columns, title, [*validation.notes, rule], "not_compared")


def verdict_line(validation: Validation) -> str:
    """``k of n speedups are equivalent within m %; largest difference x %``; of MoE layers alone the same."""
    claims, parts = validation.cases[validation.cases["verdict"].notna()], []
    for quantity, rows in claims.groupby("quantity", sort=False):
        counts = rows["verdict"].value_counts()
        of = "speedups" if quantity == ALL else f"speedups of {quantity} alone"
        line = f"{counts.get('equivalent', 0)} of {len(rows)} {of} are equivalent within {100 * validation.margin:g} %"
        others = [f"{counts[verdict]} {verdict}" for verdict in ("different", "inconclusive") if verdict in counts]
        largest = (rows["ratio_median"].astype(float) - 1).abs().max()
        line += f" ({', '.join(others)})" if others else ""
        parts.append(line + ("" if pd.isna(largest) else f", largest difference {100 * largest:.1f} %"))
    return "; ".join(parts)


def validation_text(validation: Validation) -> str:
    """The table; the last line says how many speedups are equivalent."""
    return f"{render([validation_table(validation)], 'text')}\n\n{verdict_line(validation)}"


def write_validation(directory: Path) -> str:
    """Write ``validation.txt`` and ``validation.csv``; return the text."""
    files, validation = ValidationDirectory(directory), load_validation(directory)
    shown = validation_text(validation)
    write_text(files.text, f"{shown}\n")
    write_text(files.table, render([Table(validation.cases.drop(columns="not_compared"), ())], "csv"))
    return shown
