"""A decode step's time over the experts that it activates: points, line, bound, and when there is nothing to draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from results_builder import CEILINGS, FFN_SIZE, HIDDEN_SIZE, FakeCase, FakeComparison, write_run

from moe_ep_bench.analysis.activated import Steps, decode_steps
from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.analysis.tables import run_text

FIXED_US, EXPERT_US, READ_GBPS = 80.0, 200.0, 2.0
NATIVE_US = 2000.0  # of which the experts take 0.44 on the slowest rank


def step(policy: str, loads: list[float], role: str = "policy") -> FakeCase:
    """A case whose experts take what their number says; 8 experts on 2 ranks."""
    load_E = np.array(loads)
    activated = (load_E.reshape(2, -1) > 0).sum(axis=1).max()
    wanted_us = FIXED_US + EXPERT_US * activated
    return FakeCase(policy, role=role, label=policy, speedup=0.44 * NATIVE_US / wanted_us, expert_load=load_E)


STEPS = [
    step("native", [1, 1, 1, 1, 1, 1, 1, 1], role="baseline"),
    step("oea", [2, 2, 0, 0, 0, 2, 1, 1]),  # the second rank activates more
    step("lynx", [4, 0, 0, 0, 4, 0, 0, 0]),
    step("xshare", [0, 3, 3, 0, 1, 0, 0, 1]),
]


def steps_of(root: Path, *comparisons: FakeComparison) -> list[Steps]:
    return decode_steps(load_run(write_run(root, comparisons)))


def decode(identity: str = "c0", **changes: object) -> FakeComparison:
    rank = {"ceilings": {**CEILINGS, "read_gbps": READ_GBPS}}
    exact = {"noise": 0.0, "probe_overhead": 0.0, "cases": STEPS, "conditions": {"rank": rank}}
    exact |= {"num_batches": 2, "num_iterations": 2}
    return FakeComparison(**{"comparison_id": identity, **exact, **changes})


def test_the_fullest_rank_s_experts_give_back_what_each_costs(tmp_path: Path) -> None:
    (steps,) = steps_of(tmp_path, decode())
    by_case = steps.points.groupby("label")["activated"].unique().map(list).to_dict()
    assert by_case == {"native": [4], "oea": [3], "lynx": [1], "xshare": [2]}
    assert len(steps.points) == 4 * 2  # cases, batches
    assert (steps.line.intercept_us, steps.line.slope_us, steps.line.r2) == pytest.approx((FIXED_US, EXPERT_US, 1))
    # 10**9 bytes are a gigabyte, an expert has three matrices, a value two bytes.
    assert steps.bound_us == pytest.approx(3 * HIDDEN_SIZE * FFN_SIZE * 2 / (READ_GBPS * 1e9) * 1e6)
    text = run_text(load_run(tmp_path))
    assert f"experts' time = {FIXED_US:.1f} us + {EXPERT_US:.2f} us x activated experts of the fullest rank" in text
    assert f"bound: {steps.bound_us:.2f} us an expert" in text


def test_comparisons_that_differ_in_their_tokens_alone_are_pooled(tmp_path: Path) -> None:
    few, many = decode("few", tokens=64), decode("many", tokens=128)
    other = decode("other", facts={"model": "Other-MoE"})
    pools = steps_of(tmp_path, few, many, other)
    assert [sorted(set(steps.points["num_tokens"])) for steps in pools] == [[64, 128], [4096]]
    assert pools[0].title == "Tiny-MoE, EP 2, 64 to 128 tokens a step, te experts"
    assert pools[0].cost is not None
    assert (pools[0].cost.per_expert_us, pools[0].cost.per_pair_us) == pytest.approx((EXPERT_US, 0), abs=1e-6)


def test_other_dispatchers_and_graphs_are_other_layers_and_what_is_modelled_or_placed_is_left_out(
    tmp_path: Path,
) -> None:
    others = {"dispatcher": "allgather"}, {"cuda_graph": "the whole layer"}
    others += {"device": "H100 (modelled)"}, {"placement": "strided"}
    found = steps_of(tmp_path, decode("a"), *(decode(f"b{n}", facts=facts) for n, facts in enumerate(others)))
    assert [steps.title.partition("te experts")[2] for steps in found] == [
        "",
        ", allgather dispatcher",
        ", replayed from CUDA graphs (the whole layer)",
    ]
    assert [len(steps.points) for steps in found] == [4 * 2] * 3


def activated_column(text: str) -> dict[str, str]:
    """The column ``activated`` of the first table of a summary, by policy."""
    header, _, *rows = text.split("\n\n")[1].split("\n")
    place = header.index("activated")
    return {row.split()[0]: row[place : place + len("activated")].strip() for row in rows}


def test_the_table_counts_the_fullest_rank_s_experts_over_all_source_ranks(tmp_path: Path) -> None:
    # Each source rank touches two experts of the first rank: three together, however many each has of its own.
    apart = FakeCase("pruned", expert_load=np.array([[4, 4, 0, 0, 0, 0, 0, 0], [0, 4, 4, 0, 0, 0, 0, 0]]))
    lost = FakeCase("laser", status="failed", reason="wrong")
    replicated = FakeCase("eplb", role="replication")
    comparison = decode(facts={"device": "H100 (modelled)"}, cases=[*STEPS, apart, lost, replicated])
    text = run_text(load_run(write_run(tmp_path, [comparison], "emulated")))
    found = activated_column(text)
    assert {name: found[name] for name in ("native", "oea", "lynx", "xshare", "pruned", "eplb")} == {
        **{"native": "4.0", "oea": "3.0", "lynx": "1.0", "xshare": "2.0", "pruned": "3.0"},
        "eplb": "-",
    }
    assert "activated: experts with a token on the rank that has most of them, of 4; mean over batches" in text
    for name, changes in {"idle": {"cases": STEPS[:1]}, "strided": {"facts": {"placement": "strided"}}}.items():
        untold = run_text(load_run(write_run(tmp_path / name, [decode(**changes)])))
        assert "activated" not in untold, f"{name}: all are activated, or whose experts they are does not follow"
