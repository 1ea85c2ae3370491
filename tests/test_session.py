"""What becomes of a comparison whose cases are lost before they are timed."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ep_bench.bench import inspection, job, replays, session
from moe_ep_bench.bench.inspection import LayerLook, Observation
from moe_ep_bench.bench.replays import Replays
from moe_ep_bench.bench.session import measure_comparison
from moe_ep_bench.layer.graphs import Graphs
from moe_ep_bench.policies import Routing
from moe_ep_bench.runtime.ranks import Ranks, ToldError
from moe_ep_bench.timing.ceilings import Ceilings


class Recorded:
    """A session that notes its steps."""

    def __init__(self) -> None:
        self.cases, self.steps = ["native"], []
        self.job, self.comparison = mock.Mock(), mock.Mock(**{"parts.cuda_graph": True})

    def __getattr__(self, step: str) -> Any:
        return lambda *_: self.steps.append(step)


ALL = ["try_all", "observe_all", "capture_all", "check_again", "warm_up", "time", "check_again", "gather"]


@pytest.mark.parametrize(
    ("loses", "number"), [("try_all", 1), ("observe_all", 2), ("capture_all", 3), ("check_again", 4), ("", 8)]
)
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
    here = mock.Mock(ranks=ranks, guard=SimpleNamespace(explain=steps.append))
    here.survive = partial(job.Job.survive, here)
    comparison = mock.MagicMock()
    comparison.experiment.layer.dtype = "float32"
    built, outcome = session._built(here, comparison, [SimpleNamespace(case_id=name) for name in ("native", "topk")])
    assert built is None
    assert steps == ["ceilings", "free", "build", "failed: ValueError: no experts"]
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


def capture(
    monkeypatch: pytest.MonkeyPatch, num_batches: int = 1, others: str = "", num_ranks: int = 2, **of_case: Any
) -> tuple[str, list[str], list[int]]:
    """Capture a case on rank 0 of several: its problem, the reasons left for the next job, the batches replayed.

    Args:
        others: what rank 1 has found wrong with its captures.
    """
    reasons, replayed = [], []
    ranks = mock.Mock(told=lambda text: [text, others])
    ranks.first_word = partial(Ranks.first_word, ranks)
    job = SimpleNamespace(guard=SimpleNamespace(explain=reasons.append, feed=lambda: None), ranks=ranks)
    held = mock.Mock(job=job, num_batches=num_batches, device=torch.device("cpu"))
    held.meet, held.settings = mock.Mock(size=num_ranks), SimpleNamespace(breakdown_iterations=0)
    for name in ("Graphs", "CapturedRun", "look"):
        monkeypatch.setattr(replays, name, mock.Mock())
    monkeypatch.setattr(Replays, "look", lambda self, case, batch, eager: replayed.append(batch))
    made, case = Replays(held), mock.Mock(problem="", **of_case)
    made.capture(case)
    assert made.graphs.abandon_pool.called == bool(reasons)
    return case.problem, reasons, replayed


CANNOT = "cannot be captured as a CUDA graph: "


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("it waits for the host\nand more"), "failed", "it waits for the host"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom", "CUDA out of memory"),
        (AssertionError(""), "failed", "AssertionError"),
    ],
)
def test_what_cannot_be_captured_is_the_cases_problem_and_left_for_whoever_waits(
    error: Exception, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = f"{status}: {CANNOT}{said}"
    assert capture(monkeypatch, **{"prepare.side_effect": error}) == (problem, [problem], [])


def test_a_rank_replays_nothing_that_another_could_not_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    assert capture(monkeypatch, 3) == ("", [], [0, 1, 2])
    assert capture(monkeypatch, 3, others="failed: no") == ("", [], [])


def test_peers_that_are_gone_are_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.distributed.DistBackendError("ncclRemoteError: it has ended")
    with pytest.raises(torch.distributed.DistBackendError):
        capture(monkeypatch, **{"prepare.side_effect": error})


@pytest.mark.parametrize("errors", [(math.nan, 0.5), (0.5, math.nan)])
def test_a_case_that_was_once_no_number_stays_so(errors: tuple[float, float]) -> None:
    assert math.isnan(inspection.worse(*errors))
    case = mock.Mock(error=errors[0], **{"spec.policy": None, "session.reference": mock.Mock()})
    case.session.reference.return_value.worst_error.return_value = errors[1]
    case.session.shares = [{None: SimpleNamespace(num_tokens=1)}]
    case.session.layers, case.session.device = (None,), torch.device("cpu")
    inspection._reference_error(case, None, observation(torch.eye(1, dtype=torch.bool), 1.0).layers[None])
    assert math.isnan(case.error)
    dropped: list[str] = []
    held = mock.Mock(cases=[mock.Mock(error=case.error, problem="")], dtype=torch.float32)
    held.job.ranks.told = lambda value: [value]
    held.drop = lambda case, status, reason: dropped.append(status)
    inspection.drop_failing(held, "before timing")
    assert dropped == ["failed"]


def observation(map_TE: torch.Tensor, value: float) -> Observation:
    output = torch.full((2, 1, 4), value)
    look = LayerLook(Routing(map_TE, map_TE.float()), output, output[:, 0], output[:, 0])
    return Observation(output, {None: look})


@pytest.mark.parametrize(
    ("moved", "value", "problem"),
    [
        (False, 1.0, ""),
        (False, 1.5, "failed: replayed from a CUDA graph, its output on batch 0 is off by 1.4 of 2.8"),
        (True, 1.0, "failed: replayed from a CUDA graph, it routes batch 0 otherwise"),
    ],
)
def test_a_replay_is_held_against_the_eager_run(
    moved: bool, value: float, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "Graphs", mock.Mock())
    monkeypatch.setattr(replays, "checked_rows", lambda held, batch: torch.tensor([1]))
    map_TE = torch.eye(2, dtype=torch.bool)
    replayed = observation(map_TE.roll(1, dims=1) if moved else map_TE, value)
    weights = replayed.layers[None].routing
    run = mock.Mock(output=replayed.output, routing={None: (weights.weights_TE, weights.map_TE)})
    held = Replays(mock.Mock(dtype=torch.float32, settings=SimpleNamespace(breakdown_iterations=0)))
    case = SimpleNamespace(case_id="case", problem="")
    held.captured["case", 0, False] = run
    seen = held.look(case, 0, observation(map_TE, 1.0))
    assert (case.problem, run.replay.called) == (problem, True)
    assert seen.output is not run.output, "the next replay writes over it"
    assert torch.equal(seen.layers[None].output_ND, replayed.output[1])
    assert torch.equal(seen.layers[None].routing.map_TE, weights.map_TE)


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
    problem, _, replayed = capture(monkeypatch, num_ranks=num_ranks)
    assert ("NCCL_GRAPH_REGISTER=0" in problem) == (not fits)
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
