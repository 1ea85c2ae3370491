"""Compare two runs of the same cases: what became slower, what faster, and what is inconclusive. A gate for CI.

Cases are paired by case id, a hash of all that defines them. Of each pair are compared the time of the layer, or of a
whole model's pass; what it consists of (``times_of``); and the speedup over native. Two jobs share no moment;
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
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from moe_ep_bench.analysis.cases import CASE, cases, comparisons, conditions, iterations, jobs, load, samples
from moe_ep_bench.analysis.columns import NONE, Column, Row, milliseconds, missing, number, percentage, text
from moe_ep_bench.analysis.notes import OVERSUBSCRIBED, chance_words, notes
from moe_ep_bench.analysis.origins import MODE_WORDS
from moe_ep_bench.analysis.reading import ResultsError
from moe_ep_bench.analysis.render import Table, render
from moe_ep_bench.analysis.store import Store, kind_of
from moe_ep_bench.errors import UserError
from moe_ep_bench.schema import LAYER_PHASES, MOE_REST
from moe_ep_bench.timing.statistics import (
    BELOW_MODEL,
    MIN_BATCHES,
    Estimate,
    estimate_change,
    estimate_median,
    joint_floor,
    judge,
    noise_floor,
    paired_ratios,
)

# The layer, or the pass of a whole model, from plain iterations; then the parts of a pass.
ALL = "all"
MOE, ATTENTION, REST = PARTS = ("MoE layers", "attention", "the rest")
_ITERATION = ["launch", "batch", "iteration"]
Times = dict[tuple[str, ...], dict[str, pd.Series]]

# Of run.json's ``environment``: what decides times.
_ENVIRONMENT = (
    *("device_name", "driver", "cpu_name", "num_cores", "threads_per_rank", "python", "torch", "cuda", "nccl"),
    *("triton", "megatron_core", "transformer_engine", "apex", "deep_ep", "variables"),
)
# Of run.json's ``comparisons``: what the same config may have become on another machine.
_LAYER = ("backend", "experts", "permute", "kernel", "cuda_graph", "oversubscribed", "links", "device", "placement")
_INFORMATIVE = ("hostname", "code", "git_commit")
CHANGEABLE = (*_ENVIRONMENT, *_LAYER, "clocks")
# Measured conditions: how far they may differ, and their form. A GPU's clock moves in steps of 15 MHz, under 1 %; the
# matmul and the copy beside a run are taken a few times only, too rough to take a verdict away.
_MEASURED = {
    "clocks": (0.02, "SM clock {:,.0f} MHz (median)"),
    "matmul beside the run": (0.05, "{:.3g} TFLOP/s"),
    "copy beside the run": (0.05, "{:.3g} GB/s"),
}
# Which verdicts a condition takes away: of times and speedups, of times only, or none.
_WEIGHTS = {**dict.fromkeys(CHANGEABLE, "all"), "clocks": "times"}
# Of a run's own warnings, those that say that its times may not be those of another day.
_WEAKENS = ("disturbed machine", "warm-up did not settle", "times drifted", "more ranks than cores", "launch-bound")
# What ``judge`` says of a ratio above the floor, in words for a time and for a speedup.
_WORDS = {"time": {"faster": "slower", "slower": "faster"}, "speedup": {"faster": "higher", "slower": "lower"}}
# Verdicts on a time and on a speedup that say the same.
_SAME = ("no difference", BELOW_MODEL)
_AGREE = {("slower", "lower"), ("faster", "higher"), *((one, other) for one in _SAME for other in _SAME)}
# A share of pairs or score mass that differs by less is rounding.
_ROUTING_STEP = 5e-4
# What is measured of a policy, beside controls: these decide ``--fail-over``.
_JUDGED_ROLES = ("policy", "replication")


class Change(NamedTuple):
    """What two run directories have in common, and what only one of them holds.

    Attributes:
        cases: a row per common case in reading order: what it is; ``not_compared``, why; how it
            ``routes_differently``; ``time_*`` and ``speedup_*``, the columns of ``changes`` of the layer or the pass.
        changes: a row per case x quantity x of (time or speedup): ``base`` and ``new``, medians (microseconds, or a
            speedup); ``ratio`` = new / base with its interval; the floor, ratios that noise alone makes; ``verdict``
            (``statistics.judge``; a higher or lower speedup in place of a faster or slower time), and ``why`` it is
            inconclusive.
        only_base, only_new: rows of ``cases.cases``.
        differences: conditions that differ (``_differences``), with their comparison id.
        warnings: what weakens either run: comparison_id and line.
        about: NEW's comparisons by id.
    """

    base: Path
    new: Path
    cases: pd.DataFrame
    changes: pd.DataFrame
    only_base: pd.DataFrame
    only_new: pd.DataFrame
    differences: pd.DataFrame
    warnings: pd.DataFrame
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
    for directory in (base, new):
        if kind_of(directory) == "routed":
            raise ResultsError(f"{directory}: holds routing without times; expected what `run` or `emulate` wrote")
    stores = [load(directory) for directory in (base, new)]
    old, now = frames = [cases(store) for store in stores]
    modes, scopes = ([frame[key].iloc[0] for frame in frames] for key in ("mode", "scope"))
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
    state = ["status", "reason", "dropped_share", "retained_mass"]
    common = old[["comparison_id", "case_id", "title", "label", "policy", "role", *state]].merge(
        now[["case_id", *state]], on="case_id", suffixes=("_base", "_new")
    )
    common["not_compared"] = [_not_compared(row) for row in common.to_dict("records")]
    common["routes_differently"] = [_routes_differently(row) for row in common.to_dict("records")]
    measured = common[common["not_compared"].isna()]
    if measured.empty:
        raise ResultsError(
            f"{new}: no case is in {base} as well; expected results of the same config on as many ranks (see the case "
            "ids in run.json)"
        )
    about = comparisons(stores[1]).set_index("comparison_id")
    shared = list(common["comparison_id"].unique())
    recorded = [_conditions(store, directory) for store, directory in zip(stores, (base, new), strict=True)]
    differences = pd.concat(
        _differences(*(of_run[name] for of_run in recorded), intended).assign(comparison_id=name) for name in shared
    )
    changes = _changes(list(map(_values, stores)), measured, differences, about, same_machine)
    for of in _WORDS:
        of_all = changes[(changes["quantity"] == ALL) & (changes["of"] == of)].set_index("case_id")
        common = common.join(of_all.drop(columns=["quantity", "of"]).add_prefix(f"{of}_"), on="case_id")
    warnings = [
        (comparison_id, f"{name}: {line.removeprefix('warning: ')}")
        for name, store in zip(("BASE", "NEW"), stores, strict=True)
        for directory, comparison_id in comparisons(store)[["directory", "comparison_id"]].itertuples(index=False)
        for line in notes(store, directory, comparison_id)
        if line.removeprefix("warning: ").startswith(_WEAKENS)
    ]
    only_base, only_new = (frame[~frame["case_id"].isin(common["case_id"])] for frame in frames)
    warned = pd.DataFrame(warnings, columns=["comparison_id", "warning"])
    return Change(base, new, common, changes, only_base, only_new, differences, warned, about, same_machine)


def _not_compared(row: Row) -> str | None:
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
        if abs(row[f"{name}_new"] - row[f"{name}_base"]) > _ROUTING_STEP
    ]
    return "; ".join(words) or None


# ---- times -----------------------------------------------------------------------------------------------------------


def times_of(store: Store, *, phases: bool = False) -> Times:
    """Microseconds of each quantity of every measured case by ``CASE``, indexed by (launch, batch, iteration).

    ``ALL``; of a whole model with breakdown iterations also its parts, on the rank that is slowest in each iteration,
    where they add up: MoE layers, waiting included; attention; and all the rest, which no policy reaches.

    Args:
        phases: also every phase that occurred, on the rank that spends most in it; of a whole model those of all its
            MoE layers together.
    """
    rows = iterations(store)
    is_model = cases(store)["scope"].eq("model").any()
    times: Times = {}
    for key, of_case in rows.groupby(CASE, sort=False):
        of_case = of_case.set_index(_ITERATION)
        plain, broken = (of_case[of_case["kind"] == kind] for kind in ("plain", "breakdown"))
        times[key] = {ALL: plain["time_us"]}
        if is_model and len(broken):
            moe = broken[[f"{phase}_us" for phase in (*LAYER_PHASES, MOE_REST) if f"{phase}_us" in broken]].sum(axis=1)
            attention = broken["attention_us"]
            times[key] |= {MOE: moe, ATTENTION: attention, REST: broken["time_us"] - moe - attention}
    if phases:
        found = samples(store)
        found = found[(found["kind"] == "breakdown") & found["phase"].isin(LAYER_PHASES)]
        by_rank = found.groupby([*CASE, "phase", *_ITERATION, "rank"])["time_us"].sum()
        most = by_rank.groupby([*CASE, "phase", *_ITERATION]).max()
        for (*key, phase), series in most.groupby(level=[*CASE, "phase"]):
            times[tuple(key)][phase] = series.droplevel([*CASE, "phase"])
        for key, of_case in times.items():
            order = [name for name in (ALL, *PARTS, *LAYER_PHASES) if name in of_case]
            times[key] = {name: of_case[name] for name in order}
    return times


def _values(store: Store) -> dict[str, dict[tuple[str, str], tuple[pd.Series, Estimate | None]]]:
    """Of each case id by quantity and (time or speedup): its values, and native over native again of the quantity."""
    times, values = times_of(store, phases=True), {}
    for _, group in cases(store).groupby(CASE[:2], sort=False):
        by_role = dict(zip(group["role"], group[CASE].itertuples(index=False, name=None), strict=True))
        native, again = (times.get(by_role.get(role, ()), {}) for role in ("baseline", "noise"))
        floors = {name: estimate_median(_speedups(native.get(name), series)) for name, series in again.items()}
        for key in group[CASE].itertuples(index=False, name=None):
            values[key[-1]] = {
                (name, of): (series if of == "time" else _speedups(native.get(name), series), floors.get(name))
                for name, series in times.get(key, {}).items()
                for of in _WORDS
            }
    return values


def _speedups(native: pd.Series | None, case: pd.Series) -> pd.Series:
    if native is None:
        return case.iloc[:0]
    ratios = paired_ratios(native, case[case > 0])
    return ratios[ratios > 0]


# ---- changes ---------------------------------------------------------------------------------------------------------


def _changes(
    values: list[dict[str, Any]],
    common: pd.DataFrame,
    differences: pd.DataFrame,
    about: pd.DataFrame,
    same_machine: bool,
) -> pd.DataFrame:
    """``Change.changes`` of cases that both runs measured, native's ahead of the others of its comparison."""
    weighty = differences[~differences["intended"].astype(bool)]
    forbidding = {
        of: weighty[weighty["takes_verdicts_on"].isin(weights)].groupby("comparison_id")["key"].agg(", ".join)
        for of, weights in (("time", ["all", "times"]), ("speedup", ["all"]))
    }
    found: dict[tuple[str, str, str], Row] = {}  # by case, quantity and (time or speedup)
    natives: dict[str, str] = {}
    for case_id, comparison_id, role in common[["case_id", "comparison_id", "role"]].itertuples(index=False):
        old, now = (of_run[case_id] for of_run in values)
        natives |= {comparison_id: case_id} if role == "baseline" else {}
        for name, of in (key for key in old if key in now and (role != "baseline" or key[1] == "time")):
            why = forbidding[of].get(comparison_id)
            change = _change(*old[name, of], *now[name, of], of, about.loc[comparison_id], why)
            found[case_id, name, of] = {"case_id": case_id, "quantity": name, "of": of} | change
            if of == "speedup" and not same_machine:
                native = found.get((natives.get(comparison_id, ""), name, "time"))
                _hold_against_native(found[case_id, name, "time"], found[case_id, name, of], native)
    return pd.DataFrame(found.values())


