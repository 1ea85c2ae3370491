"""Compare two runs of the same cases: what became slower, what faster, and what is inconclusive. A gate for CI.

Cases are paired by case id, a hash of all that defines them. Of each pair are compared the time of the layer, or of a
whole model's pass; what it consists of (``cases.timings``); and the speedup over native. Two jobs share no moment;
``timing.statistics`` says how a change is estimated all the same. Each change is held against the noise floors of both
runs, of the same quantity: what native differs by from itself.

No interval of a time shows that the whole machine was slower. Native is the control: a case is slower only where native
is unchanged, or where the case's speedup over native, whose pairs ran moments apart, fell as well. Native has no
control; its change is reported as the machine's or that of code that all cases share.

The gate asks of every policy: is it surely slower than the limit allows? ``slower`` needs a verdict beyond noise and a
change beyond the limit. A case is *open* where the data can neither show nor exclude such a change: too few batches, a
noise floor wider than the limit, conditions that differ. Open cases pass with a warning, for a gate that fails on noise
is soon switched off; ``--strict`` makes them a status of their own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.cases import cases, comparisons, conditions, jobs, load, timings
from moe_ep_bench.analysis.columns import NONE, Column, Row, milliseconds, missing, number, percentage, text
from moe_ep_bench.analysis.notes import OVERSUBSCRIBED, WARNING, chance_words, notes
from moe_ep_bench.analysis.origins import MODE_WORDS
from moe_ep_bench.analysis.reading import ITERATION, ResultsError
from moe_ep_bench.analysis.render import Table, render
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.errors import UserError
from moe_ep_bench.schema import ALL, MOE, PARTS
from moe_ep_bench.timing.statistics import (
    BELOW_MODEL,
    MIN_BATCHES,
    Estimate,
    NoiseFloor,
    estimate_change,
    estimate_median,
    joint_floor,
    judge,
    noise_floor,
)

# Of run.json's ``environment``; of its ``comparisons``, what the same config may have become on another machine.
_ENVIRONMENT = (
    *("device_name", "driver", "cpu_name", "num_cores", "threads_per_rank", "python", "torch", "cuda", "nccl"),
    *("triton", "megatron_core", "transformer_engine", "apex", "deep_ep", "variables"),
)
_LAYER = ("backend", "experts", "permute", "kernel", "cuda_graph", "oversubscribed", "links", "device", "placement")
# Code is what ``compare`` mostly compares.
_INFORMATIVE = ("hostname", "code", "git_commit")
# What was recorded of a run and may decide its times: the verdicts that it takes away where it differs and was not
# changed on purpose (all, times or none), by how much numbers may differ, relative, and their form. A GPU's clock moves
# in steps of 15 MHz, under 1 %; a speedup is paired inside its run, so that the clock cancels. The matmul and the copy
# beside a run are taken a few times only, too rough to take a verdict away.
_CONDITIONS: dict[str, tuple[str, float | None, str]] = {
    **dict.fromkeys((*_ENVIRONMENT, *_LAYER), ("all", None, "{}")),
    "clocks": ("times", 0.02, "SM clock {:,.0f} MHz (median)"),
    "matmul beside the run": ("none", 0.05, "{:.3g} TFLOP/s"),
    "copy beside the run": ("none", 0.05, "{:.3g} GB/s"),
    **dict.fromkeys(_INFORMATIVE, ("none", None, "{}")),
}
CHANGEABLE = tuple(key for key, (takes, *_) in _CONDITIONS.items() if takes != "none")
# Of a run's own warnings, those that say that its times may not be those of another day.
_WEAKENS = ("disturbed machine", "warm-up did not settle", "times drifted", "more ranks than cores", "launch-bound")
# What ``judge`` says of a ratio above the floor, in words for a time and for a speedup.
_WORDS = {"time": {"faster": "slower", "slower": "faster"}, "speedup": {"faster": "higher", "slower": "lower"}}
# Verdicts on a time and on a speedup that say the same.
_SAME = ("no difference", BELOW_MODEL)
_AGREE = {("slower", "lower"), ("faster", "higher"), *((time, speedup) for time in _SAME for speedup in _SAME)}
_STATE = ["status", "reason", "dropped_share", "retained_mass"]
# A share of pairs or score mass that differs by less is rounding.
_ROUTING_STEP = 5e-4
# What is measured of a policy, beside controls: these decide ``--fail-over``.
_JUDGED_ROLES = ("policy", "replication")


class Change(NamedTuple):
    """What two run directories have in common, and what only one of them holds.

    Attributes:
        cases: a row per case of either run, in reading order: what it is; ``not_compared``, why; how it
            ``routes_differently``; ``time_*`` and ``speedup_*``, the columns of ``changes`` of the layer or the pass.
        changes: a row per case x quantity x of (time or speedup): ``base`` and ``new``, medians (microseconds, or a
            speedup); ``ratio`` = new / base with its interval; the floor, ratios that noise alone makes; ``verdict``
            (``statistics.judge``; a higher or lower speedup in place of a faster or slower time), and ``why`` it is
            inconclusive.
        differences: conditions that differ (``_differences``), by comparison_id.
        warnings: what weakens either run, by comparison_id.
        about: comparisons by id, NEW's where both have them.
    """

    base: Path
    new: Path
    cases: pd.DataFrame
    changes: pd.DataFrame
    differences: pd.DataFrame
    warnings: dict[str, list[str]]
    about: pd.DataFrame
    same_machine: bool


def compare_directories(base: Path, new: Path, *, intended: Collection[str] = (), same_machine: bool = False) -> Change:
    """Compare two results directories.

    Args:
        intended: conditions that were changed on purpose (``CHANGEABLE``).
        same_machine: the machine is known to be unchanged, so that native is no control but a case like others.

    Raises:
        ValueError: no case was measured in both, they are of two modes or scopes, or ``intended`` names no condition.
    """
    for key in intended:
        if key not in CHANGEABLE:
            raise UserError(f"--changed: expected some of {', '.join(CHANGEABLE)}; got {key!r}")
    stores = [load(directory) for directory in (base, new)]
    old, now = frames = [cases(store) for store in stores]
    _check_kinds(base, new, *frames)
    listed = _paired(old, now)
    measured = listed[listed["not_compared"].isna()]
    if measured.empty:
        raise ResultsError(
            f"{new}: no case is in {base} as well; expected results of the same config on as many ranks (see the case "
            "ids in run.json)"
        )
    about = pd.concat([comparisons(store).set_index("comparison_id") for store in reversed(stores)])
    about = about[~about.index.duplicated()]
    differences = _differences(*map(_recorded, stores), intended)
    changes = _changes(stores, measured, differences, about)
    changes = changes if same_machine else _held_against_native(changes)
    for of in _WORDS:
        of_all = changes[(changes["quantity"] == ALL) & (changes["of"] == of)].set_index("case_id")
        numbers = of_all.drop(columns=["quantity", "of", "comparison_id", "role"])
        listed = listed.join(numbers.add_prefix(f"{of}_"), on="case_id")
    changes = changes.drop(columns=["comparison_id", "role"])
    return Change(base, new, listed, changes, differences, _weakened(stores), about, same_machine)


def _paired(old: pd.DataFrame, now: pd.DataFrame) -> pd.DataFrame:
    """``Change.cases`` without changes; a case of one run alone is not compared."""
    of_either, state = ["comparison_id", "title", "label", "policy", "role"], _STATE
    rows = old[["case_id", *of_either, *state]].merge(
        now[["case_id", *of_either, *state]], "outer", "case_id", suffixes=("_base", "_new"), sort=False
    )
    order = pd.Index([*old["case_id"], *now["case_id"]]).drop_duplicates()
    rows = rows.set_index("case_id").loc[order].reset_index()
    for name in of_either:
        rows[name] = rows.pop(f"{name}_base").fillna(rows.pop(f"{name}_new"))
    known = rows.to_dict("records")
    return rows.assign(
        not_compared=pd.Series([_not_compared(row) for row in known], rows.index, dtype=object),
        routes_differently=pd.Series([_routes_differently(row) for row in known], rows.index, dtype=object),
    )


def _weakened(stores: Sequence[Store]) -> dict[str, list[str]]:
    """Of each run's own warnings those that say that its times may not be those of another day."""
    warnings: dict[str, list[str]] = {}
    for name, store in zip(("BASE", "NEW"), stores, strict=True):
        for comparison in store.comparisons:
            lines = notes(store, comparison.directory, comparison.comparison_id)
            lines = [line.removeprefix(WARNING) for line in lines]
            of_run = warnings.setdefault(comparison.comparison_id, [])
            of_run += [f"{name}: {line}" for line in lines if line.startswith(_WEAKENS)]
    return warnings


