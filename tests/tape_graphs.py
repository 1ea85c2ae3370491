"""Graphs for tests without a GPU: what was captured is a tape of tensor operations, played into the same memory again.

Like a CUDA graph a tape knows no Python: only operations on tensors are on it, with their inputs and outputs where they
lay while it was made; what waits for the device (a number read, a shape that follows from values) cannot be captured.
And like one it leaves outputs unset until it is played. Collectives are noted and not run, as NCCL's are: a rank that
captures waits for nobody, and one that plays meets the others. Stamps of ``TapeClock`` are on the tape too, as events
are in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from waits import would_wait

from moe_ep_bench.layer import host
from moe_ep_bench.timing.timer import Clock

_REFUSED = "operation not permitted when stream is capturing"


def _refuse(event: host.HostStream, device: Any = None) -> None:
    """What Megatron-Core waits for when it has copied counts to the host."""
    raise RuntimeError(f"{_REFUSED}: an event is waited for")


class TapeGraph:
    """See ``layer.graphs.Graph``."""

    def __init__(self, pool: object = None) -> None:
        self._tape: list[Callable[[], None]] = []
        self._recording = _Recording(self._tape)
        self._waiting = mock.patch.object(host.HostStream, "synchronize", _refuse)

    def begin(self) -> None:
        TapeClock.tape = self._tape
        self._waiting.start()
        self._recording.__enter__()

    def end(self) -> None:
        self._recording.__exit__(None, None, None)
        self._waiting.stop()
        TapeClock.tape = None
        for tensor, before in reversed(self._recording.written):
            tensor.copy_(before)
        for tensor in self._recording.made:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)

    def replay(self) -> None:
        for play in self._tape:
            play()


class _Recording(TorchDispatchMode):
    def __init__(self, tape: list[Callable[[], None]]) -> None:
        super().__init__()
        self._tape = tape
        self.made: list[Tensor] = []
        self.written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if would_wait(func, args, kwargs):
            raise RuntimeError(f"{_REFUSED}: {func}")
        if func.namespace == "c10d":
            self._tape.append(lambda: Work.unbox(func(*args, **kwargs)[1]).wait())
            # Every collective that a layer runs writes into its first argument.
            for tensor in _tensors(args[0]):
                if any(tensor is one for one in self.made):
                    tensor.zero_()  # What lay there by chance may be no number.
            return args[0], FakeWork().boxed()
        if func._schema.is_mutable:
            self._keep_written(func, args, kwargs)
        result = func(*args, **kwargs)
        places = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        made = [one for one in _tensors(result) if one.untyped_storage().data_ptr() not in places]
        self.made += made
        if made or func._schema.is_mutable:

            def play() -> None:
                again = func(*args, **kwargs)
                for kept, new in zip(_tensors(result), _tensors(again), strict=True):
                    if made:
                        kept.copy_(new)

            self._tape.append(play)
        return result

    def _keep_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """A capture runs nothing: what it would write in place is to lie there as before when it ends."""
        own = {one.untyped_storage().data_ptr() for one in self.made}
        for number, said in enumerate(func._schema.arguments):
            if said.alias_info is not None and said.alias_info.is_write:
                written = args[number] if number < len(args) else kwargs.get(said.name)
                for one in _tensors(written):
                    if one.untyped_storage().data_ptr() not in own:
                        self.written.append((one, one.clone()))


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]


class TapeClock(Clock):
    """A host clock whose stamps are set by each play of the tape on which they are."""

    tape: list[Callable[[], None]] | None = None

    def stamp(self) -> list[int]:
        stamp = [super().stamp()]
        if TapeClock.tape is not None:

            def set_again() -> None:
                stamp[0] = super(TapeClock, self).stamp()

            TapeClock.tape.append(set_again)
        return stamp

    def between_us(self, start: list[int], end: list[int]) -> float:
        return super().between_us(start[0], end[0])


def dense_decode_experts(
    hidden_TD: Tensor, map_TL: Tensor, weights_TL: Tensor, gate_up_L2FD: Tensor, down_LDF: Tensor
) -> Tensor:
    """``decode_experts`` by all experts for all tokens: what a tape can hold, for no shape follows from the map."""
    gate_up_LT2F = torch.einsum("td,lfd->ltf", hidden_TD, gate_up_L2FD)
    gate_LTF, up_LTF = gate_up_LT2F.chunk(2, dim=-1)
    rows_LTD = torch.einsum("ltf,ldf->ltd", torch.nn.functional.silu(gate_LTF) * up_LTF, down_LDF)
    return torch.einsum("ltd,tl->td", rows_LTD, torch.where(map_TL, weights_TL, 0.0)).to(hidden_TD.dtype)
