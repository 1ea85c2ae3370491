"""Every comparison has one writer, and a dead job holds nothing.

A job locks each comparison that it may write, not the directory: jobs on other comparisons fill one directory at once.
A lock is the kernel's (``filelock``, by flock) on ``<out>/.locks/<name>`` and ends with its holder; the file says who
that is. File systems without such locks (Lustre mounted without ``-o flock``) are named on standard error, and the run
goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from moe_ep_bench.errors import UserError, brief

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
                # While it is held: who has opened it meanwhile finds it gone, and opens it anew.
                held.callback(_remove, folder / name)
                begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
                (folder / name).write_text(f"process {os.getpid()} on {socket.gethostname()}, begun {begun}")
            except Timeout:
                raise UserError(
                    f"--out {root}: {title}: another job is writing this, {_holder(folder / name)}; "
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
    try:
        if (root / FOLDER / name).exists():
            FileLock(root / FOLDER / name, fallback_to_soft=False).acquire(blocking=False).lock.release()
    except Timeout:
        return True
    except OSError:  # No locks here; ``hold`` said so.
        pass
    return False


def _acquired(path: Path, patience_s: float) -> contextlib.AbstractContextManager[object]:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return FileLock(path, fallback_to_soft=False).acquire(timeout=patience_s, poll_interval=0.1)
        except FileNotFoundError:  # The last holder of others has just removed the folder.
            continue
        except FileExistsError:  # It was there when it was to be made, and no longer when pathlib looked what it is.
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISDIR(path.parent.lstat().st_mode):
                    raise


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        return brief(path.read_text(errors="replace"), 200, quoted=False) or "which has not said who it is"
    return "which is just ending"


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # Others hold the rest of the folder.
        path.unlink()
        path.parent.rmdir()
