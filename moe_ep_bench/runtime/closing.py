"""Ending between two comparisons: what a cluster asks for shortly before a job's time is up.

SIGTERM ends a run at once, and what it was measuring is measured again some day. SIGUSR1, sent to the launcher some
minutes before, lets it finish that comparison and begin no other. The launcher's ranks learn of it by a file that it
makes and whose name they have in their environment: signals would reach them on one node only, or not at all. Rank 0
looks there between comparisons and decides for all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

_FILE = "MOE_EP_BENCH_CLOSING"


@contextlib.contextmanager
def closing_on_signal() -> Iterator[None]:
    """In a launcher: turn SIGUSR1 into a request that the ranks started meanwhile can see."""
    usr1 = {signal.SIGUSR1}
    over = threading.Event()

    def take() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, usr1)
        over.wait()

    with tempfile.TemporaryDirectory(prefix="moe-ep-bench-") as folder:
        request = Path(folder, "close")
        earlier = signal.signal(signal.SIGUSR1, lambda number, frame: request.touch())
        # Ranks inherit this thread's mask: a cluster that signals all processes of a job does not end them. What is
        # meant for this process goes to a thread that is there for nothing else.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, usr1)
        thread = threading.Thread(target=take, name="closing", daemon=True)
        thread.start()
        os.environ[_FILE] = str(request)
        try:
            yield
        finally:
            del os.environ[_FILE]
            over.set()
            thread.join()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGUSR1, earlier)


def asked_to_close() -> bool:
    """In a rank: whether its launcher was asked to end."""
    request = os.environ.get(_FILE)
    return request is not None and os.path.exists(request)
