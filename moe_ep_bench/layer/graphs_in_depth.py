"""A whole model's pass kept as CUDA graphs: one on one rank, else one between any two collectives.

Shapes: T = this rank's tokens, E = experts, B = requests, V = words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from moe_ep_bench.layer.depth import instrumented_model
from moe_ep_bench.layer.graphs import Captured, Graph, collectives_of
from moe_ep_bench.layer.passes import Pass
from moe_ep_bench.layer.phases import Rendezvous
from moe_ep_bench.layer.transformer import Transformer
from moe_ep_bench.timer import Clock, PhaseRecorder


class CapturedPass:
    """One pass of a model on one batch, as graphs.

    Attributes:
        logits_BV: what the last replay computed; None once they were forgotten.
        routing: by layer the weights and the map [T, E] that its router chose.
    """

    def __init__(
        self,
        transformer: Transformer,
        run: Pass,
        new_graph: Callable[[], Graph],
        clock: Clock,
        meet: Rendezvous,
        *,
        by_phase: bool,
    ) -> None:
        """Capture ``run`` with the MoE layers that stand in the model and the routing that was put into them.

        Args:
            by_phase: keep events at the changes of phase too.

        Raises:
            RuntimeError: as ``Captured.record``.
        """
        recorder = PhaseRecorder(clock) if by_phase else None
        self._captured = captured = Captured(new_graph, recorder)
        self.routing: dict[int, tuple[Tensor, Tensor]] = {}

        def note(layer: int, module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            self.routing[layer] = output

        with contextlib.ExitStack() as stack:
            for layer, moe in transformer.moe_layers.items():
                stack.callback(moe.router.register_forward_hook(partial(note, layer)).remove)
                stack.enter_context(captured.apart_at(collectives_of(moe)))
            if recorder is not None:
                stack.enter_context(instrumented_model(transformer, recorder, captured.apart(meet)))
            self.logits_BV: Tensor | None = captured.record(lambda: run(transformer.gpt))

    def forget(self) -> None:
        """Keep no results from now on: later captures may take their place in the memory that all graphs share."""
        self.logits_BV, self.routing = None, {}

    def replay(self, recorder: PhaseRecorder | None = None) -> None:
        """Run again; ``recorder`` gets the phases, where they were captured."""
        self._captured.replay(recorder)
