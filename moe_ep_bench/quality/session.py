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
from pathlib import Path
from typing import Any, ClassVar

import torch

from moe_ep_bench.bench.commands import fill
from moe_ep_bench.bench.description import run_json
from moe_ep_bench.bench.point import BASELINE, POLICY, CaseSpec
from moe_ep_bench.bench.result import as_columns, identity
from moe_ep_bench.config.files import load_points
from moe_ep_bench.errors import UserError, naming, progress_bar
from moe_ep_bench.facts import CaseFacts, JudgedFacts
from moe_ep_bench.facts.words import title_words
from moe_ep_bench.files import stable_hash
from moe_ep_bench.machine import provenance
from moe_ep_bench.placement import default_ep_size
from moe_ep_bench.quality.checkpoint import Checkpoint
from moe_ep_bench.quality.config import QualityExperiment
from moe_ep_bench.quality.routed import Stage, judged_stage, try_policies
from moe_ep_bench.quality.tasks import Task, check_task
from moe_ep_bench.quality.text import Text
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.torchrun import device_type

# Packages of the environment that decide the answers.
_DECISIVE = ("device_name", "torch", "transformers", "lm_eval")


@dataclass(frozen=True, eq=False)
class QualityComparison:
    """One text or task at one point of a sweep.

    Attributes:
        evaluated: what all cases are asked. Both kinds have a ``definition``, all that decides what is asked;
            ``describe()``, what analysis needs to know; and ``judge(model)``, a function of a case: its rows.
    """

    experiment: QualityExperiment
    model: Checkpoint
    ep_size: int
    evaluated: Text | Task

    mode: ClassVar = "quality"
    scope: ClassVar = "model"
    backend: ClassVar = None

    @property
    def title(self) -> str:
        return title_words(self.facts())

    @cached_property
    def definition(self) -> dict[str, Any]:
        """All that decides the answers, except versions of packages and data that the harness fetches."""
        return {
            "mode": self.mode,
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
        policies = self.experiment.make_policies()
        cases = (CaseSpec(self.comparison_id, POLICY, policy.name, policy) for policy in policies)
        return [CaseSpec(self.comparison_id, BASELINE, "native"), *cases]

    def stage(self, case: CaseSpec) -> Stage:
        """The stage in which known text is judged under a case."""
        return judged_stage(case.policy, self.experiment.arrangement)

    def facts(self) -> JudgedFacts:
        """The comparison's entry in ``run.json``."""
        layers = self.model.moe_layers
        return JudgedFacts(
            num_experts=layers[0].num_experts,
            top_k=layers[0].top_k,
            num_layers=len(layers),
            model=self.model.name,
            num_ranks=self.ep_size,
            arrangement=self.experiment.arrangement,
            dtype=self.experiment.model.dtype,
            seed=self.experiment.layer.seed,
            **self.evaluated.describe(),
        )

    def case_facts(self, case: CaseSpec) -> CaseFacts:
        """A case's entry in ``run.json``."""
        return case.facts(stage=self.stage(case))


def plan_quality(config: Path, overrides: Iterable[str]) -> list[QualityComparison]:
    """All comparisons of a config file, each found to fit its model; neither weights nor the harness are read.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    experiments = load_points(config, QualityExperiment, overrides)
    planned: dict[str, QualityComparison] = {}
    checkpoints: dict[Path, Checkpoint] = {}
    with naming(str(config)):
        for experiment in experiments:
            path = experiment.model.checkpoint
            if path not in checkpoints:
                with naming("model.checkpoint"):
                    checkpoints[path] = Checkpoint.open(path)
            for comparison in _comparisons(experiment, checkpoints[path]):
                planned.setdefault(comparison.comparison_id, comparison)
    return list(planned.values())


def _comparisons(experiment: QualityExperiment, checkpoint: Checkpoint) -> Iterator[QualityComparison]:
    """The comparisons of one point of the sweep."""
    layers = checkpoint.moe_layers
    ep_size = experiment.layer.ep_size or default_ep_size(layers[0].num_experts)
    if layers[0].num_experts % ep_size:
        divisor = f"a divisor of the {layers[0].num_experts} experts of {checkpoint.name}"
        raise UserError(f"expected {divisor}, got {ep_size}", "layer.ep_size")
    texts = [] if experiment.text is None else [Text.of(experiment, ep_size, checkpoint, experiment.text)]
    tasks = [Task(experiment, ep_size, task, checkpoint.tokenizer) for task in experiment.tasks or ()]
    try_policies(layers[0], experiment.make_policies(), ep_size)
    for evaluated in (*texts, *tasks):
        yield QualityComparison(experiment, checkpoint, ep_size, evaluated)


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
        for comparison in comparisons:
            print(comparison.title)
            for case in comparison.cases:
                print(f"  {case.case_id}  {case.role:8}  {comparison.stage(case):7}  {case.label}")
        return
    device, directory = device_type(), RunDirectory(out)
    with naming(str(config)):
        for experiment in (comparison.experiment for comparison in comparisons):
            for task in experiment.tasks or ():
                check_task(task.name, experiment.include)
    environment = {**provenance.describe(torch.device(device)), "lm_eval": provenance.version_of("lm_eval")}
    models: dict[Any, Any] = {}

    def described(run_id: str) -> dict[str, Any]:
        return run_json(run_id, comparisons, environment, QualityComparison.facts)

    def judge(run_id: str, comparison: QualityComparison, cases: Sequence[CaseSpec]) -> None:
        asked = comparison.experiment.model
        if asked not in models:
            models.clear()  # Two models may be too many for the memory.
            models[asked] = comparison.model.load(asked.dtype, device)
        judged = comparison.evaluated.judge(models[asked])
        with progress_bar(len(cases), "case", comparison.title) as progress:
            for case in cases:
                # The scores make a case done: last.
                for table, rows in judged(case).items():
                    rows_of_case = identity(run_id, comparison, case) | as_columns(rows)
                    directory.write(table, comparison.comparison_id, [rows_of_case], replaces=[case.case_id])
                progress.update()

    conditions = {key: environment[key] for key in _DECISIVE}
    fill(directory, comparisons, "quality", conditions, described, judge, force=force)
