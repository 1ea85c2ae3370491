"""Go through comparisons one after another: a job's ranks, where it writes, its watchdog, how it ends.

Timed backends work under a watchdog and leave a mark of what they are at, so that the next job knows what was lost
(``Job``). Nothing of an untimed one can be lost but its own time (``fill``).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from moe_ep_bench.bench.cases import CaseSpec
from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.bench.directory import check_agreement, given_up, hold_comparisons, keep_other_policies, writes_to
from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import stable_hash, write_json
from moe_ep_bench.layer.host import free_memory
from moe_ep_bench.machine import provenance
from moe_ep_bench.machine.monitor import MachineSampler
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.crash_journal import PEER_LOST, Mark
from moe_ep_bench.runtime.exit_codes import LOST
from moe_ep_bench.runtime.progress import progress_bar
from moe_ep_bench.runtime.ranks import Ranks, ToldError
from moe_ep_bench.runtime.signals import explaining
from moe_ep_bench.runtime.torchrun import asked_to_close
from moe_ep_bench.runtime.watchdog import Watchdog
from moe_ep_bench.timing.ceilings import Ceilings, measure_ceilings


def new_run_id() -> str:
    return stable_hash([time.time_ns()])


def identity(mode: str, run_id: str, comparison: Any, case: CaseSpec) -> dict[str, Any]:
    """The columns that say which case rows belong to.

    ``quality`` has comparisons of its own, whose checkpoint answers as a whole.
    """
    planned = comparison if isinstance(comparison, Comparison) else None
    return {
        "run_id": run_id,
        "case_id": case.case_id,
        "comparison_id": comparison.comparison_id,
        "mode": mode,
        "subject": planned.scope if planned else "model",
        "backend": planned.backend if planned else None,
        "model": comparison.model.name,
        "policy": case.name,
        "policy_params": json.dumps(case.params, sort_keys=True),
        "num_ranks": comparison.ep_size,
        "status": "ok",
    }


@dataclass
class Job:
    """One job on this rank, which makes one launch of timed comparisons.

    Attributes:
        watchdog: from the first step to the last.
        launch: which of ``measure.launches``, from 0.
        mark, progress: of what is being tried (``trying``).
        unwritten: what this rank could not write, in words.
    """

    ranks: Ranks
    directory: RunDirectory
    watchdog: Watchdog
    launch: int = 0
    run_id: str = ""
    mark: Mark = field(init=False)
    progress: tqdm = field(init=False)
    unwritten: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def trying(self, comparisons: Sequence[Comparison], folder: Path, num_iterations: int = 0) -> Iterator[None]:
        """Keep a mark in ``folder``, named by the first comparison, of what is tried in the block.

        Where the block fails, the process group is lost: the mark keeps the reason and this process ends with ``LOST``
        at once, because destructors would wait for peers that may never come.

        Raises:
            ToldError: results cannot be written; on all ranks, after one line to the user.
        """
        marks: list[Mark] = []
        place = folder, comparisons[0].comparison_id, self.ranks.rank
        timeout_s = max(comparison.experiment.measure.timeout_s for comparison in comparisons)
        with contextlib.ExitStack() as ending:
            self.progress = progress_bar(num_iterations, "iteration", shown=self.ranks.is_first)
            ending.callback(self.progress.close)
            ending.callback(lambda: [mark.clear() for mark in marks])
            self.ranks.agree(writes_to(self.directory.root)(lambda: marks.append(Mark(*place))))
            (self.mark,) = marks
            with self.watchdog.during(timeout_s, self.mark.explain), explaining(self.mark.explain):
                try:
                    yield
                except ToldError:
                    raise
                except Exception as error:
                    self._lose(reason_of(error))

    def measure(
        self,
        comparisons: Sequence[Comparison],
        todo: Sequence[Sequence[CaseSpec]],
        measure: Callable[[Job, Comparison, Sequence[CaseSpec]], object],
    ) -> bool:
        """Measure what is to do, comparison by comparison; whether all was done before the job was asked to end.

        Args:
            todo: the cases of each comparison that are to be measured.
        """
        counts = [comparison.num_iterations(cases) for comparison, cases in zip(comparisons, todo, strict=True)]
        with self.trying(comparisons, self.directory.attempts, sum(counts)):
            for comparison, cases, count in zip(comparisons, todo, counts, strict=True):
                self._write_lost(comparison, cases)
                self.check_written()
                if not cases:
                    continue
                if self.ranks.of_first(asked_to_close()):
                    return False
                launches = comparison.experiment.measure.launches
                repetition = f", launch {self.launch + 1} of {launches}" if launches > 1 else ""
                self.progress.set_description(comparison.title + repetition)
                others = self.progress.total - self.progress.n - count
                measure(self, comparison, cases)
                self.progress.total = self.progress.n + others  # They may have been more or fewer than planned.
        return True

    def enter(self, comparison: Comparison) -> None:
        """Note that work on a comparison as a whole begins: building its layers, writing its parts."""
        self.watchdog.feed()
        self.mark.set(comparison.comparison_id)

    def begin(self, case_id: str) -> None:
        """Note that an iteration of a case begins: for the watchdog, for a job after a crash, for the display."""
        self.watchdog.feed()
        self.mark.set(case_id)
        self.progress.update()

    def identity(self, comparison: Comparison, case: CaseSpec) -> dict[str, Any]:
        return identity(comparison.mode, self.run_id, comparison, case)

    def survive(self, error: Exception) -> str:
        """Say why this rank loses a case to an exception outside of collectives, and return the reason.

        All ranks then agree on it and go on, as none waits for this one.

        Raises:
            Exception: the same, where this rank cannot go on: a collective did fail, or its device answers no more.
        """
        if isinstance(error, torch.distributed.DistError) or is_of_peers(error):
            raise error
        if self.ranks.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.ranks.device)
            except RuntimeError:
                raise error from None
        reason = brief(reason_of(error), 300, quoted=False)
        print(f"moe-ep-bench: rank {self.ranks.rank}: {reason}", file=sys.stderr, flush=True)
        return reason

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write_unmeasured(self, comparison: Comparison, case: CaseSpec, status: str, reason: str) -> None:
        """Write the one row of a case that has no measurements, on rank 0."""
        if self.ranks.is_first:
            row = {**self.identity(comparison, case), "status": status, "reason": reason}
            with self.writing():
                self.directory.write("samples", case.case_id, row, self.launch)

    def write_conditions(self, comparison: Comparison, conditions: Mapping[str, Any]) -> None:
        """Say under which conditions this launch was timed, on rank 0."""
        if self.ranks.is_first:
            path = self.directory.conditions_path(comparison.comparison_id, self.launch)
            with self.writing():
                write_json(path, {"run_id": self.run_id, **conditions})

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep it in mind when files cannot be written, a full disk say, until all ranks come to ``check_written``."""
        try:
            with writes_to(self.directory.root):
                yield
        except UserError as error:
            self.unwritten.append(str(error))

    def check_written(self) -> None:
        """End on all ranks where one could not write; every rank calls this alike.

        Going on would measure for nothing, and no case is to blame.

        Raises:
            ToldError: after one line to the user.
        """
        problem = self.unwritten[0] if self.unwritten else ""
        if problem:
            self.progress.close()  # So that what is said begins a line.
            problem = f"{problem}; what is finished stays, the same command goes on from there"
        self.ranks.end_where(problem)

    def _write_lost(self, comparison: Comparison, cases: Sequence[CaseSpec]) -> None:
        """Give every case that was lost too often its row."""
        for case in comparison.cases if self.ranks.is_first else ():
            reasons = given_up(self.directory, comparison, case)
            if case not in cases and reasons and not self.directory.is_finished(case.case_id, self.launch):
                status, words = split_reason(reasons[-1])
                self.write_unmeasured(comparison, case, status, f"{words} ({len(reasons)} attempts)")

    def _lose(self, reason: str) -> NoReturn:
        try:
            self.mark.explain(reason)
            self.progress.close()
            print(
                f"moe-ep-bench: rank {self.ranks.rank}: {brief(reason, 300, quoted=False)}", file=sys.stderr, flush=True
            )
        finally:  # Though nobody may hear it.
            os._exit(LOST)


