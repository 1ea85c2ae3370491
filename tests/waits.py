"""Where a run makes the host wait for a result of the device: a hidden cost inside a timed layer.

On a GPU the host runs ahead of the device. What reads a number (``item``, ``tolist``, ``if tensor:``) or makes a shape
from values (``nonzero``, an index by a mask, ``unique``) stops it there. Operations that would wait are counted as they
are called, on any device.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations of torch that read values on the host, but for indices, which do so by masks.
_READS = frozenset(
    {
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "nonzero_numpy",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
    }
)


def would_wait(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation, as torch dispatches it, reads values on the host."""
    name = function._schema.name.split("::")[1]
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        # One value for all that a mask marks is filled in, without a list of places.
        return masked and (name == "index" or args[2].numel() > 1)
    return name in _READS


@contextlib.contextmanager
def watched_waits(unless: Callable[[], bool] = lambda: False) -> Iterator[Counter[str]]:
    """Count the operations in the block that a GPU would make the host wait for, by the line that is to blame.

    Args:
        unless: passes over those during which this is so.
    """
    waits: Counter[str] = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if would_wait(func, args, kwargs or {}) and not unless():
                waits[_place()] += 1
            return func(*args, **(kwargs or {}))

    with Watch():
        yield waits


def _place() -> str:
    """The innermost line that is neither torch's nor this file's."""
    not_blamed = os.path.dirname(torch.__file__), __file__
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(not_blamed):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
