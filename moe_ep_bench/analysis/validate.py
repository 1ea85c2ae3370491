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

from moe_ep_bench.analysis.compare import ALL, MOE, times_of
from moe_ep_bench.analysis.frames import speedups
from moe_ep_bench.analysis.load import Case, ResultsError, Run, is_whole, load_run
from moe_ep_bench.analysis.parts import read_jobs
from moe_ep_bench.analysis.render import Table, interval, milliseconds, number, percentage, render, text
from moe_ep_bench.analysis.words import OVERSUBSCRIBED, hardware_words, scale_words
from moe_ep_bench.files import atomic_path
from moe_ep_bench.results import ValidationDirectory
from moe_ep_bench.timing.statistics import equivalence, estimate_change, paired_ratios

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
        real: the run on real ranks.
    """

    cases: pd.DataFrame
    notes: dict[str, list[str]]
    margin: float
    real: Run


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
    runs = real, emulated = [load_run(root, whole=is_whole(files.real)) for root in (files.real, files.emulated)]
    for run, ids in zip(runs, zip(*pairs, strict=True), strict=True):
        if unknown := [name for name in ids if name not in run.comparisons]:
            raise ResultsError(f"{run.directory}: holds no comparison {unknown[0]}, which {files.pairs} names")
    titles = [real.comparisons[name].title for name, _ in pairs]
    frames = [
        _rows(run, dict(zip(ids, titles, strict=True))) for run, ids in zip(runs, zip(*pairs, strict=True), strict=True)
    ]
    routing = ["dropped_share", "retained_mass"]
    rows = frames[0].merge(frames[1].drop(columns=routing), "left", _KEY, suffixes=("_real", "_emulated"))
    if len(lost := rows["label_real"][rows["case_id_emulated"].isna()]):
        raise ResultsError(f"the emulated run has no case {lost.iloc[0]}, which the real one has")
    by_id = {case.case_id: case for run in runs for case in run.cases}
    notes, judged = {}, []
    for (name, _), title in zip(pairs, titles, strict=True):
        group = rows[rows["comparison"] == title].copy()
        reasons = _unsound(real, emulated, name, group, by_id)
        facts = real.comparisons[name]
        about = f"real ranks: {hardware_words(real, facts)}, {facts.dtype}, {scale_words(facts.scale)}"
        notes[title] = [about, f"links: {links}", *(f"warning: not comparable: {reason}" for reason in reasons)]
        judged.append(_judged(group, by_id, margin, is_sound=not reasons))
    cases = pd.concat(judged, ignore_index=True).drop(columns="label_emulated").rename(columns={"label_real": "label"})
    return Validation(cases, notes, margin, real)


def _rows(run: Run, titles: dict[str, str]) -> pd.DataFrame:
    """A row per case and quantity of one run; ``comparison`` is the real run's title."""
    frame = speedups(run)
    frame = frame[frame["comparison_id"].isin(titles)].assign(quantity=ALL)
    if run.scope == "model":
        moe = {"moe_ms": "median_ms", **{f"moe_{name}": name for name in _NUMBERS[1:]}}
        layers = frame[frame["role"].isin(_CLAIMS)].drop(columns=_NUMBERS).rename(columns=moe).assign(quantity=MOE)
        frame = pd.concat([frame, layers], ignore_index=True)
    columns = [*_KEY, *_FACTS, *_NUMBERS, "dropped_share", "retained_mass"]
    return frame.assign(comparison=frame["comparison_id"].map(titles))[columns]


def _judged(rows: pd.DataFrame, by_id: dict[str, Case], margin: float, *, is_sound: bool) -> pd.DataFrame:
    """The rows of a comparison with the ratio of both speedups, verdicts, and why a row has no numbers."""
    is_whole = MOE in set(rows["quantity"])
    natives = rows[rows["role"] == "baseline"].iloc[:1].to_dict("records")
    found = []
    for row in rows.to_dict("records"):
        lost = next((run for run in ("real", "emulated") if row[f"status_{run}"] != "ok"), None)
        why = lost and f"{lost}: {row[f'status_{lost}']}: {row[f'reason_{lost}'] or 'no reason recorded'}"
        speedup = []
        for run in ("real", "emulated") if natives and row["role"] in _CLAIMS else ():
            native, case = (by_id[one[f"case_id_{run}"]] for one in (natives[0], row))
            if native.is_ok and case.is_ok:
                native_us, case_us = (times_of(one, is_whole).get(row["quantity"]) for one in (native, case))
                speedup += [] if native_us is None or case_us is None else [paired_ratios(native_us, case_us)]
        ratio = estimate_change(*speedup) if len(speedup) == 2 and all(map(len, speedup)) else None
        found.append(
            {f"ratio_{end}": getattr(ratio, end, None) for end in ("median", "low", "high", "is_interval")}
            | {"verdict": equivalence(ratio if is_sound else None, margin) if row["role"] in _CLAIMS else None}
            | {"unmeasured": why}
        )
    numbers = pd.DataFrame(found, rows.index)
    return rows.join(numbers.astype({f"ratio_{end}": float for end in ("median", "low", "high")}))


def _unsound(real: Run, emulated: Run, comparison_id: str, rows: pd.DataFrame, by_id: dict[str, Case]) -> list[str]:
    """Why the runs of a comparison may not be compared at all."""
    reasons = [OVERSUBSCRIBED] if real.comparisons[comparison_id].oversubscribed else []
    threads = [read_jobs(run.directory).environment.get("threads_per_rank") for run in (real, emulated)]
    if threads[0] != threads[1]:
        reasons.append(f"each real rank computed with {threads[0]} thread(s), the emulated one with {threads[1]}")
    both = rows[(rows["quantity"] == ALL) & (rows["status_real"] == "ok") & (rows["status_emulated"] == "ok")]
    other = [
        row["label_real"]
        for row in both.to_dict("records")
        if not _loads(by_id[row["case_id_real"]]).equals(_loads(by_id[row["case_id_emulated"]]))
    ]
    return [*reasons, *([f"routing is not the same in both runs: {', '.join(other)}"] if other else [])]


def _loads(case: Case) -> pd.Series:
    """How many pairs every rank sent every expert, of every batch and layer."""
    keys = [key for key in ("batch", "layer", "rank") if key in case.routing]
    return case.routing.set_index(keys)["load_E"].sort_index().map(tuple)


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
    percentage("dropped_share", "dropped %"),
    percentage("retained_mass", "mass kept %"),
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