def fill(
    directory: RunDirectory,
    comparisons: Sequence[Any],
    mode: str,
    table: str,
    conditions: Mapping[str, Any],
    describe: Callable[[str], dict[str, Any]],
    measure: Callable[[str, Any, Sequence[CaseSpec], tqdm], object],
    *,
    unit: tuple[str, Callable[[Any, Sequence[CaseSpec]], int]],
    force: bool = False,
) -> None:
    """Go through untimed comparisons, case by case: one whose rows are in the directory is not done again.

    Args:
        comparisons: of ``plan``, or of ``quality``.
        table: whose part makes a case done.
        describe: returns ``run.json`` for a run's id.
        measure: writes the parts of a comparison's cases, given the run's id and a progress bar.
        unit: of progress, and how many of it the cases of a comparison are.

    Raises:
        ValueError: the directory cannot be used; one line.
    """
    check_agreement(directory, mode, conditions, force=force)
    with hold_comparisons(directory, comparisons):
        is_done, run_id, todo = partial(directory.is_done, table), new_run_id(), {}
        for comparison in comparisons:
            cases = [case for case in comparison.cases if force or not is_done(case.case_id)]
            if cases:
                todo[comparison] = cases
        description = describe(run_id)
        keep_other_policies(directory, description, is_done)
        directory.write_run(description, is_done)
        if not todo:
            print("moe-ep-bench: all cases are there from before; --force begins anew", file=sys.stderr)
        with progress_bar(sum(unit[1](*pair) for pair in todo.items()), unit[0]) as progress:
            for comparison, cases in todo.items():
                progress.set_description(comparison.title)
                measure(run_id, comparison, cases, progress)


