"""Compare two runs of the same cases: slower, faster, or inconclusive. A gate for CI.

Cases are paired by case id, a hash of all that defines them. Two jobs share no moment, and no interval of a time shows
that the whole machine was slower. Native is the control: of a case the *change* is that of its time over native's,
whose pairs ran moments apart in each job; of native, which has none, that of its time, the machine's or that of code
that all cases share. ``timing.statistics`` says how a change is estimated. It is held against the noise floors of both
runs, by which native differs from itself. Another driver, package or clock moves native too, so it takes no verdict
away; what differs is named.

The gate asks of every policy: is it surely slower than the limit allows? ``slower`` needs a verdict beyond noise and a
change beyond the limit. A case is *open* where the data can neither show nor exclude such a change: too few batches, a
noise floor wider than the limit. Open cases pass with a warning, for a gate that fails on noise is soon switched off;
``--strict`` makes them, and a native that changed, a status of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from moe_ep_bench.analysis.cases import cases, load_timed, timings, values_of
from moe_ep_bench.analysis.columns import (
    COSTS,
    Row,
    Table,
    interval,
    lost_columns,
    milliseconds,
    missing,
    number,
    percentage,
    render,
    text,
)
from moe_ep_bench.analysis.notes import OVERSUBSCRIBED, WARNING, chance_words
from moe_ep_bench.analysis.store import ITERATION, ResultsError, Store
from moe_ep_bench.facts import NOT_EXECUTED
from moe_ep_bench.facts.words import describe_links, device_words
from moe_ep_bench.schema import ALL
from moe_ep_bench.timing.statistics import (
    BELOW_MODEL,
    MIN_BATCHES,
    Estimate,
    NoiseFloor,
    estimate_change,
    joint_floor,
    judge,
)

# Conditions that may move times, of a job's ``environment`` and of a comparison's facts.
_CONDITIONS = (
    *("device_name", "driver", "cpu_name", "num_cores", "threads_per_rank", "python", "torch", "cuda", "nccl"),
    *("triton", "megatron_core", "transformer_engine", "apex", "deep_ep", "variables", "backend", "experts", "permute"),
    *("kernel", "cuda_graph", "oversubscribed", "links", "device"),
)
# The verdict on a time, by that of ``judge`` on the ratio.
_WORDS = {"faster": "slower", "slower": "faster"}
# Roles of policies, not of controls: these decide ``--fail-over``.
_JUDGED_ROLES = ("policy", "replication")
# A share of pairs or score mass that differs by less is rounding.
_ROUTING_STEP = 5e-4
_RUNS = {"base": "BASE", "new": "NEW"}
_IDENTITY = ["comparison_id", "title", "how", "ran_on", "label", "policy", "role"]
_OF_EITHER = [
    *("status", "reason", *COSTS, "median_ms", "speedup_median"),
    *("floor_low", "floor_high", "oversubscribed", "origin"),
]


class Change(NamedTuple):
    """Cases of two run directories, in common or of one alone.

    Attributes:
        cases: a row per case of either run, in reading order: what it is; numbers of either run, ending in ``_base``
            and ``_new``; ``not_compared``, why; ``floor``, by which noise alone may change a ratio; ``change_ratio`` =
            NEW / BASE with its interval; ``verdict``; ``why`` it is inconclusive; ``outcome``, the gate's answer.
        differences: by comparison's id, conditions that differ: (BASE's, NEW's) by key.
        limit: of the gate; None = there is none.
    """

    base: Path
    new: Path
    cases: pd.DataFrame
    differences: dict[str, dict[str, tuple[str, str]]]
    limit: float | None


def compare_directories(base: Path, new: Path, *, limit: float | None = None) -> Change:
    """Compare two results directories.

    Args:
        limit: by how much a policy may be slower and pass the gate, a share; None = there is no gate.

    Raises:
        ResultsError: no case was measured in both.
    """
    stores = [load_timed(directory) for directory in (base, new)]
    frames, costs = map(cases, stores), map(_costs, stores)
    sides = side_by_side(frames, costs, _RUNS, ["case_id"], _IDENTITY, _OF_EITHER, "cost")
    rows = [row | {"floor": _floor(row)} for row in sides.to_dict("records")]
    if all(row["not_compared"] for row in rows):
        raise ResultsError(
            f"{new}: no case is in {base} as well; expected results of the same command and config on as many ranks "
            "(see the case ids in run.json)"
        )
    for row in rows:
        row |= _judged(row, row.pop("change"))
        row["outcome"] = _outcome(row, limit) if row["role"] in _JUDGED_ROLES else None
    return Change(base, new, pd.DataFrame(rows), _differences(*map(_conditions, stores)), limit)


def _costs(store: Store) -> pd.DataFrame:
    """``cost`` of every iteration: a case's time over native's in the same one; of native its time."""
    rows = timings(store)
    rows = rows[rows["quantity"] == ALL]
    return rows.assign(cost=(1 / rows["speedup"]).where(rows["role"] != "baseline", rows["time_us"]))


# ---- two runs side by side -------------------------------------------------------------------------------------------


def side_by_side(
    frames: Iterable[pd.DataFrame],
    times: Iterable[pd.DataFrame],
    runs: Mapping[str, str],
    key: list[str],
    about: list[str],
    numbers: list[str],
    column: str,
) -> pd.DataFrame:
    """A row per key of either of two runs, and the one join of two jobs.

    Args:
        frames: of each run, rows of ``cases``, one of each key.
        times: of each run, rows of ``timings``; ``column`` is null where there is nothing to compare.
        runs: what each run is called, by the word that ends its columns.

    Returns:
        ``about`` the key, as the first run that has it says; ``numbers`` of each run; ``not_compared``, why a row has
        no numbers of some run; ``change``, the column's second over its first, batch by batch
        (``statistics.estimate_change``), None where no batch is common or one has no value above 0.
    """
    frames = dict(zip(runs, frames, strict=True))
    rows = pd.concat(frames.values())[[*key, *about]].drop_duplicates(key, ignore_index=True)
    for run, frame in frames.items():
        rows = rows.join(frame.set_index(key)[numbers].add_suffix(f"_{run}"), on=key)
    old, now = (
        {name: of.set_index(ITERATION)[column].dropna() for name, of in frame.groupby(key, sort=False)}
        for frame in times
    )
    names = list(rows[key].itertuples(index=False, name=None))
    changes = [estimate_change(old[name], now[name]) if name in old and name in now else None for name in names]
    lost = [_lost_words(row, runs) for row in rows.to_dict("records")]
    found = pd.DataFrame({"not_compared": lost, "change": changes}, rows.index, dtype=object)
    return rows.join(found)


def _lost_words(row: Row, runs: Mapping[str, str]) -> str | None:
    """Why a row has no numbers of some run, by what runs are called; None where it has all."""
    lost = []
    for run, name in runs.items():
        if missing(status := row[f"status_{run}"]):
            return f"only in {next(other for key, other in runs.items() if key != run)}"
        if status != "ok":
            lost.append(f"{status} in {name}: {' '.join(row[f'reason_{run}'].split())}")
    return "; ".join(lost) or None


# ---- verdicts --------------------------------------------------------------------------------------------------------


def _floor(row: Row) -> float | None:
    """The upper end of the joint floor, whose lower end is its inverse."""
    floors = [NoiseFloor(row[f"floor_low_{run}"], row[f"floor_high_{run}"]) for run in _RUNS]
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
        "nothing to divide: no common batch, no native, or a time of 0": ratio is None,
        f"fewer than {MIN_BATCHES} batches give no interval": not found["change_is_interval"],
        OVERSUBSCRIBED: is_shared,
        "a run lacks its noise floor": floor is None,
        "the interval lies partly in the noise floor": verdict == "inconclusive",
    }
    why = next((words for words, holds in reasons.items() if holds), None)
    return found | {"verdict": "inconclusive" if why else _WORDS.get(verdict, verdict), "why": why}


# ---- conditions ------------------------------------------------------------------------------------------------------


def _conditions(store: Store) -> dict[str, dict[str, str]]:
    """Recorded ``_CONDITIONS`` of each comparison; if several jobs measured it, those of the last one."""
    found = {}
    for one in store.comparisons:
        measured = [launch.run_id for launch in one.conditions.values()]
        job = one.run.runs.get(measured[-1] if measured else one.run.run_id)
        known = {**(job.environment if job else {}), **one.facts.model_dump(mode="json")}
        known["links"] = one.facts.links and describe_links(one.facts.links, one.facts.exchange)
        known["device"] = one.facts.device and device_words(one.facts)
        found[one.comparison_id] = {key: _text(known[key]) for key in _CONDITIONS if known.get(key) is not None}
    return found


def _text(value: Any) -> str:
    if isinstance(value, dict) and "ran" in value:  # what ran of what was asked for
        return value["ran"]
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _differences(
    old: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, tuple[str, str]]]:
    """``Change.differences``; what a run did not record differs from nothing."""
    return {
        name: {key: (then, now[name][key]) for key, then in old[name].items() if now[name].get(key, then) != then}
        for name in old.keys() & now.keys()
    }


# ---- the gate --------------------------------------------------------------------------------------------------------


def _outcome(row: Row, limit: float | None) -> str | None:
    """The gate's answer: slower, open or passed; None without a limit, and of a new case, which is no gap."""
    if limit is None or row["not_compared"] == "only in NEW":
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


