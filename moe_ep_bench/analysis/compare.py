"""Set two runs of the same cases side by side: a gate for CI (``compare``), or a margin (``validate``).

Two jobs share no moment, and no interval of a time shows that the whole machine was slower. Native is the control: its
pairs with a case ran moments apart in each job, so speedups over native are set against each other, batch by batch;
``timing.statistics`` says how. Cases are paired by what defines them.

``compare`` asks of two jobs whether a policy became slower. Of a case the *change* is that of its time over native's;
of native, which has none, that of its time, the machine's or that of code that all cases share. It is held against the
noise floors of both runs, by which native differs from itself. Another driver, package or clock moves native too, so it
takes no verdict away; what differs is named. The gate asks of every policy: is it surely slower than the limit allows?
``slower`` needs a verdict beyond noise and a change beyond the limit. A case is *open* where the data can neither show
nor exclude such a change: too few batches, a noise floor wider than the limit. Open cases pass with a warning, for a
gate that fails on noise is soon switched off; ``--strict`` makes them, and a native that changed, a status of their
own.

``validate`` asks whether emulated ranks have the speedups of real ones, on the same batches with the same routing: the
ratio of both is held against a margin (``statistics.equivalence``). An error that all cases share cancels in a speedup,
so both runs' times are in the table too. A whole pass dilutes the error of its MoE layers, which therefore have rows of
their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from moe_ep_bench.analysis import notes as said
from moe_ep_bench.analysis.cases import ESTIMATE, cases, comparisons, load, load_timed, routing, timings, values_of
from moe_ep_bench.analysis.columns import (
    COLUMNS,
    COSTS,
    Column,
    Row,
    Table,
    ends,
    interval,
    lost_columns,
    milliseconds,
    missing,
    number,
    percentage,
    render,
    text,
)
from moe_ep_bench.analysis.store import ITERATION, Store, jobs
from moe_ep_bench.facts import NOT_EXECUTED, Pairs, TimedFacts
from moe_ep_bench.facts.words import Line, describe_links, device_words
from moe_ep_bench.files import write_text
from moe_ep_bench.results import ResultsError, ValidationDirectory, read_document
from moe_ep_bench.schema import ALL, MOE
from moe_ep_bench.timing.statistics import (
    BELOW_MODEL,
    Estimate,
    NoiseFloor,
    equivalence,
    estimate_change,
    joint_floor,
    judge,
)


class Sides(NamedTuple):
    """Which columns two runs have side by side.

    Attributes:
        runs: what each run is called, by the word that ends its columns.
        key: columns that name a case in both.
        about: what a case is, as the first run that has it says.
        numbers: of each run.
        shown: columns of a table, ahead of what policies cost.
    """

    runs: Mapping[str, str]
    key: list[str]
    about: list[str]
    numbers: list[str]
    shown: Sequence[Column]


class Change(NamedTuple):
    """Cases of two runs, in common or of one alone.

    Attributes:
        cases: a row per case of either run in reading order, of ``validate`` per case and ``quantity`` (all: the layer
            or the pass; MoE layers of a pass): what it is; numbers of either run, ending in ``_base`` and ``_new``, or
            ``_real`` and ``_emulated``; ``not_compared``, why; ``change_*`` = NEW / BASE, or ``ratio_*``, emulated over
            real speedup, with its interval; ``verdict``, and ``why`` there is none. ``compare`` has ``floor`` too, by
            which noise alone may change a ratio, and ``outcome``, the gate's answer.
        tables: the rows as people read them.
        heading: above the tables.
        answer: the lines below them.
        limit: of the gate; None = there is none.
    """

    cases: pd.DataFrame
    tables: list[Table]
    heading: list[str]
    answer: list[Line]
    limit: float | None = None


def change_text(change: Change) -> str:
    """The tables, and the answer last."""
    parts = ("\n".join(change.heading), render(change.tables, "text"), "\n".join(map(str, change.answer)))
    return "\n\n".join(filter(None, parts))


# ---- two runs side by side -------------------------------------------------------------------------------------------


def _side_by_side(sides: Sides, frames: Sequence[pd.DataFrame], ratios: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """A row per key of either of two runs, and the one join of two jobs.

    Args:
        frames: of each run, rows of ``cases``, one of each key.
        ratios: of each run, ``ratio`` by key and iteration; null where there is nothing to compare.

    Returns:
        ``about`` the key; ``numbers`` of each run; ``not_compared``, why a row has no numbers of some run; ``change``,
        the second ratio over the first, batch by batch (``statistics.estimate_change``), None where no batch is common
        or one has no value above 0.
    """
    rows = pd.concat(frames)[[*sides.key, *sides.about]].drop_duplicates(sides.key, ignore_index=True)
    for run, frame in zip(sides.runs, frames, strict=True):
        rows = rows.join(frame.set_index(sides.key).reindex(columns=sides.numbers).add_suffix(f"_{run}"), on=sides.key)
    old, now = (
        {name: of.set_index(ITERATION)["ratio"].dropna() for name, of in frame.groupby(sides.key, sort=False)}
        for frame in ratios
    )
    names = list(rows[sides.key].itertuples(index=False, name=None))
    changes = [estimate_change(old[name], now[name]) if name in old and name in now else None for name in names]
    lost = [_lost_words(row, sides.runs) for row in rows.to_dict("records")]
    return rows.join(pd.DataFrame({"not_compared": lost, "change": changes}, rows.index, dtype=object))


def _lost_words(row: Row, runs: Mapping[str, str]) -> str | None:
    """Why a row has no numbers of some run, by what runs are called; None where it has all."""
    lost = []
    for run, name in runs.items():
        if missing(status := row[f"status_{run}"]):
            return f"only in {next(other for key, other in runs.items() if key != run)}"
        if status != "ok":
            lost.append(f"{status} in {name}: {' '.join(row[f'reason_{run}'].split())}")
    return "; ".join(lost) or None


# ---- compare ---------------------------------------------------------------------------------------------------------

# Conditions that may move times, of a job's ``environment`` and of a comparison's facts.
_CONDITIONS = (
    *("device_name", "driver", "cpu_name", "num_cores", "threads_per_rank", "python", "torch", "cuda", "nccl"),
    *("triton", "megatron_core", "transformer_engine", "apex", "deep_ep", "variables", "backend", "experts", "permute"),
    *("kernel", "cuda_graph", "oversubscribed", "links", "device", "command", "url"),
)
# The verdict on a time, by that of ``judge`` on the ratio.
_WORDS = {"faster": "slower", "slower": "faster"}
# Roles of policies, not of controls: these decide ``--fail-over``.
_JUDGED_ROLES = ("policy", "replication")
# A share of pairs or score mass that differs by less is rounding.
_ROUTING_STEP = 5e-4


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"


_JOBS = Sides(
    runs={"base": "BASE", "new": "NEW"},
    key=["case_id"],
    about=["comparison_id", "title", "how", "ran_on", "label", "policy", "role"],
    numbers=[
        *("status", "reason", *COSTS, "median_ms", "speedup_median"),
        *("floor_low", "floor_high", "oversubscribed", "origin", "other_length_share"),
    ],
    shown=(
        text("label", "policy"),
        number("median_ms_base", "base ms", milliseconds),
        number("median_ms_new", "new ms", milliseconds),
        number("speedup_median_base", "speedup base"),
        number("speedup_median_new", "new"),
        interval("change", "change", middle="ratio", form=_percent, unit="%"),
        percentage("floor", "floor", lambda percent: f"{percent - 100:.1f}"),
        text("verdict"),
    ),
)


def compare_directories(base: Path, new: Path, *, limit: float | None = None) -> Change:
    """Compare two results directories.

    Args:
        limit: by how much a policy may be slower and pass the gate, a share; None = there is no gate.

    Raises:
        ResultsError: no case was measured in both.
    """
    stores = [load_timed(directory, or_served=True) for directory in (base, new)]
    sides = _side_by_side(_JOBS, list(map(cases, stores)), list(map(_costs, stores)))
    rows: list[Row] = [row | {"floor": _floor(row)} for row in sides.to_dict("records")]
    if all(row["not_compared"] for row in rows):
        raise ResultsError(
            f"{new}: no case is in {base} as well; expected results of the same command and config on as many ranks "
            "(see the case ids in run.json)"
        )
    for row in rows:
        row |= _judged(row, row.pop("change"))
        row["outcome"] = _outcome(row, limit) if row["role"] in _JUDGED_ROLES else None
    frame, (old, now) = pd.DataFrame(rows), map(_conditions, stores)
    tables = []
    for name, of_one in frame.groupby("comparison_id", sort=False):
        shown = of_one.assign(instead="not compared: " + of_one["not_compared"].astype(object))
        kept = [percentage("retained_mass_new", "mass kept")] * bool(of_one["retained_mass_new"].notna().any())
        columns = [*_JOBS.shown, *lost_columns(of_one, "_new"), *kept]
        title = "{title}: {how}, {ran_on}".format_map(of_one.iloc[0])
        notes = list(_notes(of_one, old.get(str(name), {}), now.get(str(name), {})))
        tables.append(Table(shown, columns, title, notes, "instead"))
    return Change(frame, tables, [f"BASE {base}", f"NEW  {new}"], list(_answer(frame, limit)), limit)


def _costs(store: Store) -> pd.DataFrame:
    """``ratio`` of every iteration: a case's time over native's in the same one; of native its time."""
    rows = timings(store)
    rows = rows[rows["quantity"] == ALL]
    return rows.assign(ratio=(1 / rows["speedup"]).where(rows["role"] != "baseline", rows["time_us"]))


def _floor(row: Row) -> float | None:
    """The upper end of the joint floor, whose lower end is its inverse."""
    floors = [NoiseFloor(row[f"floor_low_{run}"], row[f"floor_high_{run}"]) for run in _JOBS.runs]
    return None if any(missing(floor.high) for floor in floors) else joint_floor(*floors).high


def _judged(row: Row, ratio: Estimate | None) -> Row:
    """The change of a case: its interval, the verdict, and why it is inconclusive."""
    found = {"change_ratio": ratio and ratio.median, "verdict": None, "why": None}
    found |= values_of("change_", ratio, ("low", "high", "is_interval", "num_launches"))
    if row["not_compared"] is not None:
        return found
    floor = None if row["floor"] is None else NoiseFloor(1 / row["floor"], row["floor"])
    is_shared = bool(row["oversubscribed_base"] or row["oversubscribed_new"])
    verdict = judge(ratio, floor, is_modelled=row["origin_new"] in NOT_EXECUTED, is_oversubscribed=is_shared)
    reasons = {
        "other_length": any((row[f"other_length_share_{run}"] or 0) > 0 for run in _JOBS.runs),
        "no_ratio": ratio is None,
        "few_batches": not found["change_is_interval"],
        "oversubscribed": is_shared,
        "no_floor": floor is None,
        "in_floor": verdict == "inconclusive",
    }
    why = next((said.INCONCLUSIVE[reason] for reason, holds in reasons.items() if holds), None)
    return found | {"verdict": "inconclusive" if why else _WORDS.get(verdict, verdict), "why": why}


# Facts of conditions by name, with what people read of them.
Known = dict[str, tuple[Any, str]]


def _conditions(store: Store) -> dict[str, Known]:
    """Recorded ``_CONDITIONS`` of each comparison; if several jobs measured it, those of the last one."""
    found = {}
    for one in store.comparisons:
        measured = [launch.run_id for launch in one.conditions.values()]
        job = one.run.runs.get(measured[-1] if measured else one.run.run_id)
        facts = {**(job.environment if job else {}), **one.facts.model_dump(mode="json")}
        known = {key: _condition(facts[key]) for key in _CONDITIONS if facts.get(key) is not None}
        if isinstance(one.facts, TimedFacts):
            if (links := one.facts.links) is not None:
                known["links"] = (links, one.facts.exchange), describe_links(links, one.facts.exchange)
            if one.facts.device is not None:
                known["device"] = (one.facts.device, one.facts.expert_rows), device_words(one.facts)
        found[one.comparison_id] = known
    return found


def _condition(value: Any) -> tuple[Any, str]:
    if isinstance(value, dict) and "ran" in value:  # what ran of what was asked for
        value = value["ran"]
    return value, value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _outcome(row: Row, limit: float | None) -> str | None:
    """The gate's answer: slower, open or passed; None without a limit, and of a new case, which is no gap."""
    if limit is None or missing(row["status_base"]):
        return None
    if row["verdict"] == "slower" and row["change_ratio"] > 1 + limit:
        return "slower"
    is_excluded = row["change_is_interval"] and row["change_high"] <= 1 + limit
    return "passed" if row["verdict"] in ("slower", "faster") or is_excluded else "open"


