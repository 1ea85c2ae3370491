"""``--profile``: one iteration of one case, per rank, as a trace to look at. Nothing here is timed.

Phases are named ranges in the trace. Under Nsight Systems, which cannot share the device's
tracing with torch's profiler, the iteration is marked by the CUDA profiler API instead
(``nsys profile --capture-range=cudaProfilerApi``) and nsys writes the file.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from moe_ep_bench.bench.cases import CaseSpec
from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.bench.inspection import observe_all
from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.session import Session, form_groups
from moe_ep_bench.files import atomic_path
from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.machine import provenance
from moe_ep_bench.timing.protocol import Runnable
from moe_ep_bench.timing.timer import Clock, PhaseRecorder, clock_for, timed

# Which nsys sets for the processes that it watches.
_NSYS = "NSYS_PROFILING_SESSION_ID"


class RangesInTrace:
    """A clock whose ranges torch's profiler sees too."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: list[record_function] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)

    def open_range(self, name: str) -> None:
        self._clock.open_range(name)
        self._open.append(record_function(name))
        self._open[-1].__enter__()

    def close_range(self) -> None:
        self._open.pop().__exit__(None, None, None)
        self._clock.close_range()


def profile_case(job: Job, comparison: Comparison, case: CaseSpec) -> None:
    """Run ``case`` on every batch once, then profile batch 0 with all phases marked; every rank calls this alike.

    Writes ``<out>/profiles/<case_id>-rank<rank>.json.gz`` in Chrome's trace format, for Perfetto.
    """
    job.guard.at(comparison.comparison_id)
    with device_scope(), torch.inference_mode():
        session = Session(job, comparison, [case], form_groups(comparison))
        session.fill_cache()
        observe_all(session)
        _iterate(session, session.cases[0], PhaseRecorder(clock_for(job.ranks.device)))  # warms it
        recorder = PhaseRecorder(RangesInTrace(clock_for(job.ranks.device)))
        if _NSYS in os.environ:
            torch.cuda.profiler.start()
            _iterate(session, session.cases[0], recorder)
            torch.cuda.profiler.stop()
            where = "nsys's own file"
        else:
            where = _traced(job, comparison, session, recorder)
    if job.ranks.is_first:
        print(f"one iteration of {case.label} ({comparison.title}), batch 0: {where}", flush=True)


def _traced(job: Job, comparison: Comparison, session: Session, recorder: PhaseRecorder) -> str:
    cuda = [ProfilerActivity.CUDA] if job.ranks.device.type == "cuda" else []
    case = session.cases[0]
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *cuda]) as profiler:
        profiler.add_metadata_json("case", json.dumps(case.spec.describe(comparison.comparison_id)))
        profiler.add_metadata_json("comparison", json.dumps(comparison.definition))
        profiler.add_metadata_json("environment", json.dumps(provenance.describe(job.ranks.device)))
        _iterate(session, case, recorder)
    name = f"{case.case_id}-rank{{}}.json.gz"
    path = job.directory.profiles / name.format(job.ranks.rank)
    with atomic_path(path) as temporary:
        # The profiler tells from the name whether to compress.
        compressed = temporary.with_name(f"{temporary.name}.gz")
        profiler.export_chrome_trace(str(compressed))
        compressed.replace(temporary)
    return str(job.directory.profiles / name.format("*"))


def _iterate(session: Session, case: Runnable, recorder: PhaseRecorder) -> None:
    with case.ready(0, recorder) as run:
        timed(run, recorder, session.meet)
