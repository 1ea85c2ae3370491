"""Judge policies by tasks of the lm-evaluation-harness, beside numbers that papers publish.

The harness asks and judges, the model answers under each policy, routed as N ranks would (``quality.harness``). Where
the config names a published table, what it says of the task goes into ``run.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ep_bench.bench.plan import CaseSpec
from moe_ep_bench.files import stable_hash
from moe_ep_bench.papers.published import Table, load_table
from moe_ep_bench.quality.checkpoint import Checkpoint
from moe_ep_bench.quality.comparison import Judged, QualityComparison
from moe_ep_bench.quality.config import QualityExperiment, TaskConfig
from moe_ep_bench.quality.harness import Routed, folder_hash, routed_lm, run_task
from moe_ep_bench.quality.routed import try_policies


@dataclass(frozen=True, eq=False)
class TaskComparison(QualityComparison):
    """Cases that answer the same questions."""

    task: TaskConfig
    published: Table | None
    own_tasks: str | None
    """Hash of the folder with the user's own tasks."""

    @staticmethod
    def all_of(experiment: QualityExperiment, checkpoint: Checkpoint) -> list[TaskComparison]:
        """The tasks of an experiment, each found to fit the model; neither its data nor the harness is read.

        Raises:
            ValueError: naming the key whose value does not fit.
        """
        if experiment.tasks is None:
            return []
        if experiment.include is not None and not experiment.include.is_dir():
            raise ValueError(f"include: expected a folder with tasks, got {experiment.include}")
        table, own_tasks = _published_table(experiment), folder_hash(experiment.include)
        found = [TaskComparison(experiment, checkpoint, task, table, own_tasks) for task in experiment.tasks]
        try_policies(checkpoint.skeleton[0], experiment.make_policies(), found[0].ep_size)
        return found

    def asked(self) -> dict[str, Any]:
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

    def facts(self) -> dict[str, Any]:
        return {
            "task": self.task.name,
            "metric": self.task.metric,
            "batch_size": self.experiment.batch_size,
            "limit": self.experiment.limit,
            "published": self._published(),
        }

    def _published(self) -> dict[str, Any] | None:
        """What the published table says of this task."""
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

    def judge(self, model: Any, cases: Sequence[CaseSpec], tasks: Any) -> Iterator[Judged]:
        experiment, name = self.experiment, self.task.name
        for case in cases:
            routing = Routed(case.policy, self.ep_size, experiment.arrangement, experiment.layer.seed)
            lm = routed_lm(model, self.checkpoint.tokenizer, routing, experiment.batch_size)
            rows = run_task(lm, name, tasks, num_fewshot=self.task.num_fewshot, limit=experiment.limit)
            rows += [{"task": name, "metric": metric, "value": value} for metric, value in routing.summary().items()]
            yield Judged(case, rows, [])


def _published_table(experiment: QualityExperiment) -> Table | None:
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
