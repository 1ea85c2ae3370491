"""Keep a run as CUDA graphs and replay it, as servers run decode steps.

At a few tokens a layer's dozens of launches take longer on the host than their work on the device. A graph issues them
in one call. It holds only what does not wait for the host (``dispatchers.MapDispatcher``): on one rank the whole run,
under expert parallelism what lies between two collectives, which are issued as always. A run is captured for one batch,
whose tensors are the graphs' own. Its phases are timed by events inside the graphs, which the recorder takes over.

Shapes: T = this rank's tokens, E = experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.layer.build import Subject
from moe_ep_bench.layer.megatron import MoELayer
from moe_ep_bench.layer.phases import Rendezvous, replaced
from moe_ep_bench.timing.timer import Clock, Mark, PhaseRecorder


def make_graphs(device: torch.device) -> Callable[[], Graph]:
    """Return a maker of graphs on ``device``, a GPU.

    The graphs share their memory: run one at a time, and read its outputs before the next.
    """
    assert device.type == "cuda", "Parts.choose refuses graphs elsewhere"
    return partial(Graph, torch.cuda.graph_pool_handle())


class Graph:
    """Work that was issued once and can be issued again, as a whole."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
        self._capture = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        self._outside: Any = None

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
    """One run of a layer or model on one batch, as graphs and the calls between them.

    Attributes:
        output: what the last replay computed; None after ``forget``.
        routing: weights and map [T, E] that each layer's router chose.
    """

    def __init__(
        self,
        subject: Subject,
        batch: Any,
        new_graph: Callable[[], Graph],
        clock: Clock,
        meet: Rendezvous,
        *,
        by_phase: bool,
    ) -> None:
        """Capture ``subject.run(batch)`` with the MoE layers that were taken and the routing that was put into them.

        The same must have run before, so that nothing is compiled or set up during the capture.

        Args:
            by_phase: keep events at the changes of phase too.

        Raises:
            RuntimeError: the run does something that cannot be captured, such as waiting for the device.
        """
        self.routing: dict[int | None, tuple[Tensor, Tensor]] = {}
        self._new_graph, self._recorder = new_graph, PhaseRecorder(clock) if by_phase else None
        self._steps: list[Callable[[], object]] = []
        self._open: Graph | None = None
        self._marks: list[Mark] = []

        def note(layer: int | None, module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            self.routing[layer] = output

        with contextlib.ExitStack() as stack:
            for layer, moe in subject.moe_layers.items():
                stack.callback(moe.router.register_forward_hook(partial(note, layer)).remove)
                for owner, name in _collectives_of(moe):
                    stack.enter_context(replaced(owner, name, self._apart(getattr(owner, name))))
            if self._recorder is not None:
                stack.enter_context(subject.instrumented(self._recorder, self._apart(meet)))
            self.output: Tensor | None = self._record(partial(subject.run, batch))

    def replay(self, recorder: PhaseRecorder | None = None) -> None:
        """Run again; ``recorder`` gets the phases, where they were captured."""
        assert (recorder is None) == (self._recorder is None)
        for step in self._steps:
            step()
        if recorder is not None:
            recorder.splice(self._marks)

    def forget(self) -> None:
        """Drop the results: later captures may then use their place in the memory that all graphs share."""
        self.output, self.routing = None, {}

    def _apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` so that it ends one graph, runs, and begins the next."""

        def call(*inputs: Any) -> Any:
            self._close()
            outputs = function(*inputs)
            self._steps.append(partial(_again, function, inputs, outputs))
            self._begin()
            return outputs

        return call

    def _record(self, work: Callable[[], Tensor]) -> Tensor:
        if self._recorder is not None:
            self._recorder.begin()
        self._begin()
        try:
            returned = work()
        except BaseException:
            if self._open is not None:
                # The capture is invalid: its cause says more than the error at its end.
                with contextlib.suppress(RuntimeError):
                    self._open.end()
            raise
        self._close()
        if self._recorder is not None:
            self._marks = self._recorder.marks[1:]
        return returned

    def _begin(self) -> None:
        self._open = self._new_graph()
        self._open.begin()

    def _close(self) -> None:
        """End the open graph, and run it: the next call reads what it computes."""
        assert self._open is not None
        graph, self._open = self._open, None
        graph.end()
        graph.replay()
        self._steps.append(graph.replay)


def _collectives_of(layer: MoELayer) -> list[tuple[Any, str]]:
    """Methods in which several ranks meet; what they return follows from their arguments alone."""
    if layer.ep_group.size() == 1:
        return []
    found = [(layer.token_dispatcher, "gathered"), (layer.token_dispatcher, "token_combine")]
    return [*found, (layer.router, "sum_over_ranks")] if hasattr(layer.router, "sum_over_ranks") else found


def _again(function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> None:
    """Call ``function`` anew, and copy what it returns to where the next graph expects it."""
    for kept, new in zip(_tensors(outputs), _tensors(function(*inputs)), strict=True):
        if kept.data_ptr() != new.data_ptr():
            kept.copy_(new)


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in (values if isinstance(values, tuple) else (values,)) if isinstance(one, Tensor)]
