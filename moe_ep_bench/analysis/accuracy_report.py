"""What ``moe-ep-bench quality`` prints of tasks: scores beside the unpatched model's and the paper's numbers.

Policies are set against the unpatched model question by question, where the mean over questions is the harness' own
number: the questions' own difficulty drops out. A paper's number stands only beside one of the same task, shots, metric
and policy; the difference is given in our standard errors, for papers state none.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.quality_report import WIDTH, finished_comparisons, label_lines, short_label


@dataclass(frozen=True, eq=False)
class AnsweredCase:
    """A policy on one task: scores by metric, answers by question."""

    label: str
    role: str
    policy: str
    params: dict[str, Any]
    scores: pd.DataFrame
    answers: pd.DataFrame


@dataclass(frozen=True, eq=False)
class AnsweredTask:
    """One task, the unpatched model first."""

    facts: dict[str, Any]
    cases: list[AnsweredCase]

    @property
    def native(self) -> AnsweredCase:
        return self.cases[0]


@dataclass(frozen=True)
class Line:
    """One metric of one task under one policy; shares, and None where there is nothing to say.

    Attributes:
        added: what the case adds to the unpatched model's, paired by question.
        paper: as a share.
    """

    task: str
    label: str
    metric: str
    answers_filter: str
    num_fewshot: int | None
    num_samples: int | None
    value: float
    stderr: float | None
    added: float | None
    added_stderr: float | None
    paper: float | None
    dropped: float | None
    mass: float | None

    @property
    def standard_errors(self) -> float | None:
        """Ours minus the paper's, in our standard errors; None where either is not at hand."""
        return (self.value - self.paper) / self.stderr if self.paper is not None and self.stderr else None


def load_accuracy_results(directory: Path) -> list[AnsweredTask]:
    """Read what is done of tasks in a directory that ``quality`` wrote, in the order of its config.

    Raises:
        ResultsError: see ``finished_comparisons``.
    """
    return [
        AnsweredTask(facts, [_case(case, scores) for case, scores, _ in cases])
        for facts, cases in finished_comparisons(directory)
        if "task" in facts
    ]


def _case(case: dict[str, Any], rows: pd.DataFrame) -> AnsweredCase:
    whole, of_questions = rows[rows["item"].isna()], rows[rows["item"].notna()]
    routing = whole[whole["filter"].isna()].set_index("metric")["value"]
    scores = whole[whole["filter"].notna()].assign(**routing)
    return AnsweredCase(case["label"], case["role"], case["policy"], case["policy_params"], scores, of_questions)


def lines_of(task: AnsweredTask) -> list[Line]:
    """What tables show of a task: its metrics, or the one that its config names; case by case."""
    return [line for case in task.cases for line in _lines(task, case)]


def _lines(task: AnsweredTask, case: AnsweredCase) -> list[Line]:
    asked = case.scores[case.scores["is_asked"].astype(bool)]
    if task.facts["metric"] is not None and (asked["metric"] == task.facts["metric"]).any():
        asked = asked[asked["metric"] == task.facts["metric"]]
    found = []
    for row in asked.itertuples():
        added, added_stderr = _added(task.native, case, row) if case is not task.native else (None, None)
        found.append(
            Line(
                task=str(row.task),
                label=case.label,
                metric=str(row.metric),
                answers_filter=str(row.filter),
                num_fewshot=_whole(row.num_fewshot),
                num_samples=_whole(row.num_samples),
                value=_real(row.value) or 0.0,
                stderr=_real(row.stderr),
                added=added,
                added_stderr=added_stderr,
                paper=_paper(task.facts, case, row),
                dropped=_real(row.dropped_fraction),
                mass=_real(row.retained_mass_topk),
            )
        )
    return found


def _added(native: AnsweredCase, case: AnsweredCase, row: Any) -> tuple[float | None, float | None]:
    """What a case adds to the unpatched model's number, and its standard error over questions.

    The error is None where the number is not the mean over the questions of the task and its parts.
    """
    of_native = native.scores[
        (native.scores["task"] == row.task)
        & (native.scores["metric"] == row.metric)
        & (native.scores["filter"] == row.filter)
    ]
    if not len(of_native):
        return None, None
    added = float(row.value - of_native["value"].iloc[0])
    values = []
    for one in (case, native):
        answers = one.answers[(one.answers["metric"] == row.metric) & (one.answers["filter"] == row.filter)]
        if (answers["task"] == row.task).any():
            answers = answers[answers["task"] == row.task]
        values.append(answers.set_index(["task", "item"])["value"])
    ours, theirs = values
    if len(ours) < 2 or not ours.index.equals(theirs.index):
        return added, None
    paired = ours - theirs
    is_mean = math.isclose(float(ours.mean()), row.value, abs_tol=1e-9)
    return added, float(paired.std(ddof=1) / math.sqrt(len(paired))) if is_mean else None


def _paper(facts: dict[str, Any], case: AnsweredCase, row: Any) -> float | None:
    """The published number of the same task, shots, metric and policy, as a share; none where shots are not stated."""
    for number in (facts.get("published") or {}).get("numbers", ()):
        alike = number["policy"] == case.policy and number["policy_params"] == case.params
        shots = number["num_fewshot"]
        if alike and number["metric"] == row.metric and shots is not None and shots == _whole(row.num_fewshot):
            return number["percent"] / 100 if row.task == facts["task"] else None
    return None


