"""How a point is measured: check, warm up, time, check again. Real and virtual ranks go the same way.

A *runner* runs the cases of one point. ``RealRanks`` is this rank among others, and torch.distributed carries what
ranks exchange. ``VirtualRanks`` stands for all ranks, one after another, and answers what they would exchange by
itself. ``ModelledRanks`` stands for ranks on a device that is not here: nothing runs, and so nothing is checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_ep_bench.bench.point import CaseSpec
from moe_ep_bench.bench.result import Result, Row
from moe_ep_bench.runtime.attempts import Loss
from moe_ep_bench.timing.protocol import Step, measure
from moe_ep_bench.timing.timer import PhaseRecorder


@dataclass(eq=False)
class Case:
    """A case on a runner (``timing.protocol``), and what was found of it on this rank.

    Attributes:
        rows: of its routing, by batch and layer.
        error: the worst beside the reference.
        problem: the first thing that was found wrong.
        unclocked: places in which its host waits for the device and no clock sees it, ``file:line``.
    """

    spec: CaseSpec
    runner: Any
    rows: dict[tuple[int, int | None], Row] = field(default_factory=dict)
    error: float = 0.0
    problem: Loss | None = None
    unclocked: list[str] = field(default_factory=list)

    @property
    def case_id(self) -> str:
        return self.spec.case_id

    def ready(
        self, batch: int, recorder: PhaseRecorder | None = None
    ) -> contextlib.AbstractContextManager[Callable[[], object]]:
        return self.runner.ready(self, batch, recorder)

    def time(self, step: Step) -> Any:
        return self.runner.time(self, step)


class Runner:
    """The cases of one point that are in order, on the ranks that this process stands for.

    A step of the protocol that finds a case wrong on any rank drops it on all of them. Steps that a runner has no need
    of do nothing.
    """

    cases: list[Case]

    def try_alone(self) -> None:
        """Run every case as far as no rank waits for another: what raises costs that case alone."""

    def check(self) -> None:
        """Run every case, and hold what its layers compute against the dense reference."""

    def capture(self) -> None:
        """Keep the runs of cases as CUDA graphs where the config asks for that, and hold replays against eager runs."""

    def warm_up(self) -> None:
        """Run all cases until times have settled."""

    def watched(self) -> contextlib.AbstractContextManager[object]:
        """Record what the machine does in the block."""
        return contextlib.nullcontext()

    def schedule(self) -> Iterable[Sequence[Step]]:
        """The steps to time, in parts; times of a part are put together before the next."""
        raise NotImplementedError

    def keep(self, case: int, step: Step, times: Any) -> None:
        """Keep the times of an iteration of a case."""
        raise NotImplementedError

    def check_again(self) -> None:
        """Hold cases against the reference once more."""

    def finish(self) -> Result:
        """The result of all ranks."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what would keep process groups from ending."""


def measure_point(runner: Runner, begin: Callable[[str], object]) -> Result:
    """Measure one point; every rank takes the same steps.

    Args:
        begin: called with a case's id ahead of each of its iterations.
    """
    # Check: nothing is timed that computes something else.
    for check in (runner.try_alone, runner.check, runner.capture):
        check()
        if not runner.cases:
            return runner.finish()

    # Warm up: rounds over all cases, until one takes as long as the one before it.
    runner.warm_up()

    # Time: at every step each case once, in an order that changes from step to step.
    with runner.watched():
        for steps in runner.schedule():
            measure(runner.cases, steps, begin, runner.keep)

    # Check again: what was timed still computes the same.
    runner.check_again()
    return runner.finish()
