"""Go through comparisons one after another: may results lie here, what is left of them, a job's ranks and its guard.

Figures and tables read a directory as a whole. So it holds one mode and scope, obtained under one set of conditions:
no timed rows beside emulated ones, nor two versions of torch. Timed backends work under a guard and write a line ahead
of what they try, so that the next job knows what was lost (``Job``). Nothing of an untimed one can be lost but its own
time (``fill``).
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from moe_ep_bench.bench.cases import CaseSpec
from moe_ep_bench.bench.comparison import MODELLED, Comparison
from moe_ep_bench.bench.rows import Outcome, write_launch
from moe_ep_bench.errors import UserError, brief, naming
from moe_ep_bench.files import make_folder, stable_hash, writing_to
from moe_ep_bench.machine import provenance
from moe_ep_bench.machine.monitor import MachineSampler
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime import locks
from moe_ep_bench.runtime.attempts import (
    MAX_ATTEMPTS,
    Attempt,
    collect_lost,
    forget_lost,
    is_of_peers,
    lost_attempts,
    reason_of,
    split_reason,
)
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, OK
from moe_ep_bench.runtime.guard import Guard
from moe_ep_bench.runtime.progress import progress_bar
from moe_ep_bench.runtime.ranks import Ranks, T, ToldError
from moe_ep_bench.runtime.torchrun import asked_to_close
from moe_ep_bench.timing.device import Ceilings

# ---- a results directory ---------------------------------------------------------------------------------------------


def check_agreement(
    directory: RunDirectory, mode: str, conditions: Mapping[str, Any], *, force: bool, scope: str = "layer"
) -> None:
    """Raise unless results can be written here and earlier ones are of the same mode, scope, conditions and code.

    Args:
        mode, scope: of the rows to come: one of ``schema.MODES``, one of ``schema.SCOPES``.
        conditions: the keys of the environment that must be as they were, and what they are now.
        force: all is done anew, so that the code may be another than it was.

    Raises:
        ValueError: one line naming the directory, what differs and what helps.
    """
    make_folder(directory.root, "--out")
    earlier = directory.earlier()
    if earlier is None:
        return
    kind = {"mode": earlier["mode"], "scope": earlier.get("scope", "layer")}
    then = {**kind, **earlier["environment"], "code": earlier.get("hashes", {}).get("code")}
    now = {"mode": mode, "scope": scope, **conditions} | ({} if force else {"code": provenance.code_hash()})
    for key, value in now.items():
        if then.get(key) != value:
            held = brief(then.get(key), quoted=False)
            raise UserError(
                f"--out {directory.root}: holds results with {key} {held}, here it is {value}; "
                "choose another directory" + (" or --force" if key == "code" else "")
            )


def check_timing(directory: RunDirectory, comparison: Comparison, device: torch.device, *, force: bool) -> None:
    """Raise unless such times can be written here, and earlier ones are of this machine, code and packages."""
    conditions = provenance.conditions({**provenance.hardware(device), **provenance.package_versions()})
    check_agreement(directory, comparison.mode, conditions, force=force, scope=comparison.scope)


def hold(directory: RunDirectory, comparisons: Iterable[Comparison]) -> contextlib.AbstractContextManager[None]:
    """Keep other jobs from these comparisons while the block lasts. Jobs on others may fill the directory too.

    Raises:
        ValueError: another job is at one of them; one line that says which and whose.
    """
    return locks.hold(directory.root, {comparison.comparison_id: comparison.title for comparison in comparisons})


class Todo(NamedTuple):
    """Ids of a comparison's cases that are left to measure; of those that were lost too often status and reason."""

    case_ids: list[str]
    lost: dict[str, tuple[str, str]]


