"""Print two runs side by side as text and as JSON, and give an exit status that a CI job can act on.

The gate asks of every policy: is it surely slower than the limit allows? ``slower`` needs a verdict beyond noise and a
change beyond the limit. A case is *open* where the data can neither show nor exclude such a change: too few batches, a
noise floor wider than the limit, conditions that differ. Open cases pass with a warning, for a gate that fails on noise
is soon switched off; ``--strict`` makes them a status of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import pandas as pd

from moe_ep_bench.analysis.compare import ALL, MOE, PARTS, RunChange, percent_change
from moe_ep_bench.analysis.render import (
    NONE,
    Column,
    Row,
    Table,
    milliseconds,
    missing,
    number,
    percentage,
    render,
    text,
)
from moe_ep_bench.analysis.words import chance_words, hardware_words, mode_words
from moe_ep_bench.timing.statistics import BELOW_MODEL

# What is measured of a policy, beside controls: these decide ``--fail-over``.
_JUDGED_ROLES = ("policy", "replication")
_VERDICTS = ("slower", "faster", "no difference", BELOW_MODEL, "inconclusive")
_NOTES = (
    "change: NEW over BASE, median over batches of the ratio of each batch's medians [95 % interval, bootstrapped over "
    "batches]; the two runs shared no moment",
    "floor: what native run twice differs from itself by, both runs' together; of phases and parts: ? = inconclusive",
)
_MODEL_NOTE = "ms: a pass of the whole model; MoE layers: waiting included; the rest: neither these nor attention"
_ONE_LAUNCH = "one launch: what differs from job to job is in no interval; with several (measure.launches) it is"


def _percent(row: Row, prefix: str = "") -> str:
    """``+5.0 [+4.1, +5.9]`` in percent, or ``+5.0 (-1.0..+9.0)`` where there is no interval."""
    if missing(row[f"{prefix}ratio"]):
        return NONE
    median, low, high = (f"{100 * (row[f'{prefix}{end}'] - 1):+.1f}" for end in ("ratio", "low", "high"))
    return f"{median} [{low}, {high}]" if row[f"{prefix}is_interval"] else f"{median} ({low}..{high})"


_POLICY = text("label", "policy")
_COLUMNS = (
    _POLICY,
    number("time_base", "base ms", lambda time_us: milliseconds(time_us / 1e3)),
    number("time_new", "new ms", lambda time_us: milliseconds(time_us / 1e3)),
    Column("change %", lambda row: _percent(row, "time_"), is_words=True),
    percentage("floor", "floor %"),
    text("time_verdict", "verdict"),
    number("speedup_base", "speedup base"),
    number("speedup_new", "new"),
    Column("change %", lambda row: _percent(row, "speedup_"), is_words=True),
    text("speedup_verdict", "verdict"),
    percentage("dropped_share_new", "dropped %"),
    percentage("retained_mass_new", "mass kept %"),
)
_DIFFERENCES = (text("key", "condition"), text("base", "BASE"), text("new", "NEW"), text("takes", "verdicts"))


def outcome(case: Row, limit: float) -> Literal["slower", "open", "passed"]:
    """The gate's answer on a row of ``RunChange.cases``.

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


def outcomes(change: RunChange, limit: float | None) -> pd.Series:
    """The gate's answer by row of ``change.cases``.

    None without a limit, and of controls, unless the machine is known to be the same.
    """
    is_judged = change.cases["role"].isin(_JUDGED_ROLES) | change.same_machine
    found = [
        outcome(row, limit) if limit is not None and judged else None
        for row, judged in zip(change.cases.to_dict("records"), is_judged, strict=True)
    ]
    return pd.Series(found, index=change.cases.index, dtype=object)


def exit_status(change: RunChange, limit: float | None, *, strict: bool = False) -> int:
    """0 nothing is slower by more than the limit, 1 something is, 3 (strict) something is open. No limit: always 0."""
    found = set(outcomes(change, limit))
    if "slower" in found:
        return 1
    is_open = "open" in found or len(change.only_base) > 0 or len(change.native_moved) > 0
    return 3 if strict and limit is not None and is_open else 0


def compare_text(change: RunChange, limit: float | None = None) -> str:
    """All tables, what weakens them, and the answer last."""
    tables = [table for name in change.cases["comparison_id"].unique() for table in _tables(change, name)]
    for name, cases in (("BASE", change.only_base), ("NEW", change.only_new)):
        if len(cases):
            tables.append(Table(cases, (text("case_id", "case"), _POLICY), f"only in {name}, not compared"))
    heading = f"BASE {change.base.directory}\nNEW  {change.new.directory}"
    return "\n\n".join([heading, render(tables, "text"), "\n".join(_answer(change, limit))])


def _answer(change: RunChange, limit: float | None) -> Iterator[str]:
    """How many of each verdict; under a limit, which cases it stops and which it could not decide on."""
    policies = change.cases[change.cases["role"].isin(_JUDGED_ROLES)]
    counts = policies["time_verdict"].fillna("inconclusive").value_counts()
    yield f"{len(policies)} policies: " + ", ".join(
        f"{counts.get(one, 0)} {one}" for one in _VERDICTS if one in counts or one != BELOW_MODEL
    )
    if limit is not None:
        found = outcomes(change, limit)
        slower, still_open = (", ".join(change.cases["label"][found == name]) for name in ("slower", "open"))
        yield f"slower by more than {100 * limit:g} %, beyond noise: {slower or 'none'}"
        if still_open:
            yield f"warning: neither shown nor excluded to be slower by more than {100 * limit:g} %: {still_open}"


