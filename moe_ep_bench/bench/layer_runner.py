"""What real and virtual ranks share: a layer or model that runs here, put in place and timed for one case and batch.

Shapes: T = tokens of one rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from moe_ep_bench.bench.measure import Case, Runner
from moe_ep_bench.bench.point import Point
from moe_ep_bench.layer.experts import DTYPES, TOKENS, seeded_generator
from moe_ep_bench.layer.passes import Decode, KeyValueCache, Pass, Prefill
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.timing.protocol import Step
from moe_ep_bench.timing.timer import PhaseRecorder, Stopwatch


class LayerRunner(Runner):
    """What real and virtual ranks share: layers that run here. They differ in who answers collectives.

    Attributes:
        stack: the layer or model.
        watch: times its runs.
    """

    stack: Stack
    watch: Stopwatch

    def prepare(self, case: Case, batch: int, rank: int = 0) -> Any:
        """Put the case's routing of a rank's tokens into the MoE layers, untimed; return the batch's input."""
        raise NotImplementedError

    def meetings(self, recorder: PhaseRecorder | None) -> contextlib.AbstractContextManager[object]:
        """Answer collectives while the block runs; ``recorder`` gets its phases."""
        raise NotImplementedError

    @contextlib.contextmanager
    def ready(
        self, case: Case, batch: int, recorder: PhaseRecorder | None = None, rank: int = 0
    ) -> Iterator[Callable[[], object]]:
        """Yield a function that runs the case on a rank's tokens of a batch, while the block lasts."""
        run = partial(self.stack.run, self.prepare(case, batch, rank))
        with self.meetings(recorder):
            yield run

    def time_run(self, case: Case, step: Step, recorder: PhaseRecorder | None) -> dict[Any, float]:
        """Microseconds of one run by phase (``timing.timer.timed``)."""
        with self.ready(case, step.batch, recorder, step.rank) as run:
            return self.watch.time(case.case_id, run, f"batch {step.batch} {step.kind} {step.iteration}")


# ---- what runs -------------------------------------------------------------------------------------------------------


def stack_builder(point: Point, device: torch.device) -> Callable[..., Stack]:
    """A function that builds the layer or model of a point, given its process groups (``groups``)."""
    model, settings = point.model, point.experiment.layer
    how = {"seed": settings.seed, "layer_backend": point.layer_backend}
    build = partial(Stack, model, DTYPES[settings.planned_dtype], device, **how)
    if point.scope == "layer":
        return build
    longest = point.context_length + point.most_tokens
    return partial(build, num_layers=point.num_layers, max_length=longest)


def random_pass(
    point: Point,
    device: torch.device,
    batch: int,
    rank: int,
    lengths: Sequence[int],
    cache: KeyValueCache | None,
) -> Pass:
    """A rank's pass of a model over a batch: a decode step where there is a cache, else a prefill.

    Args:
        lengths: tokens of each of the rank's sequences.
    """
    generator = seeded_generator(device, point.experiment.layer.seed, TOKENS, batch, rank)
    assert point.model.vocab_size is not None
    ids_T = torch.randint(point.model.vocab_size, (sum(lengths),), generator=generator, device=device)
    return Prefill(ids_T, lengths) if cache is None else Decode(ids_T, cache)
