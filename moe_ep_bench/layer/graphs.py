"""A layer's run kept as CUDA graphs and replayed, as servers run decode steps.

At a few tokens a layer takes less time on the device than its dozens of launches take on the host. A graph issues them
in one call. It holds what does not wait for the host (``gathering``): on one rank the whole layer; under expert
parallelism gate and policy in one graph and the experts in another, with the collectives between them issued as
always. A run is captured for one batch and used for no other: its tensors are the graph's own.

Phases of a captured run are timed by events inside the graph, which the recorder then takes over as if it had set them.

Shapes: T = this rank's tokens, E = experts, D = hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_ep_bench.layer.megatron import MoELayer
from moe_ep_bench.layer.phases import Rendezvous, instrumented, replaced
from moe_ep_bench.timer import Clock, Mark, PhaseRecorder


class Graph(Protocol):
    """Work that was issued once and can be issued again, as a whole."""

    def capture(self, issue: Callable[[], Any]) -> Any:
        """Keep what ``issue`` launches, without running it; return its outputs, filled by every ``replay``."""
        ...

    def replay(self) -> None: ...


class CudaGraphs:
    """Makes graphs that share their memory: only one of them runs at a time, and outputs are read before the next."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self) -> Graph:
        return _CudaGraph(self._pool)


class _CudaGraph:
    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, issue: Callable[[], Any]) -> Any:
        # Other threads (NCCL's watchdog) may ask CUDA what they like meanwhile.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return issue()

    def replay(self) -> None:
        self._graph.replay()


def make_graphs(device: torch.device) -> Callable[[], Graph]:
    """What makes graphs on ``device``, which is a GPU."""
    assert device.type == "cuda", "Parts.choose refuses graphs elsewhere"
    return CudaGraphs()


def _held(layer: MoELayer) -> list[tuple[Any, str]]:
    """The methods that are replayed (``Parts.held_by_graphs`` says it in words)."""
    return (
        [(layer, "forward")] if layer.ep_group.size() == 1 else [(layer.router, "forward"), (layer.experts, "forward")]
    )


class CapturedRun:
    """One run of a layer on one batch, as graphs.

    Attributes:
        output_T1D: what the last replay computed.
        routing: weights and map [T, E] that its router chose.
    """

    def __init__(
        self,
        layer: MoELayer,
        hidden_T1D: Tensor,
        new_graph: Callable[[], Graph],
        clock: Clock,
        meet: Rendezvous,
        *,
        by_phase: bool,
    ) -> None:
        """Run ``layer`` once with the routing that was put into it, capturing on the way.

        The layer must have run on this batch before, so that nothing is compiled or set up while it is captured.

        Args:
            by_phase: keep events at the changes of phase too.

        Raises:
            RuntimeError: the layer does something that cannot be captured, such as waiting for the device.
        """
        self.layer, self._hidden_T1D, self._meet, self._by_phase = layer, hidden_T1D, meet, by_phase
        self._pieces: list[tuple[Any, str, _Piece]] = []
        seen: list[tuple[Tensor, Tensor]] = []
        recorder = PhaseRecorder(clock)
        recorder.begin()
        hook = layer.router.register_forward_hook(lambda module, inputs, output: seen.append(output))
        with contextlib.ExitStack() as stack:
            stack.callback(hook.remove)
            if by_phase:
                stack.enter_context(instrumented(layer, recorder, meet))
            for owner, name in _held(layer):
                piece = _Piece(new_graph(), getattr(owner, name), recorder)
                stack.enter_context(replaced(owner, name, piece.capture))
                self._pieces.append((owner, name, piece))
            self.output_T1D: Tensor = layer(hidden_T1D)[0]
        self.routing = seen[0]

    @contextlib.contextmanager
    def ready(self, recorder: PhaseRecorder | None = None) -> Iterator[Callable[[], None]]:
        """What replays the run, while the block lasts; ``recorder`` gets its phases, where they were captured."""
        assert (recorder is not None) == self._by_phase
        with contextlib.ExitStack() as stack:
            if recorder is not None:
                stack.enter_context(instrumented(self.layer, recorder, self._meet))
            for owner, name, piece in self._pieces:
                stack.enter_context(replaced(owner, name, piece.replay_into(recorder)))
            yield self._run

    def _run(self) -> None:
        self.output_T1D = self.layer(self._hidden_T1D)[0]


class _Piece:
    """One method's run as a graph: its inputs and outputs stay where they were when it was captured."""

    def __init__(self, graph: Graph, method: Callable[..., Any], recorder: PhaseRecorder) -> None:
        self._graph, self._method, self._recorder = graph, method, recorder
        self._inputs: tuple[Any, ...] = ()
        self._outputs: Any = None
        self._marks: list[Mark] = []

    def capture(self, *inputs: Any) -> Any:
        before = len(self._recorder.marks)
        self._inputs = inputs
        self._outputs = self._graph.capture(lambda: self._method(*inputs))
        self._marks = self._recorder.marks[before:]
        self._graph.replay()
        return self._outputs

    def replay_into(self, recorder: PhaseRecorder | None) -> Callable[..., Any]:
        def replay(*inputs: Any) -> Any:
            for kept, given in zip(self._inputs, inputs, strict=True):
                # Tensors that a collective between two graphs has made anew.
                if isinstance(kept, Tensor) and kept.data_ptr() != given.data_ptr():
                    kept.copy_(given)
            self._graph.replay()
            if recorder is not None:
                recorder.splice(self._marks)
            return self._outputs

        return replay
