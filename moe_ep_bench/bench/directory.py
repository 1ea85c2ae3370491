"""Check whether a results directory may take more results, and find what is left to measure in it.

Figures and tables read a directory as a whole. So it holds one mode and scope, obtained under one set of conditions:
no timed rows beside emulated ones, nor two versions of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from moe_ep_bench.bench.cases import CaseSpec
from moe_ep_bench.bench.comparison import MODELLED, Comparison
from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import make_folders, refuse_links_out
from moe_ep_bench.machine import provenance
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime import locks
from moe_ep_bench.runtime.attempts import MAX_ATTEMPTS, collect_lost, forget_lost, lost_attempts, split_reason
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, OK


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
    refuse_links_out(directory.root, directory.root / "figures", *directory.folders)
    make_folders(directory.root, "--out", *directory.folders)
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


def hold_comparisons(directory: RunDirectory, comparisons: Iterable[Comparison]) -> AbstractContextManager[None]:
    """Keep other jobs from these comparisons while the block lasts. Jobs on others may fill the directory too.

    Raises:
        ValueError: another job is at one of them; one line that says which and whose.
    """
    return locks.hold(directory.root, {comparison.comparison_id: comparison.title for comparison in comparisons})


class Todo(NamedTuple):
    """What is left of a comparison: cases to measure, and of those that were lost too often status and reason."""

    comparison: Comparison
    cases: Sequence[CaseSpec]
    lost: Mapping[str, tuple[str, str]]


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
    cases = [case for case in comparison.cases if case.case_id not in lost]
    if comparison.backend == MODELLED:  # Nothing is timed, so that no case needs the others beside it.
        cases = [case for case in cases if case.case_id not in done]
    if launch >= comparison.experiment.measure.launches:
        return Todo(comparison, [], {})
    is_measured = {case.case_id for case in cases} <= done
    return Todo(comparison, [] if is_measured else cases, {} if is_measured and lost.keys() <= done else lost)


def status_of(directory: RunDirectory, comparisons: Sequence[Comparison], launch: int = 0) -> int:
    """The exit status: whether this launch measured all cases that it should have."""
    for comparison in comparisons:
        if launch < comparison.experiment.measure.launches:
            found = directory.statuses(comparison.comparison_id, launch)
            if any(found.get(case.case_id) != "ok" for case in comparison.cases):
                return CASES_FAILED
    return OK
