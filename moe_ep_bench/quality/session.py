"""Run ``quality``: judge policies on a text and on tasks, on virtual ranks; nothing is timed.

Every case is written when it is done, and the same command goes on with those that are not. One directory holds the
answers of one device and of one version of each package that decides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moe_ep_bench.bench.description import run_json
from moe_ep_bench.bench.job import fill, identity
from moe_ep_bench.bench.plan import CaseSpec
from moe_ep_bench.errors import UserError
from moe_ep_bench.machine import provenance
from moe_ep_bench.quality.checkpoint import pick_device
from moe_ep_bench.quality.harness import harness_version
from moe_ep_bench.quality.plan import MODE, QualityComparison, plan_quality
from moe_ep_bench.results import RunDirectory

# Of the environment: what decides the answers.
_DECISIVE = ("device_name", "torch", "transformers", "lm_eval")


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
            one.evaluated.prepare()
    except ValueError as problem:
        raise UserError(f"{config}: {problem}") from None
    environment = {**provenance.describe(device), "lm_eval": harness_version()}
    experiments = list({id(one.experiment): one.experiment for one in comparisons}.values())
    models: dict[Any, Any] = {}

    def described(run_id: str) -> dict[str, Any]:
        configs = (experiment.model_dump(mode="json") for experiment in experiments)
        how = (lambda one: one.evaluated.fingerprint), (lambda one: one.describe())
        return run_json(run_id, MODE, comparisons, environment, configs, *how)

    def judge(run_id: str, one: QualityComparison, cases: Sequence[CaseSpec], progress: tqdm) -> None:
        asked = one.experiment.model
        if asked not in models:
            models.clear()  # Two models may be too many for the memory.
            models[asked] = one.model.load(asked.dtype, device)
        for case, tables in one.evaluated.judge(models[asked], cases):
            # The scores make a case done: last.
            for table, rows in tables.items():
                values = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))}
                directory.write(table, case.case_id, identity(MODE, run_id, one, case) | values)
            progress.update()

    conditions = {key: environment[key] for key in _DECISIVE}
    unit = "case", lambda one, cases: len(cases)
    fill(directory, comparisons, MODE, "quality", conditions, described, judge, unit=unit, force=force)
