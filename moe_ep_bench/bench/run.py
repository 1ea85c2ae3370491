"""``run``, ``emulate``, ``route``: time real ranks, or one device that stands in for all of them, or route alone.

``launch`` has torchrun start ranks; each calls ``run``. Before anything is measured, ranks agree that they are doing
the same thing. Then ``measuring`` or ``virtual`` measures what is left, comparison by comparison, under a guard and
with a line ahead of what is tried, so that the next job knows what was lost (``job``). Nothing of an untimed comparison
can be lost but its own time (``fill``).
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_ep_bench.bench.comparison import RANKS, ROUTING, CaseSpec, Comparison
from moe_ep_bench.bench.description import describe_timed_run, routed_facts, run_json
from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.rows import Outcome, identity, write_launch, write_routing
from moe_ep_bench.errors import CASES_FAILED, CLOSED, OK, USER_ERROR, progress_bar
from moe_ep_bench.files import stable_hash
from moe_ep_bench.machine import provenance
from moe_ep_bench.results import RunDirectory, hold
from moe_ep_bench.runtime.attempts import collect_lost, forget_lost, lost_too_often
from moe_ep_bench.runtime.ranks import Ranks, ReportedError, as_rank, join
from moe_ep_bench.runtime.torchrun import (
    STOPPED_WORDS,
    Ended,
    asked_to_close,
    check_num_ranks,
    is_launched,
    num_nodes,
    torchrun,
)

# How long ranks may take to meet before a config has said otherwise.
_JOIN_TIMEOUT_S = 120.0
# Starts beyond the first of a job that keeps losing ranks; the same command goes on after them.
_MAX_RESTARTS = 20


def launch(
    config: Path,
    out: Path,
    overrides: Sequence[str],
    nproc: int,
    *,
    force: bool = False,
    point: int | None = None,
) -> Ended:
    """Have torchrun measure every launch of ``config`` on this node's ranks; return how that ended.

    Raises:
        UserError: the config cannot be run on these ranks; found before any is started.
    """
    check_num_ranks(nproc)
    comparisons = plan(config, overrides, RANKS, nproc * num_nodes(), point=point)
    arguments = ["run", str(config), "--out", str(out), *(f"--set={override}" for override in overrides)]
    arguments += ["--point", str(point)] if point is not None else []
    arguments += ["--force"] if force else []
    launches = range(comparisons[0].experiment.measure.launches)
    commands = [[*arguments, "--launch", str(number)] for number in launches]
    return torchrun(commands, nproc, max_restarts=_MAX_RESTARTS)


def run(
    config: Path,
    out: Path,
    overrides: Sequence[str],
    *,
    launch: int = 0,
    force: bool = False,
    point: int | None = None,
) -> int:
    """Measure one launch of all comparisons of ``config`` on the ranks that torchrun started; return the exit status.

    Args:
        out: results directory; what is finished in it is not run again unless ``force``.
        launch: which of the config's ``measure.launches`` repetitions, from 0.
        point: only this point of the config's sweep, from 0; other jobs may measure others into ``out`` meanwhile.
    """

    def work() -> int:
        with contextlib.closing(join(_JOIN_TIMEOUT_S)) as ranks:
            comparisons = _agreed_plan(ranks, config, overrides, launch, point)
            return _measure(Job(ranks, RunDirectory(out), launch), comparisons, force=force)

    return as_rank(work)


def emulate(comparisons: Sequence[Comparison], out: Path, *, force: bool = False) -> int:
    """Measure comparisons of virtual ranks in this process; return the exit status.

    Raises:
        ValueError: the directory cannot be used; one line.
    """
    measures = any(comparison.device is None for comparison in comparisons)
    try:
        with contextlib.closing(join(_JOIN_TIMEOUT_S, measures=measures)) as ranks:
            return _measure(Job(ranks, RunDirectory(out)), comparisons, force=force)
    except ReportedError:
        return USER_ERROR


def route(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False) -> RunDirectory:
    """Route every batch of every comparison of ``config`` by every policy and write the rows; nothing is timed.

    A routing decision needs scores and nothing else, so that a laptop can answer how many experts a batch activates or
    how full the fullest of 256 ranks would be. Batches are made and dealt to virtual ranks exactly as ``run`` deals
    them to real ones. ``on_cpu`` is not applied: a size that is too much work for a CPU's experts is none for routing.

    Args:
        out: results directory; cases whose rows are in it are not routed again unless ``force``.

    Raises:
        ValueError: one line naming the file, the key and what is allowed; or why ``out`` cannot be used.
    """
    from moe_ep_bench.bench.traffic import RoutedBatches  # numba takes its time, and is not for ``launch``

    comparisons, directory, cpu = plan(config, overrides, ROUTING), RunDirectory(out), torch.device("cpu")

    def routed(run_id: str, comparison: Comparison, cases: Sequence[CaseSpec]) -> None:
        batches, num_batches = RoutedBatches(comparison, cases, cpu), comparison.workload.num_batches
        with progress_bar(num_batches, "batch", comparison.title) as progress:
            for index in range(num_batches):
                batches.route(index)
                progress.update()
        facts = {case.case_id: identity(run_id, comparison, case) for case in cases}
        write_routing(directory, comparison, facts, batches.rows, batches.frontiers)

    def described(run_id: str) -> dict[str, Any]:
        return run_json(run_id, comparisons, provenance.describe(cpu), routed_facts)

    fill(directory, comparisons, "routing", {"torch": torch.__version__}, described, routed, force=force)
    return directory


def fill(
    directory: RunDirectory,
    comparisons: Sequence[Any],
    table: str,
    conditions: Mapping[str, Any],
    describe: Callable[[str], dict[str, Any]],
    measure: Callable[[str, Any, Sequence[CaseSpec]], object],
    *,
    force: bool = False,
) -> None:
    """Go through untimed comparisons, case by case: one whose rows are in the directory is not done again.

    Args:
        comparisons: of ``plan``, or of ``quality``.
        table: whose rows make a case done.
        describe: returns ``run.json`` for a run's id.
        measure: writes the rows of a comparison's cases, given the run's id.

    Raises:
        ValueError: the directory cannot be used; one line.
    """
    with _held(directory, comparisons, conditions, force=force):
        run_id, todo = _new_run_id(), {}
        for comparison in comparisons:
            done = directory.statuses(comparison.comparison_id, table=table)
            cases = [case for case in comparison.cases if force or case.case_id not in done]
            if cases:
                todo[comparison] = cases
        directory.write_run(describe(run_id), table)
        if not todo:
            print("moe-ep-bench: all cases are there from before; --force begins anew", file=sys.stderr)
        for comparison, cases in todo.items():
            measure(run_id, comparison, cases)


def _new_run_id() -> str:
    return secrets.token_hex(8)


@contextlib.contextmanager
def _held(
    directory: RunDirectory, comparisons: Sequence[Any], conditions: Mapping[str, Any], *, force: bool
) -> Iterator[None]:
    """Keep other jobs from comparisons that may lie in a directory; where all is done anew, of whatever code it was."""
    code = {} if force else {"code": provenance.code_hash()}
    directory.check_agreement({"mode": comparisons[0].mode, "scope": comparisons[0].scope, **conditions, **code})
    with hold(directory.root, {comparison.comparison_id: comparison.title for comparison in comparisons}):
        yield


# ---- what ranks do together ------------------------------------------------------------------------------------------


def _agreed_plan(
    ranks: Ranks, config: Path, overrides: Sequence[str], launch: int, point: int | None
) -> list[Comparison]:
    """Every rank reads the config and opens the workloads.

    Raises:
        ReportedError: some rank cannot, or they differ.
    """
    # Whoever launched this rank has tried out what it is to do.
    how: Any = {"point": point, "try_out": not is_launched()}
    comparisons = ranks.agree(partial(plan, config, overrides, RANKS, ranks.world_size, **how))
    planned = [(comparison.definition, [case.case_id for case in comparison.cases]) for comparison in comparisons]
    facts = {
        "the config": stable_hash([planned, launch]),
        "what computes experts and permutes": str([comparison.parts for comparison in comparisons]),
        "the code of moe-ep-bench": provenance.code_hash(),
        **provenance.package_versions(),
    }
    facts_R = ranks.all_gather(facts)
    unlike = (
        f"{what} is not the same on all ranks: rank {rank} has {here.get(what)}, rank 0 {known}; start all ranks alike"
        for rank, here in enumerate(facts_R)
        for what, known in facts_R[0].items()
        if here.get(what) != known
    )
    if ranks.report_error(next(unlike, "")):
        raise ReportedError
    return comparisons


def _measure(job: Job, comparisons: Sequence[Comparison], *, force: bool) -> int:
    """Measure what is left of this launch, comparison by comparison; return the exit status."""
    # Megatron-Core takes seconds to import: not before it is clear that there is something to run.
    if comparisons[0].backend == RANKS:
        from moe_ep_bench.bench.measuring import measure_comparison
    else:
        from moe_ep_bench.bench.virtual import measure_comparison
    ranks, directory, ended = job.ranks, job.directory, ""
    with contextlib.ExitStack() as held:

        def lock() -> list[Pending]:
            here = {**provenance.hardware(ranks.device), **provenance.package_versions()}
            # From here on no other job writes these comparisons, until this one ends.
            held.enter_context(_held(directory, comparisons, provenance.conditions(here), force=force))
            return pending_cases(directory, comparisons, job.launch, force=force)

        todo, run_id = job.on_first(lock), ranks.broadcast(_new_run_id())
        if any(left.case_ids or left.lost for left in todo):
            # Made on every rank, which solves for all batches.
            description = ranks.agree(partial(describe_timed_run, ranks, run_id, comparisons))
            job.on_first(partial(directory.write_run, description))
        else:
            ended = "all cases were finished before; --force runs them again"
        with job.trying(comparisons):
            for comparison, left in zip(comparisons, todo, strict=True):
                if not left.case_ids and not left.lost:
                    continue
                if ranks.broadcast(asked_to_close()):
                    ended = STOPPED_WORDS
                    break
                cases = [case for case in comparison.cases if case.case_id in left.case_ids]
                count = comparison.iterations_per_case * len(cases), "iteration", comparison.title
                with progress_bar(*count, shown=ranks.is_first) as job.progress:
                    outcome = measure_comparison(job, comparison, cases) if cases else Outcome()
                outcome.unmeasured |= left.lost
                job.guard.at(comparison.comparison_id)
                # Going on where that fails, on a full disk say, would measure for nothing, and no case is to blame.
                hint = "; what is finished stays, the same command goes on from there"
                job.on_first(partial(write_launch, directory, run_id, comparison, job.launch, outcome), hint)
        if ranks.is_first and ended:
            print(f"moe-ep-bench: {ended}", file=sys.stderr)
        return CLOSED if ended == STOPPED_WORDS else job.on_first(partial(_status, directory, comparisons, job.launch))


class Pending(NamedTuple):
    """Ids of a comparison's cases that are to be measured; status and reason of those that were lost too often."""

    case_ids: list[str]
    lost: dict[str, tuple[str, str]]


