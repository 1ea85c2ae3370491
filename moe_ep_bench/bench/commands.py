"""The commands ``run``, ``emulate`` and ``route``: time real ranks, one device in place of all of them, or route alone.

``launch`` plans, and has torchrun start ranks; each calls ``run``, which reads the plan. Before anything is measured,
ranks agree that they are doing the same thing. Then what is left is measured (``measure``), point by point, under a
guard and with a line ahead of what is tried, so that the next job knows what was lost (``job``). Nothing of an untimed
point can be lost but its own time (``fill``).
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_ep_bench.bench.description import describe_timed_run, held_here, routed_facts, run_json
from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.measure import Runner, measure_point
from moe_ep_bench.bench.plan import plan, plan_hash, plan_text, read_plan
from moe_ep_bench.bench.point import RANKS, ROUTING, CaseSpec, Point
from moe_ep_bench.bench.result import Result, write
from moe_ep_bench.errors import CASES_FAILED, CLOSED, OK, USER_ERROR, progress_bar
from moe_ep_bench.files import stable_hash
from moe_ep_bench.layer.host import device_scope, free_memory
from moe_ep_bench.machine import provenance
from moe_ep_bench.results import RunDirectory, hold
from moe_ep_bench.runtime.attempts import collect_lost, forget_lost, lost_too_often
from moe_ep_bench.runtime.ranks import Ranks, ReportedError, as_rank, join
from moe_ep_bench.runtime.sharing import SHARE_FLAG, Sharing, check_memory, free_bytes_of_gpus, shared_gpus
from moe_ep_bench.runtime.torchrun import (
    STOPPED_WORDS,
    Ended,
    asked_to_close,
    check_num_ranks,
    launched_plan,
    num_gpus,
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
    sharing: Sharing | None = None,
) -> Ended:
    """Have torchrun measure every launch of ``config`` on this node's ranks; return how that ended.

    Args:
        sharing: by what ranks share GPUs; None = each has its own.

    Raises:
        UserError: the config cannot be run on these ranks; found before any is started.
    """
    check_num_ranks(nproc, sharing)
    points = plan(config, overrides, RANKS, nproc * num_nodes(), point=point, sharing=sharing)
    if sharing is not None:
        _check_shared_memory(points, nproc)
    arguments = ["run", str(config), "--out", str(out), *(f"--set={override}" for override in overrides)]
    arguments += ["--point", str(point)] if point is not None else []
    arguments += ["--force"] if force else []
    arguments += SHARE_FLAG[sharing] if sharing else []
    launches = range(points[0].experiment.measure.launches)
    commands = [[*arguments, "--launch", str(number)] for number in launches]
    with shared_gpus(sharing, -(-nproc // (num_gpus() or nproc))):
        return torchrun(commands, nproc, max_restarts=_MAX_RESTARTS, plan=plan_text(points))


def _check_shared_memory(points: Sequence[Point], nproc: int) -> None:
    """Refuse more ranks than GPUs have memory for, as far as their driver tells it; by the largest point's estimate."""
    rank_bytes = max(sum(held_here(point).values()) for point in points)
    check_memory(rank_bytes, free_bytes_of_gpus(), nproc)


def run(
    config: Path,
    out: Path,
    overrides: Sequence[str],
    *,
    launch: int = 0,
    force: bool = False,
    point: int | None = None,
    sharing: Sharing | None = None,
) -> int:
    """Measure one launch of all points of ``config`` on the ranks that torchrun started; return the exit status.

    Args:
        out: results directory; what is finished in it is not run again unless ``force``.
        launch: which of the config's ``measure.launches`` repetitions, from 0.
        point: only this point of the config's sweep, from 0; other jobs may measure others into ``out`` meanwhile.
        sharing: by what these ranks share GPUs.
    """

    def work() -> int:
        with contextlib.closing(join(_JOIN_TIMEOUT_S, sharing=sharing)) as ranks:
            points = _agreed_plan(ranks, config, overrides, launch, point)
            return _measure(Job(ranks, RunDirectory(out), launch), points, force=force)

    return as_rank(work)


