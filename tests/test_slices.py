"""``layer.expert_tensor_parallel``: planned, refused, run on two ranks for a layer and a model, and counted.

What holds of the layer itself is in ``slice_laws``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from test_run import launch

from moe_ep_bench.analysis.fidelity import pairs_by_rank
from moe_ep_bench.analysis.load import Comparison as Facts
from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.analysis.timing import rates
from moe_ep_bench.bench.plan import RANKS, Comparison, plan
from moe_ep_bench.cli import main
from moe_ep_bench.metrics import routing_metrics
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.runtime.exit_codes import OK, USER_ERROR
from moe_ep_bench.schema import TOTAL

CONFIG = {
    "name": "tiny",
    "model": {"preset": "deepseek-v2-lite", "scale": 0.125},
    "workload": {"kind": "synthetic", "num_tokens": 200, "num_batches": 1, "peak_load": 4.0, "sequence_length": 24},
    "layer": {"dtype": "float32", "expert_tensor_parallel": 2},
    "policies": [{"name": "token_drop", "capacity_factor": 1.0}, {"name": "oea", "k0": 2}],
    "measure": {"iterations": 1, "breakdown_iterations": 1, "warmup": 0, "max_warmup": 0, "timeout_s": 60},
}


def write(folder: Path, layer: dict[str, object] | None = None, **changes: object) -> Path:
    config = {**CONFIG, **changes, "layer": {**CONFIG["layer"], **(layer or {})}}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def planned(folder: Path, world_size: int, layer: dict[str, object] | None = None, **changes: object) -> Comparison:
    (one,) = plan(write(folder, layer, **changes), [], RANKS, world_size, on_cpu=True)
    return one


# --- Run on two ranks ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layer_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layer")
    done = launch(write(folder), "--out", folder / "out")
    assert done.returncode == OK, done.stderr[-3000:]
    return folder / "out"


def test_a_layer_in_slices_is_right_and_its_transfers_are_waited_for(
    layer_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times, routing = (
        pd.concat(map(pd.read_parquet, (layer_run / folder).glob("*.parquet"))) for folder in ("cases", "routing")
    )
    assert set(times.status) == {"ok"}
    assert times.case_id.nunique() == 5
    assert routing.reference_error.max() < 1e-4
    assert (routing.crossing_pairs == routing.num_pairs).all(), "every pair goes to the other slice too"
    breakdown = times[times.kind == "breakdown"]
    seen = breakdown.groupby(["case_id", "rank"]).phase.agg(set)
    assert all({"dispatch", "combine", "wait_dispatch", "wait_combine"} <= phases for phases in seen)
    assert (times[times.phase == TOTAL].time_us > 0).all()
    assert main(["show", str(layer_run)]) == OK
    assert "EP 1 x TP 2" in capsys.readouterr().out


def test_work_of_a_slice_is_its_share_of_every_pair_of_both_ranks(layer_run: Path) -> None:
    run = load_run(layer_run)
    ((comparison_id, facts),) = run.comparisons.items()
    assert (facts.num_ranks, facts.expert_tensor_parallel, facts.num_replicas, facts.world_size) == (1, 2, 1, 2)
    native = next(one for one in run.cases if one.role == "baseline")
    _, pairs_BRL = pairs_by_rank(native.routing, facts)
    assert pairs_BRL.shape == (1, 2, 64)
    assert pairs_BRL.sum(axis=(0, 2)).tolist() == [200 * 6, 200 * 6]
    found = rates(native, facts, list(run.conditions[comparison_id].values()))
    assert found is not None
    assert found.dispatch_gbps is None, "two transfers share the phase"
    times = native.timings.query("kind == 'breakdown' and phase == 'experts' and rank == 0")["time_us"]
    hidden, slice_size = 256, 176 // 2
    assert found.experts_tflops == pytest.approx(6 * hidden * slice_size * 200 * 6 / times.median() / 1e6)
    assert found.crossing_pair_bytes == 200 * 6 * hidden * 4


# --- Planned -------------------------------------------------------------------------------------


def test_ranks_are_expert_parallel_ranks_times_slices_times_replicas(tmp_path: Path) -> None:
    for layer, expected in (({}, (4, 2, 8)), ({"ep_size": 2}, (2, 2, 4)), ({"expert_tensor_parallel": 4}, (2, 4, 8))):
        one = planned(tmp_path, 8, layer)
        assert (one.ep_size, one.subject.num_slices, one.subject.num_together) == expected
        assert one.parts.expert_tensor_parallel == one.subject.num_slices


def test_slices_cost_the_weights_of_as_many_experts_and_buffers_for_the_rows_of_all(tmp_path: Path) -> None:
    few = {**CONFIG["workload"], "num_tokens": 16, "sequence_length": 4}
    cut, whole = (planned(tmp_path, 2, layer, workload=few) for layer in ({}, {"expert_tensor_parallel": 1}))
    assert cut.memory_bytes_per_rank() == pytest.approx(whole.memory_bytes_per_rank(), rel=0.02)
    many = {**few, "num_tokens": 16000}
    alone = planned(tmp_path, 1, {"expert_tensor_parallel": 1}, workload={**many, "num_tokens": 8000})
    both = planned(tmp_path, 2, workload=many)
    assert both.memory_bytes_per_rank() > alone.memory_bytes_per_rank(), "two ranks' rows on each"
    assert cut.subject.flops_per_rank() == whole.subject.flops_per_rank()


BAD = (
    ("run", {"expert_tensor_parallel": 3}, {}, "expected a divisor of the 4 ranks, got 3"),
    ("run", {"experts": "te"}, {}, "expected auto, grouped or sequential, got te"),
    ("run", {"dispatcher": "flex"}, {}, "needs layer.dispatcher alltoall or allgather, got flex"),
    ("run", {"cuda_graph": True, "dispatcher": "allgather"}, {}, "layer.cuda_graph"),
    (
        "run",
        {"expert_tensor_parallel": 4, "dtype": "bfloat16"},
        {},
        "slices of a multiple of 16 bytes (or layer.experts: sequential), got 4, which are 44 values of bfloat16",
    ),
    (
        "run",
        {},
        {"model": {"preset": "deepseek-v2-lite", "tensor_parallel": 2}},
        "expected 1 with model.tensor_parallel: 2, got 2",
    ),
    ("run", {"dispatcher": "allgather"}, {}, "got allgather, where batch 0 deals"),
    *(
        (command, {}, {"emulate": {"links": "h100-nvlink4"}}, "whole experts, got 2")
        for command in ("emulate", "advise", "route")
    ),
)


@pytest.mark.parametrize(("command", "layer", "changes", "expected"), BAD)
def test_what_cannot_be_cut_is_one_line(
    command: str, layer: dict, changes: dict, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, layer, **changes)
    ranks = ["--nproc", "4"] if command == "run" else []
    assert main([command, str(config), "--out", str(tmp_path / "out"), *ranks]) == USER_ERROR
    *notes, said = capsys.readouterr().err.strip().splitlines()
    assert expected in said
    assert command != "run" or not notes
    assert not (tmp_path / "out").exists()


# --- Counted -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slices", [1, 2, 3])
def test_what_crosses_goes_to_every_rank_that_holds_a_slice_but_its_own(num_slices: int) -> None:
    scores_TE = torch.rand(11, 12, generator=torch.Generator().manual_seed(0))
    context = RoutingContext(top_k=3, num_ranks=4, rank=1)
    routing = make_policy({"name": "topk"}).route(scores_TE, context)
    pairs, copies = 0, set()
    for token, expert in routing.map_TE.nonzero().tolist():
        for column in range(num_slices):
            if (expert // 3, column) != (1, 0):
                pairs += 1
                copies.add((token, expert // 3, column))
    found = routing_metrics(routing, scores_TE, context, num_slices=num_slices)
    assert (found["crossing_pairs"], found["crossing_copies"]) == (pairs, len(copies))


def test_pairs_of_ranks_are_those_of_their_column_in_their_replica() -> None:
    """Two replicas of two expert-parallel ranks, each cut in two: ranks are numbered slice first."""
    sizes = {"num_experts": 4, "num_ranks": 2, "expert_tensor_parallel": 2, "world_size": 8, "num_replicas": 2}
    facts = Facts.model_construct(**sizes)
    load_RE = np.random.default_rng(0).integers(0, 9, size=(8, 4))
    routing = pd.DataFrame({"batch": 0, "rank": range(8), "load_E": load_RE.tolist()})
    _, (pairs_RL,) = pairs_by_rank(routing, facts)
    for rank in range(8):
        replica, ep_rank = rank // 4, rank // 2 % 2
        of_replica = load_RE[4 * replica : 4 * replica + 4].sum(axis=0)
        assert pairs_RL[rank].tolist() == of_replica[2 * ep_rank : 2 * ep_rank + 2].tolist()
        assert facts.expert_rank(rank) == ep_rank
