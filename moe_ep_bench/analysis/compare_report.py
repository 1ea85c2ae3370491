"""Print two runs side by side as text and as JSON, and give an exit status that a CI job can act on.

The gate asks of every policy: is it surely slower than the limit allows? ``slower`` needs a verdict beyond noise and a
change beyond the limit. A case is *open* where the data can neither show nor exclude such a change: too few batches, a
noise floor wider than the limit, conditions that differ. Open cases pass with a warning, for a gate that fails on noise
is soon switched off; ``--strict`` makes them a status of their own.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import pandas as pd

from moe_ep_bench.analysis.compare import CHANGE_FIELDS, RunChange, native_moved, percent_change
from moe_ep_bench.analysis.load import Case
from moe_ep_bench.analysis.quantities import ALL, MOE, PARTS
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
from moe_ep_bench.analysis.words import hardware_words, mode_words
from moe_ep_bench.schema import LAYER_PHASES

Outcome = Literal["slower", "open", "passed"]

_VERDICTS = ("slower", "faster", "no difference", "inconclusive")


def change_words(row: Row, prefix: str = "") -> str:
    """``+5.0 [+4.1, +5.9]`` in percent, or ``+5.0 (-1.0..+9.0)`` where there is no interval."""
    if missing(row[f"{prefix}ratio"]):
        return NONE
    median, low, high = (f"{100 * (row[f'{prefix}{end}'] - 1):+.1f}" for end in ("ratio", "low", "high"))
    return f"{median} [{low}, {high}]" if row[f"{prefix}is_interval"] else f"{median} ({low}..{high})"


def _us(name: str, header: str) -> Column:
    return number(name, header, lambda time_us: milliseconds(time_us / 1e3))


_COLUMNS = (
    text("label", "policy"),
    _us("time_base", "base ms"),
    _us("time_new", "new ms"),
    Column("change %", lambda row: change_words(row, "time_"), is_words=True),
    number("time_floor_high", "floor %", lambda high: f"{100 * (high - 1):.1f}"),
    text("time_verdict", "verdict"),
    number("speedup_base", "speedup base"),
    number("speedup_new", "new"),
    Column("change %", lambda row: change_words(row, "speedup_"), is_words=True),
    text("speedup_verdict", "verdict"),
    percentage("dropped_share", "dropped %"),
    percentage("retained_mass", "mass kept %"),
)
_DIFFERENCES = (text("key", "condition"), text("base", "BASE"), text("new", "NEW"), text("verdicts"))
_NOTES = (
    "change: NEW over BASE, median over batches of the ratio of each batch's medians [95 % interval, bootstrapped over "
    "batches]; the two runs shared no moment",
    "floor: what native run twice differs from itself by, both runs' together; phases: ? = inconclusive",
)
_MODEL_NOTE = (
    "ms: a pass of the whole model; speedup: from end to end; MoE layers: waiting included; the rest: what is neither "
    "these nor attention"
)
_ONE_LAUNCH = (
    "one launch: what differs from job to job (node, temperature, memory layout) is in no interval; with several "
    "(measure.launches) it is, by Student's t"
)


def parse_limit(text: str) -> float:
    """``3%`` or ``0.03`` as a share.

    Raises:
        ValueError: neither.
    """
    number, sign, rest = text.strip().partition("%")
    try:
        share = float(number) / (100 if sign else 1)
    except ValueError:
        share = math.nan
    if rest or not (0 <= share < 1):
        raise ValueError(f"--fail-over: expected a percentage such as 3%, or a share from 0 to 1; got {text!r}")
    return share


def outcome(case: Row, limit: float) -> Outcome:
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
    found = [
        outcome(row, limit) if limit is not None and (row["is_judged"] or change.same_machine) else None
        for row in change.cases.to_dict("records")
    ]
    return pd.Series(found, index=change.cases.index, dtype=object)


def exit_status(change: RunChange, limit: float | None, *, strict: bool = False) -> int:
    """0 nothing is slower by more than the limit, 1 something is, 3 (strict) something is open. No limit: always 0."""
    found = set(outcomes(change, limit))
    if "slower" in found:
        return 1
    is_open = "open" in found or bool(change.only_base) or len(native_moved(change)) > 0
    return 3 if strict and limit is not None and is_open else 0


def compare_text(change: RunChange, limit: float | None = None) -> str:
    """All tables, what weakens them, and the answer last."""
    heading = f"BASE {change.base.directory}\nNEW  {change.new.directory}"
    tables = [table for one in change.differences for table in _tables(change, one)]
    for name, cases in (("BASE", change.only_base), ("NEW", change.only_new)):
        if cases:
            lines = [f"{case.case_id}  {case.label}" for case in cases]
            tables.append(Table(pd.DataFrame(), (), f"only in {name}, not compared", lines))
    return "\n\n".join([heading, render(tables, "text"), "\n".join(answer(change, limit))])


def answer(change: RunChange, limit: float | None) -> list[str]:
    """How many of each verdict; under a limit, which cases it stops and which it could not decide on."""
    policies = change.cases[change.cases["is_judged"]]
    counts = policies["time_verdict"].fillna("inconclusive").value_counts()
    lines = [f"{len(policies)} policies: " + ", ".join(f"{counts.get(one, 0)} {one}" for one in _VERDICTS)]
    if limit is None:
        return lines
    found = outcomes(change, limit)
    slower, still_open = (", ".join(change.cases["label"][found == name]) for name in ("slower", "open"))
    lines.append(f"slower by more than {100 * limit:g} %, beyond noise: {slower or 'none'}")
    if still_open:
        lines.append(f"warning: neither shown nor excluded to be slower by more than {100 * limit:g} %: {still_open}")
    return lines


def _tables(change: RunChange, comparison_id: str) -> list[Table]:
    """Of one comparison: the cases, a pass's parts, phases, and conditions that differ."""
    facts = change.new.comparisons[comparison_id]
    cases = change.cases[change.cases["comparison_id"] == comparison_id]
    title = f"{facts.title}: {mode_words(change.new, facts)}, {hardware_words(change.new, facts)}"
    instead = "not compared: " + cases["not_compared"].astype(object)
    tables = [Table(cases.assign(instead=instead), _COLUMNS, title, _notes(change, comparison_id), "instead")]

    rows = change.changes[change.changes["case_id"].isin(cases["case_id"]) & (change.changes["quantity"] != ALL)]
    times, of_moe = rows[rows["of"] == "time"], rows[(rows["of"] == "speedup") & (rows["quantity"] == MOE)]
    records = times.to_dict("records")
    labels = cases[cases["not_compared"].isna()].set_index("case_id")[["label"]]
    if facts.whole is not None and len(records):
        cells = times.assign(cell=[change_words(row) + _mark(row) for row in records])
        parts = labels.join(cells.pivot(index="case_id", columns="quantity", values="cell"))
        parts = parts.join(of_moe.set_index("case_id")[list(CHANGE_FIELDS)])
        speedup = (
            number("base", "MoE speedup base"),
            number("new"),
            Column("change %", lambda row: NONE if missing(row["ratio"]) else change_words(row) + _mark(row), True),
        )
        title = "change of a pass's parts in %, on its slowest rank, and of the MoE layers' speedup (breakdown)"
        tables.append(Table(parts, (text("label", "policy"), *map(text, PARTS), *speedup), title))
    present = [phase for phase in LAYER_PHASES if phase in set(times["quantity"])]
    if present:
        cells = times.assign(
            cell=[None if missing(r["ratio"]) else f"{100 * (r['ratio'] - 1):+.1f}{_mark(r)}" for r in records]
        )
        phases = labels.join(cells.pivot(index="case_id", columns="quantity", values="cell"))
        of_what = "" if facts.whole is None else " of all MoE layers together"
        title = f"change of phases{of_what} in %, on the rank that spends most in each (breakdown iterations)"
        columns = (text("label", "policy"), *(number(phase, form="{}") for phase in present))
        tables.append(Table(phases, columns, title))
    found = change.differences[comparison_id]
    if len(found):
        verdicts = [_weight_words(row) for row in found.to_dict("records")]
        tables.append(Table(found.assign(verdicts=verdicts), _DIFFERENCES, "conditions that differ"))
    return tables