def left_of(
    directory: RunDirectory, comparisons: Sequence[Comparison], launch: int = 0, *, force: bool = False
) -> list[Todo]:
    """What is left to run, per comparison. What lost jobs left behind is noted and removed.

    Measured cases of a comparison are paired, so a launch that is incomplete is measured whole again, except for cases
    that were lost too often. Modelled ones are not.
    """
    ids = [comparison.comparison_id for comparison in comparisons]
    collect_lost(directory.attempts, ids)
    directory.remove_unfinished([*ids, *(case.case_id for comparison in comparisons for case in comparison.cases)])
    return [_left_of(directory, comparison, launch, force=force) for comparison in comparisons]


def _left_of(directory: RunDirectory, comparison: Comparison, launch: int, *, force: bool) -> Todo:
    whole_id, case_ids = comparison.comparison_id, [case.case_id for case in comparison.cases]
    # The first launch begins anew; later ones were forgotten with it.
    if force and launch == 0:
        directory.remove(whole_id)
        forget_lost(directory.attempts, [whole_id, *case_ids])
    lost = {}
    for case_id in case_ids:
        attempts = max((lost_attempts(directory.attempts, lost_id) for lost_id in (whole_id, case_id)), key=len)
        if len(attempts) >= MAX_ATTEMPTS:
            status, words = split_reason(attempts[-1])
            lost[case_id] = status, f"{words} ({len(attempts)} attempts)"
    done = directory.statuses(whole_id, launch).keys()
    left = [case_id for case_id in case_ids if case_id not in lost]
    if comparison.backend == MODELLED or set(left) <= done:  # Of modelled cases none needs the others beside it.
        left = [case_id for case_id in left if case_id not in done]
    return Todo(left, lost if left or not lost.keys() <= done else {})


def status_of(directory: RunDirectory, comparisons: Sequence[Comparison], launch: int = 0) -> int:
    """The exit status: whether this launch measured all cases."""
    for comparison in comparisons:
        found = directory.statuses(comparison.comparison_id, launch)
        if any(found.get(case.case_id) != "ok" for case in comparison.cases):
            return CASES_FAILED
    return OK


# ---- a job -----------------------------------------------------------------------------------------------------------


def new_run_id() -> str:
    return stable_hash([time.time_ns()])


