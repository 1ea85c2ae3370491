"""Every comparison has one writer, and a dead job holds nothing.

A job locks each comparison that it may write, not the directory: jobs on other comparisons fill one directory at once.
A lock is the kernel's (``filelock``, by flock) on ``<out>/.locks/<name>`` and ends with its holder. The file beside it
says who that is. File systems without such locks (Lustre mounted without ``-o flock``) are named on standard error, and
the run goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import read_json, write_json

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
    folder = root / FOLDER
    with contextlib.ExitStack() as held:
        for name, title in titles.items():
            try:
                held.enter_context(_acquired(folder / name, patience_s))
                for path in (folder, folder / name, _note(root, name)):  # the last one first
                    held.callback(_remove, path)
                begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
                write_json(_note(root, name), {"pid": os.getpid(), "hostname": socket.gethostname(), "begun": begun})
            except Timeout:
                raise UserError(
                    f"--out {root}: {title}: another job is writing this, {_holder(_note(root, name))}; "
                    "wait for it, stop it, or choose another directory"
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                why = f"this file system has no locks ({error.strerror}); see to it that no other job writes there"
                print(f"moe-ep-bench: {root}: {why}", file=sys.stderr)
        yield


def is_held(root: Path, name: str) -> bool:
    """Whether another job has this at the moment."""
    path = root / FOLDER / name
    if not path.exists():
        return False
    try:
        _new(path).acquire(blocking=False).lock.release()
    except Timeout:
        return True
    except OSError:  # No locks here; ``hold`` said so.
        pass
    return False


def _new(path: Path) -> FileLock:
    return FileLock(path, fallback_to_soft=False)


def _acquired(path: Path, patience_s: float) -> AbstractContextManager[object]:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return _new(path).acquire(timeout=patience_s, poll_interval=0.1)
        except FileNotFoundError:  # The last holder of others has just removed the folder.
            continue


def _remove(path: Path) -> None:
    """Remove what is ours while it is held: who has opened it meanwhile finds it gone, and opens it anew."""
    with contextlib.suppress(OSError):
        path.rmdir() if path.name == FOLDER else path.unlink()


def _note(root: Path, name: str) -> Path:
    return root / FOLDER / f"{name}.holder"


def _holder(path: Path) -> str:
    try:
        holder = read_json(path)
        return f"process {holder['pid']} on {holder['hostname']}, begun {holder['begun']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "which has not said who it is"
