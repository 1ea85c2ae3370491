"""Measure one comparison on this rank: build, look, warm up, the measuring loop, look again, gather.

What needs no other rank comes first: ceilings, building, and each case's routing of this rank's tokens. What is raised
there ranks agree on: it becomes a row, and no rank is left waiting in a collective. ``inspection`` holds every case
against the dense reference before and after it is timed; ``timing.protocol.measure`` is the loop. Where cases are
replayed from CUDA graphs, all ranks capture a batch or none does, and replays are held against eager runs.

Shapes: V = cases, S = steps, C = columns of a sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain

import numpy as np
import torch

from moe_ep_bench.bench.comparison import CaseSpec, Comparison
from moe_ep_bench.bench.inspection import (
    check_again,
    compute_alone,
    drop_failing,
    look,
    look_replayed,
    observe_all,
    try_all,
)
from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.rows import Outcome, Samples, columns_of
from moe_ep_bench.bench.session import Case, Session
from moe_ep_bench.layer.graphs import CapturedRun, Graph, unfit_environment
from moe_ep_bench.layer.host import device_scope, free_memory
from moe_ep_bench.layer.megatron import expert_parallel_groups
from moe_ep_bench.machine.monitor import watched_machine
from moe_ep_bench.runtime.attempts import is_of_peers, reason_of, split_reason
from moe_ep_bench.timing.protocol import UNCOUNTED, measure, plan, probe_floor_us, warm_breakdowns, warm_up
from moe_ep_bench.timing.timer import clock_for


def measure_comparison(job: Job, comparison: Comparison, cases: Sequence[CaseSpec]) -> Outcome:
    """Measure ``cases``; every rank calls this alike, and rank 0 gets the samples."""
    job.guard.at(comparison.comparison_id)
    session, reason = None, ""
    # The guard is to end a hang, because it knows who hangs; the collectives' own limit lies behind it.
    groups = expert_parallel_groups(comparison.ep_size, comparison.experiment.measure.timeout_s + 60)
    with device_scope(), torch.inference_mode():
        try:
            session = Measurement(job, comparison, cases, groups)
            compute_alone(session)
        except Exception as error:
            reason = job.record_failure(error)
        if first := job.ranks.first_error(reason):
            rank, _, said = first.partition(": ")
            status, words = split_reason(said)
            outcome = Outcome({case.case_id: (status, f"while building: {rank}: {words}") for case in cases})
        else:
            assert session is not None
            with contextlib.closing(session):
                outcome = session.measured()
    del session
    free_memory(job.ranks.device)
    return outcome


class Measurement(Session):
    """The steps of a comparison's measurement, which all ranks take together.

    Attributes:
        pool: memory of the CUDA graphs.
        timed: cases whose samples there are, in their order; ``samples``, their times.
    """

    def measured(self) -> Outcome:
        """Take the steps of a measurement as long as cases are left; all ranks agree on them."""
        if self._cache is not None:  # of a model that decodes
            assert self.stack.gpt is not None
            self._cache.fill_(self.stack.gpt, self.device, self.seed)
        again = partial(check_again, self)
        captured = [("before timing", [self.capture_all]), ("replayed from CUDA graphs", [again])]
        for when, steps in (
            ("before timing", [partial(try_all, self)]),
            ("before timing", [partial(observe_all, self)]),
            *(captured if self.comparison.parts.cuda_graph else []),
            ("after timing", [self.warm_up, self.time, again]),
        ):
            for step in steps:
                step()
            drop_failing(self, when)
            if not self.cases:
                return self.outcome
        self.job.guard.at(self.comparison.comparison_id)
        self.gather()
        return self.outcome

    def capture_all(self) -> None:
        """Keep every case's runs of all batches as CUDA graphs.

        A replay meets the other ranks. So they agree first that all have captured a batch, and were alike in the one
        before; where a rank cannot capture, that is the case's problem there.
        """
        self.captured, self.pool = {}, torch.cuda.graph_pool_handle()
        self.meet()  # Its communicator is set up at its first use, which no capture allows.
        for case in self.cases:
            self.job.begin(case.case_id)
            for batch in range(self.num_batches):
                self.job.guard.feed()
                eager = look(case, batch)
                self._capture(case, batch)
                if self.job.ranks.first_error(case.problem):
                    break
                look_replayed(case, batch, eager)
                if batch:  # The first is looked at again after timing.
                    self.captured[case.case_id, batch, False].forget()

    def _capture(self, case: Case, batch: int) -> None:
        """Capture a batch, once more with its phases where these are timed. Nothing is exchanged with other ranks."""
        try:
            if self.meet.size > 1 and (unfit := unfit_environment()):
                raise RuntimeError(unfit)
            for by_phase in (False, True) if self.settings.breakdown_iterations else (False,):
                what = self.stack, case.prepare(batch), Graph(self.pool), clock_for(self.device), self.meet
                run = self.captured[case.case_id, batch, by_phase] = CapturedRun(*what, by_phase=by_phase)
                if by_phase:
                    run.forget()
        except Exception as error:
            if is_of_peers(error):
                raise
            self.pool = torch.cuda.graph_pool_handle()  # that of a capture which failed may stay in use
            words = (str(error).splitlines() or [type(error).__name__])[0]
            said = f"{reason_of(error).partition(': ')[0]}: cannot be captured as a CUDA graph: {words}"
            case.problem = case.problem or said
            # NCCL may set something up between ranks while it captures. Should others wait there, this is why.
            self.job.guard.explain(said)

    def warm_up(self) -> None:
        clock = clock_for(self.device)
        if self.settings.breakdown_iterations:
            warm_breakdowns(self.cases, self.num_batches, clock, self.meet, self.job.begin)
        slowest = lambda times_B: np.max(self.job.ranks.all_gather(times_B), axis=0)  # noqa: E731
        result = warm_up(self.cases, self.num_batches, self.settings.warmup, clock, slowest, self.job.begin)
        self.conditions["warm_up"] = asdict(result)

    def time(self) -> None:
        """Run the measuring loop, and say what this rank's machine did meanwhile."""
        self.timed = list(self.cases)  # Later checks may take cases away; samples stay in this order.
        steps = plan(self.num_batches, self.settings.iterations, self.settings.breakdown_iterations)
        counted = [step for step in steps if step.kind != UNCOUNTED]
        self.samples = Samples(self.timed, counted, columns_of(self.comparison))
        with watched_machine(self.device, self.ceilings) as here, self.watch.recorder.clock.watched():
            measure(self.timed, steps, self.job.begin, self.samples.add)
        if self.meet.size > 1:
            here["probe_floor_us"] = probe_floor_us(self.meet, clock_for(self.device))
        self.conditions["ranks"] = self.job.ranks.gather(here)

    def gather(self) -> None:
        """Gather all ranks' samples and metrics to rank 0, which writes them."""
        ranks, outcome = self.job.ranks, self.outcome
        if self.captured is None:
            self.conditions["unclocked"] = {case.case_id: case.unclocked for case in self.cases if case.unclocked}
        outcome.conditions, outcome.steps, outcome.columns = self.conditions, self.samples.steps, self.samples.columns
        for case, times_SC in zip(self.timed, self.samples.times_VSC, strict=True):
            if case in self.cases:
                self.job.guard.feed()
                of_ranks = ranks.gather((times_SC, list(case.rows.values())))
                if ranks.is_first:
                    times_R, rows_R = zip(*of_ranks, strict=True)
                    outcome.times[case.case_id] = np.stack(times_R)
                    outcome.rows[case.case_id] = list(chain(*rows_R))