def exit_status(change: Change, *, strict: bool = False) -> int:
    """0 nothing is slower by more than the limit, 1 something is, 3 (strict) something is open. No limit: always 0."""
    answers = set(change.cases["outcome"])
    if "slower" in answers:
        return 1
    is_open = "open" in answers or len(_native_moved(change.cases)) > 0
    return 3 if strict and change.limit is not None and is_open else 0


def _native_moved(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of native that became slower or faster itself."""
    return rows[(rows["role"] == "baseline") & rows["verdict"].isin(["slower", "faster"])]


def _notes(rows: pd.DataFrame, then: Known, now: Known) -> Iterator[str | Line]:
    """What is needed to read a comparison's rows; conditions of either job that the other did not record are alike."""
    yield said.CHANGES
    yield from said.chance_words(int(rows["change_is_interval"][rows["role"].isin(_JUDGED_ROLES)].eq(True).sum()))
    if rows["origin_new"].eq("measured").any() and rows["change_num_launches"].max() == 1:
        yield said.ONE_LAUNCH
    for why, group in rows[rows["why"].notna()].groupby("why", sort=False):
        yield f"inconclusive ({', '.join(group['label'])}): {why}"
    differing = [name for name in then if name in now and now[name][0] != then[name][0]]
    if words := ", ".join(f"{name} {then[name][1]} -> {now[name][1]}" for name in differing):
        yield Line(f"conditions differ: {words}", is_warning=True)
    for name, does in (("dropped_share", "drops"), ("rerouted_share", "reroutes"), ("retained_mass", "keeps")):
        differ = rows[(rows[f"{name}_new"] - rows[f"{name}_base"]).abs() > _ROUTING_STEP]
        for row in differ.to_dict("records"):  # equal ids mean equal routing
            shares = (100 * row[f"{name}_{run}"] for run in _JOBS.runs)
            yield Line(said.OTHER_WORK.format(row["label"], does, *shares), is_warning=True)
    for row in _native_moved(rows).to_dict("records"):
        words = said.NATIVE_MOVED.format(row["verdict"], _percent(row["change_ratio"]))
        yield Line(words, is_warning=True)


def _answer(rows: pd.DataFrame, limit: float | None) -> Iterator[Line]:
    """How many of each verdict; under a limit, which cases it stops and which it could not decide on."""
    policies = rows[rows["role"].isin(_JUDGED_ROLES)]
    policies = policies[policies["status_base"].notna() & policies["status_new"].notna()]
    counts = policies["verdict"].fillna("inconclusive").value_counts()
    shown = ["slower", "faster", "no difference", *([BELOW_MODEL] if BELOW_MODEL in counts else []), "inconclusive"]
    yield Line(f"{len(policies)} policies: {', '.join(f'{counts.get(verdict, 0)} {verdict}' for verdict in shown)}")
    if limit is not None:
        slower, still_open = (", ".join(rows["label"][rows["outcome"] == name]) for name in ("slower", "open"))
        yield Line(said.SLOWER.format(100 * limit, slower or "none"))
        if still_open:
            yield Line(said.UNDECIDED.format(100 * limit, still_open), is_warning=True)


# ---- validate --------------------------------------------------------------------------------------------------------

_SPEEDUP = ends("speedup", of=ESTIMATE)
_RANKS = Sides(
    runs={"real": "the real run", "emulated": "the emulated run"},
    key=["pair", "role", "policy", "policy_params", "quantity"],  # cases' ids differ: they say how it was measured
    about=["label", *COSTS],
    numbers=["case_id", "status", "reason", "median_ms", *_SPEEDUP, "oversubscribed", "threads", "loads"],
    shown=(
        text("label", "policy"),
        text("comparison"),
        text("quantity", "of"),
        number("median_ms_real", "measured ms", milliseconds),
        number("median_ms_emulated", "emulated ms", milliseconds),
        number("speedup_median_real", "measured speedup"),
        number("speedup_median_emulated", "emulated"),
        interval("ratio", "emulated / measured"),
        text("shown_verdict", "verdict"),
    ),
)
_CLAIMS = ("policy", "balanced")  # native's own speedup claims nothing


def compare_ranks(directory: Path) -> Change:
    """Set both runs of a directory that ``validate`` left against each other.

    Raises:
        ResultsError: one line: a file is missing or cannot be trusted.
    """
    files = ValidationDirectory(directory)
    written = read_document(files.pairs, Pairs)
    stores = [load(root, join_draws=False) for root in (files.real, files.emulated)]
    about = comparisons(stores[0]).set_index("comparison_id")
    pairs = {name: pair[0] for pair in written.pairs for name in pair}
    rows = _side_by_side(_RANKS, *zip(*(_rows_and_ratios(store, pairs) for store in stores), strict=True))
    rows = rows[rows["case_id_real"].notna()]
    why = {pair: _incomparable(group) for pair, group in rows.groupby("pair")}
    verdicts = [
        equivalence(None if why[pair] else ratio, written.margin) if role in _CLAIMS else None
        for ratio, pair, role in zip(rows["change"], rows["pair"], rows["role"], strict=True)
    ]
    ends = pd.DataFrame([values_of("ratio_", ratio, ESTIMATE) for ratio in rows["change"]], rows.index)
    rows = rows.drop(columns=["loads_real", "loads_emulated", "change"]).join(ends)
    rows = rows.assign(why=rows["pair"].map(why), verdict=pd.Series(verdicts, rows.index))
    rows = rows.assign(pair=rows["pair"].map(about["title"])).rename(columns={"pair": "comparison"})
    ran = about.loc[[first for first, _ in written.pairs]]
    margin = f"{100 * written.margin:g} %"
    notes = [
        *(f"real ranks: {words}" for words in (ran["ran_on"] + ", " + ran["dtype"]).unique()),
        f"links: {describe_links(written.links, written.exchange)}",
        *(Line(f"not comparable: {words}", is_warning=True) for words in dict.fromkeys(why.values()) if words),
        said.EQUIVALENCE.format(margin),
    ]
    alike = {name for name in ("comparison", "quantity") if rows[name].nunique() == 1}
    columns = [column for column in _RANKS.shown if column.name not in alike]
    columns += [*lost_columns(rows), COLUMNS["retained_mass"]]
    title = rows["comparison"].iloc[0] if "comparison" in alike else said.BOTH_RANKS
    of_controls = rows["role"].map({"baseline": "native", "noise": "floor"})
    shown = rows.assign(shown_verdict=rows["verdict"].fillna(of_controls))
    answer = [Line(_equivalent_words(rows, margin))]
    return Change(rows, [Table(shown, columns, title, notes, "not_compared")], [], answer)


def _rows_and_ratios(store: Store, of_pair: dict[str, str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row per case and quantity of one run, and per iteration of its claims; ``pair`` is the real comparison's id."""
    pairs = routing(store).sort_values(["batch", "layer"], na_position="first")
    loads = (pairs["load_E"].map(tuple) + pairs["pairs_RR"].map(tuple)).groupby(pairs["case_id"]).agg(tuple)
    frame = cases(store).assign(
        pair=lambda rows: rows["comparison_id"].map(of_pair),
        quantity=ALL,
        loads=lambda rows: rows["case_id"].map(loads),
        threads=jobs(store)["environment"].iloc[-1].get("threads_per_rank"),
    )
    frame = frame[frame["pair"].notna()]
    claims = frame[frame["role"].isin(_CLAIMS)]
    if frame["scope"].eq("model").any():
        moe = {"moe_ms": "median_ms", **{f"moe_{name}": name for name in _SPEEDUP}}
        frame = pd.concat([frame, claims.drop(columns=list(moe.values())).rename(columns=moe).assign(quantity=MOE)])
    speedups = timings(store).rename(columns={"speedup": "ratio"})
    return frame, speedups.merge(claims[["case_id", "pair", "policy", "policy_params"]], on="case_id")


def _incomparable(rows: pd.DataFrame) -> str | None:
    """Why the runs of a comparison are not comparable; None where they are."""
    first, measured = rows.iloc[0], rows[(rows["status_real"] == "ok") & (rows["status_emulated"] == "ok")]
    rerouted = measured["label"][measured["loads_real"] != measured["loads_emulated"]].unique()
    if first["oversubscribed_real"]:
        return said.OVERSUBSCRIBED
    if first["threads_real"] != first["threads_emulated"]:
        return said.OTHER_THREADS.format(first["threads_real"], first["threads_emulated"])
    return said.OTHER_ROUTING.format(", ".join(rerouted)) if len(rerouted) else None


def _equivalent_words(rows: pd.DataFrame, margin: str) -> str:
    """How many speedups are equivalent; of MoE layers alone the same."""
    parts = []
    for quantity, claims in rows[rows["verdict"].notna()].groupby("quantity", sort=False):
        of = "speedups" if quantity == ALL else f"speedups of {quantity} alone"
        largest = (claims["ratio_median"].astype(float) - 1).abs().max()
        counts = {str(verdict): number for verdict, number in claims["verdict"].value_counts().items()}
        parts.append(said.equivalent_words(of, counts, margin, None if pd.isna(largest) else largest))
    return "; ".join(parts)


def write_validation(directory: Path) -> str:
    """Write ``validation.txt`` and ``validation.csv``; return the text."""
    files, change = ValidationDirectory(directory), compare_ranks(directory)
    shown = change_text(change)
    write_text(files.text, f"{shown}\n")
    write_text(files.table, render([Table(change.cases.drop(columns="not_compared"), ())], "csv"))
    return shown
