"""Plan and run ``quality``: judge policies on a text and on tasks, on virtual ranks; nothing is timed.

A comparison evaluates one thing, a text or a task, at one point of a config's sweep; a case is the unpatched model or
one policy. All cases of a comparison read the same in the same batches. Every case is written when it is done, and the
same command goes on with those that are not. One directory holds the answers of one device and of one version of each
package that decides them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moe_ep_bench.bench.cases import BASELINE, POLICY, CaseSpec, with_ids
from moe_ep_bench.bench.description import run_json
from moe_ep_bench.bench.job import fill
from moe_ep_bench.bench.rows import identity
from moe_ep_bench.errors import UserError
from moe_ep_bench.files import stable_hash
from moe_ep_bench.machine import provenance
from moe_ep_bench.placement import default_ep_size
from moe_ep_bench.quality.checkpoint import Checkpoint, pick_device
from moe_ep_bench.quality.config import QualityExperiment, load_quality
from moe_ep_bench.quality.harness import TaskIndex, harness_version
from moe_ep_bench.quality.passes import Phase, judged_phase
from moe_ep_bench.quality.routed import try_policies
from moe_ep_bench.quality.tasks import Task, published_numbers
from moe_ep_bench.quality.text import Text
from moe_ep_bench.results import RunDirectory

MODE = "quality"
# Of the environment: what decides the answers.
_DECISIVE = ("device_name", "torch", "transformers", "lm_eval")


@dataclass(frozen=True, eq=False)
class QualityComparison:
    """One text or task at one point of a sweep.

    Attributes:
        evaluated: what all cases are asked. Both kinds have a ``title``; a ``definition``, all that decides what is
            asked; ``describe()``, what analysis needs to know; and ``judge()``, which yields the rows of every case.
    """

    experiment: QualityExperiment
    model: Checkpoint
    ep_size: int
    evaluated: Text | Task

    @property
    def title(self) -> str:
        return f"{self.model.name}, EP {self.ep_size}, {self.evaluated.title}"

    @cached_property
    def definition(self) -> dict[str, Any]:
        """All that decides the answers, except versions of packages and data that the harness fetches."""
        return {
            "mode": MODE,
            "model": {"fingerprint": self.model.fingerprint, "dtype": self.experiment.model.dtype},
            **self.evaluated.definition,
            "layer": {"ep_size": self.ep_size, "seed": self.experiment.layer.seed},
            "arrangement": self.experiment.arrangement,
        }

    @cached_property
    def comparison_id(self) -> str:
        return stable_hash(self.definition)

    @cached_property
    def cases(self) -> list[CaseSpec]:
        """The unpatched model, and all policies."""
        policies = (CaseSpec("", POLICY, one.name, one) for one in self.experiment.make_policies())
        return with_ids(self.comparison_id, [CaseSpec("", BASELINE, "native", None), *policies])

    def phase(self, case: CaseSpec) -> Phase:
        """The phase in which known text is judged under a case."""
        return judged_phase(case.policy, self.experiment.arrangement)

    def describe(self) -> dict[str, Any]:
        """What analysis needs to know of the comparison, JSON-ready."""
        layers = self.model.moe_layers
        return {
            "title": self.title,
            "num_experts": layers[0].num_experts,
            "top_k": layers[0].top_k,
            "num_layers": len(layers),  # with experts
            "model": self.model.name,
            "num_ranks": self.ep_size,
            "arrangement": self.experiment.arrangement,
            "dtype": self.experiment.model.dtype,
            "seed": self.experiment.layer.seed,
            **self.evaluated.describe(),
        }

    def describe_case(self, case: CaseSpec) -> dict[str, Any]:
        """What analysis needs to know of a case, JSON-ready."""
        return {**case.describe(self.comparison_id), "phase": self.phase(case)}


def plan_quality(config: Path, overrides: Iterable[str]) -> list[QualityComparison]:
    """All comparisons of a config file, each found to fit its model; neither weights nor the harness are read.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    experiments = load_quality(config, overrides)
    planned: dict[str, QualityComparison] = {}
    checkpoints: dict[Path, Checkpoint] = {}
    indexes: dict[Path | None, TaskIndex] = {}
    try:
        asked = sorted({experiment.model.device for experiment in experiments})
        if len({pick_device(device).type for device in asked}) > 1:
            one_device = "expected one device for all comparisons of a directory"
            raise UserError(f"model.device: {one_device}, got {', '.join(asked)}")
        for experiment in experiments:
            path, include = experiment.model.checkpoint, experiment.include
            if path not in checkpoints:
                try:
                    checkpoints[path] = Checkpoint.open(path)
                except ValueError as problem:
                    raise UserError(f"model.checkpoint: {problem}") from None
            index = indexes.setdefault(include, TaskIndex(include))
            for one in _comparisons(experiment, checkpoints[path], index):
                planned.setdefault(one.comparison_id, one)
    except ValueError as problem:
        raise UserError(f"{config}: {problem}") from None
    return list(planned.values())


