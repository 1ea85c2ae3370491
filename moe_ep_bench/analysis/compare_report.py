"""Two runs side by side as text, as JSON, and as an exit status that a CI job can act on.

The gate asks of every policy: is it surely slower than the limit allows? ``slower`` needs two things, a verdict beyond
noise and a change beyond the limit. A case is *open* where the data can neither show nor exclude such a change: too few
batches, a noise floor wider than the limit, conditions that differ. Open cases pass with a warning, for a gate that
fails on noise is soon switched off; ``--strict`` makes them a status of their own.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal

from moe_ep_bench.analysis.compare import CaseChange, Change, ComparisonChange, RunChange, percent_change
from moe_ep_bench.analysis.differences import Difference
from moe_ep_bench.analysis.load import Case
from moe_ep_bench.analysis.quantities import PARTS
from moe_ep_bench.analysis.words import NONE, aligned, hardware_words, milliseconds, mode_words, percent
from moe_ep_bench.schema import LAYER_PHASES
from moe_ep_bench.timing.statistics import Estimate

Outcome = Literal["slower", "open", "passed"]

_HEADER = (
    "policy",
    "base ms",
    "new ms",
    "change %",
    "floor %",
    "verdict",
    "speedup base",
    "new",
    "change %",
    "verdict",
    "dropped %",
    "mass kept %",
)
_LEFT = (0, 3, 5, 8, 9)
# The verdict on a phase or a part beside its change.
_MARKS = {verdict: f" {verdict}" for verdict in ("slower", "faster", "lower", "higher")} | {
    "no difference": "",
    "cannot say": " ?",
}
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


def outcome(case: CaseChange, limit: float) -> Outcome:
    """What the gate makes of a case.

    A lower speedup counts as slower too, unless the case itself became faster: then it is native that gained more.
    """
    time, speedup = case.time, case.speedup
    if time is None:
        return "open"
    if time.verdict == "slower" and time.ratio is not None and time.ratio.median > 1 + limit:
        return "slower"
    if (
        speedup is not None
        and speedup.verdict == "lower"
        and speedup.ratio is not None
        and 1 / speedup.ratio.median > 1 + limit
        and time.verdict != "faster"
    ):
        return "slower"
    return "passed" if _excludes(time, limit) else "open"


def _excludes(time: Change, limit: float) -> bool:
    """Whether a slowdown beyond the limit is out of the question, or was found to be within it."""
    if time.verdict in ("slower", "faster"):
        return True
    if time.ratio is None or not time.ratio.is_interval or (time.why or "").startswith("conditions differ"):
        return False
    return time.ratio.high <= 1 + limit


def exit_status(change: RunChange, limit: float | None, *, strict: bool = False) -> int:
    """0 nothing is slower by more than the limit, 1 something is, 3 (strict) something is open. No limit: always 0."""
    if limit is None:
        return 0
    outcomes = {outcome(case, limit) for case in judged(change)}
    if "slower" in outcomes:
        return 1
    is_open = "open" in outcomes or bool(change.only_base) or any(map(_native_moved, change.comparisons))
    return 3 if strict and is_open else 0


def judged(change: RunChange) -> list[CaseChange]:
    """The cases that the gate looks at: policies; on a machine that is known to be the same, controls as well."""
    return [case for case in change.cases if case.is_judged or change.same_machine]


def _native_moved(comparison: ComparisonChange) -> bool:
    return comparison.control is not None and comparison.control.verdict in ("slower", "faster")


# ---- text -----------------------------------------------------------------------------------------------------------


def compare_text(change: RunChange, limit: float | None = None) -> str:
    """All tables, what weakens them, and the answer last."""
    blocks = ["\n".join([f"BASE {change.base.directory}", f"NEW  {change.new.directory}"])]
    blocks += [_block(change, comparison) for comparison in change.comparisons]
    alone = [*_alone("BASE", change.only_base), *_alone("NEW", change.only_new)]
    blocks += ["\n".join(alone)] if alone else []
    return "\n\n".join([*blocks, "\n".join(answer(change, limit))])


def answer(change: RunChange, limit: float | None) -> list[str]:
    """How many of each verdict; under a limit, which cases it stops and which it could not decide on."""
    policies = [case for case in change.cases if case.is_judged]
    counts = {verdict: 0 for verdict in ("slower", "faster", "no difference", "cannot say")}
    for case in policies:
        counts["cannot say" if case.time is None else case.time.verdict] += 1
    lines = [f"{len(policies)} policies: " + ", ".join(f"{number} {verdict}" for verdict, number in counts.items())]
    if limit is None:
        return lines
    of_each = {name: [c for c in judged(change) if outcome(c, limit) == name] for name in ("slower", "open")}
    limit_words = f"{100 * limit:g} %"
    slower, still_open = (", ".join(case.new.label for case in of_each[name]) for name in ("slower", "open"))
    lines.append(f"slower by more than {limit_words}, beyond noise: {slower or 'none'}")
    if still_open:
        lines.append(f"warning: neither shown nor excluded to be slower by more than {limit_words}: {still_open}")
    return lines


def _alone(name: str, cases: tuple[Case, ...]) -> list[str]:
    if not cases:
        return []
    return [f"only in {name}, not compared:", *(f"  {case.case_id}  {case.label}" for case in cases)]


def _block(change: RunChange, comparison: ComparisonChange) -> str:
    facts, run = comparison.comparison, change.new
    title = f"{facts.title}: {mode_words(run, facts)}, {hardware_words(run, facts)}"
    lines = [title, "", *aligned([_HEADER, *map(_cells, comparison.cases)], left=_LEFT)]
    measured = [case for case in comparison.cases if case.time is not None]
    if any(case.parts for case in measured):
        lines += ["", "change of a pass's parts in %, on its slowest rank, and of the MoE layers' speedup (breakdown)"]
        rows = [(case.new.label, *_part_cells(case)) for case in measured]
        lines += aligned([("policy", *PARTS, "MoE speedup base", "new", "change %"), *rows], left=(0, 1, 2, 3, 6))
    phases = [phase for phase in LAYER_PHASES if any(phase in case.phases for case in measured)]
    if phases:
        of_what = "" if facts.whole is None else " of all MoE layers together"
        lines += ["", f"change of phases{of_what} in %, on the rank that spends most in each (breakdown iterations)"]
        rows = [(case.new.label, *_phase_cells(case, phases)) for case in measured]
        lines += aligned([("policy", *phases), *rows], left=(0,))
    return "\n".join([*lines, "", *(f"  {line}" for line in _notes(comparison))])


def _cells(case: CaseChange) -> tuple[str, ...]:
    time, speedup = case.time, case.speedup
    if time is None:
        return (case.new.label, f"not compared: {case.why}")
    kept = (NONE, NONE)
    if case.fidelity is not None and case.base.role != "ceiling":
        kept = percent(case.fidelity.dropped_share), percent(case.fidelity.retained_mass)
    of_speedup = (NONE,) * 4
    if speedup is not None:
        of_speedup = (_number(speedup.base), _number(speedup.new), change_words(speedup.ratio), speedup.verdict)
    floor = NONE if time.floor is None else f"{100 * (time.floor.high - 1):.1f}"
    times = (NONE if value is None else milliseconds(value / 1e3) for value in (time.base, time.new))
    return (case.new.label, *times, change_words(time.ratio), floor, time.verdict, *of_speedup, *kept)


def change_words(ratio: Estimate | None) -> str:
    """``+5.0 [+4.1, +5.9]`` in percent, or ``+5.0 (-1.0..+9.0)`` where there is no interval."""
    if ratio is None:
        return NONE
    low, median, high = (f"{100 * (value - 1):+.1f}" for value in (ratio.low, ratio.median, ratio.high))
    return f"{median} [{low}, {high}]" if ratio.is_interval else f"{median} ({low}..{high})"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _part_cells(case: CaseChange) -> list[str]:
    """Of each part its change with its verdict, then the MoE layers' speedup in both runs."""
    parts = [case.parts.get(part) for part in PARTS]
    cells = [NONE if one is None else f"{change_words(one.ratio)}{_MARKS[one.verdict]}" for one in parts]
    speedup = case.moe_speedup
    if speedup is None:
        return [*cells, *(NONE,) * 3]
    change = f"{change_words(speedup.ratio)}{_MARKS[speedup.verdict]}"
    return [*cells, _number(speedup.base), _number(speedup.new), change]


