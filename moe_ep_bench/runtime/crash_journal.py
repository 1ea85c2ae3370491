"""The next job knows what a killed rank was doing, and goes on without it.

Every rank keeps a *mark*, a small memory-mapped file that names its case: a memory copy to write, outside of anything
timed, and it survives the process. A rank that ends in order clears its mark, or notes in it that it was stopped; any
other mark that the next job finds is a lost attempt. A line written ahead of each case's first run would not do: cases
are timed in turns, and a rank that dies meanwhile is to cost the case of that moment alone. A job is named by the first
of its comparisons and collects the marks of its own comparisons alone, which it has locked. While a comparison is built
or written, and in native's first run, its own id stands for the case.

    <out>/attempts/now-<job>-<rank>  the mark: 64 bytes of case id, 512 of reason
    <out>/attempts/<case_id>.json    reasons of the attempts that were lost, oldest first
"""

from __future__ import annotations

import mmap
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

from moe_ep_bench.files import read_json, write_json

MAX_ATTEMPTS = 2

# What a rank leaves that was ended by its peers' end, that was asked to end, and that waited for others in vain.
PEER_LOST, STOPPED = "peer lost", "stopped"
WAITED = f"{PEER_LOST}: other ranks did not come within"

_MARK_BYTES, _REASON_BYTES = 64, 512


class Mark:
    """This rank's mark. Raises OSError where it cannot be written."""

    def __init__(self, folder: Path, job: str, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"now-{job}-{rank}"
        self._path.write_bytes(bytes(_MARK_BYTES + _REASON_BYTES))
        with open(self._path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def set(self, case_id: str) -> None:
        self._map[:_MARK_BYTES] = case_id.encode().ljust(_MARK_BYTES, b"\0")

    def explain(self, reason: str) -> None:
        """Note why the case is being lost; the first reason stays."""
        if self._map[_MARK_BYTES] == 0:
            data = " ".join(reason.split()).encode()[:_REASON_BYTES]
            self._map[_MARK_BYTES : _MARK_BYTES + len(data)] = data
            self._map.flush()  # Also where the results are on other machines: the first rank reads all marks.

    def withdraw(self) -> None:
        """Take the reason back: nothing was lost for it."""
        self._map[_MARK_BYTES:] = bytes(_REASON_BYTES)

    def clear(self) -> None:
        """End in order: nothing was lost."""
        self._map.close()
        self._path.unlink(missing_ok=True)


def collect_lost(folder: Path, jobs: Container[str], *, stopped: bool = False) -> None:
    """Turn the marks that earlier jobs of these names left into recorded attempts.

    Called by one process, which knows that these jobs have ended, before there are new marks.

    Args:
        stopped: these jobs were asked to end; who died silently was killed because it did not, and is not blamed.
    """
    left = _marks(folder)
    for job in dict.fromkeys(mark.job for mark in left if mark.job in jobs):
        of_job = [mark for mark in left if mark.job == job]
        for case_id, reason in _blamed([mark for mark in of_job if mark.reason or not stopped]).items():
            write_json(folder / f"{case_id}.json", [*lost_attempts(folder, case_id), reason])
        for mark in of_job:
            mark.path.unlink(missing_ok=True)


def stopped_reason(signal_number: int) -> str:
    """What a rank leaves that was asked to end."""
    return f"{STOPPED} by signal {signal_number}"


def lost_attempts(folder: Path, case_id: str) -> list[str]:
    """Reasons of the earlier attempts at this case that were lost, oldest first; none where the file is damaged."""
    try:
        return [str(reason) for reason in read_json(folder / f"{case_id}.json")]
    except (OSError, ValueError, TypeError):
        return []


def forget_lost(folder: Path, case_ids: Iterable[str]) -> None:
    """Let these be tried anew."""
    for case_id in case_ids:
        (folder / f"{case_id}.json").unlink(missing_ok=True)


class _Left(NamedTuple):
    """A mark as it was left."""

    path: Path
    job: str
    rank: int
    case_id: str
    reason: str


def _marks(folder: Path) -> list[_Left]:
    marks = []
    for path in sorted(folder.glob("now-*-*")):
        _, job, rank = path.name.split("-")
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue  # Of another job, which has just ended.
        parts = (data[:_MARK_BYTES], data[_MARK_BYTES:])
        marks.append(_Left(path, job, int(rank), *(part.rstrip(b"\0").decode(errors="replace") for part in parts)))
    return marks


def _blamed(marks: list[_Left]) -> dict[str, str]:
    """{case_id: one line}: who failed on its own is the cause, else who died silently, else what all waited for.

    Ranks may have been at different cases: nobody is blamed for where the others were.
    """
    marks = [mark for mark in marks if mark.case_id]
    causes = [mark for mark in marks if mark.reason and not mark.reason.startswith((PEER_LOST, STOPPED))]
    silent = [mark for mark in marks if not mark.reason]
    if causes:
        return {mark.case_id: f"{mark.reason} (rank {mark.rank})" for mark in reversed(causes)}
    if silent:
        who = "all ranks" if len(silent) == len(marks) else f"rank {', '.join(str(mark.rank) for mark in silent)}"
        return {mark.case_id: f"failed: {who} ended without a word (killed, or out of memory)" for mark in silent}
    if any(mark.reason.startswith(STOPPED) for mark in marks):
        return {}
    if marks and all(mark.reason.startswith(WAITED) for mark in marks):
        # Ranks that wait for each other in different collectives, or a network that stands still.
        limit = marks[0].reason.removeprefix(WAITED).strip()
        return {mark.case_id: f"timeout: every rank waited for others for {limit}" for mark in reversed(marks)}
    return {mark.case_id: mark.reason for mark in reversed(marks)}
