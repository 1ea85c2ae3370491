"""What becomes of a comparison whose cases are lost before they are timed."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ep_bench.bench import session
from moe_ep_bench.bench.session import Session, measure_comparison
from moe_ep_bench.policies.waits import beyond


class Lost:
    """A session of which no case stands its checks."""

    def __init__(self, *_: Any) -> None:
        self.cases = ["native"]

    def observe_all(self) -> None: ...

    def drop_failing(self, when: str) -> None:
        assert when == "before timing"
        self.cases.clear()


def test_where_no_case_is_left_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "Session", Lost)
    entered = []
    ranks = SimpleNamespace(device=torch.device("cpu"), local_world_size=1, texts=lambda text: [text])
    job = SimpleNamespace(enter=entered.append, ranks=ranks)
    comparison = SimpleNamespace(parts=SimpleNamespace(cuda_graph=True), shortage=lambda available: "")
    measure_comparison(job, comparison, ["native"])
    assert entered == [comparison]


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


def test_of_what_a_case_waits_for_only_what_native_does_not_is_kept() -> None:
    waits = {case_id: Counter({"token_dispatcher.py:9": 1}) for case_id in ("native", "own", "topk")}
    waits["own"]["own.py:7"] += 2
    assert beyond(waits, "native") == {"own": {"own.py:7": 2}}
    assert set(beyond(waits, None)) == set(waits)


def test_on_a_gpu_a_look_counts_where_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "watched_waits", lambda device: nullcontext({"own.py:7": 2}))
    for device, expected in (("cuda", {"own.py:7": 2}), ("cpu", {})):
        subject = SimpleNamespace(moe_layers={}, run=lambda inputs: inputs)
        held = SimpleNamespace(rows_to_check=lambda batch: None, subject=subject, device=torch.device(device))
        assert session.look(SimpleNamespace(prepare=lambda batch: batch, session=held), 0).waits == expected
