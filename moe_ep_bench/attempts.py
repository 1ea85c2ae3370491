"""What was running when a job was lost, so that the next one goes on without it.

A failure inside a case takes the process group with it, and a rank that was killed can say
nothing more. Every rank therefore keeps a *mark*: a small memory-mapped file that names the case
it is running. Writing it is a memory copy, outside of anything timed; the kernel keeps it even
when the process is killed. A rank that ends in order, or that was asked to stop, clears its
mark. A mark that is still there when the next job starts is an attempt that was lost.

``<out>/attempts/now-<rank>``     the mark
``<out>/attempts/<case_id>.json`` reasons of the attempts that were lost, oldest first

While a comparison is built or written no single case is running; its own id stands for it then.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable
from pathlib import Path

from moe_ep_bench.records import write_json

MAX_ATTEMPTS = 2

_MARK_BYTES = 64
_REASON_BYTES = 512


class Mark:
    """This rank's mark. ``set`` costs a memory copy."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"now-{rank}"
        self._path.write_bytes(bytes(_MARK_BYTES + _REASON_BYTES))
        with open(self._path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def set(self, case_id: str) -> None:
        self._map[:_MARK_BYTES] = case_id.encode().ljust(_MARK_BYTES, b"\0")

    def explain(self, reason: str) -> None:
        """Say why the case is being lost, for the next job to record; the first reason stays."""
        if self._map[_MARK_BYTES] == 0:
            data = " ".join(reason.split()).encode()[:_REASON_BYTES]
            self._map[_MARK_BYTES : _MARK_BYTES + len(data)] = data

    def clear(self) -> None:
        """End in order: nothing was lost."""
        self._map.close()
        self._path.unlink(missing_ok=True)


def collect_lost(folder: Path) -> None:
    """Turn the marks that an earlier job left into recorded attempts. Called by one process, before new marks."""
    if not folder.is_dir():
        return
    lost: dict[str, list[tuple[int, str]]] = {}
    for path in sorted(folder.glob("now-*")):
        data = path.read_bytes()
        case_id = data[:_MARK_BYTES].rstrip(b"\0").decode(errors="replace")
        reason = data[_MARK_BYTES:].rstrip(b"\0").decode(errors="replace")
        if case_id:
            lost.setdefault(case_id, []).append((int(path.name.removeprefix("now-")), reason))
    for case_id, marks in lost.items():
        write_json(_reasons_path(folder, case_id), [*lost_attempts(folder, case_id), _reason(marks)])
    for path in folder.glob("now-*"):
        path.unlink()


def lost_attempts(folder: Path, case_id: str) -> list[str]:
    """Reasons of the earlier attempts at this case that were lost, oldest first."""
    path = _reasons_path(folder, case_id)
    return json.loads(path.read_text()) if path.exists() else []


def forget_lost(folder: Path, case_ids: Iterable[str]) -> None:
    """Let these be tried anew."""
    for case_id in case_ids:
        _reasons_path(folder, case_id).unlink(missing_ok=True)


def num_lost(folder: Path) -> list[tuple[str, int]]:
    """What was lost so far, and how often; marks that were not collected yet count once."""
    if not folder.is_dir():
        return []
    collected = [(path.name, len(json.loads(path.read_text()))) for path in sorted(folder.glob("*.json"))]
    marks = {path.read_bytes()[:_MARK_BYTES].rstrip(b"\0").decode(errors="replace") for path in folder.glob("now-*")}
    return [*collected, *((f"now {case_id}", 1) for case_id in sorted(marks - {""}))]


def _reason(marks: list[tuple[int, str]]) -> str:
    """One line from what the ranks left: who died without a word is the cause, else who failed on its own."""
    silent = [rank for rank, reason in marks if not reason]
    causes = [(rank, reason) for rank, reason in marks if reason and not reason.startswith("peer lost")]
    if causes:
        rank, reason = causes[0]
        return f"{reason} (rank {rank})"
    if silent and len(silent) < len(marks):
        return f"failed: rank {', '.join(map(str, silent))} ended without a word (killed, or out of memory)"
    if silent:
        return "failed: all ranks ended without a word (killed, or out of memory)"
    return marks[0][1]


def _reasons_path(folder: Path, case_id: str) -> Path:
    return folder / f"{case_id}.json"
