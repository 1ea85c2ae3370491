"""A line ahead of what a rank tries, and an end for every hang: the next start knows what was lost, and goes on.

Every rank keeps a file: how many cases it has begun, the last one's id, and why it is lost. A rank that ends in order
removes it; any other that the next job finds is a lost attempt. Cases are timed in turns, and a rank that dies
meanwhile is to cost the case of that moment alone: the line is written ahead of each iteration, untimed. A job is named
by the first of its comparisons and collects the files of its own comparisons alone, which it has locked. While a
comparison is built or written, and in native's first run, its own id stands for the case.

Where nothing moves for too long, or SIGTERM comes, ``faulthandler`` adds all stacks to the file and ends the process.
It is C code: it works too where Python waits in a collective to which nobody comes. Its status is 1, which torchrun
does not look at; of a process that is no rank (``emulate``) it would say that the job went through, and a thread ends
that one with ``LOST``.

    <out>/attempts/now-<job>-<rank>  four lines of text, filled up with zeros; behind them stacks
    <out>/attempts/<case_id>.json    kinds and reasons of the attempts that were lost, oldest first
"""

from __future__ import annotations

import datetime
import faulthandler
import math
import os
import re
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moe_ep_bench.errors import LOST
from moe_ep_bench.files import read_json, write_json

MAX_ATTEMPTS = 2

# Of a rank that was ended by its peers' end.
PEER_LOST = "peer lost"
_NUM_BYTES = 600
_NO_NEWS = 0.05  # of the time that nothing may move: how much shorter it may be
_GRACE_S = 10.0  # in which the thread of a process that is no rank may end it first, however busy the machine is


class Loss(NamedTuple):
    """Why a rank lost a case.

    Attributes:
        kind: failed, oom, timeout, or ``PEER_LOST`` where another rank is the cause.
    """

    kind: str
    words: str

    @staticmethod
    def of(error: Exception) -> Loss:
        """An exception of this rank, or what it says of others."""
        if _is_oom(error):
            return Loss("oom", str(error))
        return Loss(PEER_LOST if is_of_peers(error) else "failed", f"{type(error).__name__}: {error}")

    @property
    def status(self) -> str:
        """Of the case."""
        return self.kind if self.kind in ("oom", "timeout") else "failed"

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"


_SILENT = Loss("failed", "ended without a word (killed, or out of memory)")