def emulate(points: Sequence[Point], out: Path, *, force: bool = False) -> int:
    """Measure points of virtual ranks in this process; return the exit status.

    Raises:
        ValueError: the directory cannot be used; one line.
    """
    measures = any(point.device is None for point in points)
    try:
        with contextlib.closing(join(_JOIN_TIMEOUT_S, measures=measures)) as ranks:
            return _measure(Job(ranks, RunDirectory(out)), points, force=force)
    except ReportedError:
        return USER_ERROR


def route(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False) -> RunDirectory:
    """Route every batch of every point of ``config`` by every policy and write the rows; nothing is timed.

    A routing decision needs scores and nothing else, so that a laptop can answer how many experts a batch activates or
    how full the fullest of 256 ranks would be. Batches are made and dealt to virtual ranks exactly as ``run`` deals
    them to real ones. ``on_cpu`` is not applied: a size that is too much work for a CPU's experts is none for routing.

    Args:
        out: results directory; cases whose rows are in it, and ranks that an earlier job routed, are not routed again
            unless ``force``.

    Raises:
        ValueError: one line naming the file, the key and what is allowed; or why ``out`` cannot be used.
    """
    from moe_ep_bench.bench.kept import Kept
    from moe_ep_bench.bench.routing import Router  # numba takes its time, and is not for ``launch``
    from moe_ep_bench.bench.traffic import route_batch

    points, directory, cpu = plan(config, overrides, ROUTING), RunDirectory(out), torch.device("cpu")

    def routed(run_id: str, point: Point, cases: Sequence[CaseSpec]) -> None:
        router, result, num_batches = Router(point, cpu), Result(), point.workload.num_batches
        begun = directory.begun(point.comparison_id)
        if force:
            begun.unlink(missing_ok=True)
        router.batches.kept = Kept(begun, [case.case_id for case in cases])
        with progress_bar(num_batches, "batch", point.title) as progress:
            for batch in range(num_batches):
                for case, traffic in zip(cases, route_batch(router, cases, batch), strict=True):
                    result.rows[case.case_id] += traffic.rows
                    result.frontiers[case.case_id] += traffic.frontiers
                progress.update()
        write(directory, run_id, point, result)
        begun.unlink(missing_ok=True)

    def described(run_id: str) -> dict[str, Any]:
        return run_json(run_id, points, provenance.describe(cpu), routed_facts)

    fill(directory, points, "routing", {"torch": torch.__version__}, described, routed, force=force)
    return directory


def fill(
    directory: RunDirectory,
    points: Sequence[Any],
    table: str,
    conditions: Mapping[str, Any],
    describe: Callable[[str], dict[str, Any]],
    measure: Callable[..., object],
    *,
    force: bool = False,
    launches: Sequence[int] | None = None,
) -> None:
    """Go through points that need no ranks, case by case: one whose rows are in the directory is not done again.

    Args:
        points: of ``plan``, of ``quality`` or of ``serve``.
        table: whose rows make a case done.
        describe: returns ``run.json`` for a run's id.
        measure: writes the rows of a point's cases, given the run's id, and of a launch where there are ``launches``.
        launches: of a table that is by launch; one that lacks a case, or lost it, is measured whole. None = it is not.

    Raises:
        ValueError: the directory cannot be used; one line.
    """
    with _held(directory, points, conditions, force=force):
        run_id, todo = _new_run_id(), []
        for point, launch in itertools.product(points, [None] if launches is None else launches):
            found = directory.statuses(point.comparison_id, launch, table)
            done = [case_id for case_id, status in found.items() if launch is None or status == "ok"]
            cases = [case for case in point.cases if force or case.case_id not in done]
            if cases:
                todo.append((point, cases) if launch is None else (point, point.cases, launch))
        directory.write_run(describe(run_id), table)
        if not todo:
            print("moe-ep-bench: all cases are there from before; --force begins anew", file=sys.stderr)
        for one in todo:
            measure(run_id, *one)


def _new_run_id() -> str:
    return secrets.token_hex(8)