def _change(
    base: pd.Series,
    old_again: Estimate | None,
    new: pd.Series,
    new_again: Estimate | None,
    of: str,
    facts: pd.Series,
    differing: str | None,
) -> Row:
    """The numbers of one change, its verdict, and why it is inconclusive."""
    ratio = None if base.empty or new.empty else estimate_change(base, new)
    floor = joint_floor(noise_floor(old_again), noise_floor(new_again)) if old_again and new_again else None
    is_modelled, is_shared = facts["facts"].get("device") is not None, bool(facts["oversubscribed"])
    verdict, why = judge(ratio, floor, is_modelled=is_modelled, is_oversubscribed=is_shared), None
    if differing:
        why = f"conditions differ: {differing}"
    elif verdict == "inconclusive":
        why = "nothing to divide: no common batch, or a time of 0"
        if ratio is not None and not ratio.is_interval:
            why = f"{ratio.num_batches} batches: fewer than {MIN_BATCHES} give no interval"
        elif is_shared:
            why = OVERSUBSCRIBED
        elif ratio is not None and floor is None:
            why = "a run lacks its noise floor"
        elif ratio is not None and floor is not None:
            low, high, noise = (100 * (end - 1) for end in (ratio.low, ratio.high, floor.high))
            why = f"the interval ({low:+.1f} to {high:+.1f} %) lies partly in the noise floor ({noise:.1f} %)"
    return {
        "base": base.median(),
        "new": new.median(),
        "ratio": getattr(ratio, "median", None),
        **{name: getattr(ratio, name, None) for name in ("low", "high", "is_interval", "num_batches", "num_launches")},
        **{f"floor_{end}": getattr(floor, end, None) for end in ("low", "high")},
        "verdict": "inconclusive" if why else _WORDS[of].get(verdict, verdict),
        "why": why,
    }


