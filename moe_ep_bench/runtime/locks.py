"""Every comparison has one writer, and a dead job holds nothing.

A job locks each comparison that it may write, not the directory: jobs on other comparisons fill one directory at once.
A lock is the kernel's (flock) on ``<out>/.locks/<name>`` and ends with its holder. What the file says is for people.
File systems without such locks (Lustre mounted without ``-o flock``) are named on standard error, and the run goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import read_json

FOLDER = ".locks"

# A job that was just stopped may take so long to end; its successor waits for it.
PATIENCE_S = 5.0

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def hold(root: Path, titles: Mapping[str, str], *, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Keep all other jobs from what is named, while the block lasts.

    Args:
        root: the results directory.
        titles: what to lock, and what it is called where another job has it.
        patience_s: how long to wait for another holder.

    Raises:
        UserError: one line that names who holds what; nothing is held then.
        OSError: nothing can be written there.
    """
    with contextlib.ExitStack() as held:
        for name, title in titles.items():
            held.enter_context(_hold(root, name, title, patience_s))
        yield


def is_held(root: Path, name: str) -> bool:
    """Whether another job has this at the moment."""
    try:
        handle = os.open(root / FOLDER / name, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # No locks here; ``hold`` said so.
    finally:
        os.close(handle)
    return False


def holders(root: Path) -> dict[str, str]:
    """All that is held in a directory at the moment, and whose it is, in words."""
    found = {}
    for path in sorted(root.glob(f"{FOLDER}/*")):
        with contextlib.suppress(OSError):  # Somebody else's, who lets nobody look.
            if is_held(root, path.name):
                found[path.name] = _holder(path)
    return found


@contextlib.contextmanager
def _hold(root: Path, name: str, title: str, patience_s: float) -> Iterator[None]:
    path, deadline = root / FOLDER / name, time.monotonic() + patience_s
    while (handle := _take(path)) is None:
        if time.monotonic() > deadline:
            raise UserError(
                f"--out {root}: {title}: another job is writing this, {_holder(path)}; "
                "wait for it, stop it, or choose another directory"
            )
        time.sleep(0.1)
    try:
        yield
    finally:
        # Unlinked while it is held: whoever opened it before finds that it is no longer the one at this path.
        path.unlink(missing_ok=True)
        os.close(handle)
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _take(path: Path) -> int | None:
    """An open file on which we have the lock; None where another has it."""
    folder = path.parent
    while True:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Not exist_ok: it looks whether there is a folder once more, and holders remove this one between two looks.
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        with contextlib.ExitStack() as opened:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                opened.callback(os.close, handle)
                _lock(handle, folder.parent)
                if not os.path.samestat(os.fstat(handle), os.stat(path)):
                    continue  # Its last holder has just removed it, and another made one.
                os.ftruncate(handle, 0)
                begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
                holder = {"pid": os.getpid(), "hostname": socket.gethostname(), "begun": begun}
                os.pwrite(handle, json.dumps(holder).encode(), 0)
            except BlockingIOError:
                return None
            except FileNotFoundError:
                if folder.is_symlink():
                    raise  # A link to nowhere, which no holder leaves behind.
                continue  # Its last holder has just removed it, or the folder.
            opened.pop_all()
            return handle


def _lock(handle: int, root: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        why = f"this file system has no locks ({error.strerror}); see to it that no other job writes there"
        print(f"moe-ep-bench: {root}: {why}", file=sys.stderr)


def _holder(path: Path) -> str:
    try:
        holder = read_json(path)
        return f"process {holder['pid']} on {holder['hostname']}, begun {holder['begun']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "which has not said who it is"