def _check_kinds(base: Path, new: Path, old: pd.DataFrame, now: pd.DataFrame) -> None:
    """Raise a ResultsError unless both hold times, of one mode and scope."""
    modes, scopes = ([frame[key].iloc[0] for frame in (old, now)] for key in ("mode", "scope"))
    for directory, mode in zip((base, new), modes, strict=True):
        if mode == "route":
            raise ResultsError(f"{directory}: holds routing without times; expected what `run` or `emulate` wrote")
    if scopes[0] != scopes[1]:
        raise ResultsError(f"{new}: holds times of a {scopes[1]}, but {base} of a {scopes[0]}; expected one scope")
    if modes[0] != modes[1]:
        raise ResultsError(
            f"{new}: {MODE_WORDS[modes[1]]}, but {base} is {MODE_WORDS[modes[0]]}: not compared; "
            "`moe-ep-bench validate` holds one against the other"
        )


def _not_compared(row: Row) -> str | None:
    for run, other in (("base", "new"), ("new", "base")):
        if missing(row[f"status_{other}"]):
            return f"only in {run.upper()}"
    lost = [
        f"{row[f'status_{run}']} in {run.upper()}: {' '.join((row[f'reason_{run}'] or 'no reason recorded').split())}"
        for run in ("base", "new")
        if row[f"status_{run}"] != "ok"
    ]
    return "; ".join(lost) or None


