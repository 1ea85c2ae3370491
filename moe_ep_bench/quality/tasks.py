"""Judge policies by tasks of the lm-evaluation-harness, beside numbers that papers publish.

The harness asks and judges, the model answers under each policy, routed as N ranks would (``harness``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ep_bench.bench.cases import CaseSpec
from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.facts import Published, PublishedNumber
from moe_ep_bench.papers.published import load
from moe_ep_bench.policies import make_policy
from moe_ep_bench.quality.config import QualityExperiment, TaskConfig
from moe_ep_bench.quality.harness import TaskIndex, TaskRouting, routed_lm, run_task
from moe_ep_bench.quality.passes import Tables


@dataclass(frozen=True, eq=False)
class Task:
    """A task at one number of shots; see ``session.QualityComparison.evaluated``.

    Attributes:
        published: what the config's published table says of the task, JSON-ready.
    """

    experiment: QualityExperiment
    num_ranks: int
    config: TaskConfig
    tokenizer: Any
    index: TaskIndex
    published: Published | None

    @property
    def definition(self) -> dict[str, Any]:
        asked = {"name": self.config.name, "num_fewshot": self.config.num_fewshot, "own": self.index.folder_hash}
        return {"task": asked, "limit": self.experiment.limit, "batch_size": self.experiment.batch_size}

    @property
    def title(self) -> str:
        shots = "its own shots" if self.config.num_fewshot is None else f"{self.config.num_fewshot}-shot"
        return f"{self.config.name}, {shots}"

    def describe(self) -> dict[str, Any]:
        return {
            "task": self.config.name,
            "metric": self.config.metric,
            "batch_size": self.experiment.batch_size,
            "limit": self.experiment.limit,
            "published": self.published and self.published.model_dump(),
        }

    def manager(self) -> Any:
        """The harness' manager that has the task.

        Raises:
            ValueError: there is no such task, or the harness is not installed.
        """
        return self.index.find(self.config.name)

    def judge(self, model: Any, cases: Sequence[CaseSpec]) -> Iterator[tuple[CaseSpec, Tables]]:
        """Run the task under one case after the other; ``model`` has its weights and is unpatched."""
        experiment, name = self.experiment, self.config.name
        for case in cases:
            routing = TaskRouting(case.policy, self.num_ranks, experiment.arrangement, experiment.layer.seed)
            lm = routed_lm(model, self.tokenizer, routing, experiment.batch_size)
            rows = run_task(lm, name, self.manager(), num_fewshot=self.config.num_fewshot, limit=experiment.limit)
            rows += [{"task": name, "metric": metric, "value": value} for metric, value in routing.summary().items()]
            yield case, {"quality": rows}


def published_numbers(experiment: QualityExperiment, task: str) -> Published | None:
    """What the item of ``published`` says of a task; None where the config names none.

    Raises:
        ValueError: naming the key.
    """
    chosen = experiment.published
    if chosen is None:
        return None
    try:
        paper = load(chosen.paper)
    except ValueError as problem:
        raise UserError(f"published.paper: {str(problem).removeprefix('PAPER: ')}") from None
    items = {item.item: item for item in paper.items if item.policies}
    if chosen.item not in items:
        raise UserError(f"published.item: expected one of {', '.join(items)}, got {brief(chosen.item)}")
    item = items[chosen.item]
    printed = list(item.numbers(paper))
    models = list(dict.fromkeys(str(number.model) for number in printed))
    if chosen.model not in models:
        raise UserError(f"published.model: expected one of {', '.join(models)}, got {brief(chosen.model)}")
    numbers = []
    for number in printed:
        column, fields = paper.tasks.get(str(number.where["task"])), item.policy_of(number)
        if number.model != chosen.model or column is None or column.task != task or fields is None:
            continue
        policy = make_policy(fields) if fields else None
        params = policy.params() if policy else {}
        numbers.append(
            PublishedNumber(
                policy=policy.name if policy else "native",
                policy_params={key: value for key, value in params.items() if key not in chosen.unstated},
                metric=column.metric,
                num_fewshot=column.num_fewshot,
                percent=number.value,
            )
        )
    about = {"source": f"arXiv {paper.paper}, {item.item}", "note": item.note or "", "model": chosen.model}
    return Published(**about, numbers=numbers, unstated=list(chosen.unstated))
