"""``emulate``: one device stands in for all expert-parallel ranks, one after another.

For each batch every virtual rank runs the same layer on its own tokens, with as many rows arriving
at its experts as all ranks' routing would send it (``layer.virtual``). What it takes is measured with the
same phases and clock as in ``run``; the runs are then set side by side (``measure.timeline``), where
waiting appears, and what moves between ranks is modelled from the bytes (``links``). With ``emulate.device``
nothing is run, and the phases are modelled too (``measure.modelled``).

Before anything is timed, the same policies on the same number of ranks are held against the dense
reference at a small hidden size, with real rows in the exchange.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_ep_bench import environment
from moe_ep_bench.exit_codes import OK, USER_ERROR
from moe_ep_bench.layer.host import device_scope, free_memory
from moe_ep_bench.layer.megatron import initialize_expert_parallel
from moe_ep_bench.ranks import Ranks, join
from moe_ep_bench.records import RunDirectory, stable_hash
from moe_ep_bench.scopes import run
from moe_ep_bench.scopes.comparison import CaseSpec
from moe_ep_bench.scopes.directory import hold_comparisons
from moe_ep_bench.scopes.emulated import Emulated
from moe_ep_bench.scopes.job import CannotWriteError, open_job
from moe_ep_bench.scopes.model_emulation import new_emulation
from moe_ep_bench.scopes.planning import plan_emulation
from moe_ep_bench.stopping import Stopped, stoppable

_JOIN_TIMEOUT_S = 120.0


def emulate(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False, scope: str | None = None) -> int:
    """Measure all comparisons of ``config`` on virtual ranks; return the exit status, 128 + signal where one ended it.

    Raises:
        ValueError: the config or the results directory cannot be used; one line.
    """
    try:
        with stoppable():
            return _emulate(config, out, overrides, force)
    except Stopped as stopped:
        return 128 + stopped.args[0]


def _emulate(config: Path, out: Path, overrides: Sequence[str], force: bool) -> int:
    comparisons = plan_emulation(config, overrides, on_cpu=not torch.cuda.is_available())
    ranks = join(_JOIN_TIMEOUT_S)
    try:
        directory = RunDirectory(out)
        run.check_directory(directory, ranks, force, "emulated", comparisons[0].scope)
        with hold_comparisons(directory, comparisons):
            run.clear_up(directory, comparisons)
            if force:
                for comparison in comparisons:
                    run.forget(directory, comparison)
            todo = [left_of(directory, comparison) for comparison in comparisons]
            return _emulate_all(ranks, directory, comparisons, todo)
    except CannotWriteError:
        return USER_ERROR
    finally:
        ranks.close()


def left_of(directory: RunDirectory, comparison: Emulated) -> list[CaseSpec]:
    """The cases to measure. They are paired: a comparison that is incomplete is measured whole again, except for those
    that were lost too often."""
    tried = [case for case in comparison.cases if not run.given_up(directory, comparison, case)]
    return [] if all(directory.is_finished(case.case_id, 0) for case in tried) else tried


def dry_run(config: Path, overrides: Sequence[str]) -> int:
    """Print the cases and how often a layer would be run; run nothing."""
    for comparison in plan_emulation(config, overrides, on_cpu=not torch.cuda.is_available()):
        print(f"{comparison.title}, {comparison.describe_workload()['description']}")
        print(f"  {comparison.links.describe()}")
        for case in comparison.cases:
            print(f"  {case.case_id}  {case.role:11}  {case.label}")
        if comparison.device is not None:
            print(f"  {comparison.describe_device()}; no {comparison.scope} is run")
            continue
        runs = comparison.num_runs(comparison.cases)
        available = environment.available_memory_bytes(_device(), 1)
        print(
            f"  {runs:,} runs of a rank's {comparison.scope} at most, fewer where ranks have the same to do;"
            f" {comparison.memory_words(available)}"
        )
    return OK


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _emulate_all(
    ranks: Ranks, directory: RunDirectory, comparisons: Sequence[Emulated], todo: Sequence[Sequence[CaseSpec]]
) -> int:
    if all(directory.is_finished(case.case_id, 0) for comparison in comparisons for case in comparison.cases):
        print("moe-ep-bench: all cases were finished before; --force runs them again", file=sys.stderr)
        return run.status_of(directory, comparisons, 0)
    run_id = stable_hash([time.time_ns()])
    directory.write_run(_description(ranks, run_id, comparisons))
    settings = [comparison.experiment.measure for comparison in comparisons]
    with open_job(
        ranks,
        directory,
        name=comparisons[0].comparison_id,
        run_id=run_id,
        launch=0,
        timeout_s=max(one.timeout_s for one in settings),
        num_iterations=sum(one.num_runs(cases) for one, cases in zip(comparisons, todo, strict=True)),
        marks=directory.attempts,
        mode="emulated",
    ) as job:
        for comparison, cases in zip(comparisons, todo, strict=True):
            run.record_lost(job, comparison, cases)
            job.check_written()
            if not cases:
                continue
            job.enter(comparison)
            available = environment.available_memory_bytes(ranks.device, 1)
            shortage = comparison.shortage(available)
            if shortage:
                for case in cases:
                    job.write_unmeasured(comparison, case, "skipped", shortage)
                continue
            job.progress.set_description(comparison.title)
            with job.counting(comparison.num_runs(cases)), device_scope(), torch.inference_mode():
                initialize_expert_parallel(1, comparison.experiment.measure.timeout_s + 60)
                emulation = new_emulation(comparison, cases, ranks.device, job.begin)
                for case, reason in emulation.check().items():
                    job.write_unmeasured(comparison, case, "failed", reason)
                conditions = emulation.measure()
                with job.writing():
                    emulation.write(job, conditions)
                job.check_written()
                del emulation
            free_memory(ranks.device)
    return run.status_of(directory, comparisons, 0)


def _description(ranks: Ranks, run_id: str, comparisons: Sequence[Emulated]) -> dict[str, Any]:
    """``run.json``, with the models of what is not here."""
    description = run.run_description(ranks, run_id, comparisons)
    description["mode"] = "emulated"
    for comparison in comparisons:
        described = description["comparisons"][comparison.comparison_id]
        described["links"] = comparison.links.describe()
        described["device"] = comparison.device and comparison.describe_device()
        described["placement"] = comparison.experiment.route.make_placement(
            comparison.model.num_experts, comparison.ep_size
        ).name
        for case in comparison.cases:
            description["cases"][case.case_id]["extra_bytes_per_rank"] = comparison.extra_bytes_per_rank(case)
    return description
