"""``emulate``: one device stands in for all expert-parallel ranks, one after another.

For each batch every virtual rank runs the same layer on its own tokens, with as many rows arriving
at its experts as all ranks' routing would send it (``layer.virtual``). What it takes is measured with the
same phases and clock as in ``run``; the runs are then set side by side (``cost_model.timeline``), where
waiting appears, and what moves between ranks is modelled from the bytes (``links``). With ``emulate.device``
nothing is run, and the phases are modelled too (``cost_model.layer``).

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

from moe_ep_bench.bench import run
from moe_ep_bench.bench.directory import hold_comparisons
from moe_ep_bench.bench.job import CannotWriteError, Job
from moe_ep_bench.bench.plan import VIRTUAL, CaseSpec, Comparison, plan
from moe_ep_bench.bench.virtual import Emulation
from moe_ep_bench.files import stable_hash
from moe_ep_bench.layer.host import device_scope, free_memory
from moe_ep_bench.layer.megatron import initialize_expert_parallel
from moe_ep_bench.machine import provenance
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.exit_codes import OK, USER_ERROR
from moe_ep_bench.runtime.ranks import Ranks, join
from moe_ep_bench.runtime.signals import Stopped, stoppable

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
    comparisons = plan(config, overrides, VIRTUAL, on_cpu=not torch.cuda.is_available())
    ranks = join(_JOIN_TIMEOUT_S)
    try:
        directory = RunDirectory(out)
        run.check_directory(directory, ranks, force, "emulated", comparisons[0].scope)
        with hold_comparisons(directory, comparisons):
            todo = run.left_of(directory, comparisons, force=force)
            return _emulate_all(ranks, directory, comparisons, todo)
    except CannotWriteError:
        return USER_ERROR
    finally:
        ranks.close()


def dry_run(config: Path, overrides: Sequence[str]) -> int:
    """Print the cases and how often a layer would be run; run nothing."""
    for comparison in plan(config, overrides, VIRTUAL, on_cpu=not torch.cuda.is_available()):
        print(f"{comparison.title}, {comparison.describe_workload()['description']}")
        assert comparison.links is not None
        print(f"  {comparison.links.describe()}")
        for case in comparison.cases:
            print(f"  {case.case_id}  {case.role:11}  {case.label}")
        if comparison.device is not None:
            print(f"  {comparison.describe_device()}; no {comparison.scope} is run")
            continue
        runs = comparison.num_runs(comparison.cases)
        available = provenance.available_memory_bytes(_device(), 1)
        print(
            f"  {runs:,} runs of a rank's {comparison.scope} at most, fewer where ranks have the same to do;"
            f" {comparison.memory_words(available)}"
        )
    return OK


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _emulate_all(
    ranks: Ranks, directory: RunDirectory, comparisons: Sequence[Comparison], todo: Sequence[Sequence[CaseSpec]]
) -> int:
    if all(directory.is_finished(case.case_id, 0) for comparison in comparisons for case in comparison.cases):
        print("moe-ep-bench: all cases were finished before; --force runs them again", file=sys.stderr)
        return run.status_of(directory, comparisons, 0)
    run_id = stable_hash([time.time_ns()])
    directory.write_run(_description(ranks, run_id, comparisons))
    run.measure_each(ranks, directory, comparisons, todo, run_id, _measure, Comparison.num_runs, mode="emulated")
    return run.status_of(directory, comparisons, 0)


def _measure(job: Job, comparison: Comparison, cases: Sequence[CaseSpec]) -> None:
    job.enter(comparison)
    device = job.ranks.device
    shortage = comparison.shortage(provenance.available_memory_bytes(device, 1))
    if shortage:
        for case in cases:
            job.write_unmeasured(comparison, case, "skipped", shortage)
        return
    with device_scope(), torch.inference_mode():
        initialize_expert_parallel(1, comparison.experiment.measure.timeout_s + 60)
        emulation = Emulation(comparison, cases, device, job.begin)
        for case, reason in emulation.check().items():
            job.write_unmeasured(comparison, case, "failed", reason)
        conditions = emulation.measure()
        with job.writing():
            emulation.write(job, conditions)
        job.check_written()
    del emulation
    free_memory(device)


def _description(ranks: Ranks, run_id: str, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """``run.json``, with the models of what is not here."""
    description = run.run_description(ranks, run_id, comparisons)
    description["mode"] = "emulated"
    for comparison in comparisons:
        described = description["comparisons"][comparison.comparison_id]
        assert comparison.links is not None
        described["links"] = comparison.links.describe()
        described["device"] = comparison.device and comparison.describe_device()
        described["placement"] = comparison.placement.name
        for case in comparison.cases:
            description["cases"][case.case_id]["extra_bytes_per_rank"] = comparison.extra_bytes_per_rank(case)
    return description
