"""What becomes of a comparison whose cases are lost before they are timed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from moe_ep_bench.bench import commands, inspection
from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.measure import Case, Runner, measure_point
from moe_ep_bench.bench.real_ranks import RealRanks
from moe_ep_bench.bench.result import Result
from moe_ep_bench.layer.graphs import unfit_environment
from moe_ep_bench.policies import Routing, RoutingContext, make_policy
from moe_ep_bench.runtime.ranks import ReportedError
from moe_ep_bench.timing.protocol import PLAIN, UNCOUNTED, Step


class Taped(Runner):
    """Writes down what the protocol asks for; ``fails`` names the step that leaves no case."""

    def __init__(self, fails: str = "") -> None:
        self.tape, self.fails, self.cases = [], fails, [Case(SimpleNamespace(case_id="native"), self)]
        for name in ("try_alone", "check", "capture", "warm_up", "check_again", "finish"):
            setattr(self, name, partial(self.note, name))

    def note(self, name: str) -> list[str]:
        self.tape.append(name)
        if name == self.fails:
            self.cases.clear()
        return self.tape

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self.note("begin to watch")
        yield
        self.note("end")

    def schedule(self) -> Iterator[list[Step]]:
        for batch in range(2):
            self.note(f"batch {batch}")
            yield [Step(batch, 0, kind) for kind in (PLAIN, UNCOUNTED)]

    def time(self, case: Case, step: Step) -> str:
        return f"{case.case_id} {step.kind}"

    def keep(self, case: int, step: Step, times: str) -> None:
        self.note(f"{step.batch} {times}")


def test_a_point_is_checked_warmed_up_timed_and_checked_again() -> None:
    begun: list[str] = []
    checks = ["try_alone", "check", "capture"]
    timed = ["begin to watch", "batch 0", "0 native plain", "batch 1", "1 native plain", "end"]
    assert measure_point(Taped(), begun.append) == [*checks, "warm_up", *timed, "check_again", "finish"]
    assert begun == ["native"] * 4
    for number, name in enumerate(checks):
        assert measure_point(Taped(fails=name), begun.append) == [*checks[: number + 1], "finish"]
    assert len(begun) == 4, "nothing is timed where no case is left"


def test_a_runner_is_closed_where_all_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their process groups would wait for graphs that hold collectives."""
    made = mock.Mock()
    made.check.side_effect = ReportedError
    monkeypatch.setattr(commands, "runner_of", lambda *_: lambda: made)
    ranks = SimpleNamespace(device=torch.device("cpu"), is_first=False, first_error=lambda error: error and (0, error))
    point = mock.MagicMock(cases=[SimpleNamespace(case_id="native")], iterations_per_case=1)
    with pytest.raises(ReportedError):
        commands._measured(mock.Mock(ranks=ranks), point, ["native"])
    assert made.close.called


@pytest.mark.parametrize(
    ("error", "survives"),
    [
        (ValueError("top_k"), "failed: ValueError: top_k"),
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
            Job.record_failure(here, error)
    else:
        assert str(Job.record_failure(here, error)) == survives


def test_a_rank_whose_device_answers_no_more_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    here = mock.Mock(ranks=SimpleNamespace(device=torch.device("cuda"), rank=0))
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=RuntimeError("CUDA error: an illegal access")))
    with pytest.raises(ValueError, match="no kernel"):
        Job.record_failure(here, ValueError("no kernel"))


def real_ranks(**attributes: object) -> RealRanks:
    """As much of a runner as a test needs."""
    runner = RealRanks.__new__(RealRanks)
    vars(runner).update({"job": mock.Mock(), "captured": None, "_stats": {}, "tolerance": 1e-4, **attributes})
    return runner


@pytest.mark.parametrize("errors", [(math.nan, 0.5), (0.5, math.nan)])
def test_a_case_that_was_once_no_number_stays_so_and_is_dropped(errors: tuple[float, float]) -> None:
    error = inspection.worse(*errors)
    assert math.isnan(error)
    case = mock.Mock(error=error, problem="", case_id="native")
    runner = real_ranks(cases=[case], result=Result())
    runner.job.ranks.all_gather = lambda value: [value]
    runner.drop_failing("before timing")
    assert runner.cases == []
    assert runner.result.unmeasured["native"][0] == "failed"


@pytest.mark.parametrize(("shift", "error"), [(0, 0.25), (1, math.inf)])
def test_a_layer_that_routes_otherwise_than_its_policy_is_wrong_whatever_it_computes(
    shift: int, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, scores_TE, context = make_policy({"name": "topk"}), torch.rand(4, 8), RoutingContext(top_k=2)
    routing = policy.route(scores_TE, context)
    seen = mock.Mock(routing=Routing(routing.map_TE.roll(shift, 1), routing.weights_TE))
    case = mock.Mock(error=0.0)
    case.spec.policy = policy
    runner = real_ranks(point=mock.Mock(ep_size=1), device=torch.device("cpu"), router=mock.Mock())
    runner.router.context.return_value = context
    monkeypatch.setattr(runner, "tokens_of", lambda *_: mock.Mock(scores_TE=scores_TE))
    monkeypatch.setattr(runner, "_checked_rows", lambda *_: slice(None))
    monkeypatch.setattr(runner, "reference", lambda *_: mock.Mock(worst_error=lambda *_: 0.25))
    assert runner._reference_error(case, None, seen) == case.error == error


def test_a_layer_that_was_wrong_before_timing_is_not_right_by_the_look_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = mock.Mock(rows={(0, None): {"reference_error": 0.7}})
    runner = real_ranks(cases=[case])
    monkeypatch.setattr(runner, "_look", lambda *_: mock.Mock(problem="", layers={None: mock.Mock()}))
    monkeypatch.setattr(runner, "_reference_error", lambda *_: 0.1)
    monkeypatch.setattr(runner, "drop_failing", lambda when: None)
    runner.check_again()
    assert case.rows[0, None]["reference_error"] == 0.7


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
