"""Timers through the depth of a model: every phase of every layer, and what stands outside of them.

A phase is recorded with its layer as ``3:experts``; what belongs to none (embedding, last norm, output layer) without.
MoE layers are instrumented as a layer alone is (``phases``), waiting probes included. Attention and dense layers are
timed as a whole; ``rest`` is what of a layer, and of the decoder around them, is neither: norms and residual additions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from moe_ep_bench.layer.phases import instrumented, replaced
from moe_ep_bench.layer.transformer import Transformer
from moe_ep_bench.records import MOE_REST, PHASES, at
from moe_ep_bench.timer import PhaseRecorder


def phases_in_depth(num_layers: int, moe_layers: Collection[int]) -> list[str]:
    """All phases that a model of so many layers may pass, in their order."""
    names = ["embedding"]
    for layer in range(num_layers):
        own = (*PHASES, MOE_REST) if layer in moe_layers else ("dense",)
        names += [at(layer, phase) for phase in ("rest", "attention", *own)]
    return [*names, "rest", "output"]


class _AtLayer:
    """A recorder's ``wrap`` that adds the layer to a phase's name."""

    def __init__(self, recorder: PhaseRecorder, layer: int) -> None:
        self._recorder = recorder
        self._layer = layer

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._recorder.wrap(at(self._layer, phase), function)


@contextlib.contextmanager
def instrumented_model(transformer: Transformer, recorder: PhaseRecorder, meet: Callable[[], object]) -> Iterator[None]:
    """Time every phase of every layer with ``recorder``, and probe the waiting, while the block runs."""
    gpt = transformer.gpt
    with contextlib.ExitStack() as stack:

        def time(recorder: PhaseRecorder | _AtLayer, owner: Any, phase: str) -> None:
            stack.enter_context(replaced(owner, "forward", recorder.wrap(phase, owner.forward)))

        time(recorder, gpt.embedding, "embedding")
        time(recorder, gpt.decoder, "rest")
        time(recorder, gpt.output_layer, "output")
        for layer, block in enumerate(transformer.layers):
            there = _AtLayer(recorder, layer)
            time(there, block, "rest")
            time(there, block.self_attention, "attention")
            if layer in transformer.pairs:
                stack.enter_context(instrumented(block.mlp, there, meet))
                time(there, block.mlp, MOE_REST)
            else:
                time(there, block.mlp, "dense")
        yield
