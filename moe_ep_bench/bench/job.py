"""Go through comparisons one after another: may results lie here, what is left of them, a job's ranks and its guard.

Figures and tables read a directory as a whole. So it holds one mode and scope, obtained under one set of conditions:
no timed rows beside emulated ones, nor two versions of torch. Timed backends work under a guard and write a line ahead
of what they try, so that the next job knows what was lost (``Job``). Nothing of an untimed one can be lost but its own
time (``fill``).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from moe_ep_bench.bench.comparison import CaseSpec, Comparison
from moe_ep_bench.errors import CASES_FAILED, LOST, OK, UserError, brief, naming
from moe_ep_bench.files import make_folder, stable_hash, writing_to
from moe_ep_bench.machine import provenance
from moe_ep_bench.machine.monitor import MachineSampler
from moe_ep_bench.results import RunDirectory, hold
from moe_ep_bench.runtime.attempts import (
    MAX_ATTEMPTS,
    Guard,
    collect_lost,
    forget_lost,
    is_of_peers,
    lost_attempts,
    reason_of,
    split_reason,
)
from moe_ep_bench.runtime.ranks import Ranks, T, ToldError
from moe_ep_bench.timing.device import Ceilings

# ---- a results directory ---------------------------------------------------------------------------------------------


def check_agreement(
    directory: RunDirectory, mode: str, conditions: Mapping[str, Any], *, force: bool, scope: str = "layer"
) -> None:
    """Raise unless results can be written here and earlier ones are of the same mode, scope, conditions and code.

    Args:
        mode, scope: of the rows to come: one of ``schema.MODES``, and layer or model.
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


class Todo(NamedTuple):
    """Ids of a comparison's cases that are left to measure; of those that were lost too often status and reason."""

    case_ids: list[str]
    lost: dict[str, tuple[str, str]]


def left_of(
    directory: RunDirectory, comparisons: Sequence[Comparison], launch: int = 0, *, force: bool = False
) -> list[Todo]:
    """What is left to run, per comparison. What lost jobs left behind is noted and removed.

    Cases of a comparison are paired, so a launch that is incomplete is measured whole again, except for cases that were
    lost too often.
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
    if directory.statuses(whole_id, launch).keys() >= set(case_ids):
        return Todo([], {})
    lost = {}
    for case_id in case_ids:
        attempts = max((lost_attempts(directory.attempts, lost_id) for lost_id in (whole_id, case_id)), key=len)
        if len(attempts) >= MAX_ATTEMPTS:
            status, words = split_reason(attempts[-1])
            lost[case_id] = status, f"{words} ({len(attempts)} attempts)"
    return Todo([case_id for case_id in case_ids if case_id not in lost], lost)


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
        held: what ends with the job: ranks, locks of comparisons.
        launch: which of ``measure.launches``, from 0.
        guard: of the block of ``trying``; ``progress`` of the comparison that is measured.
    """

    ranks: Ranks
    directory: RunDirectory
    held: contextlib.ExitStack
    launch: int = 0
    run_id: str = ""
    guard: Guard = field(init=False)
    progress: tqdm = field(init=False)

    @contextlib.contextmanager
    def trying(self, comparisons: Sequence[Comparison]) -> Iterator[None]:
        """Keep a line of what is tried in the block, in a file that is named by the first comparison.

        Where the block fails, the process group is lost: the reason stays there and this process ends with ``LOST``.

        Raises:
            ToldError: results cannot be written; on all ranks, after one line to the user.
        """
        first = comparisons[0]
        new = partial(Guard, self.directory.attempts, first.comparison_id, self.ranks.rank)
        told = writing_to(self.directory.root, "--out")(new)
        with self.ranks.agree(partial(told, first.experiment.measure.timeout_s)) as self.guard:
            try:
                yield
            except ToldError:
                raise
            except Exception as error:
                try:
                    self._explain(reason_of(error))
                finally:  # Though nobody may hear it. Destructors would wait for peers that may never come.
                    os._exit(LOST)

    def _explain(self, reason: str) -> None:
        """Note why what is tried is being lost, and say so."""
        self.guard.explain(reason)
        words = brief(reason, 300, quoted=False)
        print(f"moe-ep-bench: rank {self.ranks.rank}: {words}", file=sys.stderr, flush=True)

    def begin(self, case_id: str) -> None:
        """Note that an iteration of a case begins: for the guard, for a job after a crash, for the display."""
        self.guard.at(case_id)
        self.progress.update(self.progress.n < (self.progress.total or 0))  # which is about so many

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
        self._explain(reason)
        return reason

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
    check_agreement(directory, comparisons[0].mode, conditions, force=force, scope=comparisons[0].scope)
    titles = {comparison.comparison_id: comparison.title for comparison in comparisons}
    with hold(directory.root, titles):
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
