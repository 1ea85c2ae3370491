"""``accuracy``: what policies do to a language model's answers to tasks of the lm-evaluation-harness; nothing is timed.

The harness asks and judges, the model answers under each policy, routed as N ranks would (``hf.harness``). A task at
one number of shots is a comparison, a policy a case; every case is written when it is done, and the same command goes
on with those that are not. Where the config names a published table, what it says of the task is put into ``run.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ep_bench.accuracy_config import AccuracyExperiment, TaskConfig, load_accuracy
from moe_ep_bench.exit_codes import OK
from moe_ep_bench.hf.checkpoint import Checkpoint
from moe_ep_bench.hf.harness import (
    Routed,
    TaskResults,
    find_tasks,
    folder_hash,
    harness_version,
    routed_lm,
    run_task,
)
from moe_ep_bench.hf.routed import try_policies
from moe_ep_bench.published import Table, load_table
from moe_ep_bench.records import RunDirectory, stable_hash
from moe_ep_bench.scopes.answering import (
    AnsweringComparison,
    LoadedModel,
    answering,
    check_ranks,
    only_device,
    open_checkpoints,
)
from moe_ep_bench.scopes.comparison import CaseSpec
from moe_ep_bench.scopes.job import identity


@dataclass(frozen=True, eq=False)
class AccuracyComparison(AnsweringComparison[AccuracyExperiment]):
    """One task of an experiment at one point of its sweep: cases that answer the same questions."""

    mode = "accuracy"

    task: TaskConfig
    published: Table | None
    own_tasks: str | None
    """Hash of the folder with tasks of the user's own."""

    def asked(self) -> dict[str, Any]:
        """Not the data behind a task's name, which the harness fetches."""
        return {
            "task": {"name": self.task.name, "num_fewshot": self.task.num_fewshot, "own": self.own_tasks},
            "limit": self.experiment.limit,
            "batch_size": self.experiment.batch_size,
        }

    @property
    def workload_hash(self) -> str:
        return stable_hash(self.definition["task"])

    @property
    def title(self) -> str:
        shots = "its own shots" if self.task.num_fewshot is None else f"{self.task.num_fewshot}-shot"
        return f"{self.model.name}, EP {self.ep_size}, {self.task.name}, {shots}"

    def routing(self, case: CaseSpec) -> Routed:
        arrangement = self.experiment.arrangement
        scored_as = None if arrangement == "auto" else arrangement
        return Routed(case.policy, self.ep_size, scored_as, self.experiment.layer.seed)

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "task": self.task.name,
            "metric": self.task.metric,
            "batch_size": self.experiment.batch_size,
            "limit": self.experiment.limit,
            "published": self._published(),
        }

    def described_experiment(self) -> dict[str, Any]:
        described = super().described_experiment()
        if self.experiment.include is not None:
            described["include"] = self.experiment.include.name
        if self.experiment.published is not None:
            described["published"]["table"] = self.experiment.published.table.name
        return described

    def _published(self) -> dict[str, Any] | None:
        """What the table that the config names says of this task."""
        chosen = self.experiment.published
        if self.published is None or chosen is None:
            return None
        return {
            "source": self.published.source,
            "note": self.published.note,
            "model": chosen.model,
            "numbers": [
                {
                    "policy": "native" if cell.policy is None else cell.policy.name,
                    "policy_params": {} if cell.policy is None else cell.policy.params(),
                    "num_fewshot": cell.column.num_fewshot,
                    "metric": cell.column.metric,
                    "percent": cell.percent,
                }
                for cell in self.published.cells(chosen.model)
                if cell.column.task == self.task.name
            ],
        }


