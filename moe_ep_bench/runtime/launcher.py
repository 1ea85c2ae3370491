"""Every case of a config is measured, or has a reason, whichever ranks are lost on the way.

A rank that dies takes its process group with it; the ranks record what they can and end. The launcher then starts a
new job in the same results directory, which goes on with the next comparison and leaves out a case that was lost too
often. It gives up when a job changed nothing. A rank that was asked to end ends the launcher too.

On several nodes each has its launcher. They agree through node 0's (``rendezvous``): it alone decides, when all ranks
of all nodes have ended, and the next attempt begins then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException

from moe_ep_bench.bench.directory import hold_comparisons
from moe_ep_bench.bench.plan import RANKS, Comparison, plan
from moe_ep_bench.files import stable_hash
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.crash_journal import collect_lost, num_lost, stopped_by
from moe_ep_bench.runtime.device import check_num_ranks, device_type
from moe_ep_bench.runtime.errors import in_short, status_of
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, CLOSED, LOST, OK, USER_ERROR
from moe_ep_bench.runtime.rendezvous import AGAIN, ApartError, Nodes, OthersLostError, Rendezvous, meet
from moe_ep_bench.runtime.signals import LAUNCHER, closing_on_signal, raise_at_first, set_handlers, signals_wait

# How a node's job ended whose ranks its launcher ended because another node had lost its own; never an exit status.
_ENDED = 1000
# How long the agent of a node whose ranks ended well waits for the others'. It takes a lost one for a slow one; nodes
# that end apart wait for each other in the rendezvous.
_AGENTS_END_S = 20.0
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Which signals torchrun's agent installs handlers for.
_AGENTS_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def default_nproc() -> int:
    """All GPUs of this node; without any, one CPU rank per core, 2 to 4."""
    return torch.cuda.device_count() or min(max(len(os.sched_getaffinity(0)), 2), 4)


def launch(
    config: Path,
    out: Path,
    overrides: Sequence[str],
    nodes: Nodes,
    *,
    force: bool,
    profile: str | None = None,
    point: int | None = None,
) -> int:
    """Run ``config`` on this node's ranks until all its cases have all their launches; return the exit status.

    With ``profile`` one job profiles that case; nothing is timed and nothing tried again. With ``point`` only that
    point of the config's sweep is measured, from 0; other jobs may measure others into ``out`` meanwhile.

    Raises:
        UserError: the config cannot be run on these ranks; found before any is started.
    """
    check_num_ranks(nodes.nproc)
    comparisons = plan(config, overrides, RANKS, nodes.nproc * nodes.count, on_cpu=device_type() == "cpu", point=point)
    left = _Left(RunDirectory(out), comparisons)
    arguments = [str(config), "--out", str(out), *(f"--set={override}" for override in overrides)]
    arguments += ["--point", str(point)] if point is not None else []
    most = max(one.experiment.measure.launches for one in comparisons)
    launches = [["--launch", str(number)] for number in range(most)]
    if profile is not None:
        comparisons.find_case(profile)  # Raises, and lists what there is.
        launches, force = [["--profile", profile]], False
    nodes = _of_job(nodes, config.read_text(), *arguments[1:], profile or "")

    def measure(rendezvous: Rendezvous) -> int:
        worst = OK
        for own in launches:
            status = _one_launch([*arguments, *own], left, nodes, rendezvous, force=force)
            if status not in (OK, CASES_FAILED):
                return status
            worst = max(worst, status)
        return worst

    with closing_on_signal():
        return _together(nodes, measure)


def launch_calibrate(arguments: Sequence[str], nodes: Nodes) -> int:
    """Measure the all-to-all on this node's ranks in one job; nothing is tried again. Return the exit status.

    Raises:
        UserError: this node cannot carry these ranks.
    """
    check_num_ranks(nodes.nproc)
    nodes = _of_job(nodes, *arguments)

    def decide(statuses: Sequence[int]) -> int:
        if min(statuses) < 0:
            return _first_stop(statuses)
        agreed = _agreed(statuses)
        return LOST if agreed is None else agreed

    def work(rendezvous: Rendezvous) -> int:
        return rendezvous.agree(_one_job("calibrate", arguments, nodes, rendezvous), decide)

    return _together(nodes, work)


def _of_job(nodes: Nodes, *parts: str) -> Nodes:
    """Nodes that know what their job is, and whose."""
    return replace(nodes, job=stable_hash([*parts, os.environ.get("SLURM_JOB_ID", "")]))


def _together(nodes: Nodes, work: Callable[[Rendezvous], int]) -> int:
    """Do ``work`` among the launchers of all nodes; return its exit status, or that of what kept it from being done."""
    with _stoppable():
        try:
            with meet(nodes) as rendezvous:
                try:
                    return work(rendezvous)
                except SignalException as stopped:  # Between two jobs.
                    return rendezvous.agree(-int(stopped.sigval), _first_stop)
                except Exception as error:
                    rendezvous.give_up(status_of(error))
                    raise
        except ApartError as error:
            print(f"moe-ep-bench: {error}", file=sys.stderr)
            return LOST
        except SignalException as stopped:
            return 128 + int(stopped.sigval)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Raise SignalException at the first signal that asks this launcher to end, and pass over all later ones.

    The agent's own handlers, which these replace, would leave ranks behind at the second.
    """

    def asked(number: int) -> SignalException:
        return SignalException(f"process {os.getpid()} was asked to end", signal.Signals(number))

    # Who started this with nohup means it.
    ignored = signal.SIGHUP if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else None
    earlier = raise_at_first([number for number in _STOPPING if number != ignored], asked)
    os.environ[_AGENTS_SIGNALS] = ""
    try:
        yield
    finally:
        del os.environ[_AGENTS_SIGNALS]
        set_handlers(earlier)