def _hold_against_native(time: Row, speedup: Row, native: Row | None) -> None:
    """Take the verdict on a time away where native's own change forbids it; see the module."""
    if time["verdict"] == "inconclusive" or (time["verdict"], speedup["verdict"]) in _AGREE:
        return
    if native is None or native["ratio"] is None:
        why = "native was not measured in both, so the machine has no control"
    elif time["verdict"] not in _SAME and native["verdict"] not in _SAME:
        why = f"native changed by {_percent(native['ratio'])} %: perhaps the machine, not the case"
    elif native["verdict"] in ("slower", "faster"):
        why = f"native became {native['verdict']} ({_percent(native['ratio'])} %), and this did not"
    else:
        return
    time |= {"verdict": "inconclusive", "why": why}


# ---- conditions ------------------------------------------------------------------------------------------------------


def _differences(old: Row, now: Row, intended: Collection[str]) -> pd.DataFrame:
    """The conditions of a comparison that differ; what a run did not record differs from nothing.

    Another GPU, driver or package takes away the verdicts on times and speedups, unless the user names it as changed on
    purpose. Another clock takes the verdicts on times only, for a speedup is paired inside its run. Other code and
    another host are listed and take nothing: code is what ``compare`` mostly compares.

    Returns:
        key, base, new (texts), takes_verdicts_on (all, times or none), intended (changed on purpose: of no weight).
    """
    rows = []
    for key in (*_ENVIRONMENT, *_LAYER, *_MEASURED, *_INFORMATIVE):
        base, new = old.get(key), now.get(key)
        if base is None or new is None:
            continue
        is_same = base == new
        if key in _MEASURED:
            allowed, form = _MEASURED[key]
            is_same = abs(new - base) <= allowed * abs(base)
            base, new = form.format(base), form.format(new)
        if not is_same:
            rows.append((key, base, new, _WEIGHTS.get(key, "none"), key in intended))
    return pd.DataFrame(rows, columns=["key", "base", "new", "takes_verdicts_on", "intended"])


