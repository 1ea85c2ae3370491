"""Runs kept as CUDA graphs and replayed, as servers run decode steps.

At a few tokens a layer takes less time on the device than its dozens of launches take on the host. A graph issues them
in one call. It holds what does not wait for the host (``gathering``): on one rank the whole layer, or the whole pass of
a model (``graphs_in_depth``). Under expert parallelism a run is taken apart at its collectives: what lies between two
of them is one graph, from one layer's combine to the next layer's dispatch, and they are issued as always. A run is
captured for one batch and used for no other: its tensors are the graphs' own.

Phases of a captured run are timed by events inside the graphs, which the recorder then takes over as if it had set
them.

Shapes: T = this rank's tokens, E = experts, D = hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_ep_bench.layer.megatron import MoELayer
from moe_ep_bench.layer.phases import Rendezvous, instrumented, replaced
from moe_ep_bench.timer import Clock, Mark, PhaseRecorder


class Graph(Protocol):
    """Work that was issued once and can be issued again, as a whole."""

    def begin(self) -> None:
        """Keep what is launched from now on, without running it; every ``replay`` fills what it returns."""
        ...

    def end(self) -> None: ...

    def replay(self) -> None: ...


class CudaGraphs:
    """Makes graphs that share their memory: only one of them runs at a time, and outputs are read before the next."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self) -> Graph:
        return _CudaGraph(self._pool)


class _CudaGraph:
    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may ask CUDA what they like meanwhile.
        self._capture = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        self._outside: Any = None

    def begin(self) -> None:
        self._outside = torch.cuda.current_stream()
        self._capture.__enter__()

    def end(self) -> None:
        try:
            self._capture.__exit__(None, None, None)
        finally:
            # A capture that has become void leaves its stream current.
            torch.cuda.set_stream(self._outside)

    def replay(self) -> None:
        self._graph.replay()


def make_graphs(device: torch.device) -> Callable[[], Graph]:
    """What makes graphs on ``device``, which is a GPU."""
    assert device.type == "cuda", "Parts.choose refuses graphs elsewhere"
    return CudaGraphs()


def collectives_of(layer: MoELayer) -> list[tuple[Any, str]]:
    """The methods in which ranks meet, where there are several; what they return follows from their arguments alone."""
    if layer.ep_group.size() == 1:
        return []
    found = [(layer.token_dispatcher, "gathered"), (layer.token_dispatcher, "token_combine")]
    return [*found, (layer.router, "sum_over_ranks")] if hasattr(layer.router, "sum_over_ranks") else found


class Captured:
    """Work as graphs, with calls that are issued as always between them, in their order.

    Make one, wrap what is to stay outside of graphs (``apart``), ``record`` the work, ``replay`` it.
    """

    def __init__(self, new_graph: Callable[[], Graph], recorder: PhaseRecorder | None = None) -> None:
        """
        Args:
            recorder: times the phases of the work that is recorded; None = they are not timed.
        """
        self._new_graph, self._recorder = new_graph, recorder
        self._steps: list[Callable[[], object]] = []
        self._open: Graph | None = None
        self._marks: list[Mark] = []

    @contextlib.contextmanager
    def apart_at(self, methods: Sequence[tuple[Any, str]]) -> Iterator[None]:
        """Keep these methods outside of graphs while the block lasts."""
        with contextlib.ExitStack() as stack:
            for owner, name in methods:
                stack.enter_context(replaced(owner, name, self.apart(getattr(owner, name))))
            yield

    def apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` as something that ends one graph, runs, and begins the next."""

        def call(*inputs: Any) -> Any:
            self._close()
            outputs = function(*inputs)
            self._steps.append(partial(_again, function, inputs, outputs))
            self._begin()
            return outputs

        return call

    def record(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` once, capturing on the way; return what it returned, which every ``replay`` fills anew.

        It must have run before, so that nothing is compiled or set up while it is captured.

        Raises:
            RuntimeError: it does something that cannot be captured, such as waiting for the device.
        """
        if self._recorder is not None:
            self._recorder.begin()
        self._begin()
        try:
            returned = work()
        except BaseException:
            if self._open is not None:
                # The capture is void; what has voided it says more than its end.
                with contextlib.suppress(RuntimeError):
                    self._open.end()
            raise
        self._close()
        if self._recorder is not None:
            self._marks = self._recorder.marks[1:]
        return returned

    def replay(self, recorder: PhaseRecorder | None = None) -> None:
        """Issue everything again; ``recorder`` gets the phases, where they were recorded."""
        assert (recorder is None) == (self._recorder is None)
        for step in self._steps:
            step()
        if recorder is not None:
            recorder.splice(self._marks)

    def _begin(self) -> None:
        self._open = self._new_graph()
        self._open.begin()

    def _close(self) -> None:
        """End the open graph, and run it: what follows is to see what it computes."""
        assert self._open is not None
        graph, self._open = self._open, None
        graph.end()
        graph.replay()
        self._steps.append(graph.replay)


def _again(function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> None:
    """Call ``function`` anew, and copy what it returns to where the next graph expects it."""
    for kept, new in zip(_tensors(outputs), _tensors(function(*inputs)), strict=True):
        if kept.data_ptr() != new.data_ptr():
            kept.copy_(new)


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in (values if isinstance(values, tuple) else (values,)) if isinstance(one, Tensor)]


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
        """Capture a run of ``layer`` with the routing that was put into it.

        Args:
            by_phase: keep events at the changes of phase too.

        Raises:
            RuntimeError: as ``Captured.record``.
        """
        recorder = PhaseRecorder(clock) if by_phase else None
        self._captured = captured = Captured(new_graph, recorder)
        seen: list[tuple[Tensor, Tensor]] = []
        hook = layer.router.register_forward_hook(lambda module, inputs, output: seen.append(output))
        with contextlib.ExitStack() as stack:
            stack.callback(hook.remove)
            stack.enter_context(captured.apart_at(collectives_of(layer)))
            if recorder is not None:
                stack.enter_context(instrumented(layer, recorder, captured.apart(meet)))
            self.output_T1D: Tensor = captured.record(lambda: layer(hidden_T1D)[0])
        self.routing = seen[0]

    def replay(self, recorder: PhaseRecorder | None = None) -> None:
        """Run again; ``recorder`` gets the phases, where they were captured."""
        self._captured.replay(recorder)