def _routes_differently(row: Row) -> str | None:
    """Equal ids mean equal routing: where that is not so, speeds are not of the same work."""
    words = [
        f"{what} {100 * row[f'{name}_base']:.1f} % in BASE, {100 * row[f'{name}_new']:.1f} % in NEW"
        for what, name in (("dropped", "dropped_share"), ("mass kept", "retained_mass"))
        if abs(row[f"{name}_new"] - row[f"{name}_base"]) > _ROUTING_STEP  # never where one has none
    ]
    return "; ".join(words) or None


# ---- changes ---------------------------------------------------------------------------------------------------------


def changes_of(base: pd.DataFrame, new: pd.DataFrame, key: Sequence[str]) -> pd.DataFrame:
    """The one join of two jobs: NEW over BASE, batch by batch (``statistics.estimate_change``).

    Args:
        base, new: ``value`` by key, launch, batch and iteration; null where there is nothing to compare.

    Returns:
        A row per key that both hold, in the order of BASE: ``base`` and ``new``, medians; ``estimate`` of the ratio,
        None where no batch is common or one has no value above 0; ``ratio`` and the estimate's other fields.
    """
    old, now = (
        {name: rows.set_index(ITERATION)["value"].dropna() for name, rows in frame.groupby(list(key), sort=False)}
        for frame in (base, new)
    )
    rows = []
    for name in (name for name in old if name in now):
        pair = old[name], now[name]
        estimate = None if any(values.empty for values in pair) else estimate_change(*pair)
        ends = {
            end: getattr(estimate, end, None) for end in ("low", "high", "is_interval", "num_batches", "num_launches")
        }
        medians = {"base": pair[0].median(), "new": pair[1].median(), "ratio": getattr(estimate, "median", None)}
        rows.append(dict(zip(key, name, strict=True)) | medians | ends | {"estimate": estimate})
    return pd.DataFrame(rows)