def _conditions(store: Store, directory: Path) -> dict[str, Row]:
    """What was recorded of each comparison: texts, and numbers of ``_MEASURED``."""
    by_run = {row.run_id: row for row in jobs(store).itertuples()}
    launches, recorded = conditions(store), {}
    for row in comparisons(store).to_dict("records"):
        ranks = launches[launches["comparison_id"] == row["comparison_id"]] if len(launches) else launches
        own = (
            [by_run[run_id] for run_id in ranks["run_id"].unique() if run_id in by_run]
            if len(ranks)
            else by_run.values()
        )
        environments = [job.environment | {"code": job.hashes.get("code")} for job in own]
        found: Row = {}
        for key in (*_ENVIRONMENT, *_INFORMATIVE):
            texts = {_text(one[key]) for one in environments if one.get(key) is not None}
            if texts:
                found[key] = " and ".join(sorted(texts))
        for key in _LAYER:
            value = row["facts"].get(key)
            found[key] = value["ran"].partition(" (")[0] if isinstance(value, dict) else _text(value)
        if row["facts"].get("kernel") is None:  # not recorded
            del found["kernel"]
        if len(ranks):
            measured = {
                "clocks": ranks["sm_clock_mhz"].median(),
                "matmul beside the run": ranks["matmul_tflops"].min(),
                "copy beside the run": ranks["copy_gbps"].min(),
            }
            found |= {key: float(value) for key, value in measured.items() if not missing(value)}
        recorded[row["comparison_id"]] = found
    return recorded


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return " ".join(f"{key}={one}" for key, one in sorted(value.items())) or "none"
    return value if isinstance(value, str) else json.dumps(value)


