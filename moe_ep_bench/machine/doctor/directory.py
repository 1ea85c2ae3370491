"""Can results be written there, will they survive it, and do they belong with those that are there?"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_ep_bench.files import atomic_path
from moe_ep_bench.machine.doctor.checks import NOTE, OK, PROBLEM, Finding
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
    missing: list[Path] = []
    probe = out / f".doctor.{uuid.uuid4()}"
    try:
        missing = [folder for folder in (out, *out.parents) if not folder.exists()]
        with atomic_path(probe) as temporary:
            temporary.write_bytes(bytes(_PROBE_BYTES))
        probe.unlink()
        space = os.statvfs(out)
    except OSError as error:
        what = f"{out}: cannot be written ({error.strerror})"
        return [Finding("results", PROBLEM, what, "a run would measure and could not keep it", _CHOOSE)]
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # it was not made, or somebody else has begun to use it
                folder.rmdir()
    free = space.f_bavail * space.f_frsize
    iterations = sum(one["iterations"] for one in comparisons)
    needed = iterations * world_size * _BYTES_PER_ITERATION
    room = f"{free / 2**30:.1f} GiB free"
    if free < max(needed, _LEAST_FREE_BYTES):
        what = f"{out}: {room}, a run may write {needed / 2**30:.2f} GiB"
        status = PROBLEM if free < needed else NOTE
        return [Finding("results", status, what, "a full disk ends it between cases", _CHOOSE)]
    new = ", not there yet" if missing else ""
    findings = [Finding("results", OK, f"{out}{new}: can be written, files appear whole or not at all, {room}")]
    return [*findings, *_busy(out, comparisons)]


def _busy(out: Path, comparisons: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Who else is at that directory, by the locks that they hold, and by the marks that a lost job left."""
    held = {name: whose for name, whose in locks.holders(out).items() if name != RUN_JSON}
    for one in comparisons:
        if one["comparison_id"] in held:
            what = f"{one['title']}: another job is writing this, {held[one['comparison_id']]}"
            fix = "wait for it, stop it, or another --out"
            return [Finding("results", PROBLEM, what, "a run would be refused", fix)]
    if held:
        jobs = "; ".join(sorted(set(held.values())))
        what = f"another job is writing {len(held)} other comparison(s) there, {jobs}"
        return [Finding("results", NOTE, what, "a run may fill the directory beside it, at the cost of both times")]
    if any((out / "attempts").glob("now-*")):
        what = "a job was lost there without a word, and none holds a lock now"
        means = "the next run counts it against what it was measuring; without locks it may still be at it"
        return [Finding("results", NOTE, what, means, "look whether it runs where the file system has no locks")]
    return []


def earlier_findings(out: Path, refusal: str, comparisons: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What is there of earlier runs; ``refusal`` is of ``facts.agreement``."""
    if refusal:
        what = refusal.removeprefix(f"--out {out}: ")
        return [Finding("results", PROBLEM, f"{out}: {what}", "a run would refuse to mix results")]
    cases = [case for one in comparisons for case in one["cases"]]
    done = sum((out / "cases" / f"{case}.parquet").exists() for case in cases)
    if not done:
        return []
    return [Finding("results", OK, f"{done} of {len(cases)} cases of this config are there; a run does what lacks")]