def _first_stop(statuses: Sequence[int]) -> int:
    return 128 - min(statuses)


def _agreed(statuses: Collection[int]) -> int | None:
    """The status on which all ranks had agreed, whatever became of some while they ended; None where there is none."""
    agreed = next((status for status in (USER_ERROR, CLOSED, CASES_FAILED) if status in statuses), None)
    return OK if set(statuses) == {OK} else agreed


@dataclass(frozen=True)
class _Left:
    """What jobs of these comparisons have left in the results directory, in which others may be busy too."""

    directory: RunDirectory
    comparisons: Sequence[Comparison]

    @property
    def job(self) -> str:
        return self.comparisons[0].comparison_id

    def progress(self) -> tuple[list[tuple[str, int]], list[int]]:
        """What a job can have moved: attempts that were lost, and parts that were written."""
        case_ids = [case.case_id for comparison in self.comparisons for case in comparison.cases]
        ids = [*(comparison.comparison_id for comparison in self.comparisons), *case_ids]
        parts = filter(Path.exists, (self.directory.path("samples", case_id) for case_id in case_ids))
        return num_lost(self.directory.attempts, self.job, ids), [path.stat().st_mtime_ns for path in parts]

    def stopped_by(self) -> int | None:
        return stopped_by(self.directory.attempts, self.job)

    def clear(self) -> None:
        """Take away what ranks left that were asked to end, unless another job has already begun."""
        with contextlib.suppress(ValueError, OSError), hold_comparisons(self.directory, self.comparisons):
            collect_lost(self.directory.attempts, [self.job], stopped=True)


def _one_launch(arguments: Sequence[str], left: _Left, nodes: Nodes, rendezvous: Rendezvous, *, force: bool) -> int:
    """One repetition of the process, started again while it is lost and leaves something to go on from."""
    while True:
        before = left.progress() if nodes.rank == 0 else None
        status = _one_job("run", [*arguments, *(["--force"] if force else [])], nodes, rendezvous)
        verdict = rendezvous.agree(status, partial(_decide, left, before))
        if verdict != AGAIN:
            if verdict > 128 and verdict != CLOSED and nodes.rank == 0:
                left.clear()
            return verdict
        force = False  # A restarted job goes on; it does not begin anew.
        if nodes.rank == 0:
            print("moe-ep-bench: the process group was lost; starting again with what is left", file=sys.stderr)


