"""What becomes of a comparison whose cases are lost before they are timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ep_bench.scopes import timed
from moe_ep_bench.scopes.timed import Session, measure_comparison


class Lost:
    """A session of which no case stands its checks."""

    def __init__(self, *_: Any) -> None:
        self.cases = ["native"]

    def observe_all(self) -> None: ...

    def drop_failing(self, when: str) -> None:
        assert when == "before timing"
        self.cases.clear()


def test_where_no_case_is_left_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "_memory_shortage", lambda job, comparison: "")
    entered = []
    job = SimpleNamespace(enter=entered.append, ranks=SimpleNamespace(device=torch.device("cpu")))
    comparison = SimpleNamespace(parts=SimpleNamespace(cuda_graph=True))
    measure_comparison(job, comparison, ["native"], Lost)
    assert entered == [comparison]


class Uncapturable:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def capture(self, *_: Any, **__: Any) -> None:
        raise self._error


def session() -> tuple[Session, list[str]]:
    """One of a batch, and the reasons that it leaves in its mark."""
    found, reasons = Session.__new__(Session), []
    mark = SimpleNamespace(explain=reasons.append)
    found.job = SimpleNamespace(mark=mark, watchdog=SimpleNamespace(feed=lambda: None))
    measure = SimpleNamespace(breakdown_iterations=0)
    found.comparison = SimpleNamespace(
        workload=SimpleNamespace(num_batches=1), experiment=SimpleNamespace(measure=measure)
    )
    found.device, found._new_graph = torch.device("cpu"), SimpleNamespace()
    found.observed = lambda case, batch: (torch.zeros(1), [])
    return found, reasons


def test_what_cannot_be_captured_is_said_and_kept_for_whoever_waits() -> None:
    found, reasons = session()
    said = found._capture(Uncapturable(RuntimeError("it waits for the host\nand more")))
    assert said == "cannot be captured as a CUDA graph: it waits for the host"
    assert reasons == [f"failed: {said}"]


def test_memory_that_runs_out_while_capturing_is_called_so() -> None:
    found, reasons = session()
    with pytest.raises(torch.OutOfMemoryError):
        found._capture(Uncapturable(torch.OutOfMemoryError("20 GiB")))
    assert reasons == []