# ---- what is printed -------------------------------------------------------------------------------------------------


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"


_COLUMNS = (
    text("label", "policy"),
    number("median_ms_base", "base ms", milliseconds),
    number("median_ms_new", "new ms", milliseconds),
    number("speedup_median_base", "speedup base"),
    number("speedup_median_new", "new"),
    interval("change", "change", middle="ratio", form=_percent, unit="%"),
    percentage("floor", "floor", lambda percent: f"{percent - 100:.1f}"),
    text("verdict"),
)


def compare_text(change: Change) -> str:
    """A table per comparison, and the answer last."""
    tables = []
    for comparison_id, rows in change.cases.groupby("comparison_id", sort=False):
        shown = rows.assign(instead="not compared: " + rows["not_compared"].astype(object))
        differing = change.differences.get(comparison_id, {})
        title = "{title}: {how}, {ran_on}".format_map(rows.iloc[0])
        columns = [*_COLUMNS, *lost_columns(rows, "_new"), percentage("retained_mass_new", "mass kept")]
        tables.append(Table(shown, columns, title, list(_notes(rows, differing)), "instead"))
    heading = f"BASE {change.base}\nNEW  {change.new}"
    return "\n\n".join([heading, render(tables, "text"), "\n".join(_answer(change))])


def _notes(rows: pd.DataFrame, differing: dict[str, tuple[str, str]]) -> Iterator[str]:
    yield (
        "change: NEW over BASE [95 % interval], of native's time, of others' time over native's; floor: what native "
        "run twice differs by, both runs' together"
    )
    yield from chance_words(int(rows["change_is_interval"][rows["role"].isin(_JUDGED_ROLES)].eq(True).sum()))
    if rows["origin_new"].eq("measured").any() and rows["change_num_launches"].max() == 1:
        yield "one launch: what differs from job to job is in no interval; with several (measure.launches) it is"
    for why, group in rows[rows["why"].notna()].groupby("why", sort=False):
        yield f"inconclusive ({', '.join(group['label'])}): {why}"
    if differing:
        yield f"{WARNING}conditions differ: " + ", ".join(
            f"{key} {old} -> {now}" for key, (old, now) in differing.items()
        )
    for name, words in (("dropped_share", "drops"), ("rerouted_share", "reroutes"), ("retained_mass", "keeps")):
        differ = rows[(rows[f"{name}_new"] - rows[f"{name}_base"]).abs() > _ROUTING_STEP]
        for row in differ.to_dict("records"):  # equal ids mean equal routing
            shares = [f"{100 * row[f'{name}_{run}']:.1f} %" for run in ("base", "new")]
            yield f"{WARNING}{row['label']} {words} {shares[0]} in BASE and {shares[1]} in NEW: not of the same work"
    for row in _native_moved(rows).itertuples():
        yield (
            f"{WARNING}native itself became {row.verdict} ({_percent(row.change_ratio)} %): the machine, or code that "
            "all cases share"
        )


def _answer(change: Change) -> Iterator[str]:
    """How many of each verdict; under a limit, which cases it stops and which it could not decide on."""
    policies = change.cases[change.cases["role"].isin(_JUDGED_ROLES)]
    policies = policies[~policies["not_compared"].isin(["only in BASE", "only in NEW"])]
    counts = policies["verdict"].fillna("inconclusive").value_counts()
    shown = ["slower", "faster", "no difference", *([BELOW_MODEL] if BELOW_MODEL in counts else []), "inconclusive"]
    yield f"{len(policies)} policies: " + ", ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in shown)
    if change.limit is not None:
        slower, still_open = (
            ", ".join(change.cases["label"][change.cases["outcome"] == name]) for name in ("slower", "open")
        )
        over = f"slower by more than {100 * change.limit:g} %"
        yield f"{over}, beyond noise: {slower or 'none'}"
        if still_open:
            yield f"{WARNING}neither shown nor excluded to be {over}: {still_open}"