class Guard:
    """This rank's file, and the end of this process where ``feed`` is not called for ``timeout_s`` seconds.

    A context manager, whose block ends in order unless the process does: then nothing was lost.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, job: str, rank: int, timeout_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._timeout_s, self._fed = folder / f"now-{job}-{rank}", timeout_s, -math.inf
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.lseek(self._file, _NUM_BYTES, os.SEEK_SET)  # Stacks go behind the lines.
        self._is_rank, self._ended = "RANK" in os.environ, threading.Event()
        self._count, self._case_id = 0, ""
        self._loss: Loss | None = None
        self._write()  # On a disk that is full by then, there is room.

    def __enter__(self) -> Guard:
        # Ctrl-C is Python's own where a process is alone; ranks have left it to the kernel (``torchrun.become_rank``).
        signals = signal.SIGTERM, signal.SIGINT
        self._signals = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
        for number in self._signals:
            faulthandler.register(number, self._file, chain=True)
        self.feed()
        if not self._is_rank:
            threading.Thread(target=self._watch, name="guard", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        for number in self._signals:
            faulthandler.unregister(number)
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def feed(self) -> None:
        """Something has moved. It takes 0.1 ms and more, so that moments later it is not said again."""
        if time.monotonic() - self._fed > _NO_NEWS * self._timeout_s:
            limit_s = self._timeout_s + (0 if self._is_rank else _GRACE_S)  # Where Python is stuck, no thread runs.
            self._fed = time.monotonic()
            faulthandler.dump_traceback_later(limit_s, exit=True, file=self._file)

    def _watch(self) -> None:
        """End this process as faulthandler would, but with ``LOST``."""
        while (left_s := self._fed + self._timeout_s - time.monotonic()) > 0:
            if self._ended.wait(left_s):
                return
        limit = datetime.timedelta(seconds=self._timeout_s)
        os.write(self._file, f"Timeout ({limit})!\n".encode())
        faulthandler.dump_traceback(self._file)
        where = f"no progress for {limit} in {_RankFile.read(self._path).place}"
        print(f"moe-ep-bench: {where}; the same command goes on", file=sys.stderr, flush=True)
        os._exit(LOST)

    def at(self, case_id: str) -> None:
        """Note that work on a case, or on a comparison as a whole, begins. No reason given before has lost anything."""
        self.feed()
        self._count, self._case_id, self._loss = self._count + 1, case_id, None
        self._write()

    def explain(self, loss: Loss) -> None:
        """Note why it is being lost; the first reason stays."""
        if self._loss is None:
            self._loss = loss._replace(words=" ".join(loss.words.split()))
            self._write()
            os.fsync(self._file)  # Also where the results are on other machines: the first rank reads all files.

    def _write(self) -> None:
        text = "\n".join([str(self._count), self._case_id, *(self._loss or ())]).encode()
        os.pwrite(self._file, text[:_NUM_BYTES].ljust(_NUM_BYTES, b"\0"), 0)


# ---- at the next start -----------------------------------------------------------------------------------------------


class _RankFile(NamedTuple):
    """The file of a rank that did not end in order: its case, why it was lost, and where it stood."""

    rank: int
    count: int
    case_id: str
    loss: Loss | None
    stacks: str

    @staticmethod
    def read(path: Path) -> _RankFile:
        content = path.read_bytes()
        lines, stacks = content[:_NUM_BYTES].rstrip(b"\0"), content[_NUM_BYTES:]
        count, case_id, kind, words = (*lines.decode(errors="replace").split("\n"), "", "", "")[:4]
        rank, loss = int(path.name.rpartition("-")[2]), Loss(kind, words) if kind else None
        return _RankFile(rank, int(count or 0), case_id, loss, stacks.decode(errors="replace"))

    @property
    def place(self) -> str:
        """The function in which it stood: the last thread is the main one."""
        return next(iter(re.findall(r" in (\S+)", self.stacks.rpartition("hread 0x")[2])), "native code")


def collect_lost(folder: Path, jobs: Iterable[str]) -> None:
    """Turn the files that earlier jobs of these names left into recorded attempts.

    Called by one process, which knows that these jobs have ended, before there are new files.
    """
    for job in jobs:
        paths = sorted(folder.glob(f"now-{job}-*"))
        if lost := _lost_case([file for file in map(_RankFile.read, paths) if file.case_id]):
            case_id, loss = lost
            write_json(folder / f"{case_id}.json", [*lost_attempts(folder, case_id), loss])
        for path in paths:
            path.unlink(missing_ok=True)


def _lost_case(files: Sequence[_RankFile]) -> tuple[str, Loss] | None:
    """The case that a job lost, and why; None if all ranks were asked to end.

    To blame are ranks that failed by themselves; else those that died silently; else those that lost a peer. Among
    them it is the ranks that had begun the fewest cases: others may have gone on, and wait for these.
    """
    if timed_out := re.search(r"^Timeout \((\S+)\)!", "\n".join(file.stacks for file in files), re.MULTILINE):
        # The first that was overdue ended the others, which left their stacks too.
        files = [file if file.loss else _with_timeout(file, timed_out[1]) for file in files]
    failed = [file for file in files if file.loss and file.loss.kind != PEER_LOST]
    silent = [file._replace(loss=_SILENT) for file in files if not file.loss and not file.stacks]
    lost_peers = [] if any(file.stacks for file in files) else files
    causes = failed or silent or lost_peers
    if not causes:
        return None
    fewest = min(file.count for file in causes)
    first = [file for file in causes if file.count == fewest]
    ranks_by_loss = defaultdict(list)
    for file in first:
        ranks_by_loss[file.loss or _SILENT].append(str(file.rank))
    (kind, words), *others = (
        loss._replace(words=f"{loss.words} (rank {', '.join(ranks)})") for loss, ranks in ranks_by_loss.items()
    )
    return first[0].case_id, Loss(kind, "; ".join([words, *map(str, others)]))


def _with_timeout(file: _RankFile, limit: str) -> _RankFile:
    """The same with its reason, of a job in which one rank made no progress; its stacks go into the log."""
    if not file.stacks:
        return file
    print(f"moe-ep-bench: rank {file.rank} stood here:\n{file.stacks}", file=sys.stderr, flush=True)
    return file._replace(loss=Loss("timeout", f"no progress for {limit} in {file.place}"))


def lost_too_often(folder: Path, comparison_id: str, case_ids: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Status and reason of a comparison's cases that ``MAX_ATTEMPTS`` starts did not survive, or that went with it."""
    lost, whole = {}, lost_attempts(folder, comparison_id)
    for case_id in case_ids:
        attempts = max(whole, lost_attempts(folder, case_id), key=len)
        if len(attempts) >= MAX_ATTEMPTS:
            lost[case_id] = attempts[-1].status, f"{attempts[-1].words} ({len(attempts)} attempts)"
    return lost


def lost_attempts(folder: Path, case_id: str) -> list[Loss]:
    """The earlier attempts at this case that were lost, oldest first; none where the file is damaged."""
    try:
        return [Loss(str(kind), str(words)) for kind, words in read_json(folder / f"{case_id}.json")]
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
