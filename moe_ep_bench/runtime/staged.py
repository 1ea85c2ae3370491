"""A process group whose collectives pass through the host: for ranks that share a GPU where NCCL lets them not.

Every tensor is copied to (pinned) host memory behind what is queued on the current stream, the host waits for it, gloo
exchanges the copies, and the results are queued on the same stream. So collectives are in order with everything else on
their stream, and the host is kept waiting in each: for rehearsals, whose times mean nothing. CPU tensors take the same
way.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from moe_ep_bench.runtime.sharing import STAGED

_c10d: Any = _distributed_c10d  # torch's stubs lack some of it, and ask a group for a store, which it does not take


def register() -> None:
    """Let ``torch.distributed`` know the backend ``staged``; again does nothing."""
    if not hasattr(dist.Backend, STAGED.upper()):
        dist.Backend.register_backend(STAGED, _new_group, devices=["cpu", "cuda"])


def _new_group(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> StagedGroup:
    return StagedGroup(store, rank, size, timeout)


class StagedGroup(dist.ProcessGroup):
    """See the module. Methods are those of ``ProcessGroup`` that ``torch.distributed`` calls, by both their names.

    An asynchronous collective is done when it returns: its work is only waited for by other streams.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._gloo: Any = _c10d.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802  torch names it
        return STAGED

    def _staged(self, read: Sequence[Tensor], written: Sequence[Tensor], act: Callable[..., Any]) -> dist.Work:
        """Do a collective on copies.

        Args:
            read: what it sends; ``written``: what it fills. A tensor may be both.
            act: called with the copies of both, in order; returns gloo's work.

        Raises:
            RuntimeError: as gloo raises it, where a peer is gone or late.
        """
        copies = {id(tensor): _host_copy(tensor) for tensor in read}
        copies |= {id(tensor): _host_buffer(tensor) for tensor in written if id(tensor) not in copies}
        devices = {tensor.device for tensor in (*read, *written) if tensor.is_cuda}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        act([copies[id(tensor)] for tensor in read], [copies[id(tensor)] for tensor in written]).wait()
        for tensor in written:
            tensor.copy_(copies[id(tensor)], non_blocking=True)
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=sorted(devices, key=str))
        done.set_result(list(written))  # on this stream; who waits on another one has it wait for this
        return _c10d._create_work_from_future(done)

    # ---- in one tensor -----------------------------------------------------------------------------------------------

    def all_to_all_single(
        self, output: Tensor, sent: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        """Splits are rows by rank; empty lists = all alike."""
        opts = opts or dist.AllToAllOptions()
        return self._staged(
            [sent],
            [output],
            lambda read, written: self._gloo.alltoall_base(*written, *read, output_splits, input_splits, opts),
        )

    def all_gather_single(self, output: Tensor, sent: Tensor, opts: Any = None) -> dist.Work:
        opts = opts or _c10d.AllgatherOptions()
        return self._staged([sent], [output], lambda read, written: self._gloo._allgather_base(*written, *read, opts))

    def reduce_scatter_single(self, output: Tensor, sent: Tensor, opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        return self._staged(
            [sent], [output], lambda read, written: self._gloo._reduce_scatter_base(*written, *read, opts)
        )

    # As torch before 2.13 calls them, with other names of their arguments.
    alltoall_base = all_to_all_single  # pyright: ignore[reportAssignmentType]
    _allgather_base = all_gather_single  # pyright: ignore[reportAssignmentType]
    _reduce_scatter_base = reduce_scatter_single  # pyright: ignore[reportAssignmentType]

    # ---- in lists ----------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        return self._staged(tensors, tensors, lambda read, _: self._gloo.allreduce(read, opts))

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._staged(tensors, tensors, lambda read, _: self._gloo.reduce(read, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._staged(tensors, tensors, lambda read, _: self._gloo.broadcast(read, opts))

    def allgather(self, outputs: list[list[Tensor]], sent: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or _c10d.AllgatherOptions()
        (of_ranks,) = outputs
        return self._staged(sent, of_ranks, lambda read, written: self._gloo.allgather([written], read, opts))

    def reduce_scatter(self, outputs: list[Tensor], sent: list[list[Tensor]], opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        (of_ranks,) = sent
        return self._staged(of_ranks, outputs, lambda read, written: self._gloo.reduce_scatter(written, [read], opts))

    def alltoall(self, outputs: list[Tensor], sent: list[Tensor], opts: Any = None) -> dist.Work:
        """gloo has none of lists: they go as one tensor, split by their sizes."""
        output_splits, input_splits = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in sent]

        def act(read: Sequence[Tensor], written: Sequence[Tensor]) -> Any:
            flat = torch.cat([tensor.reshape(-1) for tensor in read])
            received = flat.new_empty(sum(output_splits))
            self._gloo.alltoall_base(received, flat, output_splits, input_splits, dist.AllToAllOptions()).wait()
            for tensor, part in zip(written, received.split(output_splits), strict=True):
                tensor.copy_(part.view_as(tensor))
            return self._gloo.barrier(dist.BarrierOptions())  # a work to wait for; the exchange itself is done

        return self._staged(sent, outputs, act)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Streams too: what ranks have queued before it is done when it returns."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self._staged([], [], lambda *_: self._gloo.barrier(dist.BarrierOptions()))


def _host_buffer(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _host_copy(tensor: Tensor) -> Tensor:
    return _host_buffer(tensor).copy_(tensor, non_blocking=True)
