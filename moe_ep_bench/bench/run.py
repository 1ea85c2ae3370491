"""``run`` and ``emulate``: time real expert-parallel ranks, or one device that stands in for all of them.

``launch`` has torchrun start ranks; each calls ``run``. Before anything is measured, ranks agree that they are doing
the same thing. Then each comparison is measured, by ``session`` or by ``virtual``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_ep_bench.bench.cases import CaseSpec
from moe_ep_bench.bench.description import describe_timed_run
from moe_ep_bench.bench.directory import check_timing, hold_comparisons, left_of, status_of, writes_to
from moe_ep_bench.bench.job import is_of_peers, measure_each, new_run_id, open_job
from moe_ep_bench.bench.plan import RANKS, VIRTUAL, Comparison, find_case, plan
from moe_ep_bench.errors import UserError
from moe_ep_bench.machine import provenance
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.crash_journal import PEER_LOST, collect_lost
from moe_ep_bench.runtime.device import check_num_ranks, device_type, is_busy
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, CLOSED, LOST, OK, USER_ERROR
from moe_ep_bench.runtime.ranks import NotMetError, Ranks, ToldError, join
from moe_ep_bench.runtime.signals import ends_on_signals
from moe_ep_bench.runtime.torchrun import Ended, is_launched, leave_status, num_nodes, torchrun
from moe_ep_bench.runtime.watchdog import Watchdog

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
    profile: str | None = None,
    point: int | None = None,
) -> Ended:
    """Have torchrun measure every launch of ``config`` on this node's ranks; return how that ended.

    With ``profile`` one job profiles that case; nothing is timed and nothing tried again.

    Raises:
        UserError: the config cannot be run on these ranks; found before any is started.
    """
    check_num_ranks(nproc)
    num_ranks, on_cpu = nproc * num_nodes(), device_type() == "cpu"
    comparisons = plan(config, overrides, RANKS, num_ranks, on_cpu=on_cpu, point=point)
    arguments = ["run", str(config), "--out", str(out), *(f"--set={override}" for override in overrides)]
    arguments += ["--point", str(point)] if point is not None else []
    if profile is not None:
        find_case(comparisons, profile)  # Raises, and lists what there is.
        return torchrun([*arguments, "--profile", profile], nproc)
    arguments += ["--force"] if force else []
    worst, last = Ended(OK), max(one.experiment.measure.launches for one in comparisons) - 1
    for number in range(last + 1):
        ended = torchrun([*arguments, "--launch", str(number)], nproc, max_restarts=_MAX_RESTARTS)
        if ended.status in (OK, CASES_FAILED) and ended.asked_to_close and number < last:
            # It came in this launch's last comparison, after which its ranks had nothing left to end.
            ended = ended._replace(status=CLOSED)
        if ended.status not in (OK, CASES_FAILED):
            if ended.status > 128:
                _forgive(RunDirectory(out), comparisons)
            return ended
        # Which node has rank 0 may change from launch to launch.
        worst = ended._replace(status=max(worst.status, ended.status))
    return worst


def _forgive(directory: RunDirectory, comparisons: Sequence[Comparison]) -> None:
    """Take away what ranks left that were asked to end, unless another job has already begun."""
    with contextlib.suppress(ValueError, OSError), hold_comparisons(directory, comparisons):
        collect_lost(directory.attempts, [comparisons[0].comparison_id], stopped=True)


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
    here: _Launch | None = None
    try:
        with ends_on_signals(lambda: here and here.say_kept()), contextlib.ExitStack() as held:
            try:
                ranks = join(_JOIN_TIMEOUT_S)
            except (UserError, NotMetError) as error:
                print(f"moe-ep-bench: {error}", file=sys.stderr)
                return leave_status(USER_ERROR if isinstance(error, UserError) else LOST)
            # Nothing of a case is lost where a rank hangs out here: the watchdog's own line says all.
            waits = partial(is_busy, ranks.device)
            setup = Watchdog(_SETUP_TIMEOUT_S, lambda reason: None, waits, partial(leave_status, LOST))
            held.callback(setup.stop)
            held.callback(ranks.close)
            here = _Launch(ranks, setup, held, RunDirectory(out), launch, force)
            comparisons = here.plan(config, overrides, point)
            setup.feed()
            if profile is not None:
                return leave_status(here.profile(comparisons, profile))
            return leave_status(here.measure(comparisons, is_point=point is not None))
    except ToldError:
        return leave_status(USER_ERROR)
    except Exception as error:
        if is_of_peers(error):
            print(f"moe-ep-bench: {PEER_LOST}: {' '.join(str(error).split())[:200]}", file=sys.stderr, flush=True)
        else:
            # Not a user's mistake and not a case's failure: show all of it.
            traceback.print_exc()
        return leave_status(LOST)  # Before or after all cases: another start would end alike.


def emulate(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False) -> int:
    """Measure all comparisons of ``config`` on virtual ranks; return the exit status, 128 + signal where one ended it.

    Raises:
        ValueError: the config cannot be used; one line.
    """
    on_cpu = not torch.cuda.is_available()
    return emulate_plan(plan(config, overrides, VIRTUAL, on_cpu=on_cpu), out, force=force)


def emulate_plan(comparisons: list[Comparison], out: Path, *, force: bool = False, survey: bool = True) -> int:
    """Measure comparisons of virtual ranks in this process; return the exit status, 128 + signal where one ended it.

    Args:
        survey: see ``describe_timed_run``.
    """
    here: _Launch | None = None
    try:
        with ends_on_signals(lambda: here and here.say_kept()), contextlib.ExitStack() as held:
            ranks = join(_JOIN_TIMEOUT_S, measures=any(one.device is None for one in comparisons))
            held.callback(ranks.close)
            here = _Launch(ranks, None, held, RunDirectory(out), 0, force)
            return here.measure(comparisons, survey=survey)
    except ToldError:
        return USER_ERROR


@dataclass(frozen=True)
class _Launch:
    """One launch on this rank.

    Attributes:
        setup: watches what happens outside of jobs; None = nobody waits for this process.
        held: closed when the launch ends.
        number: of the launch, from 0.
    """

    ranks: Ranks
    setup: Watchdog | None
    held: contextlib.ExitStack
    directory: RunDirectory
    number: int
    force: bool
    planned: list[Comparison] = field(default_factory=list)
    """What is measured, once that is known."""

    def say_kept(self) -> None:
        """Say on standard error what an ended job leaves; rank 0 for all."""
        if not self.ranks.is_first:
            return
        cases = [case for one in self.planned for case in one.cases]
        finished = sum(self.directory.is_finished(case.case_id, self.number) for case in cases)
        kept = f"{finished} of {len(cases)} cases are kept in {self.directory.root}" if finished else "no case is kept"
        print(f"moe-ep-bench: stopped: {kept}; the same command does what is left", file=sys.stderr, flush=True)

    def plan(self, config: Path, overrides: Sequence[str], point: int | None) -> list[Comparison]:
        """Every rank reads the config and opens the workloads.

        Raises:
            ToldError: some rank cannot, or they differ.
        """
        ranks, setup = self.ranks, self.setup
        assert setup is not None

        def read() -> list[Comparison]:
            # Whoever launched this rank has tried out what it is to do.
            how: Any = {"on_cpu": ranks.device.type == "cpu", "point": point, "try_out": not is_launched()}
            before = lambda experiment: setup.allow(experiment.measure.timeout_s)  # noqa: E731
            comparisons = plan(config, overrides, RANKS, ranks.world_size, before=before, **how)
            most = max(one.experiment.measure.launches for one in comparisons)
            if not 0 <= self.number < most:
                raise UserError(f"--launch: expected 0 to {most - 1} (measure.launches={most}), got {self.number}")
            return comparisons

        comparisons = ranks.agree(read)
        planned = [(one.definition, [case.case_id for case in one.cases]) for one in comparisons]
        for what, value in (
            ("the config", json.dumps([planned, self.number], sort_keys=True)),
            ("what computes experts and permutes", str([one.parts for one in comparisons])),
            ("the code of moe-ep-bench", provenance.code_hash()),
        ):
            differing = ", ".join(map(str, ranks.differing(value)))
            unlike = (
                f"{what} is not the same on all ranks: rank {differing} differ(s) from rank 0; start all ranks alike"
            )
            ranks.end_where(unlike if differing else "")
        ranks.end_where(_other_versions(ranks))
        return comparisons

    def measure(self, comparisons: list[Comparison], *, is_point: bool = False, survey: bool = True) -> int:
        """Measure what is left of this launch; return the exit status."""
        # Megatron-Core takes seconds to import: not before it is clear that there is something to run.
        ranks, directory, setup = self.ranks, self.directory, self.setup
        self.planned.extend(comparisons)
        if comparisons[0].backend == RANKS:
            from moe_ep_bench.bench.session import measure_comparison as measure
        else:
            from moe_ep_bench.bench.virtual import measure_comparison as measure
        todo = self._left(comparisons)
        run_id = ranks.of_first(new_run_id())
        if any(todo):
            # Made on every rank, which keeps them together: it goes through all batches.
            feed = setup.feed if setup else lambda: None
            describe = partial(describe_timed_run, ranks, run_id, comparisons, feed, survey=survey)
            description = ranks.agree(describe)
            # Checked before, but another job may have come first.
            check = partial(check_timing, directory, comparisons[0], ranks.device, force=self.force)
            self._on_first(partial(directory.write_run, description, check=check, keep_others=is_point))
        how: dict[str, Any] = {"meanwhile": setup and setup.paused(), "launch": self.number}
        if not measure_each(ranks, directory, comparisons, todo, run_id, measure, **how):
            if ranks.is_first:
                print("moe-ep-bench: asked to end; the same command does what is left", file=sys.stderr)
            return CLOSED
        status = status_of(directory, comparisons, self.number) if ranks.is_first else OK
        if ranks.is_first and not any(todo):
            number = f" in launch {self.number + 1}" if self.number else ""
            cases = f"all {sum(len(one.cases) for one in comparisons)} cases were finished before{number}"
            print(f"moe-ep-bench: {cases}; --force runs them again", file=sys.stderr)
        return int(ranks.of_first(str(status)))

    def profile(self, comparisons: list[Comparison], wanted: str) -> int:
        """Profile the case that is ``wanted``; return the exit status."""
        from moe_ep_bench.bench.profile import profile_case

        assert self.setup is not None
        comparison, case = self.ranks.agree(partial(find_case, comparisons, wanted))
        self._on_first(partial(self._hold, [comparison], force=True))
        with open_job(self.ranks, self.directory, [comparison], self.directory.profiles) as job, self.setup.paused():
            profile_case(job, comparison, case)
        return OK

    def _left(self, comparisons: Sequence[Comparison]) -> list[list[CaseSpec]]:
        """What is left to run, per comparison; rank 0 looks into the results directory for all.

        From here on no other job writes these comparisons, until ``held`` is closed.
        """
        wanted: list[str] = []

        def look() -> None:
            self._hold(comparisons, force=self.force)
            left = left_of(self.directory, comparisons, self.number, force=self.force)
            wanted.extend(case.case_id for cases in left for case in cases)

        self._on_first(look)
        ids = set(json.loads(self.ranks.of_first(json.dumps(wanted))))
        return [[case for case in comparison.cases if case.case_id in ids] for comparison in comparisons]

    def _hold(self, comparisons: Sequence[Comparison], *, force: bool) -> None:
        check_timing(self.directory, comparisons[0], self.ranks.device, force=force)
        self.held.enter_context(hold_comparisons(self.directory, comparisons))

    def _on_first(self, act: Callable[[], object]) -> None:
        """Have rank 0 act in the results directory for all; ToldError on all ranks where it cannot."""
        self.ranks.agree(writes_to(self.directory.root)(act), on_first=True)


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