@contextlib.contextmanager
def _held(
    directory: RunDirectory, points: Sequence[Any], conditions: Mapping[str, Any], *, force: bool
) -> Iterator[None]:
    """Lock these points in a directory that may hold them; with ``force``, whatever code measured them before."""
    code = {} if force else {"code": provenance.code_hash()}
    directory.check_agreement({"mode": points[0].mode, "scope": points[0].scope, **conditions, **code})
    with hold(directory.root, {point.comparison_id: point.title for point in points}):
        yield


# ---- what ranks do together ------------------------------------------------------------------------------------------


def _agreed_plan(ranks: Ranks, config: Path, overrides: Sequence[str], launch: int, point: int | None) -> list[Point]:
    """The launcher's plan, whose workloads every rank opens; ranks that somebody else started plan by themselves.

    Raises:
        ReportedError: some rank cannot, or they differ.
    """

    def read() -> list[Point]:
        if (text := launched_plan()) is not None:
            return read_plan(text, ranks.world_size)
        return plan(config, overrides, RANKS, ranks.world_size, point=point, sharing=ranks.sharing)

    points = ranks.agree(read)
    facts = {
        "the config": stable_hash([plan_hash(points), launch]),
        "--share-gpu": str(ranks.sharing),
        "what computes experts and permutes": str([one.layer_backend for one in points]),
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
    return points


def _measure(job: Job, points: Sequence[Point], *, force: bool) -> int:
    """Measure what is left of this launch, point by point; return the exit status."""
    ranks, directory = job.ranks, job.directory
    with contextlib.ExitStack() as held:
        pending = job.on_first(partial(_lock, job, points, held, force=force))
        todo = [(point, left) for point, left in zip(points, pending, strict=True) if left.case_ids or left.lost]
        run_id = ranks.broadcast(_new_run_id())
        if todo:
            # Made on every rank, which solves for all batches.
            description = ranks.agree(partial(describe_timed_run, ranks, run_id, points))
            job.on_first(partial(directory.write_run, description, points[0].table))
        else:
            _say(ranks, "all cases were finished before; --force runs them again")
        modelled = sum(one.routing_work for one, _ in todo) if points[0].device is not None else 0
        with job.trying(points), progress_bar(modelled, "rank", shown=ranks.is_first) as job.progress:
            for point, left in todo:
                if ranks.broadcast(asked_to_close()):
                    _say(ranks, STOPPED_WORDS)
                    return CLOSED
                result = _measured(job, point, left.case_ids)
                result.unmeasured |= left.lost
                job.guard.at(point.comparison_id)
                # Going on where that fails, on a full disk say, would measure for nothing, and no case is to blame.
                hint = "; what is finished stays, the same command goes on from there"
                job.on_first(partial(write, directory, run_id, point, result, job.launch), hint)
                del result  # The next point's rows would stand beside it.
        return job.on_first(partial(_status, directory, points, job.launch))


def _say(ranks: Ranks, words: str) -> None:
    if ranks.is_first:
        print(f"moe-ep-bench: {words}", file=sys.stderr)


def _lock(job: Job, points: Sequence[Point], held: contextlib.ExitStack, *, force: bool) -> list[Pending]:
    """Keep other jobs from writing these points while ``held`` lasts; return what is left of each."""
    here = {**provenance.hardware(job.ranks.device), **provenance.package_versions()}
    held.enter_context(_held(job.directory, points, provenance.conditions(here), force=force))
    return pending_cases(job.directory, points, job.launch, force=force)


def _measured(job: Job, point: Point, case_ids: Sequence[str]) -> Result:
    """Build what runs these cases of a point, and measure them; rank 0 gets the samples of all ranks."""
    cases = [case for case in point.cases if case.case_id in case_ids]
    if not cases:
        return Result()
    job.guard.at(point.comparison_id)
    with _counted(job, point, len(cases)), device_scope(), torch.inference_mode():
        build, runner, loss = runner_of(job, point, cases), None, None
        try:
            runner = build()
        except Exception as error:
            loss = job.record_failure(error)
        if first := job.ranks.first_error(loss):
            rank, loss = first
            why = loss.status, f"while building: rank {rank}: {loss.words}"
            result = Result({case.case_id: why for case in cases})
        else:
            assert runner is not None  # where no rank has failed
            with contextlib.closing(runner):
                begin = job.begin if point.device is None else job.guard.at
                result = measure_point(runner, begin)
    del runner
    if point.device is None:  # What is modelled holds nothing of layers.
        free_memory(job.ranks.device)
    return result


@contextlib.contextmanager
def _counted(job: Job, point: Point, num_cases: int) -> Iterator[None]:
    """Display the progress of one point by its iterations; modelled ones have one count of what is routed, for all."""
    if point.device is not None:
        job.progress.set_description(point.title)
        yield
        return
    count = point.iterations_per_case * num_cases, "iteration", point.title
    with progress_bar(*count, shown=job.ranks.is_first) as job.progress:
        yield


def runner_of(job: Job, point: Point, cases: Sequence[CaseSpec]) -> Callable[[], Runner]:
    """What builds the runner of a point, which needs no other rank; ranks have met in their process groups then.

    Megatron-Core takes seconds to import: not before it is clear that there is something to run.
    """
    if point.device is not None:
        from moe_ep_bench.bench.emulated_ranks import ModelledRanks
        from moe_ep_bench.bench.kept import Kept
        from moe_ep_bench.bench.tokens import Batches
        from moe_ep_bench.bench.traffic import ROUTED

        if job.batches is None or not job.batches.serves(point):
            job.batches = Batches(point, job.ranks.device)
        kept = Kept(job.directory.begun(point.comparison_id), [case.case_id for case in cases])
        job.batches.kept, job.progress.total = kept, job.progress.total - kept.number(ROUTED) * point.num_parts
        return partial(ModelledRanks, point, cases, job.ranks.device, job.guard.at, job.progress.update, job.batches)
    from moe_ep_bench.layer.megatron import expert_parallel_groups

    # The guard is to end a hang, because it knows who hangs; the collectives' own limit lies behind it.
    limit_s = point.experiment.measure.timeout_s + 60
    if point.backend == RANKS:
        from moe_ep_bench.bench.real_ranks import RealRanks

        return partial(RealRanks, job, point, cases, expert_parallel_groups(point.ep_size, limit_s))
    from moe_ep_bench.bench.virtual_ranks import VirtualRanks

    expert_parallel_groups(1, limit_s)
    return partial(VirtualRanks, job, point, cases)


class Pending(NamedTuple):
    """Ids of a point's cases that are to be measured; status and reason of those that were lost too often."""

    case_ids: list[str]
    lost: dict[str, tuple[str, str]]


def pending_cases(directory: RunDirectory, points: Sequence[Point], launch: int, *, force: bool) -> list[Pending]:
    """Cases to measure, by point. Files of jobs that were lost are recorded and removed.

    Cases of a point are paired, so a launch that is incomplete is measured whole again, except for cases that were lost
    too often.
    """
    ids = {point.comparison_id: [case.case_id for case in point.cases] for point in points}
    known = [*ids, *(case_id for case_ids in ids.values() for case_id in case_ids)]
    collect_lost(directory.attempts, ids)
    directory.remove_unfinished(known)
    if force and launch == 0:  # Later launches were forgotten with the first.
        forget_lost(directory.attempts, known)
        for comparison_id in ids:
            directory.remove(comparison_id)
    pending = []
    for comparison_id, case_ids in ids.items():
        if directory.statuses(comparison_id, launch, points[0].table).keys() >= set(case_ids):
            directory.begun(comparison_id).unlink(missing_ok=True)  # of a job that was killed right after
            pending.append(Pending([], {}))
            continue
        lost = lost_too_often(directory.attempts, comparison_id, case_ids)
        pending.append(Pending([case_id for case_id in case_ids if case_id not in lost], lost))
    return pending


def _status(directory: RunDirectory, points: Sequence[Point], launch: int) -> int:
    """The exit status: whether this launch measured all cases."""
    for point in points:
        statuses = directory.statuses(point.comparison_id, launch, point.table)
        if any(statuses.get(case.case_id) != "ok" for case in point.cases):
            return CASES_FAILED
    return OK
