"""Where a host waits for its GPU: torch's operations that do, clocked as they are called.

On a GPU the host runs ahead of the device. What reads a value (``item``, ``if tensor:``), makes a shape from values
(``nonzero``, an index by a mask) or copies to the other side without ``non_blocking`` stops it there until the stream
is empty. So does Megatron-Core's ``_maybe_dtoh_and_synchronize``, by an event or a stream. The call counts as a whole:
what of it is no waiting is a few microseconds.

Not seen is what waits inside other operations: assignments by a mask, memory that the allocator asks the driver for,
and launches once a thousand of them are queued. ``unseen_syncs`` finds the first kind in an untimed run.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Blocking = Callable[[], contextlib.AbstractContextManager[Any]]
# Whether a call with these arguments waits for the device of a type.
Waits = Callable[[str, tuple[Any, ...], dict[str, Any]], bool]


def _always(device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _is_of(device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return isinstance(args[0], Tensor) and args[0].device.type == device


def _has_mask(device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if type(args[1]) in (int, slice):
        return False
    for index in args[1] if type(args[1]) is tuple else args[1:]:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            return _is_of(device, args, kwargs)
    return False


def _counts_rows(device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    of_tensor = len(args) > 1 and isinstance(args[1], Tensor)
    return of_tensor and kwargs.get("output_size") is None and _is_of(device, args, kwargs)


def _crosses(device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``Tensor.to`` goes from the device or to it and the host sees to that."""
    tensor, *rest = args
    target = rest[0] if rest else kwargs.get("device")
    if not isinstance(target, str | torch.device) or kwargs.get("non_blocking"):
        return False
    here, there = tensor.device.type, torch.device(target).type
    return here != there and device in (here, there)


def _makes(device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether values of the host become a tensor of the device."""
    target = kwargs.get("device")
    return target is not None and torch.device(target).type == device and not isinstance(args[0], Tensor)


_READS = ("nonzero", "masked_select", "unique", "unique_consecutive", "bincount", "equal")
_NUMBERS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__")


def _operations() -> Iterator[tuple[Any, str, Waits]]:
    """Owner, name and when it waits, of all that are watched; looked up anew, as owners are stood in for on the CPU."""
    yield from ((owner, "synchronize", _always) for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event))
    yield from ((owner, name, _is_of) for owner in (torch, Tensor) for name in _READS)
    yield from ((Tensor, name, _is_of) for name in _NUMBERS)
    yield from ((owner, "repeat_interleave", _counts_rows) for owner in (torch, Tensor))
    yield from ((torch, name, _makes) for name in ("tensor", "as_tensor"))
    yield from ((Tensor, "__getitem__", _has_mask), (Tensor, "to", _crosses))


@contextlib.contextmanager
def watched_syncs(blocking: Blocking, device: str) -> Iterator[None]:
    """Enter ``blocking`` around every operation that waits for a device of this type, while the block runs."""
    with contextlib.ExitStack() as patches:
        for owner, name, waits in _operations():
            function = getattr(owner, name)
            patches.enter_context(mock.patch.object(owner, name, _watched(function, waits, blocking, device)))
        yield


def _watched(function: Callable[..., Any], waits: Waits, blocking: Blocking, device: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not waits(device, args, kwargs):
            return function(*args, **kwargs)
        with blocking():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def unseen_syncs(is_blocking: Callable[[], bool]) -> Iterator[list[str]]:
    """Collect where the host waits for the GPU, ``file:line``, though nothing is ``blocking``; torch tells it.

    Args:
        is_blocking: whether the host is inside an operation that is watched.
    """
    places: list[str] = []

    def note(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        if "synchronizing CUDA operation" in str(message) and not is_blocking():
            places.append(f"{Path(filename).name}:{line}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
