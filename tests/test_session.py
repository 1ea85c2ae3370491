"""What becomes of a comparison whose cases are lost before they are timed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ep_bench.bench import job, replays, session
from moe_ep_bench.bench.replays import Replays
from moe_ep_bench.bench.session import measure_comparison
from moe_ep_bench.layer.graphs import Graphs
from moe_ep_bench.runtime.ranks import Ranks, ToldError
from moe_ep_bench.timing.ceilings import Ceilings


class Recorded:
    """A session that notes its steps."""

    def __init__(self) -> None:
        self.cases, self.steps = ["native"], []
        self.is_replayed, self.job, self.comparison = True, mock.Mock(), mock.Mock()

    def __getattr__(self, step: str) -> Any:
        return lambda *_: self.steps.append(step)


ALL = ["try_all", "observe_all", "capture_all", "check_again", "warm_up", "time", "check_again", "gather"]


@pytest.mark.parametrize(("loses", "number"), [("try_all", 1), ("observe_all", 2), ("check_again", 4), ("", 8)])
def test_where_no_case_is_left_nothing_more_is_run(loses: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ``loses`` no case stands its check."""
    recorded = Recorded()
    for name in ("try_all", "observe_all", "check_again"):
        monkeypatch.setattr(session, name, lambda held, name=name: held.steps.append(name))
    check = lambda held, when: held.cases.clear() if held.steps[-1] == loses else None  # noqa: E731
    monkeypatch.setattr(session, "drop_failing", check)
    session._measure(recorded)
    assert recorded.steps == ALL[:number]


def test_a_session_is_closed_where_all_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their process groups would wait for graphs that hold collectives."""
    made = mock.Mock()
    monkeypatch.setattr(session, "_built", lambda *_: (made, None))
    monkeypatch.setattr(session, "try_all", mock.Mock(side_effect=ToldError))
    ranks = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(ToldError):
        measure_comparison(mock.Mock(ranks=ranks), mock.Mock(), ["native"])
    assert made.close.called


def test_ceilings_are_measured_before_anything_is_built_or_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take gigabytes: later, the allocator might have to give back what warming up made it hold."""
    steps = []

    def builds(*_: Any) -> Any:
        steps.append("build")
        raise ValueError("no experts")

    monkeypatch.setattr(job, "measure_ceilings", lambda device, dtype: steps.append("ceilings"))
    monkeypatch.setattr(job, "free_memory", lambda device: steps.append("free"))
    monkeypatch.setattr(session, "form_groups", lambda *_: SimpleNamespace(ep=None))
    monkeypatch.setattr(session, "Rendezvous", lambda *_: None)
    monkeypatch.setattr(session, "builder", builds)
    ranks = SimpleNamespace(device=torch.device("cpu"), rank=0, first_word=lambda text: f"rank 1: {text}")
    guard = SimpleNamespace(explain=lambda reason: steps.append("explain" if reason else "withdraw"))
    here = mock.Mock(ranks=ranks, guard=guard)
    here.survive = partial(job.Job.survive, here)
    comparison = mock.MagicMock()
    comparison.experiment.layer.dtype = "float32"
    built, outcome = session._built(here, comparison, [SimpleNamespace(case_id=name) for name in ("native", "topk")])
    assert built is None
    assert steps == ["ceilings", "free", "build", "explain", "withdraw"]
    reason = "while building: rank 1: ValueError: no experts"
    assert outcome.unmeasured == dict.fromkeys(("native", "topk"), ("failed", reason))
    with job.watched_machine(torch.device("cpu"), Ceilings(1, 2.0, 3.0, 4.0)) as found:
        pass
    assert found["ceilings"]["copy_gbps"] == 3.0
    assert steps.count("ceilings") == 1


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


def capturing(
    monkeypatch: pytest.MonkeyPatch, num_batches: int = 1, others: str = ""
) -> tuple[Replays, list[str], list[int]]:
    """Graphs on rank 0 of two, the reasons that it leaves for the next job, and the batches that it replays.

    Args:
        others: what rank 1 says of its captures.
    """
    reasons, replayed = [], []
    ranks = mock.Mock(told=lambda text: [text, others])
    ranks.first_word = partial(Ranks.first_word, ranks)
    job = SimpleNamespace(guard=SimpleNamespace(explain=reasons.append, feed=lambda: None), ranks=ranks)
    held = mock.Mock(job=job, num_batches=num_batches, device=torch.device("cpu"))
    held.meet, held.settings = mock.Mock(size=2), SimpleNamespace(breakdown_iterations=0)
    monkeypatch.setattr(replays, "Graphs", mock.Mock())
    monkeypatch.setattr(replays, "look", lambda case, batch: None)
    monkeypatch.setattr(replays, "CapturedRun", mock.Mock())
    monkeypatch.setattr(Replays, "_replayed", lambda self, case, batch: (replayed.append(batch), {}))
    monkeypatch.setattr(Replays, "_unlike", lambda self, eager, output, routed, batch: f"unlike in batch {batch}")
    return Replays(held), reasons, replayed


CANNOT = "cannot be captured as a CUDA graph: "


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("it waits for the host\nand more"), "failed", "it waits for the host"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom", "CUDA out of memory"),
        (AssertionError(""), "failed", "AssertionError"),
    ],
)
def test_what_cannot_be_captured_is_agreed_on_and_left_for_whoever_waits(
    error: Exception, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, reasons, replayed = capturing(monkeypatch)
    assert made.capture(mock.Mock(**{"prepare.side_effect": error})) == f"rank 0: {status}: {CANNOT}{said}"
    assert reasons == [f"{status}: {CANNOT}{said}"]
    assert made.graphs.abandon_pool.called
    assert replayed == []


def test_a_rank_replays_nothing_that_another_could_not_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    made, reasons, replayed = capturing(monkeypatch, 3, others="failed: no")
    assert made.capture(mock.Mock()) == "rank 1: failed: no"
    assert reasons == replayed == []


def test_a_rank_that_found_a_difference_replays_the_later_batches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, replayed = capturing(monkeypatch, 3)
    assert made.capture(mock.Mock()) == "rank 0: failed: unlike in batch 0"
    assert replayed == [0, 1, 2]  # Others wait in their collectives.


def test_peers_that_are_gone_are_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, reasons, _ = capturing(monkeypatch)
    case = mock.Mock(**{"prepare.side_effect": torch.distributed.DistBackendError("ncclRemoteError: it has ended")})
    with pytest.raises(torch.distributed.DistBackendError):
        made.capture(case)
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
    made.session.meet.size = num_ranks
    said = made.capture(mock.Mock())
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
