"""Keep the cases of a session as CUDA graphs: capture on every rank or on none, and hold replays against eager runs.

A replay meets the other ranks. So they agree first that all have captured a batch, and were alike in the one before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_ep_bench.bench.inspection import Observation, checked_rows, look
from moe_ep_bench.layer.experts import TOLERANCE
from moe_ep_bench.layer.graphs import CapturedRun, Graph, unfit_environment
from moe_ep_bench.policies import Routing
from moe_ep_bench.runtime.attempts import is_of_peers, reason_of
from moe_ep_bench.timing.timer import PhaseRecorder, clock_for

if TYPE_CHECKING:
    from moe_ep_bench.bench.session import Case, Session


class Replays:
    """The graphs of a session: one by case, batch and whether its phases are timed."""

    def __init__(self, session: Session) -> None:
        self.session, self.pool = session, torch.cuda.graph_pool_handle()
        self.by_phase = session.settings.breakdown_iterations > 0
        self.captured: dict[tuple[str, int, bool], CapturedRun] = {}

    def capture(self, case: Case) -> None:
        """Keep a case's runs of all batches; where a rank cannot, that is the case's problem there."""
        for batch in range(self.session.num_batches):
            self.session.job.guard.feed()
            eager = look(case, batch)
            self._keep(case, batch)
            if self.session.job.ranks.first_word(case.problem):
                return
            self.look(case, batch, eager)
            if batch:  # The first is looked at again after timing.
                self.captured[case.case_id, batch, False].forget()

    def _keep(self, case: Case, batch: int) -> None:
        """Capture a batch. Nothing is exchanged with other ranks."""
        session = self.session
        try:
            if session.meet.size > 1 and (unfit := unfit_environment()):
                raise RuntimeError(unfit)
            for by_phase in (False, True)[: 1 + self.by_phase]:
                what = session.stack, case.prepare(batch), Graph(self.pool), clock_for(session.device), session.meet
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
            session.job.guard.explain(said)

    def replay(self, case: Case, batch: int, recorder: PhaseRecorder | None) -> None:
        """Run a case once from its graph; ``recorder`` gets the phases."""
        self.captured[case.case_id, batch, recorder is not None].replay(recorder)

    def look(self, case: Case, batch: int, eager: Observation) -> Observation:
        """Replay a batch and hold it against an eager run; what can be seen of it: of a model only the latter."""
        run = self.captured[case.case_id, batch, False]
        run.replay()
        assert run.output is not None
        output, routed = run.output.clone(), {}
        for layer, (weights_TE, map_TE) in run.routing.items():
            routed[layer] = Routing(map_TE=map_TE.clone(), weights_TE=weights_TE.clone())
        gap, size = (float(x.float().norm()) for x in (output - eager.output, eager.output))
        problem = ""
        if not all(torch.equal(seen.routing.map_TE, routed[layer].map_TE) for layer, seen in eager.layers.items()):
            problem = f"it routes batch {batch} otherwise"
        elif not gap <= TOLERANCE[self.session.dtype] * size:
            problem = f"its output on batch {batch} is off by {gap:.2g} of {size:.2g}"
        case.problem = case.problem or (problem and f"failed: replayed from a CUDA graph, {problem}")
        if None not in routed:
            return eager
        output_ND = output.flatten(0, 1)[checked_rows(self.session, batch)]
        return Observation(output, {None: eager.layers[None]._replace(routing=routed[None], output_ND=output_ND)})

    def forget(self, case: Case) -> None:
        """Drop a case's graphs: no NCCL communicator can end while one holds its collectives (pytorch#115388)."""
        for key in [key for key in self.captured if key[0] == case.case_id]:
            del self.captured[key]
