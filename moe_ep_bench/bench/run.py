"""``run`` and ``emulate``: time real expert-parallel ranks, or one device that stands in for all of them.

``launch`` has torchrun start ranks; each calls ``run``. Before anything is measured, ranks agree that they are doing
the same thing. Then each comparison is measured, by ``session`` or by ``virtual``.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moe_ep_bench.bench.comparison import RANKS, VIRTUAL, Comparison
from moe_ep_bench.bench.description import describe_timed_run
from moe_ep_bench.bench.job import Job, Todo, check_timing, hold, left_of, new_run_id, status_of
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.files import stable_hash
from moe_ep_bench.machine import provenance
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.device import check_num_ranks
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, CLOSED, OK, USER_ERROR
from moe_ep_bench.runtime.guard import STOPPED_WORDS, Guard
from moe_ep_bench.runtime.ranks import ToldError, as_rank, join
from moe_ep_bench.runtime.torchrun import Ended, is_launched, num_nodes, torchrun

# How long ranks may take to meet before a config has said otherwise.
_JOIN_TIMEOUT_S = 120.0
# Starts beyond the first of a job that keeps losing ranks; the same command goes on after them.
_MAX_RESTARTS = 20
# How long nothing may move outside of comparisons: while ranks read the config, make a workload, look into the results
# directory. ``measure.timeout_s`` counts where it is longer.
_SETUP_TIMEOUT_S = 600.0


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
    worst, last = Ended(OK), comparisons[0].experiment.measure.launches - 1
    for number in range(last + 1):
        ended = torchrun([*arguments, "--launch", str(number)], nproc, max_restarts=_MAX_RESTARTS)
        if ended.status in (OK, CASES_FAILED) and ended.asked_to_close and number < last:
            # It came in this launch's last comparison, after which its ranks had nothing left to end.
            ended = ended._replace(status=CLOSED)
        if ended.status not in (OK, CASES_FAILED):
            return ended
        # Which node has rank 0 may change from launch to launch.
        worst = ended._replace(status=max(worst.status, ended.status))
    return worst


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
        # Nothing of a case is lost where a rank hangs out here: the guard's own line says all.
        with _begun(out, launch, _SETUP_TIMEOUT_S) as job:
            comparisons = _agreed_plan(job, config, overrides, point)
            job.guard.feed()
            return _measure(job, comparisons, force=force, is_point=point is not None)

    return as_rank(work)


def emulate(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False) -> int:
    """Measure all comparisons of ``config`` on virtual ranks; return the exit status, 128 + signal where one ended it.

    Raises:
        ValueError: the config cannot be used; one line.
    """
    return emulate_plan(plan(config, overrides, VIRTUAL), out, force=force)


def emulate_plan(comparisons: Sequence[Comparison], out: Path, *, force: bool = False) -> int:
    """Measure comparisons of virtual ranks in this process; return the exit status, 128 + signal where one ended it."""
    measures = any(comparison.device is None for comparison in comparisons)
    try:
        with _begun(out, 0, math.inf, measures=measures) as job:  # Nobody waits for it outside of cases.
            return _measure(job, comparisons, force=force)
    except ToldError:
        return USER_ERROR


@contextlib.contextmanager
def _begun(out: Path, launch: int, timeout_s: float, *, measures: bool = True) -> Iterator[Job]:
    """Join the other ranks and work under a guard.

    Args:
        timeout_s: how long nothing may move outside of comparisons.
        measures: see ``join``.
    """
    with Guard(timeout_s) as guard, contextlib.ExitStack() as held:
        ranks = join(_JOIN_TIMEOUT_S, measures=measures)
        guard.feed()
        held.callback(ranks.close)
        yield Job(ranks, RunDirectory(out), guard, held, launch)


# ---- what ranks do together ------------------------------------------------------------------------------------------


def _agreed_plan(job: Job, config: Path, overrides: Sequence[str], point: int | None) -> list[Comparison]:
    """Every rank reads the config and opens the workloads.

    Raises:
        ToldError: some rank cannot, or they differ.
    """
    ranks = job.ranks
    before = lambda experiment: job.guard.allow(experiment.measure.timeout_s)  # noqa: E731
    # Whoever launched this rank has tried out what it is to do.
    how: Any = {"point": point, "try_out": not is_launched(), "before": before}
    comparisons = ranks.agree(partial(plan, config, overrides, RANKS, ranks.world_size, **how))
    planned = [(comparison.definition, [case.case_id for case in comparison.cases]) for comparison in comparisons]
    facts = {
        "the config": stable_hash([planned, job.launch]),
        "what computes experts and permutes": str([comparison.parts for comparison in comparisons]),
        "the code of moe-ep-bench": provenance.code_hash(),
        **provenance.package_versions(),
    }
    of_ranks = ranks.told(facts)
    unlike = (
        f"{what} is not the same on all ranks: rank {rank} has {told.get(what)}, rank 0 {known}; start all ranks alike"
        for rank, told in enumerate(of_ranks)
        for what, known in of_ranks[0].items()
        if told.get(what) != known
    )
    if ranks.complain(next(unlike, "")):
        raise ToldError
    return comparisons


def _measure(job: Job, comparisons: Sequence[Comparison], *, force: bool, is_point: bool = False) -> int:
    """Measure what is left of this launch; return the exit status."""
    # Megatron-Core takes seconds to import: not before it is clear that there is something to run.
    if comparisons[0].backend == RANKS:
        from moe_ep_bench.bench.session import measure_comparison
    else:
        from moe_ep_bench.bench.virtual import measure_comparison
    ranks, directory = job.ranks, job.directory
    todo = job.on_first(partial(_take, job, comparisons, force=force))
    is_done = not any(case_ids or lost for case_ids, lost in todo)
    job.run_id = ranks.of_first(new_run_id())
    if not is_done:
        # Made on every rank, which keeps them together: it goes through all batches.
        description = ranks.agree(partial(describe_timed_run, ranks, job.run_id, comparisons, job.guard.feed))
        job.on_first(partial(directory.write_run, description, keep_others=is_point))
    ended = "all cases were finished before; --force runs them again" if is_done else ""
    if is_closed := not job.measure(comparisons, todo, measure_comparison):
        ended = STOPPED_WORDS
    if ranks.is_first and ended:
        print(f"moe-ep-bench: {ended}", file=sys.stderr)
    return CLOSED if is_closed else job.on_first(partial(status_of, directory, comparisons, job.launch))


def _take(job: Job, comparisons: Sequence[Comparison], *, force: bool) -> list[Todo]:
    """What is left to run. From here on no other job writes these comparisons, until this one ends."""
    check_timing(job.directory, comparisons[0], job.ranks.device, force=force)
    job.held.enter_context(hold(job.directory, comparisons))
    return left_of(job.directory, comparisons, job.launch, force=force)