def _phase_cells(case: CaseChange, phases: list[str]) -> list[str]:
    found = [case.phases.get(phase) for phase in phases]
    return [
        NONE if one is None or one.ratio is None else f"{100 * (one.ratio.median - 1):+.1f}{_MARKS[one.verdict]}"
        for one in found
    ]


def _notes(comparison: ComparisonChange) -> list[str]:
    facts = comparison.comparison
    notes = [
        "change: NEW over BASE, median over batches of the ratio of each batch's medians [95 % interval, bootstrapped "
        "over batches]; the two runs shared no moment",
        "floor: what native run twice differs from itself by, both runs' together; phases: ? = cannot say",
    ]
    if facts.whole is not None:
        notes.append(
            "ms: a pass of the whole model; speedup: from end to end; MoE layers: waiting included; the rest: what is "
            "neither these nor attention"
        )
    measured = [case.time.ratio for case in comparison.cases if case.time is not None and case.time.ratio is not None]
    if facts.device is None and measured and max(ratio.num_launches for ratio in measured) == 1:
        notes.append(_ONE_LAUNCH)
    for case in comparison.cases:
        for what, of_what in (("time", case.time), ("speedup", case.speedup)):
            if of_what is not None and of_what.verdict == "cannot say":
                notes.append(f"cannot say, {what} of {case.new.label}: {of_what.why}")
    for one in comparison.differences:
        notes.append(f"differs: {one.words()}{_weight_words(one)}")
    control = comparison.control
    if _native_moved(comparison) and control is not None and control.ratio is not None:
        notes.append(
            f"warning: native itself became {control.verdict} ({percent_change(control.ratio)}): the machine, or code "
            "that all cases share; where it is known to be the same machine, --same-machine says so"
        )
    for case in comparison.cases:
        if case.fidelity_change is not None:
            notes.append(f"warning: {case.new.label} routes differently: {case.fidelity_change}")
    return notes + [f"warning: {line}" for line in comparison.warnings]


