"""What becomes of a comparison whose cases are lost before they are timed."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ep_bench.bench import inspection, job, session
from moe_ep_bench.bench.inspection import LayerLook
from moe_ep_bench.bench.session import measure_comparison
from moe_ep_bench.layer.graphs import Graphs, unfit_environment
from moe_ep_bench.policies import Routing
from moe_ep_bench.runtime.ranks import ToldError
from moe_ep_bench.timing.ceilings import Ceilings


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


@pytest.mark.parametrize("errors", [(math.nan, 0.5), (0.5, math.nan)])
def test_a_case_that_was_once_no_number_stays_so(errors: tuple[float, float]) -> None:
    assert math.isnan(inspection.worse(*errors))
    case = mock.Mock(error=errors[0], **{"spec.policy": None, "session.reference": mock.Mock()})
    case.session.reference.return_value.worst_error.return_value = errors[1]
    case.session.shares = [{None: SimpleNamespace(num_tokens=1)}]
    case.session.layers, case.session.device = (None,), torch.device("cpu")
    output, map_TE = torch.ones(2, 1, 4), torch.eye(1, dtype=torch.bool)
    look = LayerLook(Routing(map_TE, map_TE.float()), output, output[:, 0], output[:, 0])
    inspection._reference_error(case, None, look)
    assert math.isnan(case.error)
    dropped: list[str] = []
    held = mock.Mock(cases=[mock.Mock(error=case.error, problem="")], dtype=torch.float32)
    held.job.ranks.told = lambda value: [value]
    held.drop = lambda case, status, reason: dropped.append(status)
    inspection.drop_failing(held, "before timing")
    assert dropped == ["failed"]


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
        ({"PYTORCH_ALLOC_CONF": "backend:native,expandable_segments:True"}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}, True),
    ],
)
def test_collectives_in_graphs_are_refused_where_their_replay_would_hang(
    settings: dict[str, str], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert ("NCCL_GRAPH_REGISTER=0" in unfit_environment()) == (not fits)


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