def _changes(
    stores: Sequence[Store], measured: pd.DataFrame, differences: pd.DataFrame, about: pd.DataFrame
) -> pd.DataFrame:
    """``Change.changes`` of cases that both runs measured, without regard to native."""
    frames = [timings(store).rename(columns={"time_us": "time"}) for store in stores]
    floors = [_floors(frame) for frame in frames]
    key = ["case_id", "quantity", "of"]
    values = [frame.melt([*key[:2], *ITERATION], list(_WORDS), var_name="of") for frame in frames]
    paired = measured[["comparison_id", "case_id", "role"]].merge(changes_of(*values, key), on="case_id")
    paired = paired[(paired["role"] != "baseline") | (paired["of"] == "time")]
    weighty, rows = differences[~differences["intended"].astype(bool)], []
    for row in paired.to_dict("records"):
        forbidding = weighty["takes_verdicts_on"].isin(["all", "times"] if row["of"] == "time" else ["all"])
        forbidding &= weighty["comparison_id"] == row["comparison_id"]
        pair = [of_run.get((row["comparison_id"], row["quantity"])) for of_run in floors]
        floor = joint_floor(*pair) if all(pair) else None
        differing = ", ".join(weighty.loc[forbidding, "key"])
        verdict, why = _verdict(row["estimate"], floor, about.loc[row["comparison_id"]], differing)
        ends = {f"floor_{end}": getattr(floor, end, None) for end in ("low", "high")}
        rows.append(row | ends | {"verdict": _WORDS[row["of"]].get(verdict, verdict), "why": why})
    return pd.DataFrame(rows).drop(columns="estimate")


def _floors(times: pd.DataFrame) -> dict[tuple[str, str], NoiseFloor]:
    """What native run twice differs by, by comparison and quantity."""
    again = times[(times["role"] == "noise") & times["speedup"].notna()]
    return {
        name: noise_floor(estimate)
        for name, rows in again.groupby(["comparison_id", "quantity"])
        if (estimate := estimate_median(rows.set_index(ITERATION)["speedup"])) is not None
    }


def _verdict(
    ratio: Estimate | None, floor: NoiseFloor | None, about: pd.Series, differing: str
) -> tuple[str, str | None]:
    """``statistics.judge`` of a change, and why it is inconclusive."""
    if differing:
        return "inconclusive", f"conditions differ: {differing}"
    is_modelled, is_shared = about["facts"].get("device") is not None, bool(about["oversubscribed"])
    verdict = judge(ratio, floor, is_modelled=is_modelled, is_oversubscribed=is_shared)
    if verdict != "inconclusive":
        return verdict, None
    if ratio is None:
        return verdict, "nothing to divide: no common batch, or a time of 0"
    if not ratio.is_interval:
        return verdict, f"{ratio.num_batches} batches: fewer than {MIN_BATCHES} give no interval"
    if is_shared:
        return verdict, OVERSUBSCRIBED
    if floor is None:
        return verdict, "a run lacks its noise floor"
    low, high, noise = (100 * (end - 1) for end in (ratio.low, ratio.high, floor.high))
    return verdict, f"the interval ({low:+.1f} to {high:+.1f} %) lies partly in the noise floor ({noise:.1f} %)"


def _held_against_native(changes: pd.DataFrame) -> pd.DataFrame:
    """The changes without verdicts on times that native's own change forbids; see the module."""
    speedups = changes.loc[changes["of"] == "speedup", ["case_id", "quantity", "verdict"]]
    natives = changes.loc[changes["role"] == "baseline", ["comparison_id", "quantity", "verdict", "ratio"]]
    held = changes.merge(speedups, "left", ["case_id", "quantity"], suffixes=("", "_of_speedup"))
    held = held.merge(natives, "left", ["comparison_id", "quantity"], suffixes=("", "_of_native"))
    whys = pd.Series([_uncontrolled(row) for row in held.to_dict("records")], changes.index, dtype=object)
    verdicts = changes["verdict"].mask(whys.notna(), "inconclusive")
    return changes.assign(verdict=verdicts, why=whys.where(whys.notna(), changes["why"]))


def _uncontrolled(row: Row) -> str | None:
    """Why a verdict on a time does not stand beside native's; None where it does."""
    verdict, native = row["verdict"], row["verdict_of_native"]
    if row["of"] != "time" or row["role"] == "baseline" or verdict == "inconclusive":
        return None
    if (verdict, row["verdict_of_speedup"]) in _AGREE:
        return None
    if missing(row["ratio_of_native"]):
        return "native was not measured in both, so the machine has no control"
    if verdict not in _SAME and native not in _SAME:
        return f"native changed by {_percent(row['ratio_of_native'])} %: perhaps the machine, not the case"
    if native in ("slower", "faster"):
        return f"native became {native} ({_percent(row['ratio_of_native'])} %), and this did not"
    return None


