"""``run`` and ``emulate``: time real expert-parallel ranks, or one device that stands in for all of them.

``launch`` has torchrun start ranks; each calls ``run``. Before anything is measured, ranks agree that they are doing
the same thing. Then each comparison is measured, by ``session`` or by ``virtual``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moe_ep_bench.bench.comparison import RANKS, VIRTUAL, Comparison
from moe_ep_bench.bench.description import describe_timed_run
from moe_ep_bench.bench.job import Job, Todo, check_agreement, left_of, new_run_id, status_of
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.rows import Outcome, write_launch
from moe_ep_bench.errors import CLOSED, USER_ERROR, progress_bar
from moe_ep_bench.files import stable_hash
from moe_ep_bench.machine import provenance
from moe_ep_bench.results import RunDirectory, hold
from moe_ep_bench.runtime.ranks import ToldError, as_rank, join
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
        with _begun(out, launch) as job:
            comparisons = _agreed_plan(job, config, overrides, point)
            return _measure(job, comparisons, force=force)

    return as_rank(work)


def emulate(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False) -> int:
    """Measure all comparisons of ``config`` on virtual ranks; return the exit status.

    Raises:
        ValueError: the config cannot be used; one line.
    """
    return emulate_plan(plan(config, overrides, VIRTUAL), out, force=force)


def emulate_plan(comparisons: Sequence[Comparison], out: Path, *, force: bool = False) -> int:
    """Measure comparisons of virtual ranks in this process; return the exit status."""
    measures = any(comparison.device is None for comparison in comparisons)
    try:
        with _begun(out, 0, measures=measures) as job:
            return _measure(job, comparisons, force=force)
    except ToldError:
        return USER_ERROR


@contextlib.contextmanager
def _begun(out: Path, launch: int, *, measures: bool = True) -> Iterator[Job]:
    """Join the other ranks; ``measures`` as of ``join``."""
    with contextlib.ExitStack() as held:
        ranks = join(_JOIN_TIMEOUT_S, measures=measures)
        held.callback(ranks.close)
        yield Job(ranks, RunDirectory(out), held, launch)


# ---- what ranks do together ------------------------------------------------------------------------------------------


def _agreed_plan(job: Job, config: Path, overrides: Sequence[str], point: int | None) -> list[Comparison]:
    """Every rank reads the config and opens the workloads.

    Raises:
        ToldError: some rank cannot, or they differ.
    """
    ranks = job.ranks
    # Whoever launched this rank has tried out what it is to do.
    how: Any = {"point": point, "try_out": not is_launched()}
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


def _measure(job: Job, comparisons: Sequence[Comparison], *, force: bool) -> int:
    """Measure what is left of this launch, comparison by comparison; return the exit status."""
    # Megatron-Core takes seconds to import: not before it is clear that there is something to run.
    if comparisons[0].backend == RANKS:
        from moe_ep_bench.bench.session import measure_comparison
    else:
        from moe_ep_bench.bench.virtual import measure_comparison
    ranks, directory, ended = job.ranks, job.directory, ""
    todo = job.on_first(partial(_take, job, comparisons, force=force))
    job.run_id = ranks.of_first(new_run_id())
    if any(case_ids or lost for case_ids, lost in todo):
        # Made on every rank, which solves for all batches.
        description = ranks.agree(partial(describe_timed_run, ranks, job.run_id, comparisons))
        job.on_first(partial(directory.write_run, description))
    else:
        ended = "all cases were finished before; --force runs them again"
    with job.trying(comparisons):
        for comparison, (case_ids, lost) in zip(comparisons, todo, strict=True):
            if not case_ids and not lost:
                continue
            if ranks.of_first(asked_to_close()):
                ended = STOPPED_WORDS
                break
            cases = [case for case in comparison.cases if case.case_id in case_ids]
            count = comparison.iterations_per_case * len(cases), "iteration", comparison.title
            with progress_bar(*count, shown=ranks.is_first) as job.progress:
                outcome = measure_comparison(job, comparison, cases) if cases else Outcome()
            outcome.unmeasured |= lost
            job.guard.at(comparison.comparison_id)
            # Going on where that fails, on a full disk say, would measure for nothing, and no case is to blame.
            hint = "; what is finished stays, the same command goes on from there"
            job.on_first(partial(write_launch, directory, job.run_id, comparison, job.launch, outcome), hint)
    if ranks.is_first and ended:
        print(f"moe-ep-bench: {ended}", file=sys.stderr)
    return CLOSED if ended == STOPPED_WORDS else job.on_first(partial(status_of, directory, comparisons, job.launch))


def _take(job: Job, comparisons: Sequence[Comparison], *, force: bool) -> list[Todo]:
    """What is left to run. From here on no other job writes these comparisons, until this one ends."""
    first, directory = comparisons[0], job.directory
    conditions = provenance.conditions({**provenance.hardware(job.ranks.device), **provenance.package_versions()})
    check_agreement(directory, first.mode, conditions, force=force, scope=first.scope)
    titles = {comparison.comparison_id: comparison.title for comparison in comparisons}
    job.held.enter_context(hold(directory.root, titles))
    return left_of(directory, comparisons, job.launch, force=force)