def _tables(change: RunChange, comparison_id: str) -> Iterator[Table]:
    """Of one comparison: the cases, changes of parts and phases, and conditions that differ."""
    facts = change.new.comparisons[comparison_id]
    cases = change.cases[change.cases["comparison_id"] == comparison_id]
    instead = "not compared: " + cases["not_compared"].astype(object)
    shown = cases.assign(instead=instead, floor=cases["time_floor_high"] - 1)
    title = f"{facts.title}: {mode_words(change.new, facts)}, {hardware_words(change.new, facts)}"
    yield Table(shown, _COLUMNS, title, list(_notes(change, comparison_id, cases)), "instead")

    parts = cases[["case_id", "label"]].merge(change.changes[change.changes["quantity"] != ALL])
    parts = parts[(parts["of"] == "time") | (parts["quantity"] == MOE)]
    if len(parts):
        speedup = parts["of"].map({"time": "", "speedup": ", speedup"})
        parts = parts.assign(column=parts["quantity"] + speedup, cell=[_cell(row) for row in parts.to_dict("records")])
        wide = parts.pivot(index=["case_id", "label"], columns="column", values="cell")
        wide = wide.loc[parts["case_id"].unique()].reset_index()
        whole = [name for name in (*PARTS, f"{MOE}, speedup") if name in wide]
        phases = [name for name in parts["column"].unique() if name not in whole]
        if whole:
            yield Table(wide, (_POLICY, *map(text, whole)), "change of a pass's parts in %, on its slowest rank")
        of_what = "of all MoE layers together " if whole else ""
        title = f"change of phases {of_what}in %, on the rank that spends most in each (breakdown iterations)"
        yield Table(wide, (_POLICY, *(number(phase, form="{}") for phase in phases)), title)
    found = change.differences[change.differences["comparison_id"] == comparison_id]
    if len(found):
        takes = [_takes(row) for row in found.to_dict("records")]
        yield Table(found.assign(takes=takes), _DIFFERENCES, "conditions that differ")


def _cell(row: Row) -> str:
    """The change of a part, or without its interval of a phase, and the verdict on it."""
    if missing(row["ratio"]):
        return NONE
    verdict = {"no difference": "", BELOW_MODEL: "", "inconclusive": " ?"}.get(row["verdict"], f" {row['verdict']}")
    return (_percent(row) if row["quantity"] in PARTS else f"{100 * (row['ratio'] - 1):+.1f}") + verdict


def _takes(row: Row) -> str:
    if row["intended"]:
        return "changed on purpose"
    on = {"all": "none", "times": "none on times", "none": ""}[row["takes_verdicts_on"]]
    return f"{on} without --changed {row['key']}" if on else "stay"


def _notes(change: RunChange, comparison_id: str, cases: pd.DataFrame) -> Iterator[str]:
    facts = change.new.comparisons[comparison_id]
    yield from _NOTES
    judged = cases[cases["role"].isin(_JUDGED_ROLES)]
    yield from chance_words(int(judged["time_is_interval"].eq(True).sum()))
    if facts.whole is not None:
        yield _MODEL_NOTE
    if facts.device is None and cases["time_num_launches"].max() == 1:
        yield _ONE_LAUNCH
    for row in cases.to_dict("records"):
        for of in ("time", "speedup"):
            if row[f"{of}_verdict"] == "inconclusive":
                yield f"inconclusive, {of} of {row['label']}: {row[f'{of}_why']}"
        if not missing(row["routes_differently"]):
            yield f"warning: {row['label']} routes differently: {row['routes_differently']}"
    for row in change.native_moved.to_dict("records"):
        if row["comparison_id"] == comparison_id:
            yield (
                f"warning: native itself became {row['time_verdict']} ({percent_change(row['time_ratio'])}): the "
                "machine, or code that all cases share; --same-machine says that the machine is known to be the same"
            )
    yield from (f"warning: {line}" for of, line in change.warnings if of == comparison_id)


def compare_json(change: RunChange, limit: float | None = None, *, strict: bool = False) -> str:
    """The same for scripts, a list of rows for each frame; times in microseconds, changes as ratios NEW / BASE."""
    about = ["case_id", "label"]
    frames = {
        "cases": change.cases.assign(outcome=outcomes(change, limit)),
        "changes": change.changes,
        "differences": change.differences,
        "warnings": pd.DataFrame(change.warnings, columns=["comparison_id", "warning"]),
        "only_base": change.only_base[about],
        "only_new": change.only_new[about],
    }
    content = {
        "base": str(change.base.directory),
        "new": str(change.new.directory),
        "mode": change.new.mode,
        "scope": change.new.scope,
        "fail_over": limit,
        "strict": strict,
        "same_machine": change.same_machine,
        "exit_status": exit_status(change, limit, strict=strict),
        **{name: frame.astype(object).where(frame.notna(), None).to_dict("records") for name, frame in frames.items()},
    }
    return json.dumps(content, indent=2, allow_nan=False)