def plan_accuracy(config: Path, overrides: Iterable[str]) -> list[AccuracyComparison]:
    """All comparisons of a config file, each found to fit its model; no weights are read, no task's data, no harness.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    experiments = load_accuracy(config, overrides)
    try:
        checkpoints = open_checkpoints(experiment.model for experiment in experiments)
        planned: dict[str, AccuracyComparison] = {}
        for experiment in experiments:
            for one in _comparisons(experiment, checkpoints[experiment.model.checkpoint]):
                planned.setdefault(one.comparison_id, one)
    except ValueError as problem:
        raise ValueError(f"{config}: {problem}") from None
    return list(planned.values())


def _comparisons(experiment: AccuracyExperiment, checkpoint: Checkpoint) -> Iterator[AccuracyComparison]:
    check_ranks(checkpoint, experiment.layer.ep_size)
    if experiment.include is not None and not experiment.include.is_dir():
        raise ValueError(f"include: expected a folder with tasks, got {experiment.include}")
    table = _published_table(experiment)
    own_tasks = folder_hash(experiment.include)
    for task in experiment.tasks:
        comparison = AccuracyComparison(experiment, checkpoint, task, table, own_tasks)
        if task is experiment.tasks[0]:
            try_policies(checkpoint.skeleton[0], experiment.make_policies(), comparison.ep_size)
        yield comparison


def _published_table(experiment: AccuracyExperiment) -> Table | None:
    if experiment.published is None:
        return None
    try:
        table = load_table(experiment.published.table)
    except ValueError as problem:
        raise ValueError(f"published.table: {problem}") from None
    if experiment.published.model not in table.models:
        raise ValueError(
            f"published.model: expected one of {', '.join(table.models)}, got {experiment.published.model!r}"
        )
    return table


def dry_run(config: Path, overrides: Sequence[str]) -> int:
    """Print the cases; load no weights and no data."""
    for comparison in plan_accuracy(config, overrides):
        print(comparison.title)
        for case in comparison.cases:
            print(f"  {case.case_id}  {case.role:8}  {case.label}")
    return OK


def accuracy(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False) -> RunDirectory:
    """Run every case of every comparison of ``config`` and write the rows.

    Args:
        out: results directory; cases whose rows are in it are not run again unless ``force``.

    Raises:
        ValueError: one line naming the file, the key and what is allowed; or why ``out`` cannot be used.
    """
    comparisons = plan_accuracy(config, overrides)
    only_device(config, [one.experiment.model for one in comparisons])  # Before the harness looks for its tasks.
    tasks = _find_tasks(config, comparisons)
    models = LoadedModel()
    with answering(config, out, comparisons, force=force, lm_eval=harness_version()) as job:
        total, number = sum(len(cases) for _, cases in job.todo), 0
        for comparison, cases in job.todo:
            for case in cases:
                number += 1
                print(f"moe-ep-bench: {number} of {total}: {comparison.title}: {case.label}", file=sys.stderr)
                model, _ = models.load(comparison.checkpoint, comparison.experiment.model)
                _run_case(job.directory, job.run_id, comparison, case, model, tasks[comparison.experiment.include])
    return job.directory


def _find_tasks(config: Path, comparisons: Iterable[AccuracyComparison]) -> dict[Path | None, Any]:
    """The harness' index of tasks, by the folder with the user's own."""
    names: dict[Path | None, list[str]] = {}
    for one in comparisons:
        names.setdefault(one.experiment.include, []).append(one.task.name)
    try:
        return {include: find_tasks(several, include) for include, several in names.items()}
    except ValueError as problem:
        raise ValueError(f"{config}: {problem}") from None


def _run_case(
    directory: RunDirectory, run_id: str, comparison: AccuracyComparison, case: CaseSpec, model: Any, tasks: Any
) -> None:
    routing = comparison.routing(case)
    lm = routed_lm(model, comparison.checkpoint.tokenizer, routing, comparison.experiment.batch_size)
    task = comparison.task
    results = run_task(lm, task.name, tasks, num_fewshot=task.num_fewshot, limit=comparison.experiment.limit)
    if not results.scores:
        raise ValueError(f"tasks: {task.name}: expected numbers from the harness, got none")
    columns = _score_columns(results, task.name, routing.summary())
    named = {**identity("accuracy", run_id, comparison, case, len(results.scores)), **columns}
    directory.write_accuracy(case.case_id, named, _answer_columns(results, case))


def _score_columns(results: TaskResults, task: str, routing: Mapping[str, float | None]) -> dict[str, list[Any]]:
    scores = results.scores
    # The name of several tasks that are no group has no results of its own.
    has_own = any(score.task == task for score in scores)
    return {
        "task": [score.task for score in scores],
        "is_asked": [score.task == task or not has_own for score in scores],
        "version": [score.version for score in scores],
        "num_fewshot": [score.num_fewshot for score in scores],
        "num_samples": [score.num_samples for score in scores],
        "metric": [score.metric for score in scores],
        "filter": [score.answers_filter for score in scores],
        "value": [score.value for score in scores],
        "stderr": [score.stderr for score in scores],
        "higher_is_better": [score.higher_is_better for score in scores],
        **{name: [value] * len(scores) for name, value in routing.items()},
    }


def _answer_columns(results: TaskResults, case: CaseSpec) -> dict[str, list[Any]]:
    return {
        "case_id": [case.case_id] * len(results.samples),
        "task": [sample.task for sample in results.samples],
        "document": [sample.document for sample in results.samples],
        "metric": [sample.metric for sample in results.samples],
        "filter": [sample.answers_filter for sample in results.samples],
        "value": [sample.value for sample in results.samples],
    }
