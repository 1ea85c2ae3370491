"""What becomes of a comparison whose cases are lost before they are timed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ep_bench.bench import job, session
from moe_ep_bench.bench.session import Session, measure_comparison
from moe_ep_bench.timing.ceilings import Ceilings
from moe_ep_bench.timing.protocol import WarmUp


class Recorded:
    """A session that notes its steps; in ``loses`` no case stands its check."""

    def __init__(self, loses: str) -> None:
        self.cases, self.steps, self._loses = ["native"], [], loses

    def drop_failing(self, when: str) -> None:
        if self.steps[-1] == self._loses:
            self.cases.clear()

    def __getattr__(self, step: str) -> Any:
        return lambda *_: self.steps.append(step)


@pytest.mark.parametrize(
    ("loses", "steps"),
    [
        ("try_all", ["try_all"]),
        ("observe_all", ["try_all", "observe_all"]),
        ("check_again", ["try_all", "observe_all", "capture_all", "check_again"]),
        ("", ["try_all", "observe_all", "capture_all", "check_again", "warm_up", "time", "check_again", "write"]),
    ],
)
def test_where_no_case_is_left_nothing_more_is_run(
    loses: str, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(loses)
    monkeypatch.setattr(session, "_built", lambda *_: recorded)
    ranks = SimpleNamespace(device=torch.device("cpu"), local_world_size=1, texts=lambda text: [text])
    here = SimpleNamespace(enter=lambda comparison: None, ranks=ranks)
    comparison = SimpleNamespace(parts=SimpleNamespace(cuda_graph=True), shortage=lambda available: "")
    measure_comparison(here, comparison, ["native"])
    assert recorded.steps == steps


def test_ceilings_are_measured_before_anything_is_built_or_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take gigabytes: later, the allocator might have to give back what warming up made it hold."""
    steps, rows = [], []

    def builds(*_: Any) -> Any:
        steps.append("build")
        raise ValueError("no experts")

    monkeypatch.setattr(job, "measure_ceilings", lambda device, dtype: steps.append("ceilings"))
    monkeypatch.setattr(job, "free_memory", lambda device: steps.append("free"))
    for name in ("form_groups", "meeting_group", "columns_of"):
        monkeypatch.setattr(session, name, lambda *_: None)
    monkeypatch.setattr(session, "builder", builds)
    ranks = SimpleNamespace(device=torch.device("cpu"), rank=0, texts=lambda text: ["", text])
    mark = SimpleNamespace(explain=lambda reason: steps.append("explain"), withdraw=lambda: steps.append("withdraw"))
    here = mock.Mock(ranks=ranks, mark=mark, write_unmeasured=lambda *row: rows.append(row))
    here.survive = partial(job.Job.survive, here)
    comparison = mock.Mock()
    comparison.experiment.layer.dtype = "float32"
    assert session._built(here, comparison, ["native", "topk"]) is None
    assert steps == ["ceilings", "free", "build", "explain", "withdraw"]
    reason = "while building: rank 1: ValueError: no experts"
    assert rows == [(comparison, case, "failed", reason) for case in ("native", "topk")]
    with job.watched_machine(torch.device("cpu"), Ceilings(1, 2.0, 3.0, 4.0)) as found:
        pass
    assert found["ceilings"]["copy_gbps"] == 3.0
    assert steps.count("ceilings") == 1


@pytest.mark.parametrize("breakdown_iterations", [0, 2])
def test_breakdowns_are_warmed_up_where_there_are_any(
    breakdown_iterations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, steps = Session.__new__(Session), []
    found.settings = SimpleNamespace(warmup=1, max_warmup=1, breakdown_iterations=breakdown_iterations)
    found.device, found.num_batches, found.cases, found.meet = torch.device("cpu"), 1, [], None
    found.conditions, found.job = {}, SimpleNamespace(progress=SimpleNamespace(total=0), begin=None)
    monkeypatch.setattr(session, "warm_breakdowns", lambda *_: steps.append("breakdowns"))
    monkeypatch.setattr(session, "warm_up", lambda *_: (steps.append("plain"), WarmUp(1, None, False))[1])
    found.warm_up()
    assert steps == ["breakdowns"] * bool(breakdown_iterations) + ["plain"]


@pytest.mark.parametrize(
    ("error", "survives"),
    [
        (ValueError("chunk_size"), "failed: ValueError: chunk_size"),
        (torch.OutOfMemoryError("20 GiB"), "oom: 20 GiB"),
        (RuntimeError("Connection closed by peer"), None),
        (torch.distributed.DistBackendError("NCCL error: unhandled system error"), None),
    ],
)
def test_a_rank_goes_on_after_an_exception_but_not_after_a_collective_failed(
    error: Exception, survives: str | None
) -> None:
    here = mock.Mock(ranks=SimpleNamespace(device=torch.device("cpu"), rank=0))
    if survives is None:
        with pytest.raises(type(error)):
            job.Job.survive(here, error)
    else:
        assert job.Job.survive(here, error) == survives


def test_a_rank_whose_device_answers_no_more_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    here = mock.Mock(ranks=SimpleNamespace(device=torch.device("cuda"), rank=0))
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=RuntimeError("CUDA error: an illegal access")))
    with pytest.raises(ValueError, match="no kernel"):
        job.Job.survive(here, ValueError("no kernel"))


def session_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> tuple[Session, list[str]]:
    """One of a batch, and the reasons that it leaves in its mark."""
    found, reasons = Session.__new__(Session), []
    mark = SimpleNamespace(explain=reasons.append)
    found.job = SimpleNamespace(mark=mark, watchdog=SimpleNamespace(feed=lambda: None))
    found.settings, found.num_batches = SimpleNamespace(breakdown_iterations=0), 1
    found.device, found._new_graph = torch.device("cpu"), SimpleNamespace()
    monkeypatch.setattr(session, "look", lambda case, batch: None)
    return found, reasons


def test_what_cannot_be_captured_is_said_for_whoever_waits_and_no_memory_is_called_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, reasons = session_of_a_batch(monkeypatch)
    case = mock.Mock(**{"capture.side_effect": [RuntimeError("it waits for the host\nand more")]})
    said = found._capture(case)
    assert said == "cannot be captured as a CUDA graph: it waits for the host"
    assert reasons == [f"failed: {said}"]
    found, reasons = session_of_a_batch(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        found._capture(mock.Mock(**{"capture.side_effect": torch.OutOfMemoryError("20 GiB")}))
    assert reasons == []


def test_a_rank_that_found_a_difference_replays_the_later_batches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = session_of_a_batch(monkeypatch)
    found.num_batches = 3
    found._unlike = lambda eager, output, routed, batch: f"unlike in batch {batch}"
    replayed = []
    monkeypatch.setattr(session, "replay", lambda case, batch: (replayed.append(batch), {}))
    runs = {(batch, False): SimpleNamespace(forget=lambda: None) for batch in range(3)}
    case = SimpleNamespace(capture=lambda *_, **__: None, captured=runs)
    assert found._capture(case) == "unlike in batch 0"
    assert replayed == [0, 1, 2]  # Others wait in their collectives.