# ---- conditions ------------------------------------------------------------------------------------------------------


def _differences(old: dict[str, Row], now: dict[str, Row], intended: Collection[str]) -> pd.DataFrame:
    """Conditions of comparisons that differ; what a run did not record differs from nothing.

    Returns:
        comparison_id, key, base, new (texts), takes_verdicts_on (all, times or none), intended (changed on purpose: of
        no weight).
    """
    rows = []
    for comparison_id in (name for name in old if name in now):
        for key, (takes, allowed, form) in _CONDITIONS.items():
            base, new = old[comparison_id].get(key), now[comparison_id].get(key)
            if missing(base) or missing(new) or base == new:
                continue
            if allowed is None or abs(new - base) > allowed * abs(base):
                rows.append((comparison_id, key, form.format(base), form.format(new), takes, key in intended))
    return pd.DataFrame(rows, columns=["comparison_id", "key", "base", "new", "takes_verdicts_on", "intended"])


def _recorded(store: Store) -> dict[str, Row]:
    """What was recorded of each comparison, by key of ``_CONDITIONS``."""
    by_run, all_ranks, recorded = jobs(store).set_index("run_id"), conditions(store), {}
    for about in comparisons(store).to_dict("records"):
        facts, ranks = about["facts"], all_ranks
        ranks = ranks[ranks["comparison_id"] == about["comparison_id"]] if len(ranks) else ranks
        runs = by_run[by_run.index.isin(ranks["run_id"])] if len(ranks) else by_run
        environments = [job.environment | {"code": job.hashes.get("code")} for job in runs.itertuples()]
        row: Row = {}
        for key in (*_ENVIRONMENT, *_INFORMATIVE):
            texts = {_text(environment[key]) for environment in environments if environment.get(key) is not None}
            row[key] = " and ".join(sorted(texts)) or None
        for key in _LAYER if facts.get("kernel") is not None else (name for name in _LAYER if name != "kernel"):
            value = facts.get(key)
            row[key] = value["ran"].partition(" (")[0] if isinstance(value, dict) else _text(value)
        if len(ranks):
            row["clocks"] = ranks["sm_clock_mhz"].astype(float).median()
            row["matmul beside the run"] = ranks["matmul_tflops"].min()
            row["copy beside the run"] = ranks["copy_gbps"].min()
        recorded[about["comparison_id"]] = row
    return recorded


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return " ".join(f"{key}={value[key]}" for key in sorted(value)) or "none"
    return value if isinstance(value, str) else json.dumps(value)


# ---- the gate --------------------------------------------------------------------------------------------------------


def outcomes(change: Change, limit: float | None) -> pd.Series:
    """The gate's answer by row of ``change.cases``: slower, open or passed.

    A lower speedup counts as slower too, unless the case itself became faster: then it is native that gained more.
    None without a limit, and of controls, unless the machine is known to be the same.
    """
    rows = change.cases
    if limit is None:
        return pd.Series(None, rows.index, dtype=object)
    verdict, time, speedup = rows["time_verdict"], rows["time_ratio"].astype(float), rows["speedup_ratio"].astype(float)
    fell = rows["speedup_verdict"].eq("lower") & (1 / speedup > 1 + limit) & verdict.ne("faster")
    differing = rows["time_why"].astype(object).str.startswith("conditions differ").eq(True)
    excluded = rows["time_is_interval"].eq(True) & ~differing & (rows["time_high"].astype(float) <= 1 + limit)
    answers = np.select(
        [
            verdict.isna(),
            (verdict.eq("slower") & (time > 1 + limit)) | fell,
            verdict.isin(["slower", "faster"]) | excluded,
        ],
        ["open", "slower", "passed"],
        "open",
    )
    is_judged = rows["role"].isin(_JUDGED_ROLES) | change.same_machine
    is_judged &= rows["not_compared"].ne("only in NEW")  # a new case is no gap
    return pd.Series(answers, rows.index, dtype=object).where(is_judged, None)


