"""Keep a run as one CUDA graph and replay it, as servers run decode steps.

At a few tokens a layer's dozens of launches take longer on the host than their work on the device. A graph issues them
in one call, collectives included. It holds only what does not wait for the host (``components.MapDispatcher``). A run
is captured for one batch, whose tensors the graph reads where they lie: nothing is copied when it is replayed. Its
phases are timed by events inside the graph, which the recorder takes over.

A capture records collectives and runs none, so a rank that cannot capture keeps nobody waiting. A replay runs them: all
ranks must have captured the same, and replay in the same order (NCCL's guide, "Using NCCL with CUDA Graphs").

Shapes: T = this rank's tokens, E = experts.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.layer.phases import Rendezvous
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.timing.timer import Clock, Mark, PhaseRecorder


def unfit_environment() -> str:
    """Why this environment cannot replay NCCL's collectives; empty where it can.

    NCCL registers the buffers of captured collectives as one allocation each. Those of expandable segments are several,
    and a replay hangs or reads other memory (pytorch/pytorch#158029; Megatron-Core 0.20 asks for the same setting).
    """
    settings = [os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    if "expandable_segments:True" in ",".join(settings) and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        return "with expandable_segments:True its collectives need NCCL_GRAPH_REGISTER=0 in the environment"
    return ""


class Graph:
    """Work that was issued once on a GPU and can be issued again, as a whole.

    Graphs of one ``pool`` share their memory: replay one at a time, and read its outputs before the next.
    """

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
        self._capture = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")

    def begin(self) -> None:
        """Capture what is launched from now on, without running it; every ``replay`` fills its outputs."""
        self._outside = torch.cuda.current_stream()
        self._capture.__enter__()

    def end(self) -> None:
        try:
            self._capture.__exit__(None, None, None)
        finally:
            # An invalid capture leaves its stream current.
            torch.cuda.set_stream(self._outside)

    def replay(self) -> None:
        self._graph.replay()


class CapturedRun:
    """One run of a layer or model on one batch, as a graph.

    Attributes:
        output: what the last replay computed; None after ``forget``.
        routing: weights and map [T, E] that each layer's router chose in it.
    """

    def __init__(
        self, stack: Stack, batch: Any, graph: Graph, clock: Clock, meet: Rendezvous, *, by_phase: bool
    ) -> None:
        """Capture ``stack.run(batch)`` with the MoE layers that were taken and the routing that was put into them.

        The same must have run before, and ``meet`` too, so that nothing is compiled or set up during the capture.
        Nothing has been computed until the first replay.

        Args:
            by_phase: keep events at the changes of phase, and the waiting probes.

        Raises:
            RuntimeError: the run does something that cannot be captured, such as waiting for the device.
        """
        self.routing: dict[int | None, tuple[Tensor, Tensor]] = {}
        self._graph, self._marks = graph, list[Mark]()
        recorder = PhaseRecorder(clock) if by_phase else None
        routers = {layer: moe.router for layer, moe in stack.moe_layers.items()}
        # A graph knows addresses alone: what it reads must live as long as it does.
        self._read = batch, meet, [(router.replay_TE, getattr(router, "context", None)) for router in routers.values()]

        def note(layer: int | None, module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            self.routing[layer] = output

        with contextlib.ExitStack() as hooks:
            for layer, router in routers.items():
                hooks.callback(router.register_forward_hook(partial(note, layer)).remove)
            if recorder is not None:
                hooks.enter_context(stack.instrumented(recorder, meet))
                recorder.begin()
            graph.begin()
            try:
                self.output: Tensor | None = stack.run(batch)
            except BaseException:
                # The capture is invalid: its cause says more than the error at its end.
                with contextlib.suppress(RuntimeError):
                    graph.end()
                raise
            graph.end()
        if recorder is not None:
            self._marks = recorder.marks[1:]

    def replay(self, recorder: PhaseRecorder | None = None) -> None:
        """Run again; ``recorder`` gets the phases, where they were captured."""
        assert (recorder is None) == (not self._marks)
        self._graph.replay()
        if recorder is not None:
            recorder.splice(self._marks)

    def forget(self) -> None:
        """Drop the results: later captures may then use their place in the memory that all graphs share."""
        self.output, self.routing = None, {}
