"""A sample stands for a batch: its counts come to the batch's, and answers to what all tokens would have said."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from moe_ep_bench.analysis.notes import _matched, _sampled
from moe_ep_bench.bench.checks import VIRTUAL
from moe_ep_bench.bench.emulated_ranks import ModelledRanks
from moe_ep_bench.bench.measure import measure_point
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import Point
from moe_ep_bench.bench.routing import Router
from moe_ep_bench.bench.sampling import sample_of
from moe_ep_bench.bench.tokens import Batches
from moe_ep_bench.bench.traffic import route_layer
from moe_ep_bench.config import RebalanceConfig
from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.capacity import ExpandedDrop
from moe_ep_bench.schema import TOTAL

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "name": "sample",
    "model": {"preset": "olmoe-1b-7b"},
    "workload": {"kind": "synthetic", "num_tokens": 65536, "num_batches": 1, "history": 1, "seed": 3, "peak_load": 3},
    "layer": {"ep_size": 8},
    "policies": [
        {"name": "token_drop", "capacity_factor": 1.5},
        {"name": "expanded_drop", "capacity_factor": 1.5},
        {"name": "budget_drop", "max_dropped": 0.1},
    ],
    "emulate": {
        "links": "h100-nvlink4-ndr",
        "device": "h100-sxm",
        "replication": [{"spare_per_rank": 1}],
        "rebalance": [{"name": "llep"}, {"name": "epic"}],
    },
}


def planned(folder: Path, *overrides: str) -> Point:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return plan(path, overrides, VIRTUAL, on_cpu=True)[0]


def found(point: Point) -> dict[str, tuple[float, float, float]]:
    """Of each case the layer's time (us), the share of pairs dropped, and the fullest rank's load over the mean."""
    ranks = ModelledRanks(point, point.cases, CPU, lambda _: None)
    with torch.inference_mode():
        measure_point(ranks, ranks.begin)
    at, values = ranks.result.columns[TOTAL], {}
    for case in point.cases:
        rows = ranks.result.rows[case.case_id]
        dropped = sum(row["num_dropped_pairs"] for row in rows) / sum(row["num_topk_pairs"] for row in rows)
        loads = sum(row["load_R"] for row in rows)
        time_us = float(ranks.result.times[case.case_id][:, 0, at].max())
        values[case.label + case.role] = time_us, dropped, float(loads.max() / loads.mean())
    return values


@pytest.mark.parametrize(
    "sizes",
    [
        ["layer.ep_size=8"],
        ["layer.ep_size=32"],
        ["model.preset=deepseek-v3", "layer.ep_size=32", "workload.num_tokens=32768", "layer.dtype=bfloat16"],
    ],
    ids=["64 experts over 8", "64 over 32", "256 over 32"],
)
def test_a_sample_says_what_all_tokens_do(sizes: list[str], tmp_path: Path) -> None:
    whole = planned(tmp_path, *sizes)
    few = planned(tmp_path, *sizes, f"emulate.sample_tokens={whole.num_tokens // 4}")
    assert (few.stands_for, few.num_tokens, few.most_tokens) == (4, whole.num_tokens, whole.most_tokens)
    assert few.comparison_id != whole.comparison_id
    expected, got = found(whole), found(few)
    assert got.keys() == expected.keys()
    pairs = whole.num_tokens * whole.model.top_k / whole.ep_size / 4
    for label, (time_us, dropped, fullest) in expected.items():
        # Which weights move is a choice of whole experts: a sample may make another, as another batch does.
        moves = label.startswith(("LLEP", "EPIC"))
        assert got[label][0] == pytest.approx(time_us, rel=0.15 if moves else 0.04), label
        assert got[label][1] == pytest.approx(dropped, abs=0.03), label
        assert got[label][2] == pytest.approx(fullest, rel=0.25 if moves else 4 / np.sqrt(pairs) + 0.01), label


def test_counts_of_a_sample_are_those_of_the_batch(tmp_path: Path) -> None:
    for overlap in ("none", "two_batch"):
        point = planned(tmp_path, "emulate.sample_tokens=1024", f"emulate.overlap={overlap}")
        cases = [case for case in point.cases if not case.name.endswith("_drop")]
        with torch.inference_mode():
            of_cases = route_layer(Router(point, CPU), cases, None, 0)
        for case, traffic in zip(cases, of_cases, strict=True):
            assert traffic.counts_RP.sum() == point.num_tokens * point.model.top_k, case.label
            assert sum(traffic.num_tokens_R) == point.num_tokens
            assert traffic.copies("rank").max() <= max(traffic.num_tokens_R)
            assert traffic.frontier is None, "the best that dropping can do is known of all tokens alone"
            for part in traffic.parts:
                assert sum(part.num_tokens_R) == point.num_tokens / 2
        assert {length for of_rank in point.lengths_of_ranks(0) for length in of_rank} == {128}
        assert sum(map(sum, point.lengths_of_ranks(0))) == point.num_tokens


@pytest.mark.parametrize("ep_size", [65, 72, 80, 96, 128, 192, 256, 1024])
def test_a_sample_is_found_for_any_number_of_tokens_on_many_ranks(ep_size: int, tmp_path: Path) -> None:
    """Ranks that stand for all divide them evenly, and there are never more of them."""
    model = {"num_experts": ep_size, "top_k": 8, "hidden_size": 64, "ffn_hidden_size": 64}
    for each in (1, 2, 7, 64, 1024, 8192):
        changes = [f"model={model}", f"layer.ep_size={ep_size}", f"workload.num_tokens={each * ep_size}"]
        experiment = planned(tmp_path, *changes).experiment
        sample = sample_of([experiment], 2**22)
        ranks = sample.get("sample_ranks", ep_size)
        assert ep_size % ranks == 0
        assert sample.get("sample_tokens", 0) % ranks == 0
        assert sample or each * ep_size * ep_size <= 2 * 2**22
        assert ranks < ep_size or ep_size < 256 or each < 64, "a step of decode takes a minute too"


SUMMED = ("retained_mass_topk", "retained_mass_all")
SOURCES = ["layer.ep_size=32", "emulate.sample_ranks=8", "emulate.sample_tokens=8192"]


@pytest.mark.parametrize("overlap", ["none", "two_batch"])
def test_tokens_of_few_ranks_say_what_those_of_all_do(overlap: str, tmp_path: Path) -> None:
    """Matched loads leave experts as equal as all tokens do, so that nothing looks worse balanced than it is."""
    sizes = "layer.ep_size=32", f"emulate.overlap={overlap}"
    whole, few = planned(tmp_path, *sizes), planned(tmp_path, *sizes, *SOURCES)
    assert (few.num_sources, few.stands_for, few.num_tokens, few.most_tokens) == (8, 2, 65536, whole.most_tokens)
    expected, got = found(whole), found(few)
    for label, (time_us, dropped, fullest) in expected.items():
        moves = label.startswith(("LLEP", "EPIC"))
        assert got[label][0] == pytest.approx(time_us, rel=0.15 if moves else 0.04), label
        assert got[label][1] == pytest.approx(dropped, abs=0.02), label
        assert got[label][2] == pytest.approx(fullest, rel=0.25 if moves else 0.03), label


@pytest.mark.slow
def test_a_step_of_decode_on_few_ranks_says_what_all_do(tmp_path: Path) -> None:
    sizes = "layer.ep_size=32", "workload.num_tokens=4096", "workload.sequence_length=1"
    few = planned(tmp_path, *sizes, "emulate.sample_ranks=8", "emulate.sample_tokens=1024")
    expected, got = found(planned(tmp_path, *sizes)), found(few)
    for label, (time_us, dropped, fullest) in expected.items():
        if not label.startswith(("LLEP", "EPIC")):
            assert got[label][0] == pytest.approx(time_us, rel=0.04), label
            assert got[label][1] == pytest.approx(dropped, abs=0.03), label
            assert got[label][2] == pytest.approx(fullest, rel=0.06), label


def test_matched_loads_are_those_of_the_traffic_in_each_half_of_a_ranks_tokens(tmp_path: Path) -> None:
    sizes = "layer.ep_size=32", "workload.num_tokens=4194304", "emulate.overlap=two_batch"
    point, by_chance = (planned(tmp_path, *of, *sizes) for of in (SOURCES, ["emulate.sample_tokens=8192"]))

    def apart(of: Point) -> float:
        """How far the experts' loads of micro-batches are from each other, of those with a load at least."""
        batches = Batches(of, CPU)
        parts = [batches.tokens(None, 0, rank).parts(2) for rank in range(of.num_sources)]
        first_E, second_E = (
            np.sum([part[half].top_k_TE.sum(dim=0).numpy() for part in parts], axis=0) for half in (0, 1)
        )
        is_busy_E = first_E + second_E > 400
        return float(np.abs(first_E / second_E - 1)[is_busy_E].max())

    assert apart(point) < 0.05 < apart(by_chance)
    counts_RE = Batches(point, CPU).native_counts(0)
    assert counts_RE.shape == (32, 64)
    assert np.array_equal(counts_RE[:8], counts_RE[24:])