def _comparisons(
    experiment: QualityExperiment, checkpoint: Checkpoint, index: TaskIndex
) -> Iterator[QualityComparison]:
    """The comparisons of one point of the sweep."""
    layers = checkpoint.moe_layers
    ep_size = experiment.layer.ep_size or default_ep_size(layers[0].num_experts)
    for layer in layers:
        if layer.num_experts % ep_size:
            divisor = f"a divisor of the {layer.num_experts} experts of {checkpoint.name}"
            raise UserError(f"layer.ep_size: expected {divisor}, got {ep_size}")
    evaluated: list[Text | Task] = []
    if experiment.text is not None:
        evaluated.append(Text.of(experiment, ep_size, checkpoint, experiment.text))
    for task in experiment.tasks or ():
        published = published_numbers(experiment, task.name)
        evaluated.append(Task(experiment, ep_size, task, checkpoint.tokenizer, index, published))
    try_policies(layers[0], experiment.make_policies(), ep_size)
    for one in evaluated:
        yield QualityComparison(experiment, checkpoint, ep_size, one)


def run_quality(
    config: Path, out: Path, overrides: Sequence[str] = (), *, force: bool = False, dry_run: bool = False
) -> None:
    """Judge every case of every comparison of ``config`` and write the rows.

    Args:
        out: results directory; cases whose rows are in it are not judged again unless ``force``.
        dry_run: print the cases instead; neither weights nor a task's data are read.

    Raises:
        ValueError: one line naming the file, the key and what is allowed; or why ``out`` cannot be used.
    """
    comparisons = plan_quality(config, overrides)
    if dry_run:
        for one in comparisons:
            cases = (f"  {case.case_id}  {case.role:8}  {one.phase(case):7}  {case.label}" for case in one.cases)
            print("\n".join([one.title, *cases]))
        return
    device, directory = pick_device(comparisons[0].experiment.model.device), RunDirectory(out)
    try:
        for one in comparisons:
            if isinstance(one.evaluated, Task):
                one.evaluated.manager()
    except ValueError as problem:
        raise UserError(f"{config}: {problem}") from None
    environment = {**provenance.describe(device), "lm_eval": harness_version()}
    experiments = list({id(one.experiment): one.experiment for one in comparisons}.values())
    models: dict[Any, Any] = {}

    def described(run_id: str) -> dict[str, Any]:
        configs = (experiment.model_dump(mode="json") for experiment in experiments)
        return run_json(run_id, MODE, comparisons, environment, configs, lambda one: one.describe())

    def judge(run_id: str, one: QualityComparison, cases: Sequence[CaseSpec], progress: tqdm) -> None:
        asked = one.experiment.model
        if asked not in models:
            models.clear()  # Two models may be too many for the memory.
            models[asked] = one.model.load(asked.dtype, device)
        for case, tables in one.evaluated.judge(models[asked], cases):
            # The scores make a case done: last.
            for table, rows in tables.items():
                values = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))}
                rows_of_case = identity(MODE, run_id, one, case) | values
                directory.write(table, one.comparison_id, [rows_of_case], replaces=[case.case_id])
            progress.update()

    conditions = {key: environment[key] for key in _DECISIVE}
    unit = "case", lambda one, cases: len(cases)
    fill(directory, comparisons, MODE, "quality", conditions, described, judge, unit=unit, force=force)
