"""A line ahead of what a rank tries: the next start knows what a killed rank was doing, and goes on without it.

Every rank keeps a file: how many cases it has begun, the last one's id, and why it is lost. A rank that ends in order
removes it; any other that the next job finds is a lost attempt. Cases are timed in turns, and a rank that dies
meanwhile is to cost the case of that moment alone: the line is written ahead of each iteration, untimed. A job is named
by the first of its comparisons and collects the files of its own comparisons alone, which it has locked. While a
comparison is built or written, and in native's first run, its own id stands for the case.

    <out>/attempts/now-<job>-<rank>  three lines of text, filled up with zeros
    <out>/attempts/<case_id>.json    reasons of the attempts that were lost, oldest first
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moe_ep_bench.files import read_json, write_json

MAX_ATTEMPTS = 2

# What a rank leaves that was ended by its peers' end, and that was asked to end.
PEER_LOST, STOPPED = "peer lost", "stopped"
_SILENT = "failed: ended without a word (killed, or out of memory)"
_NUM_BYTES, _PATIENCE_S = 600, 1.0


class Attempt:
    """This rank's file. Raises OSError where it cannot be written."""

    def __init__(self, folder: Path, job: str, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"now-{job}-{rank}"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._lock = threading.Lock()  # The guard's thread explains while the main one may be naming.
        self._count, self._case_id, self._reason = 0, "", ""
        self._write()  # On a disk that is full by then, there is room.

    def name(self, case_id: str) -> None:
        """Note what is tried from now on. Nothing was lost for a reason that was given before."""
        with self._lock:
            self._count, self._case_id, self._reason = self._count + 1, case_id, ""
            self._write()

    def explain(self, reason: str) -> None:
        """Note why it is being lost; the first reason stays."""
        with self._lock:
            self._explain(reason)

    def explain_last(self, reason: str) -> None:
        """Note why the process ends: whoever would name another case waits from now on."""
        self._lock.acquire(timeout=_PATIENCE_S)  # Whoever has it may be stuck.
        self._explain(reason)

    def clear(self) -> None:
        """End in order: nothing was lost."""
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _explain(self, reason: str) -> None:
        if not self._reason:
            self._reason = " ".join(reason.split())
            self._write()
            os.fsync(self._file)  # Also where the results are on other machines: the first rank reads all files.

    def _write(self) -> None:
        text = f"{self._count}\n{self._case_id}\n{self._reason}".encode()
        os.pwrite(self._file, text[:_NUM_BYTES].ljust(_NUM_BYTES, b"\0"), 0)


class _Left(NamedTuple):
    """What a rank's file was left to say."""

    rank: int
    count: int
    case_id: str
    reason: str

    @staticmethod
    def read(path: Path) -> _Left:
        count, _, rest = path.read_bytes().rstrip(b"\0").decode(errors="replace").partition("\n")
        case_id, _, reason = rest.partition("\n")
        return _Left(int(path.name.rpartition("-")[2]), int(count or 0), case_id, reason)


def collect_lost(folder: Path, jobs: Iterable[str]) -> None:
    """Turn the files that earlier jobs of these names left into recorded attempts.

    Called by one process, which knows that these jobs have ended, before there are new files.
    """
    for job in jobs:
        paths = sorted(folder.glob(f"now-{job}-*"))
        if lost := _lost([found for found in map(_Left.read, paths) if found.case_id]):
            case_id, reason = lost
            write_json(folder / f"{case_id}.json", [*lost_attempts(folder, case_id), reason])
        for path in paths:
            path.unlink(missing_ok=True)


def _lost(left: Sequence[_Left]) -> tuple[str, str] | None:
    """The case that was lost, and why: by who failed on its own, else by who died silently, else who lost its peers.

    Ranks may be at different cases: one that is behind keeps the others waiting. None where all were asked to end.
    """
    failed = [found for found in left if found.reason and not found.reason.startswith((PEER_LOST, STOPPED))]
    silent = [found._replace(reason=_SILENT) for found in left if not found.reason]
    is_stopped = any(found.reason.startswith(STOPPED) for found in left)
    causes = failed or silent or ([] if is_stopped else left)
    behind = [cause for cause in causes if cause.count == min(other.count for other in causes)]
    if not behind:
        return None
    ranks = {cause.reason: [str(other.rank) for other in behind if other.reason == cause.reason] for cause in behind}
    return behind[0].case_id, "; ".join(f"{reason} (rank {', '.join(of)})" for reason, of in ranks.items())


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
    """Why this rank lost a case, as its file keeps it: a status, or "peer lost" where another rank is the cause."""
    if _is_oom(error):
        return f"oom: {error}"
    return f"{PEER_LOST if is_of_peers(error) else 'failed'}: {type(error).__name__}: {error}"


def split_reason(reason: str) -> tuple[str, str]:
    """Status of a lost case, and the words of its reason (``reason_of``)."""
    kind, _, words = reason.partition(": ")
    if kind not in ("oom", "timeout", "failed", PEER_LOST):
        return "failed", reason
    return (kind if kind in ("oom", "timeout") else "failed"), words or reason