def _decide(left: _Left, before: object, statuses: Sequence[int]) -> int:
    """The verdict on an attempt, by how the ranks of every node ended and what they left."""
    if (agreed := _agreed(statuses)) is not None:
        return agreed
    if min(statuses) < 0:
        return _first_stop(statuses)
    # Ranks that a launcher ended on behalf of another node say that they were asked to; nobody had asked the job.
    stopped = left.stopped_by() if _ENDED not in statuses else None
    if stopped is not None:
        return 128 + stopped
    if left.progress() == before:
        print("moe-ep-bench: the job was lost and left nothing to go on from; giving up", file=sys.stderr)
        return LOST
    return AGAIN


def _near_their_gpus() -> Any:
    """torchrun's option that binds each rank to the cores of its GPU's NUMA node; None without GPUs or ``numactl``."""
    if not torch.cuda.is_available() or shutil.which("numactl") is None:
        return None
    from torch.numa.binding import AffinityMode, NumaOptions

    # Machines that hide their topology are bound to nothing.
    return NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)


def _set_environment(nodes: Nodes) -> None:
    """What ranks are told unless the user has: threads, and on several nodes or under Slurm a Triton cache per node.

    Homes are shared there, and ranks of all nodes, or of all tasks of an array, would compile into one folder at once.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if (nodes.count > 1 or "SLURM_JOB_ID" in os.environ) and "TRITON_CACHE_DIR" not in os.environ:
        folder = Path(tempfile.gettempdir(), f"moe-ep-bench-triton-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            os.environ["TRITON_CACHE_DIR"] = str(folder)


def _one_job(command: str, arguments: Sequence[str], nodes: Nodes, rendezvous: Rendezvous) -> int:
    """One job of ranks under torchrun's agent, from the nodes' rendezvous to the end of this node's ranks.

    Returns:
        A rank's exit status (one that all agreed on, or the first to fail), ``_ENDED`` where another node had lost its
        ranks, or minus the signal that stopped the launcher.
    """
    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            # It knows its ranks when all are started: a signal that came between would leave some behind.
            os.environ[LAUNCHER] = str(os.getpid())
            try:
                with signals_wait(_STOPPING):
                    return super()._start_workers(worker_group)
            finally:
                del os.environ[LAUNCHER]

    # What torchrun's agent says of a failure, the ranks and this launcher say better.
    agents = logging.getLogger("torch.distributed.elastic")
    agents.addHandler(logging.NullHandler())
    agents.propagate = False  # Its modules set levels of their own.
    _set_environment(nodes)
    try:
        # The agent and its config make a folder for the logs of every job, and would leave it.
        with tempfile.TemporaryDirectory(prefix="moe-ep-bench-") as folder:
            logs = DefaultLogsSpecs(log_dir=folder)
            usual = LaunchConfig(nodes.count, nodes.count, nodes.nproc, logs_specs=logs)
            spec = WorkerSpec(
                role="default",
                local_world_size=nodes.nproc,
                entrypoint=sys.executable,
                args=("-m", "moe_ep_bench", command, *arguments),
                rdzv_handler=rendezvous,
                max_restarts=0,
                monitor_interval=0.1,
                numa_options=_near_their_gpus() or usual.numa_options,
            )
            result = Agent(spec, logs, exit_barrier_timeout=_AGENTS_END_S).run()
    except OthersLostError:
        return _ENDED
    except torch.distributed.DistError as error:
        print(f"moe-ep-bench: {in_short(error)}", file=sys.stderr)
        return LOST
    except SignalException as stopped:
        return -int(stopped.sigval)
    if not result.is_failed():
        return OK
    statuses = {rank: failure.exitcode for rank, failure in result.failures.items()}
    if (agreed := _agreed(statuses.values())) is not None:
        return agreed
    if set(statuses.values()) <= {128 + signal.SIGTERM, -signal.SIGTERM}:
        # They were told to stop before this launcher was: a cluster signals all processes of a job at once.
        return -signal.SIGTERM
    listed = ", ".join(f"rank {rank}: {status}" for rank, status in sorted(statuses.items()))
    print(f"moe-ep-bench: exit status of {listed}", file=sys.stderr, flush=True)
    return LOST
