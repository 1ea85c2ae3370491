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
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from moe_ep_bench.bench.description import describe_timed_run
from moe_ep_bench.bench.directory import check_timing, hold_comparisons, left_of, status_of
from moe_ep_bench.bench.job import Job, ToldError, measure_each
from moe_ep_bench.bench.plan import VIRTUAL, CaseSpec, Comparison, Plan, plan
from moe_ep_bench.bench.virtual import Emulation
from moe_ep_bench.files import stable_hash
from moe_ep_bench.layer.host import device_scope, free_memory
from moe_ep_bench.layer.megatron import initialize_expert_parallel
from moe_ep_bench.machine import provenance
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.exit_codes import OK, USER_ERROR
from moe_ep_bench.runtime.ranks import join
from moe_ep_bench.runtime.signals import Stopped, stoppable

_JOIN_TIMEOUT_S = 120.0


def emulate(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False) -> int:
    """Measure all comparisons of ``config`` on virtual ranks; return the exit status, 128 + signal where one ended it.

    Raises:
        ValueError: the config or the results directory cannot be used; one line.
    """
    return _stoppable(lambda: _emulate(plan_virtual(config, overrides), RunDirectory(out), force))


def _stoppable(measure: Callable[[], int]) -> int:
    try:
        with stoppable():
            return measure()
    except Stopped as stopped:
        return 128 + stopped.args[0]
    except ToldError:
        return USER_ERROR


def plan_virtual(config: Path, overrides: Sequence[str]) -> Plan:
    """Plan a config for this device; ValueError where it does not fit."""
    return plan(config, overrides, VIRTUAL, on_cpu=not torch.cuda.is_available())


def emulate_plan(comparisons: Plan, out: Path, *, force: bool = False, survey: bool = True) -> int:
    """Measure planned comparisons; see ``emulate``.

    Args:
        survey: see ``describe_timed_run``.
    """
    return _stoppable(lambda: _emulate(comparisons, RunDirectory(out), force, survey))


def _emulate(comparisons: Plan, directory: RunDirectory, force: bool, survey: bool = True) -> int:
    ranks = join(_JOIN_TIMEOUT_S)
    try:
        check_timing(directory, comparisons[0], ranks.device, force=force)
        with hold_comparisons(directory, comparisons):
            todo = left_of(directory, comparisons, force=force)
            if all(directory.is_finished(case.case_id, 0) for one in comparisons for case in one.cases):
                print("moe-ep-bench: all cases were finished before; --force runs them again", file=sys.stderr)
            else:
                run_id = stable_hash([time.time_ns()])
                directory.write_run(describe_timed_run(ranks, run_id, comparisons, survey=survey))
                measure_each(ranks, directory, comparisons, todo, run_id, _measure)
            return status_of(directory, comparisons)
    finally:
        ranks.close()


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


def dry_run(config: Path, overrides: Sequence[str]) -> int:
    """Print the cases and how often a layer would be run; run nothing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for comparison in plan_virtual(config, overrides):
        print(f"{comparison.title}, {comparison.describe_workload()['description']}")
        assert comparison.links is not None
        print(f"  {comparison.links.describe()}")
        for case in comparison.cases:
            print(f"  {case.case_id}  {case.role:11}  {case.label}")
        subject = comparison.subject.name
        if comparison.device is not None:
            print(f"  {comparison.describe_device()}; no {subject} is run")
            continue
        print(
            f"  {comparison.num_iterations():,} runs of a rank's {subject} at most, fewer where ranks have the same to"
            f" do; {comparison.memory_words(provenance.available_memory_bytes(device, 1))}"
        )
    return OK