def test_a_plan_knows_of_a_matched_batch_what_its_tokens_would_have_said(tmp_path: Path) -> None:
    """To less than half of what chance would leave, without drawing any."""
    point = planned(tmp_path, *SOURCES, "model={num_experts: 64, top_k: 8, hidden_size: 64, ffn_hidden_size: 64}")
    deepseek = "model.preset=deepseek-v3", "layer.dtype=bfloat16"
    grouped, even = (planned(tmp_path, *SOURCES, *deepseek, *peak) for peak in ([], ["workload.peak_load=null"]))
    for of in (point, grouped, even):
        batches = Batches(of, CPU)
        for batch in (-1, 0):
            load_E = batches.loads(batch)
            assert not batches._counts
            counts_E = batches.native_counts(batch)[: of.num_sources].sum(axis=0)
            batches._counts.clear()
            assert (load_E * counts_E.mean() / counts_E - 1).std() < 0.5 / np.sqrt(counts_E.mean())


@pytest.mark.parametrize("overlap", ["none", "two_batch"])
def test_ranks_with_the_same_tokens_are_as_if_each_were_routed(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = planned(tmp_path, *SOURCES, f"emulate.overlap={overlap}")
    cases = [case for case in point.cases if case.role not in ("replication", "balanced")]
    with torch.inference_mode():
        shared = route_layer(Router(point, CPU), cases, None, 0)
        for kind in {type(case.policy) for case in cases if case.policy is not None}:
            monkeypatch.setattr(kind, "knows_rank", True)
            monkeypatch.setattr(kind, "fills_experts_apart", False)
        each = route_layer(Router(point, CPU), cases, None, 0)
    for one, other in zip(shared, each, strict=True):
        assert [row["rank"] for row in one.rows_R] == list(range(32))
        for row, expected in zip(one.rows_R, other.rows_R, strict=True):
            exact, expected_exact = ({**of, **dict.fromkeys(SUMMED)} for of in (row, expected))
            np.testing.assert_equal(exact, expected_exact)
            # Mass is added up in another order.
            assert [row[key] for key in SUMMED] == pytest.approx([expected[key] for key in SUMMED], rel=1e-12)
        for part, expected_part in zip(one.parts, other.parts, strict=True):
            assert np.array_equal(part.counts_RP, expected_part.counts_RP)


def test_a_policy_of_ones_own_is_routed_on_each_rank() -> None:
    class Mine(ExpandedDrop):
        """Which may choose otherwise."""

    assert ExpandedDrop(capacity_factor=1.0, scope="local").fills_experts_apart
    assert not Mine(capacity_factor=1.0, scope="local").fills_experts_apart


def test_rows_of_ranks_that_are_closed_are_freed_at_once(tmp_path: Path) -> None:
    """Not when garbage is next collected: rows of many points would stand beside each other."""
    point = planned(tmp_path, "workload.num_tokens=512")
    gc.disable()
    try:
        ranks = ModelledRanks(point, point.cases, CPU, lambda _: None)
        with torch.inference_mode():
            measure_point(ranks, ranks.begin)
        there = weakref.ref(ranks)
        ranks.close()
        del ranks
        assert there() is None
    finally:
        gc.enable()


def test_slots_of_ranks_with_the_same_tokens_get_what_a_balancer_gave_them(tmp_path: Path) -> None:
    point = planned(tmp_path, *SOURCES, "emulate.replication=[{spare_per_rank: 1, balancer: lp}]")
    cases, router = [case for case in point.cases if case.replication is not None], Router(point, CPU)
    with torch.inference_mode():
        for case, traffic in zip(cases, route_layer(router, cases, None, 0), strict=True):
            pairs_P = router._balanced(case, case.replication, 0).pairs_P
            assert pairs_P is not None
            sent_P = traffic.counts_RP.sum(axis=0) / point.stands_for
            assert sent_P.sum() == pairs_P.sum(), case.label
            assert np.abs(sent_P - pairs_P).max() <= point.world_size // point.num_sources, case.label


def test_rules_in_pairs_count_those_that_a_sample_stands_for() -> None:
    llep, epic = RebalanceConfig(name="llep", least_pairs=1000), RebalanceConfig(name="epic")
    assert llep.of_sample(8).least_pairs == 125
    assert RebalanceConfig(name="llep", least_pairs=3).of_sample(8).least_pairs == 1
    assert epic.of_sample(8) == epic, "it goes by what is computed during an exchange"
    assert RebalanceConfig(name="epic", least_pairs=80).of_sample(8).least_pairs == 10


def test_a_sample_says_how_well_it_tells_the_fullest_rank_and_one_of_more_than_all_says_nothing() -> None:
    native = pd.DataFrame({"fullest_rank": [1.5, 1.5]})
    facts: Any = SimpleNamespace(sample_tokens=1000, sample_ranks=None, num_tokens=4000, top_k=8, num_ranks=8)
    assert _sampled(facts, native) == (1000, 4, pytest.approx(300 * np.sqrt(0.75 / 1500)))
    facts.sample_tokens = 5000
    assert _sampled(facts, native) is None


def test_tokens_of_few_ranks_say_how_near_loads_are_to_those_of_all() -> None:
    native = pd.DataFrame({"fullest_rank": [1.5]})
    facts: Any = SimpleNamespace(sample_tokens=1000, sample_ranks=4, num_tokens=4000, top_k=8, num_experts=20)
    assert _sampled(facts, native) is None
    assert _matched(facts) == (1000, 4, 4, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["emulate.sample_tokens=1000"], "a divisor of the batch's 65536 tokens, at least 8 .one a rank., got 1000"),
        (["emulate.sample_tokens=4"], "at least 8 .one a rank., got 4"),
        (
            ["emulate.device=measured", "emulate.replication=[]", "emulate.rebalance=[]"],
            "null where layers are measured",
        ),
        (["workload.padding_per_rank=1"], "null where ranks have tokens or padding of their own, got 64"),
        (["emulate.sample_ranks=3"], "emulate.sample_ranks: expected a divisor of the 8 ranks, got 3"),
        (["emulate.sample_ranks=2", "emulate.sample_tokens=null"], "null without emulate.sample_tokens, got 2"),
        (["emulate.sample_ranks=2", "emulate.sample_tokens=1000"], "of the batch's 16384 tokens on 2 of 8 ranks"),
        (["workload.tokens_of_ranks=1.5"], "null where ranks have tokens or padding of their own, got 64"),
    ],
)
def test_what_cannot_be_sampled_is_refused(overrides: list[str], expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"emulate.sample_tokens: expected {expected}|{expected}"):
        planned(tmp_path, "emulate.sample_tokens=64", *overrides)
