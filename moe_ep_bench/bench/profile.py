"""``--profile``: one iteration of one case, per rank, as a trace to look at; phases are named ranges in it.

Nothing here is timed.
"""

from __future__ import annotations

import json
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
from moe_ep_bench.timing.timer import Clock, PhaseRecorder, clock_for, timed


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
    cuda = [ProfilerActivity.CUDA] if job.ranks.device.type == "cuda" else []
    facts = {
        "case": case.describe(comparison.comparison_id),
        "comparison": comparison.definition,
        "environment": provenance.describe(job.ranks.device),
    }
    with device_scope(), torch.inference_mode():
        session = Session(job, comparison, [case], form_groups(comparison))
        session.fill_cache()
        observe_all(session)
        _iterate(session, PhaseRecorder(clock_for(job.ranks.device)))  # warms it
        recorder = PhaseRecorder(RangesInTrace(clock_for(job.ranks.device)))
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, *cuda]) as profiler:
            for key, described in facts.items():
                profiler.add_metadata_json(key, json.dumps(described))
            _iterate(session, recorder)
    name = f"{case.case_id}-rank{{}}.json.gz"
    with atomic_path(job.directory.profiles / name.format(job.ranks.rank)) as temporary:
        # The profiler tells from the name whether to compress.
        compressed = temporary.with_name(f"{temporary.name}.gz")
        profiler.export_chrome_trace(str(compressed))
        compressed.replace(temporary)
    if job.ranks.is_first:
        where = job.directory.profiles / name.format("*")
        print(f"one iteration of {case.label} ({comparison.title}), batch 0: {where}", flush=True)


def _iterate(session: Session, recorder: PhaseRecorder) -> None:
    with session.cases[0].ready(0, recorder) as run:
        timed(run, recorder, session.meet)