# ---- the machine -----------------------------------------------------------------------------------------------------


def ceilings_of(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure what the device reaches, and give the memory back (over 2 GiB on a GPU).

    Before layers are built: behind the warm-up, the allocator could have to give back what the warm-up made it hold.
    """
    ceilings = measure_ceilings(device, dtype)
    free_memory(device)
    return ceilings


@contextlib.contextmanager
def watched_machine(device: torch.device, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Yield a dict that says, once the block has run, what this rank's machine can do and did meanwhile.

    Args:
        ceilings: measured before anything was warmed up (``ceilings_of``).
    """
    facts: dict[str, Any] = {}
    with MachineSampler(device) as sampler:
        yield facts
        state = sampler.stop()
    facts |= {
        "hostname": socket.gethostname(),
        "machine": state.as_dict(),
        "ceilings": asdict(ceilings),
        "peak_memory_bytes": provenance.peak_memory_bytes(device),
    }


# ---- reasons ---------------------------------------------------------------------------------------------------------

# How gloo, NCCL and the store say that another rank has ended. NCCL's other errors (of CUDA, of the fabric) are this
# rank's own.
_GONE = (
    *("closed by peer", "closed by remote peer", "reset by peer", "Timed out waiting", "Broken pipe"),
    *("ncclRemoteError", "remote process exit", "Connection was likely closed", "communicator was aborted"),
)


def is_of_peers(error: Exception) -> bool:
    """Whether a collective says that other ranks have ended, and so nothing of what went wrong."""
    return not _is_oom(error) and any(text in str(error) for text in _GONE)


def _is_oom(error: Exception) -> bool:
    """Memory that torch's allocator, CUDA or NCCL did not get on this rank."""
    named = isinstance(error, torch.distributed.DistBackendError) or "CUDA error" in str(error)
    return isinstance(error, torch.OutOfMemoryError) or (named and "out of memory" in str(error))


def reason_of(error: Exception) -> str:
    """Why this rank lost a case, as its mark keeps it: a status, or "peer lost" where another rank is the cause."""
    if _is_oom(error):
        return f"oom: {error}"
    return f"{PEER_LOST if is_of_peers(error) else 'failed'}: {type(error).__name__}: {error}"


def split_reason(reason: str) -> tuple[str, str]:
    """Status of a lost case, and the words of its reason (``reason_of``)."""
    kind, _, words = reason.partition(": ")
    if kind not in ("oom", "timeout", "failed", PEER_LOST):
        return "failed", reason
    return (kind if kind in ("oom", "timeout") else "failed"), words or reason
