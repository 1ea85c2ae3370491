"""Which method of a layer or model is which phase, and where ranks meet: timers and waiting probes on them.

A collective lasts until the slowest rank has come and moved its data; timed alone it mixes the two. In front of every
method in which ranks meet a one-element all-reduce is therefore run and timed on its own: it ends when the last rank
arrives, so what it took is waiting and what follows is transfer. Plain iterations, from which speedups come, run
without any of this.

Phases of an MoE layer: ``gate`` is the router's GEMM, ``policy`` the score function and the selection (for ``native``
Megatron-Core's own), ``metadata`` the exchange of counts and the host sync, ``permute`` both permutations and their
inverses, ``dispatch`` and ``combine`` the all-to-alls, ``experts`` and ``shared`` the FFNs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from moe_ep_bench.schema import MOE_REST, phase_key

if TYPE_CHECKING:
    from moe_ep_bench.layer.megatron import MoELayer
    from moe_ep_bench.timing.timer import PhaseRecorder


class TimedMethod(NamedTuple):
    """A method ``owner.method`` of an MoE layer ('' = its own) that belongs to ``phase``.

    ``waits`` names the phase of the waiting before it, where ranks meet in it.
    """

    owner: str
    method: str
    phase: str
    waits: str | None = None


# They nest (``dispatch_preprocess`` calls ``preprocess``): what is nested inside another is taken out of it.
# ``postprocess`` adds the shared experts' output to what ``combine_postprocess`` returns.
TIMED_METHODS = (
    TimedMethod("router", "gating", "gate"),
    TimedMethod("router", "routing", "policy"),
    TimedMethod("router", "sum_over_ranks", "policy", waits="wait_policy"),
    TimedMethod("token_dispatcher", "dispatch_preprocess", "permute"),
    TimedMethod("token_dispatcher", "preprocess", "metadata", waits="wait_metadata"),
    TimedMethod("token_dispatcher", "_maybe_dtoh_and_synchronize", "metadata"),
    TimedMethod("token_dispatcher", "token_dispatch", "dispatch", waits="wait_dispatch"),
    TimedMethod("token_dispatcher", "dispatch_postprocess", "permute"),
    TimedMethod("experts", "forward", "experts"),
    TimedMethod("token_dispatcher", "combine_preprocess", "permute"),
    TimedMethod("token_dispatcher", "token_combine", "combine", waits="wait_combine"),
    TimedMethod("token_dispatcher", "combine_postprocess", "permute"),
    TimedMethod("", "shared_experts_compute", "shared"),
    TimedMethod("", "postprocess", "shared"),
)


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
def instrumented(
    moe: MoELayer, recorder: PhaseRecorder, meet: Callable[[], object], layer: int | None = None
) -> Iterator[None]:
    """Time every phase of an MoE layer with ``recorder``, and probe the waiting, while the block runs.

    Args:
        layer: which of a model it is; None = it stands alone.
    """
    with contextlib.ExitStack() as stack:
        for place, method, phase, waits in TIMED_METHODS:
            owner = getattr(moe, place) if place else moe
            if not hasattr(owner, method) or (phase == "shared" and not moe.use_shared_expert):
                continue
            run = recorder.wrap(phase_key(layer, phase), getattr(owner, method))
            if waits is not None and moe.ep_group.size() > 1:
                run = _after(recorder.wrap(phase_key(layer, waits), meet), run)
            stack.enter_context(replaced(owner, method, run))
        yield


def _after(wait: Callable[[], object], run: Callable[..., Any]) -> Callable[..., Any]:
    def wait_then_run(*args: Any, **kwargs: Any) -> Any:
        wait()
        return run(*args, **kwargs)

    return wait_then_run


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


@contextlib.contextmanager
def instrumented_model(gpt: Any, recorder: PhaseRecorder, meet: Callable[[], object]) -> Iterator[None]:
    """Time every phase of every layer of a GPTModel with ``recorder``, and probe the waiting, while the block runs.

    A phase of a layer is recorded as (layer, phase); what belongs to none (embedding, last norm, output layer) by its
    name. Attention and dense layers are timed as a whole; ``rest`` is all else of a layer and of the decoder around it:
    norms and residual additions.
    """
    with contextlib.ExitStack() as stack:

        def time(owner: Any, phase: str, layer: int | None = None) -> None:
            run = recorder.wrap(phase_key(layer, phase), owner.forward)
            stack.enter_context(replaced(owner, "forward", run))

        time(gpt.embedding, "embedding")
        time(gpt.decoder, "rest")
        time(gpt.output_layer, "output")
        for layer, block in enumerate(gpt.decoder.layers):
            time(block, "rest", layer)
            time(block.self_attention, "attention", layer)
            if hasattr(block.mlp, "token_dispatcher"):  # an MoE layer
                stack.enter_context(instrumented(block.mlp, recorder, meet, layer))
                time(block.mlp, MOE_REST, layer)
            else:
                time(block.mlp, "dense", layer)
        yield
