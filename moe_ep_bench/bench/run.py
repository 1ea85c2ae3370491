"""``run``: time a real expert-parallel Megatron-Core layer, every case on the same batches.

For each comparison: build the layers, run every case once on every batch (which checks it
against the dense reference, takes its routing metrics and lets every shape be seen), warm up,
time, check again, and write all ranks' samples. Before anything runs, ranks agree that they are
doing the same thing; what cannot run is found there and recorded as skipped.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from moe_ep_bench.bench.directory import cannot_write, check_agreement, hold_comparisons
from moe_ep_bench.bench.job import CannotWriteError, Job, is_of_peers, open_job
from moe_ep_bench.bench.plan import RANKS, CaseSpec, Comparison, Plan, plan
from moe_ep_bench.config import Experiment
from moe_ep_bench.files import stable_hash
from moe_ep_bench.machine import provenance
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.crash_journal import MAX_ATTEMPTS, PEER_LOST, collect_lost, forget_lost, lost_attempts
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, CLOSED, LOST, OK, USER_ERROR
from moe_ep_bench.runtime.ranks import NotMetError, Ranks, join
from moe_ep_bench.runtime.signals import Stopped, asked_to_close, stoppable
from moe_ep_bench.runtime.watchdog import Watchdog
from moe_ep_bench.schema import SCHEMA_VERSION
from moe_ep_bench.workload import Workload

# How long ranks may take to meet before a config has said otherwise.
_JOIN_TIMEOUT_S = 120.0
# How long nothing may move outside of comparisons: while ranks read the config, make a workload, look into the results
# directory. ``measure.timeout_s`` counts where it is longer.
_SETUP_TIMEOUT_S = 600.0
# What batches may take of a rank's memory until they are used.
_MOST_KEPT_BYTES = 4 * 2**30


def run(
    config: Path,
    out: Path,
    overrides: Sequence[str],
    *,
    launch: int = 0,
    force: bool = False,
    profile: str | None = None,
    point: int | None = None,
) -> int:
    """Measure one launch of all comparisons of ``config`` on the ranks that torchrun started; return the exit status.

    Args:
        out: results directory; what is finished in it is not run again unless ``force``.
        launch: which of the config's ``measure.launches`` repetitions, from 0.
        profile: a case (its id, label or policy name); one iteration of it is profiled and nothing timed.
        point: only this point of the config's sweep, from 0; other jobs may measure others into ``out`` meanwhile.
    """
    try:
        with stoppable():
            return _run(config, out, overrides, launch, force, profile, point)
    except Stopped as stopped:
        return 128 + stopped.args[0]
    except CannotWriteError:
        return USER_ERROR
    except Exception as error:
        if is_of_peers(error):
            print(f"moe-ep-bench: {PEER_LOST}: {' '.join(str(error).split())[:200]}", file=sys.stderr, flush=True)
        else:
            # Not a user's mistake and not a case's failure: show all of it.
            traceback.print_exc()
        return LOST


def _run(
    config: Path,
    out: Path,
    overrides: Sequence[str],
    launch: int,
    force: bool,
    profile: str | None,
    point: int | None,
) -> int:
    try:
        ranks = join(_JOIN_TIMEOUT_S)
    except ValueError as error:
        print(f"moe-ep-bench: {error}", file=sys.stderr)
        return USER_ERROR
    except NotMetError as error:
        print(f"moe-ep-bench: {error}", file=sys.stderr)
        return LOST
    # Nothing of a case is lost where a rank hangs out here: the line that the watchdog prints is all there is to say.
    setup = Watchdog(_SETUP_TIMEOUT_S, lambda reason: None)
    held = contextlib.ExitStack()
    try:
        comparisons = _agree_on_comparisons(ranks, setup, config, overrides, launch, point)
        if comparisons is None:
            return USER_ERROR
        setup.feed()
        directory = RunDirectory(out)
        if profile is not None:
            return _profile(ranks, setup, directory, comparisons, profile, held)
        todo = _agree_on_cases(ranks, directory, comparisons, launch, force, held)
        if todo is None:
            return USER_ERROR
        is_point = point is not None
        return _measure_all(ranks, setup, directory, comparisons, todo, launch, force=force, is_point=is_point)
    finally:
        held.close()
        ranks.close()
        setup.stop()


def _agree_on_comparisons(
    ranks: Ranks, setup: Watchdog, config: Path, overrides: Sequence[str], launch: int, point: int | None
) -> Plan | None:
    """Every rank reads the config and opens the workloads; None if any cannot or if they differ."""
    comparisons = None
    error = ""
    try:
        comparisons = plan(
            config,
            overrides,
            RANKS,
            ranks.world_size,
            on_cpu=ranks.device.type == "cpu",
            point=point,
            before=lambda experiment: setup.allow(experiment.measure.timeout_s),
        )
        most = max(comparison.num_launches for comparison in comparisons)
        if not 0 <= launch < most:
            raise ValueError(f"--launch: expected 0 to {most - 1} (measure.launches={most}), got {launch}")
    except ValueError as problem:
        error = str(problem)
    if ranks.complain(error) or comparisons is None:
        return None
    definitions = json.dumps([comparison.definition for comparison in comparisons], sort_keys=True)
    policies = json.dumps([case.case_id for comparison in comparisons for case in comparison.cases])
    for what, value in (
        ("the config", definitions + policies + str(launch)),
        ("what computes experts and permutes", str([comparison.parts for comparison in comparisons])),
        ("the code of moe-ep-bench", provenance.code_hash()),
    ):
        differing = ranks.differing(value)
        if differing:
            ranks.complain(
                f"{what} is not the same on all ranks: rank {', '.join(map(str, differing))} differ(s) "
                "from rank 0; start all ranks alike",
            )
            return None
    return None if ranks.complain(_other_versions(ranks)) else comparisons


def _other_versions(ranks: Ranks) -> str:
    """What the first rank with other packages than rank 0 has in their place; empty where all have the same."""
    versions = [json.loads(text) for text in ranks.texts(json.dumps(provenance.package_versions()))]
    for rank, of_rank in enumerate(versions):
        differing = [name for name in of_rank if of_rank[name] != versions[0][name]]
        if differing:
            theirs, ours = (
                ", ".join(f"{name} {of[name]}" if of[name] else f"no {name}" for name in differing)
                for of in (of_rank, versions[0])
            )
            return f"packages are not the same on all ranks: rank {rank} has {theirs}, rank 0 has {ours}; install alike"
    return ""


def _agree_on_cases(
    ranks: Ranks,
    directory: RunDirectory,
    comparisons: Sequence[Comparison],
    launch: int,
    force: bool,
    held: contextlib.ExitStack,
) -> list[list[CaseSpec]] | None:
    """What is left to run, per comparison; rank 0 looks into the results directory for all.

    Returns None where the directory cannot be used. From here on no other job writes these comparisons, until ``held``
    is closed.
    """
    wanted = torch.zeros(sum(len(comparison.cases) for comparison in comparisons), dtype=torch.uint8)

    def look() -> None:
        check_directory(directory, ranks, force, scope=comparisons[0].scope)
        held.enter_context(hold_comparisons(directory, comparisons))
        left = left_of(directory, comparisons, launch, force=force)
        flags = [case in cases for one, cases in zip(comparisons, left, strict=True) for case in one.cases]
        wanted.copy_(torch.tensor(flags))

    if not _first_can(ranks, directory, look):
        return None
    flags = iter(ranks.gather(wanted, everywhere=True)[0].tolist())
    return [[case for case in comparison.cases if next(flags)] for comparison in comparisons]


def _first_can(ranks: Ranks, directory: RunDirectory, act: Callable[[], object]) -> bool:
    """Have rank 0 act in the results directory for all; where it cannot, the user is told and all ranks know."""
    error = ""
    if ranks.is_first:
        try:
            act()
        except OSError as problem:
            error = cannot_write(directory.root, problem)
        except ValueError as problem:
            error = str(problem)
    return not ranks.complain(error)


def left_of(
    directory: RunDirectory, comparisons: Sequence[Comparison], launch: int = 0, *, force: bool = False
) -> list[list[CaseSpec]]:
    """What is left to run, per comparison. What jobs left that ended as they should not have is noted and removed.

    Cases of a comparison are paired, so a launch that is incomplete is measured whole again, except for cases that were
    lost too often.
    """
    ids = [one.comparison_id for one in comparisons]
    collect_lost(directory.attempts, ids)
    directory.remove_unfinished([*ids, *(case.case_id for one in comparisons for case in one.cases)])
    left = []
    for comparison in comparisons:
        # The first launch begins anew; later ones were forgotten with it.
        if force and launch == 0:
            forget(directory, comparison)
        tried = [case for case in comparison.cases if not given_up(directory, comparison, case)]
        finished = all(directory.is_finished(case.case_id, launch) for case in tried)
        left.append([] if finished or launch >= comparison.num_launches else tried)
    return left


def forget(directory: RunDirectory, comparison: Comparison) -> None:
    """Remove what is there of a comparison, so that it is measured anew."""
    for case in comparison.cases:
        directory.remove_case(case.case_id)
    directory.remove_conditions(comparison.comparison_id)
    forget_lost(directory.attempts, [comparison.comparison_id, *(case.case_id for case in comparison.cases)])


def given_up(directory: RunDirectory, comparison: Comparison, case: CaseSpec) -> list[str]:
    """The reasons for which this case is not tried again; empty while it may be."""
    for lost_id in (case.case_id, comparison.comparison_id):
        reasons = lost_attempts(directory.attempts, lost_id)
        if len(reasons) >= MAX_ATTEMPTS:
            return reasons
    return []


def check_directory(
    directory: RunDirectory, ranks: Ranks, force: bool, mode: str = "run", scope: str = "layer"
) -> None:
    """Raise unless such times can be written here, and earlier ones are of this machine, code and packages."""
    check_agreement(directory, mode, provenance.conditions(ranks.device), force=force, scope=scope)


def _measure_all(
    ranks: Ranks,
    setup: Watchdog,
    directory: RunDirectory,
    comparisons: Sequence[Comparison],
    todo: Sequence[Sequence[CaseSpec]],
    launch: int,
    *,
    force: bool,
    is_point: bool,
) -> int:
    # Megatron-Core takes seconds to import: not before it is clear that there is something to run.
    from moe_ep_bench.bench.session import measure_comparison

    run_id = ranks.texts(stable_hash([time.time_ns()]))[0]
    if any(todo):
        # Made on every rank, which keeps them together: it goes through all batches.
        try:
            description = run_description(ranks, run_id, comparisons, lambda comparison: setup.feed())
        except ValueError as problem:  # On all ranks alike.
            ranks.complain(str(problem))
            return USER_ERROR
        # Checked before, but another job may have come first.
        check = partial(check_directory, directory, ranks, force, scope=comparisons[0].scope)
        write = partial(directory.write_run, description, check=check, keep_others=is_point)
        if not _first_can(ranks, directory, write):
            return USER_ERROR
    work, paused = (measure_comparison, _iterations), setup.paused()
    if not measure_each(ranks, directory, comparisons, todo, run_id, *work, meanwhile=paused, launch=launch):
        if ranks.is_first:
            print("moe-ep-bench: asked to end; the same command does what is left", file=sys.stderr)
        return CLOSED
    status = torch.tensor([status_of(directory, comparisons, launch) if ranks.is_first else OK])
    status = int(ranks.gather(status, everywhere=True)[0])
    if ranks.is_first and not any(todo):
        print(
            f"moe-ep-bench: all {sum(len(c.cases) for c in comparisons)} cases were finished before"
            f"{f' in launch {launch + 1}' if launch else ''}; --force runs them again",
            file=sys.stderr,
        )
    return status


def measure_each(
    ranks: Ranks,
    directory: RunDirectory,
    comparisons: Sequence[Comparison],
    todo: Sequence[Sequence[CaseSpec]],
    run_id: str,
    measure: Callable[[Job, Comparison, Sequence[CaseSpec]], object],
    count: Callable[[Comparison, Sequence[CaseSpec]], int],
    *,
    meanwhile: contextlib.AbstractContextManager | None = None,
    launch: int = 0,
    mode: str = "run",
) -> bool:
    """Measure what is to do, comparison by comparison; whether it was all done before the job was asked to end.

    Args:
        count: iterations that are planned.
        meanwhile: entered once the job's own watchdog is there, and left before it ends.
    """
    with (
        open_job(
            ranks,
            directory,
            comparisons,
            directory.attempts,
            run_id=run_id,
            launch=launch,
            num_iterations=sum(map(count, comparisons, todo)),
            mode=mode,
        ) as job,
        meanwhile or contextlib.nullcontext(),
    ):
        for comparison, cases in zip(comparisons, todo, strict=True):
            if ranks.is_first:
                record_lost(job, comparison, cases)
            job.check_written()
            if not cases:
                continue
            if ranks.gather(torch.tensor([asked_to_close()]), everywhere=True)[0]:
                return False
            launches = comparison.num_launches if mode == "run" else 1
            repetition = f", launch {launch + 1} of {launches}" if launches > 1 else ""
            job.progress.set_description(comparison.title + repetition)
            with job.counting(count(comparison, cases)):
                measure(job, comparison, cases)
    return True


def _profile(
    ranks: Ranks,
    setup: Watchdog,
    directory: RunDirectory,
    comparisons: Plan,
    wanted: str,
    held: contextlib.ExitStack,
) -> int:
    from moe_ep_bench.bench.profile import profile_case

    try:
        comparison, case = comparisons.find_case(wanted)
    except ValueError as problem:  # On all ranks alike.
        ranks.complain(str(problem))
        return USER_ERROR

    def prepare() -> None:
        check_directory(directory, ranks, True, scope=comparison.scope)
        held.enter_context(hold_comparisons(directory, [comparison]))

    if not _first_can(ranks, directory, prepare):
        return USER_ERROR
    with open_job(ranks, directory, [comparison], directory.profiles) as job, setup.paused():
        profile_case(job, comparison, case)
    return OK


def _iterations(comparison: Comparison, cases: Sequence[CaseSpec]) -> int:
    return comparison.num_iterations() * len(cases) // len(comparison.cases)


def record_lost(job: Job, comparison: Comparison, cases: Sequence[CaseSpec]) -> None:
    """Give every case that was lost too often its row."""
    for case in comparison.cases:
        reasons = given_up(job.directory, comparison, case)
        if case not in cases and reasons and not job.directory.is_finished(case.case_id, job.launch):
            status, _, reason = reasons[-1].partition(": ")
            status = status if status in ("oom", "timeout") else "failed"
            job.write_unmeasured(comparison, case, status, f"{reason or reasons[-1]} ({len(reasons)} attempts)")


def status_of(directory: RunDirectory, comparisons: Sequence[Comparison], launch: int) -> int:
    """The exit status: whether this launch measured all cases that it should have."""
    meant = [comparison for comparison in comparisons if launch < comparison.num_launches]
    failed = any(directory.statuses(case.case_id).get(launch) != "ok" for c in meant for case in c.cases)
    return CASES_FAILED if failed else OK


def run_description(
    ranks: Ranks,
    run_id: str,
    comparisons: Sequence[Comparison],
    before: Callable[[Comparison], object] = lambda comparison: None,
) -> dict[str, Any]:
    """``run.json``, as rank 0 writes it; every rank calls this.

    Args:
        before: called ahead of each layer of a comparison whose batches are all gone through on this rank.

    Raises:
        ValueError: a batch cannot meet its targets; one line, on every rank.
    """
    fingerprints = {}
    for comparison in comparisons:
        # Of several comparisons the last would wait long for what is kept of it; a layer has one workload.
        workloads = tuple(comparison.workloads.values())
        keep = comparison.scope == "model" and len(comparisons) == comparison.world_size == 1
        try:
            survey_together(workloads, ranks, partial(before, comparison), keep=keep)
        except ValueError as problem:
            raise ValueError(f"{comparison.title}: {problem}") from None
        of_layers = [workload.fingerprint() for workload in workloads]
        fingerprints[comparison.comparison_id] = of_layers[0] if len(of_layers) == 1 else stable_hash(of_layers)
    mine = provenance.describe_rank(ranks.device, several_nodes=ranks.local_world_size < ranks.world_size)
    of_ranks = [json.loads(text) for text in ranks.texts(json.dumps(mine))]
    # Of one rank: it asks the driver, which answers all ranks of a node alike and slowly.
    described = provenance.describe(ranks.device) if ranks.is_first else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "mode": "run",
        "scope": comparisons[0].scope,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": [describe_experiment(comparison.experiment) for comparison in comparisons],
        "environment": {**described, "ranks": of_ranks},
        "hashes": {
            "code": provenance.code_hash(),
            "config": stable_hash([comparison.definition for comparison in comparisons]),
            "workload": fingerprints,
        },
        "comparisons": {comparison.comparison_id: _describe(comparison, ranks) for comparison in comparisons},
        "cases": {
            case.case_id: {
                **comparison.describe_case(case),
                "kernel": comparison.kernel_of(case, ranks.device.type),
            }
            for comparison in comparisons
            for case in comparison.cases
        },
    }


def survey_together(
    workloads: Sequence[Workload], ranks: Ranks, before: Callable[[], object], *, keep: bool = False
) -> None:
    """Go through all batches of all workloads, so that each knows its ``findings`` on every rank; all call this alike.

    Ranks take turns: each goes through every so-manieth workload, and tells the others what it found and solved for.

    Args:
        before: called ahead of each workload that is gone through here.
        keep: where there is one rank, and memory for it, keep the batches for it.

    Raises:
        ValueError: a batch cannot meet its targets; on every rank, whichever found it.
    """
    size = sum(one.num_batches * one.num_tokens * one.num_experts * 4 for one in workloads)
    if keep and ranks.world_size == 1 and size <= _MOST_KEPT_BYTES:
        for workload in workloads:
            workload.keep_batches()
    mine, problem = {}, ""
    try:
        for number in range(ranks.rank, len(workloads), ranks.world_size):
            before()
            mine[number] = workloads[number].findings()
    except ValueError as error:
        problem = str(error)
    told = [json.loads(text) for text in ranks.texts(json.dumps([problem, mine]))]
    for found, _ in told:
        if found:
            raise ValueError(found)
    for rank, (_, others) in enumerate(told):
        for number, findings in others.items():
            if rank != ranks.rank:
                workloads[int(number)].take_findings(findings)


def _describe(comparison: Comparison, ranks: Ranks) -> dict[str, Any]:
    return {
        "title": comparison.title,
        "model": comparison.model.name,
        "scale": comparison.model.scale,
        "departures": list(comparison.subject.departures),
        "num_experts": comparison.model.num_experts,
        "top_k": comparison.model.top_k,
        "num_ranks": comparison.ep_size,
        "expert_tensor_parallel": comparison.num_slices,
        "num_replicas": comparison.world_size // comparison.num_together,
        "world_size": comparison.world_size,
        "hidden_size": comparison.model.hidden_size,
        "ffn_hidden_size": comparison.model.ffn_hidden_size,
        "num_tokens": comparison.num_tokens,
        "num_batches": comparison.workload.num_batches,
        "dtype": comparison.experiment.layer.dtype,
        "backend": ranks.backend,
        "dispatcher": comparison.parts.dispatcher,
        "cuda_graph": comparison.parts.held_by_graphs(comparison.ep_size, comparison.scope),
        "experts": {
            "requested": comparison.experiment.layer.experts,
            "ran": comparison.parts.experts,
            "why": comparison.parts.experts_why,
        },
        "permute": {"requested": comparison.experiment.layer.permute, "ran": comparison.parts.permute},
        "kernel": comparison.describe_kernels(comparison.cases, ranks.device.type),
        "flush_l2": comparison.experiment.measure.flush_l2,
        "oversubscribed": ranks.oversubscribed,
        "random_weights": True,
        "point": describe_point(comparison.experiment),
        "workload": comparison.describe_workload(),
        **comparison.describe(),
    }


def describe_experiment(experiment: Experiment) -> dict[str, Any]:
    """The resolved experiment for ``run.json``, without folders of this machine."""
    described = experiment.model_dump(mode="json")
    if experiment.model.hf_config is not None:
        described["model"]["hf_config"] = experiment.model.spec().source
    if described["emulate"]["links"] is not None:
        described["emulate"]["links"] = Path(described["emulate"]["links"]).name
    for recording in described["workload"].get("trace", ()):
        recording["trace"] = Path(recording["trace"]).name
    return described


def describe_point(experiment: Experiment) -> dict[str, Any]:
    """Swept keys with their values at this point of the sweep, as ``describe_experiment`` says them."""
    described = describe_experiment(experiment)
    return {key: reduce(lambda section, name: section[name], key.split("."), described) for key, _ in experiment.point}


def dry_run(config: Path, overrides: Sequence[str], world_size: int, point: int | None = None) -> int:
    """Print the cases, the memory that each rank needs and the time to expect; run nothing."""
    from moe_ep_bench.layer.experts import DTYPES
    from moe_ep_bench.timing.ceilings import measure_ceilings

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    comparisons = plan(config, overrides, RANKS, world_size, on_cpu=device.type == "cpu", point=point)
    available = provenance.available_memory_bytes(device, world_size)
    for comparison in comparisons:
        print(f"{comparison.title} on {world_size} rank(s), {comparison.describe_workload()['description']}")
        for case in comparison.cases:
            kernel = comparison.kernel_of(case, device.type)
            print(f"  {case.case_id}  {case.role:8}  {case.label}" + (f", routed by {kernel}" if kernel else ""))
        ceilings = measure_ceilings(device, DTYPES[comparison.experiment.layer.dtype])
        iterations = comparison.num_iterations() * comparison.num_launches
        seconds = comparison.flops_per_rank() * iterations / (ceilings.matmul_tflops * 1e12)
        print(
            f"  memory per rank about {comparison.memory_bytes_per_rank() / 2**30:.1f} GiB "
            f"of {available / 2**30:.1f} GiB; at least {seconds:.0f} s for "
            f"{iterations:,} iterations (arithmetic at this device's matmul speed, no transfers)"
        )
    return OK
