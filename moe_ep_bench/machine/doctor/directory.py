"""Can results be written there, will they survive it, and do they belong with those that are there?"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_ep_bench.machine.doctor.findings import NOTE, OK, PROBLEM, Finding
from moe_ep_bench.results import RUN_JSON
from moe_ep_bench.runtime import locks

# What a full disk shows and an empty file does not.
_PROBE_BYTES = 2**20
# Of a row in a part: 20 to 60 bytes were seen. A breakdown iteration has a row for each of 12 phases and three more.
_BYTES_PER_ITERATION = 60 * 15
_LEAST_FREE_BYTES = 2**28
_CHOOSE = "choose another with --out"


def directory_findings(out: Path, comparisons: Sequence[Mapping[str, Any]], world_size: int) -> list[Finding]:
    """Try all that a run will do to its results directory; nothing is left behind.

    Args:
        out: may not be there yet.
        comparisons: of ``facts.plan``; empty without a config.
        world_size: ranks in all.
    """
    made: list[Path] = []
    try:
        made = _make(out)
        _write_and_rename(out)
        space = os.statvfs(out)
    except OSError as error:
        what = f"{out}: cannot be written ({error.strerror})"
        return [Finding("results", PROBLEM, what, "a run would measure and could not keep it", _CHOOSE)]
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # somebody else has begun to use it
                folder.rmdir()
    free = space.f_bavail * space.f_frsize
    iterations = sum(one["iterations"] for one in comparisons)
    needed = iterations * world_size * _BYTES_PER_ITERATION
    room = f"{free / 2**30:.1f} GiB free"
    if free < max(needed, _LEAST_FREE_BYTES):
        what = f"{out}: {room}, a run may write {needed / 2**30:.2f} GiB"
        status = PROBLEM if free < needed else NOTE
        return [Finding("results", status, what, "a full disk ends it between cases", _CHOOSE)]
    new = ", not there yet" if made else ""
    findings = [Finding("results", OK, f"{out}{new}: can be written, files appear whole or not at all, {room}")]
    return [*findings, *_busy(out, comparisons)]


def _busy(out: Path, comparisons: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Who else is at that directory, by the locks that they hold, and by the marks that a lost job left."""
    held = {name: whose for name, whose in locks.holders(out).items() if name != RUN_JSON}
    for one in comparisons:
        if one["comparison_id"] in held:
            what = f"{one['title']}: another job is writing this, {held[one['comparison_id']]}"
            return [
                Finding("results", PROBLEM, what, "a run would be refused", "wait for it, stop it, or another --out")
            ]
    if held:
        jobs = "; ".join(sorted(set(held.values())))
        what = f"another job is writing {len(held)} other comparison(s) there, {jobs}"
        return [Finding("results", NOTE, what, "a run may fill the directory beside it, at the cost of both times")]
    if any((out / "attempts").glob("now-*")):
        what = "a job was lost there without a word, and none holds a lock now"
        means = "the next run counts it against what it was measuring; without locks it may still be at it"
        return [Finding("results", NOTE, what, means, "look whether it runs where the file system has no locks")]
    return []


def _make(folder: Path) -> list[Path]:
    """Make a directory; return what was not there before, outermost first."""
    if folder.is_dir():
        return []
    made = _make(folder.parent) if folder.parent != folder else []
    try:
        folder.mkdir()
    except OSError:
        for other in reversed(made):
            other.rmdir()
        raise
    return [*made, folder]


def _write_and_rename(folder: Path) -> None:
    """As ``files.atomic_path`` does: a file beside, flushed, then renamed over."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".doctor.")
    temporary, final = Path(name), Path(f"{name}.renamed")
    try:
        with open(handle, "wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)
        final.unlink(missing_ok=True)


def earlier_findings(out: Path, refusal: str, comparisons: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What is there of earlier runs.

    Args:
        refusal: of ``facts.agreement``.
    """
    if refusal:
        what = refusal.removeprefix(f"--out {out}: ")
        return [Finding("results", PROBLEM, f"{out}: {what}", "a run would refuse to mix results")]
    cases = [case for one in comparisons for case in one["cases"]]
    done = sum((out / "cases" / f"{case}.parquet").exists() for case in cases)
    if not done:
        return []
    return [Finding("results", OK, f"{done} of {len(cases)} cases of this config are there; a run does what lacks")]
