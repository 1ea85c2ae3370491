"""A rank ends with the launcher that started it.

A launcher that was killed cannot stop its ranks any more: without anybody to watch them they would go on. So the kernel
is asked to send a rank SIGTERM when its parent is gone. It is asked before torch is imported, which takes seconds, and
the parent is looked at afterwards: one that died before the kernel knew is gone without a signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "MOE_EP_BENCH_LAUNCHER"
"""Process id of our own launcher, in the environment of its ranks; torchrun's agent says nothing of that kind."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """In a rank that torchrun or our launcher started: end with it. Nothing in any other process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
        print("moe-ep-bench: the launcher of this rank is gone", file=sys.stderr)
        os._exit(128 + signal.SIGTERM)