def _mark(row: Row) -> str:
    """The verdict on a phase or a part beside its change."""
    return {"no difference": "", "inconclusive": " ?"}.get(row["verdict"], f" {row['verdict']}")


def _weight_words(row: Row) -> str:
    if row["intended"]:
        return "changed on purpose"
    on = {"all": "none", "times": "none on times", "none": ""}[row["takes_verdicts_on"]]
    return f"{on} without --changed {row['key']}" if on else "stay"


def _notes(change: RunChange, comparison_id: str) -> list[str]:
    facts = change.new.comparisons[comparison_id]
    cases = change.cases[change.cases["comparison_id"] == comparison_id]
    notes = [*_NOTES, *([] if facts.whole is None else [_MODEL_NOTE])]
    if facts.device is None and cases["time_num_launches"].max() == 1:
        notes.append(_ONE_LAUNCH)
    for row in cases.to_dict("records"):
        notes += [
            f"inconclusive, {of} of {row['label']}: {row[f'{of}_why']}"
            for of in ("time", "speedup")
            if row[f"{of}_verdict"] == "inconclusive"
        ]
    for row in native_moved(change).to_dict("records"):
        if row["comparison_id"] == comparison_id:
            notes.append(
                f"warning: native itself became {row['time_verdict']} ({percent_change(row['time_ratio'])}): the "
                "machine, or code that all cases share; --same-machine says that the machine is known to be the same"
            )
    for row in cases[cases["routes_differently"].notna()].to_dict("records"):
        notes.append(f"warning: {row['label']} routes differently: {row['routes_differently']}")
    return notes + [f"warning: {line}" for line in change.warnings[comparison_id]]


