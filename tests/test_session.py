"""What becomes of a comparison whose cases are lost before they are timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ep_bench.bench import session
from moe_ep_bench.bench.job import ToldError
from moe_ep_bench.bench.session import Session, measure_comparison
from moe_ep_bench.layer.graphs import Graphs


class Lost:
    """A session of which no case stands its checks."""

    def __init__(self, *_: Any) -> None:
        self.cases = ["native"]

    closed = 0

    def observe_all(self) -> None: ...

    def drop_failing(self, when: str) -> None:
        assert when == "before timing"
        self.cases.clear()

    def close(self) -> None:
        Lost.closed += 1


def test_where_no_case_is_left_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "Session", Lost)
    entered = []
    ranks = SimpleNamespace(device=torch.device("cpu"), local_world_size=1, texts=lambda text: [text])
    job = SimpleNamespace(enter=entered.append, ranks=ranks)
    comparison = SimpleNamespace(parts=SimpleNamespace(cuda_graph=True), shortage=lambda available: "")
    measure_comparison(job, comparison, ["native"])
    assert entered == [comparison]
    assert Lost.closed == 1
    # Where all ranks end, too: their process groups would wait for graphs that hold collectives.
    monkeypatch.setattr(Lost, "observe_all", mock.Mock(side_effect=ToldError))
    with pytest.raises(ToldError):
        measure_comparison(job, comparison, ["native"])
    assert Lost.closed == 2


def capturing(
    monkeypatch: pytest.MonkeyPatch, num_batches: int = 1, others: str = ""
) -> tuple[Session, list[str], list[int]]:
    """A session on rank 0 of two, the reasons that it leaves in its mark, and the batches that it replays.

    Args:
        others: what rank 1 says of its captures.
    """
    made, reasons, replayed = Session.__new__(Session), [], []
    ranks = SimpleNamespace(texts=lambda text: [text, others])
    job = SimpleNamespace(mark=SimpleNamespace(explain=reasons.append), watchdog=mock.Mock(), ranks=ranks)
    made.job, made.num_batches, made.meet = job, num_batches, SimpleNamespace(size=2)
    made.settings = SimpleNamespace(breakdown_iterations=0)
    monkeypatch.setattr(session, "look", lambda case, batch: None)
    monkeypatch.setattr(session, "replay", lambda case, batch: (replayed.append(batch), {}))
    monkeypatch.setattr(Session, "_unlike", lambda self, eager, output, routed, batch: f"unlike in batch {batch}")
    return made, reasons, replayed


CANNOT = "cannot be captured as a CUDA graph: "


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("it waits for the host\nand more"), "failed", "it waits for the host"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom", "CUDA out of memory"),
        (AssertionError(""), "failed", "AssertionError"),
    ],
)
def test_what_cannot_be_captured_is_agreed_on_and_left_in_the_mark_for_whoever_waits(
    error: Exception, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, reasons, replayed = capturing(monkeypatch)
    graphs = mock.Mock()
    assert made._capture(mock.Mock(**{"capture.side_effect": error}), graphs) == f"rank 0: {status}: {CANNOT}{said}"
    assert reasons == [f"{status}: {CANNOT}{said}"]
    assert graphs.abandon_pool.called
    assert replayed == []


def test_a_rank_replays_nothing_that_another_could_not_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    made, reasons, replayed = capturing(monkeypatch, 3, others="failed: no")
    assert made._capture(mock.MagicMock(), mock.Mock()) == "rank 1: failed: no"
    assert reasons == replayed == []


def test_a_rank_that_found_a_difference_replays_the_later_batches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, replayed = capturing(monkeypatch, 3)
    assert made._capture(mock.MagicMock(), mock.Mock()) == "rank 0: failed: unlike in batch 0"
    assert replayed == [0, 1, 2]  # Others wait in their collectives.


def test_peers_that_are_gone_are_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, reasons, _ = capturing(monkeypatch)
    case = mock.Mock(**{"capture.side_effect": torch.distributed.DistBackendError("ncclRemoteError: it has ended")})
    with pytest.raises(torch.distributed.DistBackendError):
        made._capture(case, mock.Mock())
    assert reasons == []


@pytest.mark.parametrize(
    ("settings", "num_ranks", "fits"),
    [
        ({}, 2, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, 2, False),
        ({"PYTORCH_ALLOC_CONF": "backend:native,expandable_segments:True"}, 2, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, 1, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}, 2, True),
    ],
)
def test_collectives_in_graphs_are_refused_where_their_replay_would_hang(
    settings: dict[str, str], num_ranks: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    made, _, replayed = capturing(monkeypatch)
    made.meet = SimpleNamespace(size=num_ranks)
    said = made._capture(mock.MagicMock(), mock.Mock())
    assert ("NCCL_GRAPH_REGISTER=0" in said) == (not fits)
    assert replayed == ([0] if fits else [])


def test_graphs_take_the_bytes_of_their_pools_and_what_the_driver_took_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles, taken = iter([(0, 1), (0, 2)]), {"used": 1000, "reserved": 600}
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9000 - taken["used"], 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: taken["reserved"])
    sizes = {(0, 0): 500, (0, 1): 70, (0, 2): 30, (0, 3): 200}  # the allocator's own, two of graphs, somebody else's
    segments = [{"segment_pool_id": pool, "total_size": size} for pool, size in sizes.items()]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    graphs = Graphs(torch.device("cuda"))
    graphs.abandon_pool()
    taken.update(used=1150, reserved=700)  # 100 for tensors, 50 for graphs as such
    assert graphs.num_bytes() == {"pool_bytes": 100, "driver_bytes": 50}
