"""Go through comparisons one after another: a job's ranks, where it writes, its watchdog, how it ends.

Timed backends work under a watchdog and leave a mark of what they are at, so that the next job knows what was lost
(``Job``). Nothing of an untimed one can be lost but its own time (``fill``).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from moe_ep_bench.bench.cases import CaseSpec
from moe_ep_bench.bench.comparison import MODELLED, Comparison
from moe_ep_bench.bench.directory import check_agreement, given_up, hold_comparisons, keep_other_policies, writes_to
from moe_ep_bench.bench.rows import Outcome, write_launch
from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import stable_hash
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


@dataclass
class Job:
    """One job on this rank, which makes one launch of timed comparisons.

    Attributes:
        watchdog: from the first step to the last.
        held: what ends with the job: ranks, locks of comparisons.
        launch: which of ``measure.launches``, from 0.
        mark, progress: of what is being tried (``trying``).
    """

    ranks: Ranks
    directory: RunDirectory
    watchdog: Watchdog
    held: contextlib.ExitStack
    launch: int = 0
    run_id: str = ""
    mark: Mark = field(init=False)
    progress: tqdm = field(init=False)

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
        measure: Callable[[Job, Comparison, Sequence[CaseSpec]], Outcome],
    ) -> bool:
        """Measure what is to do, comparison by comparison; whether all was done before the job was asked to end.

        Args:
            todo: the cases of each comparison that are to be measured.
        """
        counts = [comparison.num_iterations(cases) for comparison, cases in zip(comparisons, todo, strict=True)]
        with self.trying(comparisons, self.directory.attempts, sum(counts)):
            for comparison, cases, count in zip(comparisons, todo, counts, strict=True):
                lost = self.ranks.of_first(self._lost(comparison, cases) if self.ranks.is_first else {})
                if not cases and not lost:
                    continue
                if self.ranks.of_first(asked_to_close()):
                    return False
                launches, outcome = comparison.experiment.measure.launches, Outcome()
                repetition = f", launch {self.launch + 1} of {launches}" if launches > 1 else ""
                self.progress.set_description(comparison.title + repetition)
                others = self.progress.total - self.progress.n - count
                if cases:
                    outcome = measure(self, comparison, cases)
                self.progress.total = self.progress.n + others  # They may have been more or fewer than planned.
                outcome.unmeasured |= lost
                self.write(comparison, outcome, anew=bool(cases) and comparison.backend != MODELLED)
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

    def write(self, comparison: Comparison, outcome: Outcome, *, anew: bool) -> None:
        """Write one launch of a comparison on rank 0; every rank calls this alike.

        Going on where that fails, on a full disk say, would measure for nothing, and no case is to blame.

        Raises:
            ToldError: on all ranks, after one line to the user.
        """

        def act() -> None:
            try:
                with writes_to(self.directory.root):
                    write_launch(self.directory, self.run_id, comparison, self.launch, outcome, anew=anew)
            except UserError as error:
                self.progress.close()  # So that what is said begins a line.
                raise UserError(f"{error}; what is finished stays, the same command goes on from there") from None

        self.enter(comparison)
        self.ranks.agree(act, on_first=True)

    def _lost(self, comparison: Comparison, cases: Sequence[CaseSpec]) -> dict[str, tuple[str, str]]:
        """Status and reason of cases that were lost too often; nothing where no case is left and all is written."""
        lost = {}
        for case in comparison.cases:
            if case not in cases and (reasons := given_up(self.directory, comparison, case)):
                status, words = split_reason(reasons[-1])
                lost[case.case_id] = status, f"{words} ({len(reasons)} attempts)"
        is_written = not cases and lost.keys() <= self.directory.statuses(comparison.comparison_id, self.launch).keys()
        return {} if is_written else lost

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
        table: whose rows make a case done.
        describe: returns ``run.json`` for a run's id.
        measure: writes the rows of a comparison's cases, given the run's id and a progress bar.
        unit: of progress, and how many of it the cases of a comparison are.

    Raises:
        ValueError: the directory cannot be used; one line.
    """
    check_agreement(directory, mode, conditions, force=force)
    with hold_comparisons(directory, comparisons):
        run_id, todo = new_run_id(), {}
        for comparison in comparisons:
            done = directory.statuses(comparison.comparison_id, table=table)
            cases = [case for case in comparison.cases if force or case.case_id not in done]
            if cases:
                todo[comparison] = cases
        description = describe(run_id)
        keep_other_policies(directory, description, table)
        directory.write_run(description, table)
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
