"""What the parts of a job share: its ranks, where it writes, the columns that name a case, how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from moe_ep_bench.bench.directory import cannot_write
from moe_ep_bench.bench.plan import CaseSpec, Comparison
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.crash_journal import PEER_LOST, Mark, stopped_reason
from moe_ep_bench.runtime.exit_codes import LOST
from moe_ep_bench.runtime.progress import progress_bar
from moe_ep_bench.runtime.ranks import Ranks
from moe_ep_bench.runtime.signals import Stopped, explaining
from moe_ep_bench.runtime.watchdog import Watchdog
from moe_ep_bench.schema import backend_of


class CannotWriteError(Exception):
    """Results cannot be written; all ranks know, and the user was told."""


@dataclass(frozen=True)
class Job:
    """One job on this rank, which makes one launch."""

    ranks: Ranks
    directory: RunDirectory
    run_id: str
    launch: int
    mark: Mark
    watchdog: Watchdog
    progress: tqdm
    mode: str = "run"
    unwritten: list[str] = field(default_factory=list)
    """What this rank could not write, in words."""

    def enter(self, comparison: Comparison) -> None:
        """Note that work on a comparison as a whole begins: building its layers, writing its parts."""
        self.watchdog.feed()
        self.mark.set(comparison.comparison_id)

    def begin(self, case_id: str) -> None:
        """Note that an iteration of a case begins: for the watchdog, for a job after a crash, for the display."""
        self.watchdog.feed()
        self.mark.set(case_id)
        self.progress.update()

    @contextlib.contextmanager
    def counting(self, planned: int) -> Iterator[None]:
        """Count the block's iterations as those that were run, which may be more or fewer than were ``planned``."""
        others = self.progress.total - self.progress.n - planned
        yield
        self.progress.total = self.progress.n + others

    def identity(self, comparison: Comparison, case: CaseSpec, num_rows: int) -> dict[str, list[Any]]:
        """See ``identity``."""
        return identity(self.mode, self.run_id, comparison, case, num_rows)

    def write_unmeasured(self, comparison: Comparison, case: CaseSpec, status: str, reason: str) -> None:
        """Write the one row of a case that has no measurements; rank 0 calls this."""
        row = {**self.identity(comparison, case, 1), "status": [status], "reason": [reason]}
        with self.writing():
            self.directory.write("samples", case.case_id, row, self.launch)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep it in mind when files cannot be written, a full disk say, until all ranks come to ``check_written``."""
        try:
            yield
        except OSError as error:
            self.unwritten.append(cannot_write(self.directory.root, error))

    def check_written(self) -> None:
        """End on all ranks where one could not write; every rank calls this alike.

        Going on would measure for nothing, and no case is to blame.

        Raises:
            CannotWriteError: after one line to the user.
        """
        said = self.unwritten[0] if self.unwritten else ""
        if said:
            self.progress.close()  # So that what is said begins a line.
        if self.ranks.complain(f"{said}; what is finished stays, the same command goes on from there" if said else ""):
            raise CannotWriteError


def identity(mode: str, run_id: str, comparison: Any, case: CaseSpec, num_rows: int) -> dict[str, list[Any]]:
    """The columns that say which case rows belong to, repeated for ``num_rows`` rows."""
    values = {
        "run_id": run_id,
        "case_id": case.case_id,
        "comparison_id": comparison.comparison_id,
        "mode": mode,
        "subject": getattr(comparison, "scope", "model"),  # a checkpoint answers as a whole
        "backend": backend_of(mode, is_modelled=getattr(comparison, "device", None) is not None),
        "model": comparison.model.name,
        "policy": case.name,
        "policy_params": json.dumps(case.params, sort_keys=True),
        "num_ranks": comparison.ep_size,
        "status": "ok",
    }
    return {key: [value] * num_rows for key, value in values.items()}


@contextlib.contextmanager
def open_job(
    ranks: Ranks,
    directory: RunDirectory,
    comparisons: Sequence[Comparison],
    marks: Path,
    *,
    run_id: str = "",
    launch: int = 0,
    num_iterations: int = 0,
    mode: str = "run",
) -> Iterator[Job]:
    """A job under a watchdog, with a mark in the folder ``marks``, named by the first of its comparisons.

    Where the block fails, the process group is lost: the mark keeps the reason and this process ends
    with ``LOST`` at once, because destructors would wait for peers that may never come.

    Raises:
        CannotWriteError: results cannot be written; on all ranks, after one line to the user.
    """
    try:
        mark, error = Mark(marks, comparisons[0].comparison_id, ranks.rank), ""
    except OSError as problem:
        mark, error = None, cannot_write(directory.root, problem)
    if ranks.complain(error) or mark is None:
        if mark is not None:
            mark.clear()
        raise CannotWriteError
    timeout_s = max(one.experiment.measure.timeout_s for one in comparisons)
    watchdog = Watchdog(timeout_s, mark.explain)
    progress = progress_bar(num_iterations, "iteration", shown=ranks.is_first)
    job = Job(ranks, directory, run_id, launch, mark, watchdog, progress, mode)
    try:
        try:
            with explaining(mark.explain):
                yield job
        except CannotWriteError:
            watchdog.stop()
            mark.clear()
            progress.close()
            raise
        except torch.OutOfMemoryError as error:
            _lose(job, f"oom: {error}")
        except Exception as error:
            _lose(job, f"{PEER_LOST if is_of_peers(error) else 'failed'}: {type(error).__name__}: {error}")
    except Stopped as stopped:
        # Also where all ranks were asked to end and this one, waiting in a collective, first saw the others gone.
        watchdog.stop()
        mark.explain(stopped_reason(stopped.args[0]))
        raise
    watchdog.stop()
    mark.clear()
    progress.close()


def is_of_peers(error: Exception) -> bool:
    """Whether a collective says that other ranks have ended, and so nothing of what went wrong."""
    gone = "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe"
    return any(text in str(error) for text in gone) or isinstance(error, torch.distributed.DistBackendError)


def _lose(job: Job, reason: str) -> NoReturn:
    try:
        job.mark.explain(reason)
        job.progress.close()
        print(f"moe-ep-bench: rank {job.ranks.rank}: {' '.join(reason.split())[:300]}", file=sys.stderr, flush=True)
    finally:  # Though nobody may hear it.
        os._exit(LOST)