def pending_cases(
    directory: RunDirectory, comparisons: Sequence[Comparison], launch: int, *, force: bool
) -> list[Pending]:
    """Cases to measure, by comparison. Files of jobs that were lost are recorded and removed.

    Cases of a comparison are paired, so a launch that is incomplete is measured whole again, except for cases that were
    lost too often.
    """
    ids = {comparison.comparison_id: [case.case_id for case in comparison.cases] for comparison in comparisons}
    known = [*ids, *(case_id for case_ids in ids.values() for case_id in case_ids)]
    collect_lost(directory.attempts, ids)
    directory.remove_unfinished(known)
    if force and launch == 0:  # Later launches were forgotten with the first.
        forget_lost(directory.attempts, known)
        for comparison_id in ids:
            directory.remove(comparison_id)
    todo = []
    for comparison_id, case_ids in ids.items():
        if directory.statuses(comparison_id, launch).keys() >= set(case_ids):
            todo.append(Pending([], {}))
            continue
        lost = lost_too_often(directory.attempts, comparison_id, case_ids)
        todo.append(Pending([case_id for case_id in case_ids if case_id not in lost], lost))
    return todo


def _status(directory: RunDirectory, comparisons: Sequence[Comparison], launch: int) -> int:
    """The exit status: whether this launch measured all cases."""
    for comparison in comparisons:
        statuses = directory.statuses(comparison.comparison_id, launch)
        if any(statuses.get(case.case_id) != "ok" for case in comparison.cases):
            return CASES_FAILED
    return OK