_HEADER = (
    ["", "", "ours", "over", "paper", "ours - paper", "dropped", "mass"],
    ["policy", "metric", "%", "unpatched", "%", "(std. errors)", "%", "kept %"],
)


def accuracy_text(tasks: Sequence[AnsweredTask]) -> str:
    """Every task as a table, means over tasks where there are several, and what the numbers are; may be empty."""
    if not tasks:
        return ""
    blocks = [_block(task) for task in tasks]
    means = _means(tasks)
    return "\n\n".join([*blocks, *([means] if means else []), *_notes(tasks)])


def _block(task: AnsweredTask) -> str:
    lines = lines_of(task)
    shots = {line.num_fewshot for line in lines} - {None}
    counts = {line.num_samples for line in lines} - {None}
    told = [f"{min(shots)} shots" if len(shots) == 1 else "", f"{max(counts):,} questions" if counts else ""]
    if task.facts["limit"]:
        told.append(f"the first {task.facts['limit']} of each task only")
    title = f"{task.facts['title']}: " + ", ".join(word for word in told if word)
    return "\n".join([*textwrap.wrap(title, WIDTH, subsequent_indent="  "), "", *_table(lines)])


def _table(lines: Sequence[Line]) -> list[str]:
    several = len({line.task for line in lines}) > 1
    rows = [
        [
            short_label(line.label) + (f", {line.task}" if several else ""),
            line.metric if line.answers_filter == "none" else f"{line.metric} ({line.answers_filter})",
            _percent(line.value, line.stderr),
            "-" if line.added is None else _percent(line.added, line.added_stderr, signed=True),
            "-" if line.paper is None else f"{100 * line.paper:.1f}",
            _against_paper(line),
            "-" if line.dropped is None else f"{100 * line.dropped:.1f}",
            "-" if line.mass is None else f"{100 * line.mass:.1f}",
        ]
        for line in lines
    ]
    return _aligned([*_HEADER, *rows])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    room = WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = min(widths[0], room)
    lines = []
    for row in rows:
        first, *more = label_lines(row[0], room)
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines += ["  ".join(cells), *more]
    return lines


def _against_paper(line: Line) -> str:
    if line.paper is None:
        return "-"
    errors = line.standard_errors
    return f"{100 * (line.value - line.paper):+.1f}" + ("" if errors is None else f" ({errors:+.1f})")


def _percent(value: float, stderr: float | None, *, signed: bool = False) -> str:
    return f"{100 * value:{'+' if signed else ''}.1f}" + ("" if stderr is None else f" +-{100 * stderr:.1f}")


def _means(tasks: Sequence[AnsweredTask]) -> str:
    """Means over the tasks that both we and the paper have one number of, policy by policy; empty where not two are."""
    by_label: dict[str, list[Line]] = {}
    left_out: dict[str, None] = {}
    for task in tasks:
        comparable = [line for line in lines_of(task) if line.paper is not None]
        for line in comparable:
            if sum(other.label == line.label for other in comparable) == 1:
                by_label.setdefault(line.label, []).append(line)
            else:
                left_out[line.task] = None
    rows = [["mean over tasks", "tasks", "ours %", "paper %", "ours - paper (std. errors)"]]
    for label, lines in by_label.items():
        if len(lines) < 2:
            continue
        ours = sum(line.value for line in lines) / len(lines)
        paper = sum(line.paper or 0.0 for line in lines) / len(lines)
        errors = [line.stderr for line in lines]
        stderr = None if None in errors else math.sqrt(sum((one or 0.0) ** 2 for one in errors)) / len(lines)
        against = f"{100 * (ours - paper):+.1f}" + (f" ({(ours - paper) / stderr:+.1f})" if stderr else "")
        rows.append([short_label(label), str(len(lines)), _percent(ours, stderr), f"{100 * paper:.1f}", against])
    if len(rows) == 1:
        return ""
    why = "left out of the means, for which of its numbers the paper's stands for is not stated"
    return "\n".join([*_aligned(rows), *(f"  {name}: {why}" for name in left_out)])


def _notes(tasks: Sequence[AnsweredTask]) -> list[str]:
    facts = tasks[0].facts
    notes = [
        "+-: standard errors; of a difference to the unpatched model over the same questions, where the number is "
        f"their mean. {facts['batch_size']} requests are routed together, on {facts['num_ranks']} virtual ranks; "
        "dropped pairs and kept mass are of all passes of a task, over all layers. Nothing was timed",
    ]
    tables = {one.facts["published"]["source"]: one.facts["published"] for one in tasks if one.facts["published"]}
    notes += [
        f"paper: {table['source']}, {table['model']}; the difference is in our standard errors, the paper states none. "
        + table["note"]
        for table in tables.values()
    ]
    wrapped = [textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="    ") for note in notes]
    return ["\n".join(line for lines in wrapped for line in lines)]


def _real(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def _whole(value: Any) -> int | None:
    return None if value is None or pd.isna(value) else int(value)