def compare_json(change: RunChange, limit: float | None = None, *, strict: bool = False) -> str:
    """The same for scripts; times in microseconds, changes as ratios NEW / BASE."""

    def alone(cases: list[Case]) -> list[dict[str, str]]:
        return [{"case_id": case.case_id, "label": case.label} for case in cases]

    cases = _with_none(change.cases.assign(outcome=outcomes(change, limit)))
    changes = _with_none(change.changes)
    content = {
        "base": str(change.base.directory),
        "new": str(change.new.directory),
        "mode": change.new.mode,
        "scope": change.new.scope,
        "fail_over": limit,
        "strict": strict,
        "same_machine": change.same_machine,
        "exit_status": exit_status(change, limit, strict=strict),
        "comparisons": [
            {
                "comparison_id": comparison_id,
                "title": change.new.comparisons[comparison_id].title,
                "differences": found.to_dict("records"),
                "warnings": change.warnings[comparison_id],
                "cases": [
                    _case_json(row, changes[changes["case_id"] == row["case_id"]])
                    for row in cases[cases["comparison_id"] == comparison_id].to_dict("records")
                ],
            }
            for comparison_id, found in change.differences.items()
        ],
        "only_base": alone(change.only_base),
        "only_new": alone(change.only_new),
    }
    return json.dumps(content, indent=2, allow_nan=False)


def _with_none(frame: pd.DataFrame) -> pd.DataFrame:
    """A frame with None, which JSON knows, in place of NaN."""
    return frame.astype(object).where(frame.notna(), None)


def _case_json(row: Row, changes: pd.DataFrame) -> dict[str, Any]:
    fields = changes[list(CHANGE_FIELDS)].to_dict("records")
    found = dict(zip(zip(changes["of"], changes["quantity"], strict=True), fields, strict=True))
    times = {name: one for (of, name), one in found.items() if of == "time"}
    names = ("case_id", "label", "policy", "role", "outcome", "not_compared", "routes_differently")
    return {
        **{name: row[name] for name in names},
        "time_us": times.get(ALL),
        "speedup": found.get(("speedup", ALL)),
        "parts_us": {name: times[name] for name in PARTS if name in times},
        "moe_speedup": found.get(("speedup", MOE)),
        "phases_us": {name: one for name, one in times.items() if name not in (ALL, *PARTS)},
    }
