"""A line ahead of what a rank tries: the next start knows what a killed rank was doing, and goes on without it.

Every rank keeps a file that names its case. A rank that ends in order removes it, or notes in it that it was asked to
end; any other that the next job finds is a lost attempt. Cases are timed in turns, and a rank that dies meanwhile is to
cost the case of that moment alone: the line is written ahead of each iteration, untimed. A job is named by the first of
its comparisons and collects the files of its own comparisons alone, which it has locked. While a comparison is built or
written, and in native's first run, its own id stands for the case.

    <out>/attempts/now-<job>-<rank>  64 bytes of case id, 512 of reason
    <out>/attempts/<case_id>.json    reasons of the attempts that were lost, oldest first
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from moe_ep_bench.files import read_json, write_json

MAX_ATTEMPTS = 2

# What a rank leaves that was ended by its peers' end, that was asked to end, and that waited for others in vain.
PEER_LOST, STOPPED = "peer lost", "stopped"
WAITED = f"{PEER_LOST}: other ranks did not come within"

_NAME_BYTES, _REASON_BYTES = 64, 512


class Attempt:
    """This rank's file. Raises OSError where it cannot be written."""

    def __init__(self, folder: Path, job: str, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._is_explained = folder / f"now-{job}-{rank}", True
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self.name("")  # On a disk that is full by then, there is room.

    def name(self, case_id: str) -> None:
        """Note what is tried from now on. Nothing was lost for a reason that was given before."""
        if self._is_explained:
            self._write("", _REASON_BYTES, _NAME_BYTES)
        self._is_explained = False
        self._write(case_id, _NAME_BYTES, 0)

    def explain(self, reason: str) -> None:
        """Note why it is being lost; the first reason stays."""
        if not self._is_explained:
            self._is_explained = True
            self._write(" ".join(reason.split()), _REASON_BYTES, _NAME_BYTES)
            os.fsync(self._file)  # Also where the results are on other machines: the first rank reads all files.

    def clear(self) -> None:
        """End in order: nothing was lost."""
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _write(self, text: str, size: int, at: int) -> None:
        os.pwrite(self._file, text.encode()[:size].ljust(size, b"\0"), at)


class _Left(NamedTuple):
    """What a rank's file was left to say."""

    rank: int
    case_id: str
    reason: str


def collect_lost(folder: Path, jobs: Iterable[str], *, stopped: bool = False) -> None:
    """Turn the files that earlier jobs of these names left into recorded attempts.

    Called by one process, which knows that these jobs have ended, before there are new files.

    Args:
        stopped: these jobs were asked to end; who died silently was killed because it did not, and is not blamed.
    """
    for job in jobs:
        paths, left = sorted(folder.glob(f"now-{job}-*")), []
        for path in paths:
            data = path.read_bytes()
            texts = (part.rstrip(b"\0").decode(errors="replace") for part in (data[:_NAME_BYTES], data[_NAME_BYTES:]))
            left.append(_Left(int(path.name.rpartition("-")[2]), *texts))
        for case_id, reason in _blamed([one for one in left if one.reason or not stopped]).items():
            write_json(folder / f"{case_id}.json", [*lost_attempts(folder, case_id), reason])
        for path in paths:
            path.unlink(missing_ok=True)


def _blamed(left: list[_Left]) -> dict[str, str]:
    """{case_id: one line}: who failed on its own is the cause, else who died silently, else what all waited for.

    Ranks may have been at different cases: nobody is blamed for where the others were.
    """
    left = [one for one in left if one.case_id]
    causes = [one for one in left if one.reason and not one.reason.startswith((PEER_LOST, STOPPED))]
    silent = [one for one in left if not one.reason]
    if causes:
        return {one.case_id: f"{one.reason} (rank {one.rank})" for one in reversed(causes)}
    if silent:
        who = "all ranks" if len(silent) == len(left) else f"rank {', '.join(str(one.rank) for one in silent)}"
        return {one.case_id: f"failed: {who} ended without a word (killed, or out of memory)" for one in silent}
    if any(one.reason.startswith(STOPPED) for one in left):
        return {}
    if left and all(one.reason.startswith(WAITED) for one in left):
        # Ranks that wait for each other in different collectives, or a network that stands still.
        limit = left[0].reason.removeprefix(WAITED).strip()
        return {one.case_id: f"timeout: every rank waited for others for {limit}" for one in reversed(left)}
    return {one.case_id: one.reason for one in reversed(left)}


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