def exit_status(change: Change, limit: float | None, *, strict: bool = False) -> int:
    """0 nothing is slower by more than the limit, 1 something is, 3 (strict) something is open. No limit: always 0."""
    answers = set(outcomes(change, limit))
    if "slower" in answers:
        return 1
    is_open = "open" in answers or len(_native_moved(change.cases)) > 0
    return 3 if strict and limit is not None and is_open else 0


def _native_moved(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of native that became slower or faster itself."""
    return rows[(rows["role"] == "baseline") & rows["time_verdict"].isin(["slower", "faster"])]


# ---- what is printed -------------------------------------------------------------------------------------------------


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"


def _change_words(row: Row, prefix: str = "") -> str:
    """``+5.0 [+4.1, +5.9]`` in percent, or ``+5.0 (-1.0..+9.0)`` where there is no interval."""
    if missing(row[f"{prefix}ratio"]):
        return NONE
    median, low, high = (_percent(row[f"{prefix}{end}"]) for end in ("ratio", "low", "high"))
    return f"{median} [{low}, {high}]" if row[f"{prefix}is_interval"] else f"{median} ({low}..{high})"


_POLICY = text("label", "policy")
_COLUMNS = (
    _POLICY,
    number("time_base", "base ms", lambda time_us: milliseconds(time_us / 1e3)),
    number("time_new", "new ms", lambda time_us: milliseconds(time_us / 1e3)),
    Column("time_ratio", "change", "%", cell=lambda row: _change_words(row, "time_")),
    percentage("floor", "floor"),
    text("time_verdict", "verdict"),
    number("speedup_base", "speedup base"),
    number("speedup_new", "new"),
    Column("speedup_ratio", "change", "%", cell=lambda row: _change_words(row, "speedup_")),
    text("speedup_verdict", "verdict"),
    percentage("dropped_share_new", "dropped"),
    percentage("retained_mass_new", "mass kept"),
)
_DIFFERENCES = (text("key", "condition"), text("base", "BASE"), text("new", "NEW"), text("takes", "verdicts"))


def compare_text(change: Change, limit: float | None = None) -> str:
    """All tables, what weakens them, and the answer last."""
    tables = [table for name in change.cases["comparison_id"].unique() for table in _tables(change, name)]
    heading = f"BASE {change.base}\nNEW  {change.new}"
    return "\n\n".join([heading, render(tables, "text"), "\n".join(_answer(change, limit))])


def _answer(change: Change, limit: float | None) -> Iterator[str]:
    """How many of each verdict; under a limit, which cases it stops and which it could not decide on."""
    policies = change.cases[change.cases["role"].isin(_JUDGED_ROLES) & change.cases["status_new"].notna()]
    policies = policies[policies["status_base"].notna()]
    counts = policies["time_verdict"].fillna("inconclusive").value_counts()
    shown = ["slower", "faster", "no difference", *([BELOW_MODEL] if BELOW_MODEL in counts else []), "inconclusive"]
    yield f"{len(policies)} policies: " + ", ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in shown)
    if limit is not None:
        answers = outcomes(change, limit)
        slower, still_open = (", ".join(change.cases["label"][answers == name]) for name in ("slower", "open"))
        yield f"slower by more than {100 * limit:g} %, beyond noise: {slower or 'none'}"
        if still_open:
            yield f"warning: neither shown nor excluded to be slower by more than {100 * limit:g} %: {still_open}"


def _tables(change: Change, comparison_id: str) -> Iterator[Table]:
    """Of one comparison: the cases, changes of parts and phases, and conditions that differ."""
    about = change.about.loc[comparison_id]
    rows = change.cases[change.cases["comparison_id"] == comparison_id]
    instead = "not compared: " + rows["not_compared"].astype(object)
    shown = rows.assign(instead=instead, floor=rows["time_floor_high"] - 1)
    title = f"{about['title']}: {about['how']}, {about['ran_on']}"
    yield Table(shown, _COLUMNS, title, list(_notes(change, about, rows)), "instead")

    parts = rows[["case_id", "label"]].merge(change.changes[change.changes["quantity"] != ALL])
    parts = parts[(parts["of"] == "time") | (parts["quantity"] == MOE)]
    if len(parts):
        names = parts["quantity"] + parts["of"].map({"time": "", "speedup": ", speedup"})
        parts = parts.assign(column=names, cell=[_cell(row) for row in parts.to_dict("records")])
        wide = parts.pivot(index=["case_id", "label"], columns="column", values="cell")
        wide = wide.loc[parts["case_id"].unique()].reset_index()
        title = "change in % of phases, on the rank that spends most in each (breakdown iterations)"
        if MOE in set(parts["quantity"]):
            title += ", of all MoE layers together; and of a pass's parts, on its slowest rank"
        yield Table(wide, (_POLICY, *(number(name, form="{}") for name in names.unique())), title)
    differing = change.differences[change.differences["comparison_id"] == comparison_id]
    if len(differing):
        yield Table(differing.assign(takes=differing.apply(_takes, axis=1)), _DIFFERENCES, "conditions that differ")


def _cell(row: Row) -> str:
    """The change of a part, or without its interval of a phase, and the verdict on it."""
    if missing(row["ratio"]):
        return NONE
    verdict = {"no difference": "", BELOW_MODEL: "", "inconclusive": " ?"}.get(row["verdict"], f" {row['verdict']}")
    return (_change_words(row) if row["quantity"] in PARTS else _percent(row["ratio"])) + verdict


def _takes(row: pd.Series) -> str:
    if row["intended"]:
        return "changed on purpose"
    on = {"all": "none", "times": "none on times", "none": ""}[row["takes_verdicts_on"]]
    return f"{on} without --changed {row['key']}" if on else "stay"


def _notes(change: Change, about: pd.Series, rows: pd.DataFrame) -> Iterator[str]:
    yield (
        "change: NEW over BASE, median over batches of the ratio of each batch's medians [95 % interval, bootstrapped "
        "over batches]; the two runs shared no moment"
    )
    yield "floor: what native run twice differs by, both runs' together; ? of phases and parts: inconclusive"
    yield from chance_words(int(rows["time_is_interval"][rows["role"].isin(_JUDGED_ROLES)].eq(True).sum()))
    if about["scope"] == "model":
        yield "ms: a pass of the whole model; MoE layers: waiting included; the rest: neither these nor attention"
    if about["facts"].get("device") is None and rows["time_num_launches"].max() == 1:
        yield "one launch: what differs from job to job is in no interval; with several (measure.launches) it is"
    for row in rows.to_dict("records"):
        for of in ("time", "speedup"):
            if row[f"{of}_verdict"] == "inconclusive":
                yield f"inconclusive, {of} of {row['label']}: {row[f'{of}_why']}"
        if not missing(row["routes_differently"]):
            yield f"warning: {row['label']} routes differently: {row['routes_differently']}"
    for row in _native_moved(rows).to_dict("records"):
        yield (
            f"warning: native itself became {row['time_verdict']} ({_percent(row['time_ratio'])} %): the machine, or "
            "code that all cases share; --same-machine says that the machine is known to be the same"
        )
    yield from (f"warning: {line}" for line in change.warnings.get(rows["comparison_id"].iloc[0], ()))


def compare_json(change: Change, limit: float | None = None, *, strict: bool = False) -> str:
    """The same for scripts, a list of rows for each frame; times in microseconds, changes as ratios NEW / BASE."""
    cases = change.cases.assign(outcome=outcomes(change, limit))
    frames = {"cases": cases, "changes": change.changes, "differences": change.differences}
    content = {
        "base": str(change.base),
        "new": str(change.new),
        **{name: change.about[name].iloc[0] for name in ("mode", "scope")},
        "fail_over": limit,
        "strict": strict,
        "same_machine": change.same_machine,
        "exit_status": exit_status(change, limit, strict=strict),
        "warnings": change.warnings,
        **{name: frame.astype(object).where(frame.notna(), None).to_dict("records") for name, frame in frames.items()},
    }
    return json.dumps(content, indent=2, allow_nan=False)
