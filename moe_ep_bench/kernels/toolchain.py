"""What Triton needs beside itself: it builds a small launcher in C for every kernel, with a compiler and Python.h.

Where that is lacking nothing of Triton's can run, though it can be imported: policies and the experts' activation then
run as torch operations, and results say so.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
import warnings
from pathlib import Path


def lacking() -> str:
    """What Triton lacks to build its launchers, in words; empty where nothing is."""
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"no C compiler ({' or '.join(compilers)})"
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if headers.exists() else f"no {headers}"


@functools.cache
def triton_lacks() -> str:
    """Why Triton can run nothing on a GPU here, said once as a warning too; empty where it can."""
    try:
        import triton  # noqa: F401 - is it there?
    except ImportError as error:
        why, what = "Triton is not installed", f"Triton cannot be imported ({error})"
    else:
        if not lacking():
            return ""
        why = what = f"{lacking()}, which Triton needs"
    warnings.warn(
        f"{what}: on the GPU policies and activations run as torch operations, which is exact but several times slower",
        RuntimeWarning,
        stacklevel=2,
    )
    return why
