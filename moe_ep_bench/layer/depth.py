"""Timers through the depth of a model: every phase of every layer, and what stands outside of them.

A phase of a layer is recorded as (layer, phase); what belongs to none (embedding, last norm, output layer) by its name.
MoE layers are instrumented as a layer alone is (``phases``), waiting probes included. Attention and dense layers are
timed as a whole; ``rest`` is what of a layer, and of the decoder around them, is neither: norms and residual additions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from moe_ep_bench.layer.megatron import MoELayer
from moe_ep_bench.layer.phases import instrumented, replaced
from moe_ep_bench.schema import MOE_REST
from moe_ep_bench.timing.timer import PhaseRecorder


class _AtLayer:
    """A recorder's ``wrap`` that adds the layer to a phase."""

    def __init__(self, recorder: PhaseRecorder, layer: int) -> None:
        self._recorder = recorder
        self._layer = layer

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._recorder.wrap((self._layer, phase), function)


@contextlib.contextmanager
def instrumented_model(gpt: Any, recorder: PhaseRecorder, meet: Callable[[], object]) -> Iterator[None]:
    """Time every phase of every layer of a GPTModel with ``recorder``, and probe the waiting, while the block runs."""
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
            if isinstance(block.mlp, MoELayer):
                stack.enter_context(instrumented(block.mlp, there, meet))
                time(there, block.mlp, MOE_REST)
            else:
                time(there, block.mlp, "dense")
        yield
