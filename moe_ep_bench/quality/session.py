"""Run ``quality``: judge policies on a text and on tasks, on virtual ranks; nothing is timed.

Every case is written when it is done, and the same command goes on with those that are not. One directory holds the
answers of one device and of one version of each package that decides them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from moe_ep_bench.bench.directory import check_agreement, hold_comparisons, keep_other_policies
from moe_ep_bench.bench.job import identity
from moe_ep_bench.files import stable_hash
from moe_ep_bench.machine import provenance
from moe_ep_bench.quality.checkpoint import pick_device
from moe_ep_bench.quality.harness import harness_version
from moe_ep_bench.quality.plan import MODE, QualityComparison, plan_quality
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.progress import progress_bar
from moe_ep_bench.schema import SCHEMA_VERSION

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
            print(one.title)
            for case in one.cases:
                print(f"  {case.case_id}  {case.role:8}  {one.phase(case):7}  {case.label}")
        return
    device = pick_device(comparisons[0].experiment.model.device)
    try:
        for one in comparisons:
            one.evaluated.prepare()
    except ValueError as problem:
        raise ValueError(f"{config}: {problem}") from None
    environment = {**provenance.describe(device), "lm_eval": harness_version()}
    directory, run_id = RunDirectory(out), stable_hash([time.time_ns()])
    check_agreement(directory, MODE, {key: environment[key] for key in _DECISIVE}, force=force)
    with hold_comparisons(directory, comparisons):
        is_done = partial(directory.is_done, "quality")
        todo = {one: [case for case in one.cases if force or not is_done(case.case_id)] for one in comparisons}
        description = _run_description(run_id, comparisons, environment)
        keep_other_policies(directory, description, is_done)
        directory.write_run(description, is_done)
        if not any(todo.values()):
            print("moe-ep-bench: all cases are there from before; --force begins anew", file=sys.stderr)
        model, loaded = None, None
        with progress_bar(sum(map(len, todo.values())), "case") as progress:
            for one, cases in todo.items():
                if not cases:
                    continue
                progress.set_description(one.title)
                if loaded != one.experiment.model:
                    model = None  # Two models may be too many for the memory.
                    model, loaded = one.model.load(one.experiment.model.dtype, device), one.experiment.model
                for case, tables in one.evaluated.judge(model, cases):
                    # The scores make a case done: last.
                    for table, rows in tables.items():
                        named = identity(MODE, run_id, one, case, len(rows))
                        values = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))}
                        directory.write(table, case.case_id, named | values)
                    progress.update()


def _run_description(
    run_id: str, comparisons: Sequence[QualityComparison], environment: dict[str, Any]
) -> dict[str, Any]:
    experiments = {id(one.experiment): one.experiment for one in comparisons}
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "mode": MODE,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": [experiment.model_dump(mode="json") for experiment in experiments.values()],
        "environment": environment,
        "hashes": {
            "code": provenance.code_hash(),
            "config": stable_hash([one.definition for one in comparisons]),
            "workload": {one.comparison_id: stable_hash(one.evaluated.definition) for one in comparisons},
        },
        "comparisons": {one.comparison_id: {**one.describe(), "order": order} for order, one in enumerate(comparisons)},
        "cases": {
            case.case_id: {**one.describe_case(case), "order": order}
            for one in comparisons
            for order, case in enumerate(one.cases)
        },
    }
