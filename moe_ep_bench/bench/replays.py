"""Keep the cases of a session as CUDA graphs: capture on every rank or on none, and hold replays against eager runs.

A replay meets the other ranks. So they agree first that all have captured a batch, and a rank that found a difference
replays the later batches too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_ep_bench.bench.inspection import Observation, checked_rows, look
from moe_ep_bench.layer.graphs import CapturedRun, Graphs, unfit_environment
from moe_ep_bench.layer.reference import TOLERANCE
from moe_ep_bench.policies import Routing
from moe_ep_bench.runtime.attempts import is_of_peers, reason_of
from moe_ep_bench.timing.timer import PhaseRecorder, clock_for

if TYPE_CHECKING:
    from moe_ep_bench.bench.session import Case, Session


class Replays:
    """The graphs of a session: one by case, batch and whether its phases are timed."""

    def __init__(self, session: Session) -> None:
        self.session, self.graphs = session, Graphs(session.device)
        self.by_phase = session.settings.breakdown_iterations > 0
        self.captured: dict[tuple[str, int, bool], CapturedRun] = {}

    def capture_all(self) -> None:
        """Keep every case's runs; those that cannot be kept are recorded as failed, on all ranks."""
        session = self.session
        session.meet()  # Its communicator is set up at its first use, which no capture allows.
        for case in list(session.cases):
            session.job.begin(case.case_id)
            said = self.capture(case)
            session.job.guard.explain("")
            if said:
                rank, status, reason = said.split(": ", 2)
                session.drop(case, f"{rank}: {reason}", status)

    def capture(self, case: Case) -> str:
        """Keep a case's runs of all batches; rank, status and reason where a rank cannot, alike on all ranks."""
        unlike, job = "", self.session.job
        for batch in range(self.session.num_batches):
            job.guard.feed()
            eager = look(case, batch)
            if said := job.ranks.first_word(self._keep(case, batch)):
                return said
            output, routed = self._replayed(case, batch)
            unlike = unlike or self._unlike(eager, output, routed, batch)
            if batch:  # The first is looked at again after timing.
                self.captured[case.case_id, batch, False].forget()
        return job.ranks.first_word(unlike and f"failed: {unlike}")

    def _keep(self, case: Case, batch: int) -> str:
        """Capture a batch; status and reason where this rank cannot. Nothing is exchanged with other ranks."""
        session = self.session
        try:
            if session.meet.size > 1 and (unfit := unfit_environment()):
                raise RuntimeError(unfit)
            for by_phase in (False, True)[: 1 + self.by_phase]:
                what = session.stack, case.prepare(batch), self.graphs.new(), clock_for(session.device), session.meet
                run = self.captured[case.case_id, batch, by_phase] = CapturedRun(*what, by_phase=by_phase)
                if by_phase:
                    run.forget()
        except Exception as error:
            if is_of_peers(error):
                raise
            self.graphs.abandon_pool()
            what = (str(error).splitlines() or [type(error).__name__])[0]
            said = f"{reason_of(error).partition(': ')[0]}: cannot be captured as a CUDA graph: {what}"
            # NCCL may set something up between ranks while it captures. Should others wait there, this is why.
            session.job.guard.explain(said)
            return said
        return ""

    def replay(self, case: Case, batch: int, recorder: PhaseRecorder | None) -> None:
        """Run a case once from its graph; ``recorder`` gets the phases."""
        self.captured[case.case_id, batch, recorder is not None].replay(recorder)

    def looked_at(self, case: Case, eager: Observation) -> tuple[Observation, str]:
        """Hold a replay of batch 0 against an eager run: what can be seen of it, and what is wrong."""
        output, routed = self._replayed(case, 0)
        problem = self._unlike(eager, output, routed, 0)
        if None not in routed:
            return eager, problem
        output_ND = output.flatten(0, 1)[checked_rows(self.session, 0)]
        seen = eager.layers[None]._replace(routing=routed[None], output_ND=output_ND)
        return Observation(output, {None: seen}), problem

    def forget(self, case: Case) -> None:
        """Drop a case's graphs: no NCCL communicator can end while one holds its collectives (pytorch#115388)."""
        for key in [key for key in self.captured if key[0] == case.case_id]:
            del self.captured[key]

    def _replayed(self, case: Case, batch: int) -> tuple[Tensor, dict[int | None, Routing]]:
        """A case's output from its graph, and what its layers chose."""
        run = self.captured[case.case_id, batch, False]
        run.replay()
        assert run.output is not None
        chosen = run.routing.items()
        routed = {
            layer: Routing(map_TE=map_TE.clone(), weights_TE=weights.clone()) for layer, (weights, map_TE) in chosen
        }
        return run.output.clone(), routed

    def _unlike(self, eager: Observation, output: Tensor, routed: dict[int | None, Routing], batch: int) -> str:
        """In what a replayed run differs from the same one run eagerly; empty where it does not."""
        if not all(torch.equal(seen.routing.map_TE, routed[layer].map_TE) for layer, seen in eager.layers.items()):
            return f"replayed from a CUDA graph, it routes batch {batch} otherwise"
        gap, size = (float(x.float().norm()) for x in (output - eager.output, eager.output))
        if not gap <= TOLERANCE[self.session.dtype] * size:
            return f"replayed from a CUDA graph, its output on batch {batch} is off by {gap:.2g} of {size:.2g}"
        return ""
