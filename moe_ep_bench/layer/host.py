"""Stand-ins that let Megatron-Core's expert-parallel layer run on CPU ranks.

Megatron-Core asks ``torch.cuda`` for the current device and for streams even where every tensor
lies on the CPU. On a machine without CUDA these questions get the only sensible answers: the
device is the CPU, and there is one stream, on which all work is already in order. It also hands
gloo its split sizes as tensors, which on CUDA were copied to the host on the way; gloo wants
whole numbers. Nothing of Megatron-Core is edited; on a machine with CUDA nothing here is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


class HostStream:
    """The host's only stream, and any event on it: whatever came before is done. All instances compare equal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostStream)

    def __hash__(self) -> int:
        return 0

    def synchronize(self, device: Any = None) -> None:
        pass

    wait = wait_stream = wait_event = synchronize

    def record_event(self, event: Any = None) -> HostStream:
        return self


def _plain_splits(splits: Any) -> list[int] | None:
    return splits.tolist() if isinstance(splits, torch.Tensor) else splits


def _cpu() -> torch.device:
    """No mock, which would keep a record of every call."""
    return torch.device("cpu")


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Answer Megatron-Core's questions to ``torch.cuda`` for the CPU while the block runs."""
    all_to_all_single = dist.all_to_all_single

    def all_to_all_with_plain_splits(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        return all_to_all_single(
            output, input, _plain_splits(output_split_sizes), _plain_splits(input_split_sizes), **kwargs
        )

    keep_freed_memory()
    with (
        mock.patch.object(dist, "all_to_all_single", all_to_all_with_plain_splits),
        mock.patch.object(torch.cuda, "current_device", _cpu),
        mock.patch.object(torch.cuda, "Stream", HostStream),
        mock.patch.object(torch.cuda, "current_stream", HostStream),
        mock.patch.object(torch.cuda, "stream", contextlib.nullcontext),
        mock.patch.object(torch.cuda, "synchronize", HostStream().synchronize),
    ):
        yield


def keep_freed_memory() -> None:
    """Tell the C library to keep freed buffers for reuse, as CUDA's caching allocator does.

    By default glibc maps every large buffer anew and unmaps it again: each layer run would pay for
    zeroed pages, at moments that have nothing to do with the phase that is being timed. Elsewhere
    than on glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def free_memory(device: torch.device) -> None:
    """Give back what is not used any more (layers with hooks hold themselves), and let the peak begin anew."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextlib.contextmanager
def device_scope() -> Iterator[None]:
    """The scope in which layers are built and run: stand-ins on the CPU, and float32 that is float32.

    NGC images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1: float32 products are then TF32 unless a program says otherwise.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with contextlib.nullcontext() if torch.cuda.is_available() else _stand_ins():
            yield
    finally:
        torch.set_float32_matmul_precision(before)
