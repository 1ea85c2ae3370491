"""Timers and waiting probes on the stages of layers and models, on for breakdown iterations and then off again.

A collective lasts until the slowest rank has come and moved its data; timed alone it mixes the
two. In front of every stage in which ranks meet a one-element all-reduce is therefore run and
timed on its own: it ends when the last rank arrives, so what it took is waiting and what follows
is transfer. Plain iterations, from which speedups come, run without any of this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from moe_ep_bench.layer.stages import Stage, stages_of
from moe_ep_bench.schema import MOE_REST

if TYPE_CHECKING:
    from moe_ep_bench.layer.megatron import MoELayer
    from moe_ep_bench.timing.timer import PhaseRecorder


class Wraps(Protocol):
    """What credits a function's time to a phase: a ``PhaseRecorder``."""

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]: ...


class Rendezvous:
    """The smallest collective: every rank of the group has come when it returns (on CUDA: on the stream)."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._token = torch.zeros(1, device=device)

    @property
    def size(self) -> int:
        return self._group.size()

    def __call__(self) -> None:
        dist.all_reduce(self._token, group=self._group)


@contextlib.contextmanager
def instrumented(layer: MoELayer, recorder: Wraps, meet: Callable[[], object]) -> Iterator[None]:
    """Time every stage of ``layer`` with ``recorder``, and probe the waiting, while the block runs."""
    alone = layer.ep_group.size() == 1
    with contextlib.ExitStack() as stack:
        for owner, stage in stages_of(layer):
            method = _timed(getattr(owner, stage.method), stage, recorder, meet, alone)
            stack.enter_context(replaced(owner, stage.method, method))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Hide ``owner.name`` behind an attribute of the instance while the block runs."""
    hidden = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        delattr(owner, name)
        if hidden is not None:
            setattr(owner, name, hidden)


def _timed(
    method: Callable[..., Any], stage: Stage, recorder: Wraps, meet: Callable[[], object], alone: bool
) -> Callable[..., Any]:
    run = recorder.wrap(stage.phase, method)
    if stage.waits is None or alone:
        return run
    wait = recorder.wrap(stage.waits, meet)

    def wait_then_run(*args: Any, **kwargs: Any) -> Any:
        wait()
        return run(*args, **kwargs)

    return wait_then_run


class _AtLayer:
    """A recorder's ``wrap`` that adds the layer to a phase."""

    def __init__(self, recorder: PhaseRecorder, layer: int) -> None:
        self._recorder = recorder
        self._layer = layer

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._recorder.wrap((self._layer, phase), function)


@contextlib.contextmanager
def instrumented_model(gpt: Any, recorder: PhaseRecorder, meet: Callable[[], object]) -> Iterator[None]:
    """Time every phase of every layer of a GPTModel with ``recorder``, and probe the waiting, while the block runs.

    A phase of a layer is recorded as (layer, phase); what belongs to none (embedding, last norm, output layer) by its
    name. Attention and dense layers are timed as a whole; ``rest`` is what of a layer, and of the decoder around them,
    is neither: norms and residual additions.
    """
    with contextlib.ExitStack() as stack:

        def time(recorder: PhaseRecorder | _AtLayer, owner: Any, phase: str) -> None:
            stack.enter_context(replaced(owner, "forward", recorder.wrap(phase, owner.forward)))

        time(recorder, gpt.embedding, "embedding")
        time(recorder, gpt.decoder, "rest")
        time(recorder, gpt.output_layer, "output")
        for layer, block in enumerate(gpt.decoder.layers):
            there = _AtLayer(recorder, layer)
            time(there, block, "rest")
            time(there, block.self_attention, "attention")
            if hasattr(block.mlp, "token_dispatcher"):  # an MoE layer
                stack.enter_context(instrumented(block.mlp, there, meet))
                time(there, block.mlp, MOE_REST)
            else:
                time(there, block.mlp, "dense")
        yield