def _weight_words(one: Difference) -> str:
    if one.intended:
        return " (changed on purpose)"
    return {"all": "; no verdicts without --changed " + one.key, "none": ""}.get(
        one.weight, "; no verdicts on times without --changed " + one.key
    )


# ---- JSON -----------------------------------------------------------------------------------------------------------


def compare_json(change: RunChange, limit: float | None = None, *, strict: bool = False) -> str:
    """The same for scripts; times in microseconds, changes as ratios NEW / BASE."""
    content = {
        "base": str(change.base.directory),
        "new": str(change.new.directory),
        "mode": change.new.mode,
        "scope": change.new.scope,
        "fail_over": limit,
        "strict": strict,
        "same_machine": change.same_machine,
        "exit_status": exit_status(change, limit, strict=strict),
        "comparisons": [_comparison_json(comparison, limit, change) for comparison in change.comparisons],
        "only_base": [{"case_id": case.case_id, "label": case.label} for case in change.only_base],
        "only_new": [{"case_id": case.case_id, "label": case.label} for case in change.only_new],
    }
    return json.dumps(content, indent=2, allow_nan=False)


def _comparison_json(comparison: ComparisonChange, limit: float | None, change: RunChange) -> dict[str, Any]:
    return {
        "comparison_id": comparison.cases[0].new.comparison_id if comparison.cases else None,
        "title": comparison.comparison.title,
        "differences": [
            {"key": d.key, "base": d.base, "new": d.new, "takes_verdicts_on": d.weight, "intended": d.intended}
            for d in comparison.differences
        ],
        "warnings": list(comparison.warnings),
        "cases": [
            {
                "case_id": case.new.case_id,
                "label": case.new.label,
                "policy": case.new.policy,
                "role": case.new.role,
                "outcome": outcome(case, limit) if limit is not None and case in judged(change) else None,
                "not_compared": case.why,
                "routes_differently": case.fidelity_change,
                "time_us": _change_json(case.time),
                "speedup": _change_json(case.speedup),
                "parts_us": {part: _change_json(one) for part, one in case.parts.items()},
                "moe_speedup": _change_json(case.moe_speedup),
                "phases_us": {phase: _change_json(one) for phase, one in case.phases.items()},
            }
            for case in comparison.cases
        ],
    }


def _change_json(change: Change | None) -> dict[str, Any] | None:
    if change is None:
        return None
    ratio, floor = change.ratio, change.floor
    return {
        "base": change.base,
        "new": change.new,
        "ratio": None if ratio is None else ratio.median,
        "low": None if ratio is None else ratio.low,
        "high": None if ratio is None else ratio.high,
        "is_interval": ratio is not None and ratio.is_interval,
        "num_batches": 0 if ratio is None else ratio.num_batches,
        "num_launches": 0 if ratio is None else ratio.num_launches,
        "floor_low": None if floor is None else floor.low,
        "floor_high": None if floor is None else floor.high,
        "verdict": change.verdict,
        "why": change.why,
    }