# ---- the gate --------------------------------------------------------------------------------------------------------


def outcome(case: Row, limit: float) -> Literal["slower", "open", "passed"]:
    """The gate's answer on a row of ``Change.cases``.

    A lower speedup counts as slower too, unless the case itself became faster: then it is native that gained more.
    """
    verdict = case["time_verdict"]
    if missing(verdict):
        return "open"
    if verdict == "slower" and case["time_ratio"] > 1 + limit:
        return "slower"
    if case["speedup_verdict"] == "lower" and 1 / case["speedup_ratio"] > 1 + limit and verdict != "faster":
        return "slower"
    if verdict in ("slower", "faster"):
        return "passed"
    is_known = case["time_is_interval"] and not str(case["time_why"]).startswith("conditions differ")
    return "passed" if is_known and case["time_high"] <= 1 + limit else "open"


def outcomes(change: Change, limit: float | None) -> pd.Series:
    """The gate's answer by row of ``change.cases``.

    None without a limit, and of controls, unless the machine is known to be the same.
    """
    is_judged = change.cases["role"].isin(_JUDGED_ROLES) | change.same_machine
    found = [
        outcome(row, limit) if limit is not None and judged else None
        for row, judged in zip(change.cases.to_dict("records"), is_judged, strict=True)
    ]
    return pd.Series(found, index=change.cases.index, dtype=object)


def exit_status(change: Change, limit: float | None, *, strict: bool = False) -> int:
    """0 nothing is slower by more than the limit, 1 something is, 3 (strict) something is open. No limit: always 0."""
    found = set(outcomes(change, limit))
    if "slower" in found:
        return 1
    is_open = "open" in found or len(change.only_base) > 0 or len(_native_moved(change.cases)) > 0
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
    for name, rows in (("BASE", change.only_base), ("NEW", change.only_new)):
        if len(rows):
            tables.append(Table(rows, (text("case_id", "case"), _POLICY), f"only in {name}, not compared"))
    heading = f"BASE {change.base}\nNEW  {change.new}"
    return "\n\n".join([heading, render(tables, "text"), "\n".join(_answer(change, limit))])


def _answer(change: Change, limit: float | None) -> Iterator[str]:
    """How many of each verdict; under a limit, which cases it stops and which it could not decide on."""
    policies = change.cases[change.cases["role"].isin(_JUDGED_ROLES)]
    counts = policies["time_verdict"].fillna("inconclusive").value_counts()
    shown = ["slower", "faster", "no difference", *([BELOW_MODEL] if BELOW_MODEL in counts else []), "inconclusive"]
    yield f"{len(policies)} policies: " + ", ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in shown)
    if limit is not None:
        found = outcomes(change, limit)
        slower, still_open = (", ".join(change.cases["label"][found == name]) for name in ("slower", "open"))
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
    found = change.differences[change.differences["comparison_id"] == comparison_id]
    if len(found):
        yield Table(found.assign(takes=found.apply(_takes, axis=1)), _DIFFERENCES, "conditions that differ")


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
    own = change.warnings[change.warnings["comparison_id"] == rows["comparison_id"].iloc[0]]
    yield from (f"warning: {line}" for line in own["warning"])


def compare_json(change: Change, limit: float | None = None, *, strict: bool = False) -> str:
    """The same for scripts, a list of rows for each frame; times in microseconds, changes as ratios NEW / BASE."""
    frames = {
        "cases": change.cases.assign(outcome=outcomes(change, limit)),
        "changes": change.changes,
        "differences": change.differences,
        "warnings": change.warnings,
        "only_base": change.only_base[["case_id", "label"]],
        "only_new": change.only_new[["case_id", "label"]],
    }
    content = {
        "base": str(change.base),
        "new": str(change.new),
        **{name: change.about[name].iloc[0] for name in ("mode", "scope")},
        "fail_over": limit,
        "strict": strict,
        "same_machine": change.same_machine,
        "exit_status": exit_status(change, limit, strict=strict),
        **{name: frame.astype(object).where(frame.notna(), None).to_dict("records") for name, frame in frames.items()},
    }
    return json.dumps(content, indent=2, allow_nan=False)
