"""Start ``run`` under torchrun's agent, and start it again when the process group was lost.

A rank that dies takes its process group with it; the ranks record what they can and end. The
launcher then starts a new job in the same results directory, which goes on with the next
comparison and leaves out a case that was lost too often. It gives up when a job changed nothing. A
rank that was asked to end (SIGTERM, SIGINT) ends the launcher too: whoever asked means the job.

Signals: SIGTERM and SIGINT end the ranks at once, SIGUSR1 after the comparison that they are measuring (``closing``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousError

from moe_ep_bench.attempts import collect_lost, num_lost, stopped_by
from moe_ep_bench.closing import closing_on_signal
from moe_ep_bench.exit_codes import CASES_FAILED, CLOSED, LOST, OK, USER_ERROR
from moe_ep_bench.records import RunDirectory
from moe_ep_bench.scopes.comparison import Comparison, find_case, plan_comparisons
from moe_ep_bench.scopes.directory import hold_comparisons

_JOIN_TIMEOUT_S = 120


@dataclass(frozen=True)
class Nodes:
    """Where ranks are started: ``nproc`` on each of ``count`` nodes, of which this is number ``rank``."""

    nproc: int
    count: int = 1
    rank: int = 0
    master: str = "127.0.0.1:0"

    def __post_init__(self) -> None:
        if self.nproc < 1 or self.count < 1 or not 0 <= self.rank < self.count:
            raise ValueError(
                f"--nproc, --nnodes, --node-rank: expected at least 1, at least 1 and below --nnodes; "
                f"got {self.nproc}, {self.count}, {self.rank}"
            )
        host, _, port = self.master.rpartition(":")
        if not host or not port.isdigit() or (self.count > 1 and port == "0"):
            raise ValueError(
                f"--master: expected host:port of node 0, with a port above 0 for several nodes; got {self.master!r}"
            )


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
        ValueError: the config cannot be run on these ranks; found before any is started.
    """
    on_cpu = not torch.cuda.is_available()
    comparisons = plan_comparisons(config, overrides, nodes.nproc * nodes.count, on_cpu=on_cpu, point=point)
    # Another node may notice only by its own time limit that a job was lost.
    patience_s = int(max(comparison.experiment.measure.timeout_s for comparison in comparisons)) + _JOIN_TIMEOUT_S
    arguments = [str(config), "--out", str(out), *(f"--set={override}" for override in overrides)]
    left = _Left(RunDirectory(out), comparisons)
    if point is not None:
        arguments += ["--point", str(point)]
    if profile is not None:
        find_case(comparisons, profile)  # Raises, and lists what there is.
        return _one_launch([*arguments, "--profile", profile], left, nodes, patience_s, force=False)
    worst = OK
    try:
        with closing_on_signal():
            for number in range(max(comparison.num_launches for comparison in comparisons)):
                status = _one_launch([*arguments, "--launch", str(number)], left, nodes, patience_s, force=force)
                if status not in (OK, CASES_FAILED):
                    return status
                worst = max(worst, status)
    except SignalException as stopped:  # Between two jobs: the agent's handlers stay behind.
        return 128 + int(stopped.sigval)
    return worst


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
        parts = filter(Path.exists, map(self.directory.case_path, case_ids))
        return num_lost(self.directory.attempts, self.job, ids), [path.stat().st_mtime_ns for path in parts]

    def stopped_by(self) -> int | None:
        return stopped_by(self.directory.attempts, self.job)

    def clear(self) -> None:
        """Take away what ranks left that could not end in order, unless another job has already begun."""
        with contextlib.suppress(ValueError, OSError), hold_comparisons(self.directory, self.comparisons):
            collect_lost(self.directory.attempts, [self.job])


def _one_launch(arguments: Sequence[str], left: _Left, nodes: Nodes, patience_s: int, *, force: bool) -> int:
    """One repetition of the process, started again while it is lost and leaves something to go on from."""
    while True:
        before = left.progress()
        try:
            status = _one_job([*arguments, *(["--force"] if force else [])], nodes, patience_s)
        except (torch.distributed.DistError, RendezvousError) as error:
            return _not_met(nodes, patience_s, error)
        if status in (OK, CASES_FAILED, USER_ERROR, CLOSED):
            return status
        stopped = -status if status < 0 else left.stopped_by()
        if stopped is not None:
            if nodes.count == 1:  # Launchers of other nodes may still have to look at what is left.
                left.clear()
            return 128 + stopped
        force = False  # A restarted job goes on; it does not begin anew.
        if nodes.rank == 0 and left.progress() == before:
            print("moe-ep-bench: the job was lost and left nothing to go on from; giving up", file=sys.stderr)
            return LOST
        print("moe-ep-bench: the process group was lost; starting again with what is left", file=sys.stderr, flush=True)


def launch_calibrate(arguments: Sequence[str], nodes: Nodes) -> int:
    """Measure the all-to-all on this node's ranks in one job; nothing is tried again. Return the exit status."""
    try:
        status = _one_job(arguments, nodes, _JOIN_TIMEOUT_S, command="calibrate")
    except (torch.distributed.DistError, RendezvousError) as error:
        return _not_met(nodes, _JOIN_TIMEOUT_S, error)
    return 128 - status if status < 0 else status


def _not_met(nodes: Nodes, patience_s: int, error: Exception) -> int:
    print(
        f"moe-ep-bench: the nodes did not meet at {nodes.master} within {patience_s} s: "
        f"{' '.join(str(error).split())[:200]}",
        file=sys.stderr,
    )
    return LOST


def _one_job(arguments: Sequence[str], nodes: Nodes, patience_s: int, command: str = "run") -> int:
    """One torchrun job: a rank's exit status (the first to fail), or minus the signal that stopped the launcher."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What torchrun's agent says of a failure, the ranks and this launcher say better.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    host, _, port = nodes.master.rpartition(":")
    several = nodes.count > 1
    program = [sys.executable, "-m", "moe_ep_bench", command, *arguments]
    try:
        # The agent makes a folder for the logs of every job, and would leave it.
        with tempfile.TemporaryDirectory(prefix="moe-ep-bench-") as logs:
            config = LaunchConfig(
                min_nodes=nodes.count,
                max_nodes=nodes.count,
                nproc_per_node=nodes.nproc,
                run_id="moe-ep-bench",
                rdzv_backend="static" if several else "c10d",
                rdzv_endpoint=f"{host}:{port}",
                rdzv_configs={"timeout": patience_s, **({"rank": nodes.rank} if several else {})},
                max_restarts=0,
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
                local_addr=None if several else "127.0.0.1",
            )
            elastic_launch(config, program[0])(*program[1:])
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for agreed in (USER_ERROR, CLOSED, CASES_FAILED):
            # All ranks had agreed on it, whatever became of the others while they ended.
            if agreed in statuses.values():
                return agreed
        if set(statuses.values()) <= {128 + signal.SIGTERM, -signal.SIGTERM}:
            # They were told to stop before this launcher was: a cluster signals all processes of a job at once.
            return -signal.SIGTERM
        listed = ", ".join(f"rank {rank}: {status}" for rank, status in sorted(statuses.items()))
        print(f"moe-ep-bench: exit status of {listed}", file=sys.stderr, flush=True)
        return LOST
    except SignalException as stopped:
        return -int(stopped.sigval)
    except KeyboardInterrupt:
        return -int(signal.SIGINT)
    return OK