@dataclass
class Job:
    """One job on this rank, which makes one launch of timed comparisons.

    Attributes:
        guard: from the first step to the last.
        held: what ends with the job: ranks, locks of comparisons.
        launch: which of ``measure.launches``, from 0.
        progress: of the comparison that is measured.
    """

    ranks: Ranks
    directory: RunDirectory
    guard: Guard
    held: contextlib.ExitStack
    launch: int = 0
    run_id: str = ""
    progress: tqdm = field(default_factory=lambda: tqdm(disable=True))

    @contextlib.contextmanager
    def trying(self, comparisons: Sequence[Comparison]) -> Iterator[None]:
        """Keep a line of what is tried in the block, in a file that is named by the first comparison.

        Where the block fails, the process group is lost: the reason stays there and this process ends with ``LOST``.

        Raises:
            ToldError: results cannot be written; on all ranks, after one line to the user.
        """
        new = partial(Attempt, self.directory.attempts, comparisons[0].comparison_id, self.ranks.rank)
        attempt = self.ranks.agree(writing_to(self.directory.root, "--out")(new))
        with self.guard.trying(attempt, comparisons[0].experiment.measure.timeout_s):
            try:
                yield
            except ToldError:
                raise
            except Exception as error:
                self.guard.lose(reason_of(error), self.ranks.rank)

    def measure(
        self,
        comparisons: Sequence[Comparison],
        todo: Sequence[Todo],
        measure: Callable[[Job, Comparison, Sequence[CaseSpec]], Outcome],
    ) -> bool:
        """Measure what is to do, comparison by comparison; whether all was done before the job was asked to end."""
        with self.trying(comparisons):
            for comparison, (case_ids, lost) in zip(comparisons, todo, strict=True):
                if not case_ids and not lost:
                    continue
                if self.ranks.of_first(asked_to_close()):
                    return False
                cases = [case for case in comparison.cases if case.case_id in case_ids]
                launches, count = comparison.experiment.measure.launches, comparison.num_iterations(cases)
                with progress_bar(count, "iteration", shown=self.ranks.is_first) as self.progress:
                    repetition = f", launch {self.launch + 1} of {launches}" if launches > 1 else ""
                    self.progress.set_description(comparison.title + repetition)
                    outcome = measure(self, comparison, cases) if cases else Outcome()
                outcome.unmeasured |= lost
                self.write(comparison, outcome, anew=bool(cases) and comparison.backend != MODELLED)
        return True

    def begin(self, case_id: str) -> None:
        """Note that an iteration of a case begins: for the guard, for a job after a crash, for the display."""
        self.guard.at(case_id)
        self.progress.update()

    def survive(self, error: Exception) -> str:
        """Say why this rank loses a case to an exception outside of collectives, and return the reason.

        All ranks then agree on it and go on, as none waits for this one. Should others wait in a collective after all,
        the job is lost, and this is why.

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
        self.guard.explain(reason)
        print(f"moe-ep-bench: rank {self.ranks.rank}: {reason}", file=sys.stderr, flush=True)
        return reason

    def write(self, comparison: Comparison, outcome: Outcome, *, anew: bool) -> None:
        """Write one launch of a comparison on rank 0; every rank calls this alike.

        Going on where that fails, on a full disk say, would measure for nothing, and no case is to blame.
        """
        self.guard.at(comparison.comparison_id)
        part = self.directory, self.run_id, comparison, self.launch, outcome
        self.on_first(
            partial(write_launch, *part, anew=anew), "; what is finished stays, the same command goes on from there"
        )

    def on_first(self, act: Callable[[], T], hint: str = "") -> T:
        """Have rank 0 act in the results directory for all, and tell them what came of it.

        Raises:
            ToldError: it cannot; on all ranks, after one line to the user, which ends with ``hint``.
        """

        def write() -> T:
            with naming("", hint), writing_to(self.directory.root, "--out"):
                return act()

        return self.ranks.agree(write, on_first=True)


def fill(
    directory: RunDirectory,
    comparisons: Sequence[Any],
    table: str,
    conditions: Mapping[str, Any],
    describe: Callable[[str], dict[str, Any]],
    measure: Callable[[str, Any, Sequence[CaseSpec]], object],
    *,
    force: bool = False,
) -> None:
    """Go through untimed comparisons, case by case: one whose rows are in the directory is not done again.

    Args:
        comparisons: of ``plan``, or of ``quality``.
        table: whose rows make a case done.
        describe: returns ``run.json`` for a run's id.
        measure: writes the rows of a comparison's cases, given the run's id.

    Raises:
        ValueError: the directory cannot be used; one line.
    """
    check_agreement(directory, comparisons[0].mode, conditions, force=force)
    with hold(directory, comparisons):
        run_id, todo = new_run_id(), {}
        for comparison in comparisons:
            done = directory.statuses(comparison.comparison_id, table=table)
            cases = [case for case in comparison.cases if force or case.case_id not in done]
            if cases:
                todo[comparison] = cases
        directory.write_run(describe(run_id), table)
        if not todo:
            print("moe-ep-bench: all cases are there from before; --force begins anew", file=sys.stderr)
        for comparison, cases in todo.items():
            measure(run_id, comparison, cases)


# ---- the machine -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched_machine(device: torch.device, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Yield a dict that says, once the block has run, what this rank's machine can do and did meanwhile.

    Args:
        ceilings: measured before layers are built: behind the warm-up, the allocator could have to give back what the
            warm-up made it hold.
    """
    facts: dict[str, Any] = {}
    with MachineSampler(device) as sampler:
        yield facts
        state = sampler.stop()
    facts |= {
        "hostname": socket.gethostname(),
        "machine": asdict(state),
        "ceilings": asdict(ceilings),
        "peak_memory_bytes": provenance.peak_memory_bytes(device),
    }
