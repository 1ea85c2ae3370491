"""Every comparison has one writer, and a dead job holds nothing.

A job locks each comparison that it may write, not the directory: jobs on other comparisons fill one directory at once.
A lock is the kernel's (``filelock``, by flock) on ``<out>/.lock-<name>`` and ends with its holder; the file says who
that is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from moe_ep_bench.errors import UserError, brief

# A job that was just stopped may take so long to end; its successor waits for it.
PATIENCE_S = 5.0


def lock_file(root: Path, name: str) -> Path:
    return root / f".lock-{name}"


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
            file = lock_file(root, name)
            try:
                held.enter_context(FileLock(file, timeout=patience_s, poll_interval=0.1, fallback_to_soft=False))
            except Timeout:
                raise UserError(
                    f"--out {root}: {title}: another job is writing this, {_holder(file)}; "
                    "wait for it, stop it, or choose another directory"
                ) from None
            # While it is held: who has opened it meanwhile finds it gone, and opens it anew.
            held.callback(file.unlink, missing_ok=True)
            begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}, begun {begun}")
        yield


def is_held(root: Path, name: str) -> bool:
    """Whether another job has this at the moment."""
    file = lock_file(root, name)
    try:
        if file.exists():
            FileLock(file, fallback_to_soft=False).acquire(blocking=False).lock.release()
    except Timeout:
        return True
    return False


def _holder(file: Path) -> str:
    with contextlib.suppress(OSError):
        return brief(file.read_text(errors="replace"), 200, quoted=False)
    return "which is just ending"
