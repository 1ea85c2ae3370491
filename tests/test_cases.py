"""The frame: a row per case whatever wrote it, whose every number is known; other frames join on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from results_builder import (
    ELSEWHERE_TOTAL_US,
    ELSEWHERE_US,
    FAST_RANK,
    WHOLE_CASES,
    FakeCase,
    FakeComparison,
    modelled_facts,
    samples,
    standard_cases,
    whole_facts,
    write_run,
    write_whole,
)

from moe_ep_bench.analysis import tables
from moe_ep_bench.analysis.cases import (
    CASE,
    cases,
    comparisons,
    differs_from_topk,
    load,
    point_parts,
    routing,
    timings,
)
from moe_ep_bench.analysis.notes import notes

FEW = {"noise": 0.0, "num_batches": 2, "num_iterations": 1}  # where no interval is looked at
DROP = "token_drop capacity_factor=1.0"
NATIVE = [FakeCase("native", role="baseline")]


def frame_of(root: Path, mode: str = "run", **changes) -> pd.DataFrame:
    """The rows of one comparison, by label."""
    write_run(root, [FakeComparison(**{"cases": standard_cases(), "num_iterations": 3, **changes})], mode)
    return cases(load(root)).set_index("label")


def rewritten(root: Path, folder: str, change: Callable[[dict], list[dict]]) -> pd.DataFrame:
    """The frame after every row of the parts in a folder has become other rows."""
    for path in (root / folder).glob("*.parquet"):
        table = pq.read_table(path)
        rows = [changed for row in table.to_pylist() for changed in change(row)]
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return cases(load(root)).set_index("label")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two directories that hold one comparison each, of the same ids."""
    root = tmp_path_factory.mktemp("runs")
    dropping = FakeCase("oea", params={"k0": 3}, speedup=1.2, dropped=0.1, mass=0.9)
    for number, name in enumerate(("a", "b")):
        comparison = FakeComparison(
            facts={"point": {"workload.peak_load": number + 1.5}}, cases=[*standard_cases(), dropping], num_iterations=2
        )
        write_run(root / name, [comparison])
    return load([root / "a", root / "b"])


# ---- frames join -----------------------------------------------------------------------------------------------------


def test_directories_are_told_apart_by_a_column_and_every_frame_joins_on_the_case(store):
    rows = cases(store)
    assert len(rows) == 12
    assert not rows.duplicated(CASE).any()
    assert list(rows["directory"].unique()) == ["a", "b"]
    assert list(comparisons(store)["point"]) == ['{"workload.peak_load": 1.5}', '{"workload.peak_load": 2.5}']
    for frame in (timings(store), routing(store)):
        joined = frame.merge(rows[[*CASE, "role"]], on=[*CASE, "role"], how="left", indicator=True)
        assert len(joined) == len(frame)
        assert (joined["_merge"] == "both").all()
        assert frame[CASE].drop_duplicates().shape == (12, 3)


def test_means_of_batches_are_the_cases_own(store):
    """But for the balanced case, whose scores are not the model's."""
    names = ["dropped_share", "retained_mass", "fullest_expert", "fullest_rank"]
    means = routing(store).query("role != 'balanced'").groupby(CASE)[names].mean()
    rows = cases(store).query("role != 'balanced'").set_index(CASE)
    found = rows[means.columns].astype(float).sort_index()
    pd.testing.assert_frame_equal(found, means.sort_index(), check_exact=False, check_index_type=False)
    assert cases(store).query("role == 'balanced'")[names[:2]].isna().all(axis=None)


def test_a_case_is_as_slow_as_its_slowest_rank(store):
    """The frame of iterations agrees with a plain maximum over the samples of all ranks."""
    rows, plain = samples(store), timings(store).query("quantity == 'all'")
    totals = rows[(rows["kind"] == "plain") & (rows["phase"] == "total")]
    keys = [*CASE, "launch", "batch", "iteration"]
    slowest = totals.groupby(keys)["time_us"].max()
    assert plain.set_index(keys)["time_us"].sort_index().to_numpy() == pytest.approx(slowest.sort_index().to_numpy())
    times = plain.groupby(CASE)["time_us"].quantile([0.5, 0.9, 0.99]).unstack() / 1e3
    found = cases(store).set_index(CASE)[["median_ms", "p90_ms", "p99_ms"]].astype(float)
    assert found.sort_index().to_numpy() == pytest.approx(times.sort_index().to_numpy())


def test_draws_of_the_traffic_become_launches_with_batches_of_their_own(tmp_path):
    """A case that one draw lost is lost; other points of the sweep stay apart."""

    def comparison(seed: int, point: int, *, lost: bool = False) -> FakeComparison:
        listed = [*standard_cases()[2:], FakeCase("oea", status="oom" if lost else "ok", reason="big")]
        traffic = {"kind": "synthetic", "tail_model": None, "targets": {"expert_loads": [1, seed]}, "seed": seed}
        traffic |= {"is_one_draw": True, "num_batches": 4, "num_tokens": 8, "sequence_length": 2}
        facts = {
            "point": {"workload.seed": seed, "x": point},
            "workload": traffic,
            "title": None,
            "model": f"Tiny {point}",
        }
        return FakeComparison(f"s{seed}{point}", facts, listed, 4, num_iterations=2, native_us=1e3 * (1 + seed))

    drawn = [comparison(seed, point, lost=seed == 1 and point == 2) for point in (1, 2) for seed in (0, 1)]
    store = load(write_run(tmp_path, drawn))
    about = comparisons(store)
    assert about[["comparison_id", "num_batches", "num_draws", "num_launches"]].to_numpy().tolist() == [
        ["s01", 8, 2, 2],
        ["s02", 8, 2, 2],
    ]
    assert about["point"].tolist() == ['{"x": 1}', '{"x": 2}']
    placed = "EP 2, 4,096 tokens, no skew, experts placed at random, 2 draws"
    assert about["title"].tolist() == [f"Tiny 1, {placed}", f"Tiny 2, {placed}"]
    assert about["workload_words"].str.endswith("4 x 8 tokens in sequences of 2, 2 seeds from 0 to 1").all()
    plain = timings(store).query("quantity == 'all' and comparison_id == 's01' and role == 'baseline'")
    batches = plain.groupby("launch")["batch"].unique().map(sorted).to_list()
    assert batches == [list(range(4)), list(range(4, 8))]
    assert plain.groupby("launch")["time_us"].median().tolist() == pytest.approx([1e3, 2e3], rel=0.05)
    assert routing(store).query("comparison_id == 's01' and policy == 'topk'")["batch"].tolist() == list(range(8))
    rows = cases(store).set_index(["comparison_id", "policy"])
    assert rows.loc[("s02", "oea"), ["status", "reason"]].tolist() == ["oom", "big"]
    assert rows.loc[("s02", "topk"), "status"] == "ok"
    assert len(cases(load(tmp_path, join_draws=False))) == 16


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_verdicts_hold_speedups_against_the_noise_floor(tmp_path):
    rows = frame_of(tmp_path, noise=0.01, cases=[*standard_cases(), FakeCase("oea", speedup=0.7)])
    expected = {
        "native": "baseline",
        "native again": "noise floor",
        DROP: "faster",
        "balanced": "faster",
    }
    assert rows["verdict"].to_dict() == {**expected, "topk": "no difference", "oea": "slower"}


def test_speedups_over_topk_are_paired_with_it(tmp_path):
    three = [FakeCase("native", role="baseline"), FakeCase("topk", speedup=0.8), FakeCase("oea", speedup=1.2)]
    rows = frame_of(tmp_path, cases=three, **FEW)
    ends = ["over_topk_median", "over_topk_low", "over_topk_high"]
    assert rows.loc["oea", ends].tolist() == pytest.approx([1.5] * 3)
    assert rows.loc["oea", "speedup_median"] == pytest.approx(1.2)
    assert rows.loc["topk", ends].isna().all(), "nothing is held against itself"


@pytest.mark.slow
@pytest.mark.parametrize(("topk", "differs"), [(1.005, False), (1.05, True)])
@pytest.mark.parametrize("modelled", [False, True])
def test_the_speedup_over_topk_is_another_one_where_native_differs_from_it_beyond_the_floor(
    tmp_path, topk, differs, modelled
):
    listed = [*standard_cases()[3:], FakeCase("topk", speedup=topk), FakeCase("oea", speedup=1.4)]
    how = {"mode": "emulated", "facts": {"device": modelled_facts()["device"]}} if modelled else {}
    rows = frame_of(tmp_path, noise=0.0 if modelled else 0.01, cases=listed, num_batches=10, **how)
    assert differs_from_topk(rows).loc[["native", "oea"]].tolist() == [differs] * 2
    assert not differs_from_topk(frame_of(tmp_path / "alone", cases=listed[:2], **FEW)).any()


def test_launches_are_all_used_and_their_scatter_widens_the_interval(tmp_path):
    two = [case for case in standard_cases() if case.policy in ("native", "topk")]
    alone = frame_of(tmp_path / "one", noise=0.01, cases=two).loc["topk"]
    # Each case of each launch is off by its own factor: what Student's t over launches is for.
    three = frame_of(tmp_path / "three", noise=0.01, cases=two, num_launches=3, launch_noise=0.05).loc["topk"]
    assert three["speedup_high"] - three["speedup_low"] > 3 * (alone["speedup_high"] - alone["speedup_low"])
    assert three["detectable"] > alone["detectable"] > 1


def test_phases_show_waiting_and_the_slowest_rank_names_the_phase(tmp_path):
    native, layer_ms = frame_of(tmp_path, **FEW).loc["native"], 2.0 * 1.005
    assert native["breakdown_slowest_phase"] == "experts"
    # Half the ranks save a fifth of 0.44 of the layer and wait for all of it but a hundredth.
    expected = {
        "breakdown_layer_ms": layer_ms,
        "experts_ms": layer_ms * 0.44 * (1 + FAST_RANK) / 2,
        "waiting_ms": layer_ms * 0.44 * (1 - FAST_RANK) * 0.99 / 2,
        "gate_ms": layer_ms * 0.10,
        "permute_ms": layer_ms * 0.20,
        "comm_ms": layer_ms * 0.25,
        "shared_ms": 0,
        "breakdown_unaccounted_share": 0.01,
        "breakdown_policy_share": 0.06,
    }
    assert native[list(expected)].to_dict() == pytest.approx(expected)


def test_on_gpus_waits_are_less_what_a_probe_costs_when_nobody_waits(tmp_path):
    def waiting_ms(backend: str, floor_us: float | None) -> float:
        rank = {"probe_floor_us": floor_us} if floor_us else {}
        root = tmp_path / f"{backend}{floor_us}"
        two = {"cases": standard_cases()[3:], "facts": {"backend": backend}, "conditions": {"rank": rank}}
        return frame_of(root, **FEW, **two).loc["native", "waiting_ms"]

    whole = waiting_ms("nccl", None)
    assert 0 < whole - waiting_ms("nccl", 4.0) <= 4 * 4e-3 + 1e-9, "four waits in a layer"
    assert waiting_ms("gloo", 4.0) == whole
    assert waiting_ms("nccl", 1e9) == 0


def test_a_probe_is_taken_off_the_wait_of_every_layer_wherever_waits_are_shown(tmp_path):
    """Two layers and two ranks, of which one waits; a pass keeps what its probes took."""
    floor, free = (
        write_whole(tmp_path / name, WHOLE_CASES, num_batches=2, conditions={"rank": rank}, seed=1)
        for name, rank in (("floor", {"probe_floor_us": 50.0}), ("free", {}))
    )
    store = load(floor)
    rows = cases(store)
    native = rows.query("role == 'baseline'").iloc[0]
    waits = samples(store).query("role == 'baseline' and phase == 'wait_combine' and rank == 1")
    assert waits["layer"].nunique() == 2
    assert waits["time_us"].min() > 50
    expected_ms = (waits["time_us"] - 50).groupby([waits["batch"], waits["iteration"]]).sum().median() / 1e3
    by_rank = tables.by_rank(store, rows).query("role == 'baseline'").set_index("rank")["waiting_ms"]
    assert by_rank.to_dict() == pytest.approx({0: 0.0, 1: expected_ms})
    assert native["waiting_ms"] == pytest.approx(expected_ms / 2)
    assert native["mean_rank_waiting_ms"] == pytest.approx(expected_ms / 2)
    same = ["moe_ms", "moe_share"]
    unlike = cases(load(free)).query("role == 'baseline'").iloc[0]
    assert native[same].tolist() == pytest.approx(unlike[same].tolist())


@pytest.mark.slow
def test_ep_groups_that_never_meet_are_reduced_by_themselves(tmp_path):
    """EP 2 on 4 ranks: the second group takes one and a half times as long, and its fullest rank is the other one."""
    one = frame_of(tmp_path / "one", **FEW)
    write_run(
        tmp_path / "two", [FakeComparison(cases=standard_cases(), facts={"world_size": 4, "num_replicas": 2}, **FEW)]
    )

    def second(row: dict) -> list[dict]:
        longer = {name: row[name] and 1.5 * row[name] for name in ("time_us", "host_us") if name in row}
        loads = {name: row[name][::-1] for name in ("load_E", "load_R") if name in row}
        return [row, {**row, **longer, **loads, "rank": row["rank"] + 2}]

    rewritten(tmp_path / "two", "cases", second)
    two = rewritten(tmp_path / "two", "routing", second)
    for column in ("median_ms", "breakdown_layer_ms", "experts_ms", "waiting_ms"):
        assert two[column].to_numpy() == pytest.approx(1.25 * one[column].to_numpy()), column
    assert two["slowest_group_ms"].to_numpy() == pytest.approx(1.5 * one["median_ms"].to_numpy())
    same = ["speedup_median", "fullest_expert", "fullest_rank", "rank_imbalance", "dropped_share", "experts_per_token"]
    same += ["retained_mass", "activated_experts", "host_bound_share"]
    for column in same:
        assert two[column].dropna().to_numpy() == pytest.approx(one[column].dropna().to_numpy()), column
    assert one["fullest_rank"]["native"] > 1.1, "summed over groups it would be 1"
    assert two["slowest_group_fullest_rank"].tolist() == pytest.approx(two["fullest_rank"].tolist())
    assert one[["slowest_group_ms", "slowest_group_fullest_rank"]].isna().all(axis=None)
    store = load(tmp_path / "two")
    assert len(routing(store)) == 2 * len(routing(load(tmp_path / "one")))
    (line,) = [line.text for line in notes(store, "two", "c0") if "EP groups" in line.text]
    assert line.startswith("2 independent EP groups: times and loads are means over them")


def test_ep_groups_of_unequal_tokens_count_by_what_they_hold(tmp_path):
    """Shares are of all tokens; the fullest ranks of two groups are one mean, and beside it the fuller one."""
    write_run(tmp_path, [FakeComparison(cases=standard_cases(), facts={"world_size": 4, "num_replicas": 2}, **FEW)])
    counts = ("num_tokens", "num_pairs", "num_topk_pairs")

    def second(row: dict) -> list[dict]:
        smaller = {name: row[name] // 4 for name in counts} | {"retained_mass_topk": 0.4}
        drops = {name: 0 for name in ("num_dropped_pairs", "num_rerouted_pairs", "num_missing_pairs") if name in row}
        balanced = [row["num_pairs"] // 4 // len(row["load_E"])] * len(row["load_E"])
        even = {"load_E": balanced, "load_R": [sum(balanced) // 2] * 2}
        return [row, {**row, **smaller, **drops, **even, "rank": row["rank"] + 2}]

    before = cases(load(tmp_path)).set_index("label").loc[DROP]
    rewritten(tmp_path, "cases", lambda row: [row, {**row, "rank": row["rank"] + 2}])
    row = rewritten(tmp_path, "routing", second).loc[DROP]
    assert row["dropped_share"] == pytest.approx(before["dropped_share"] * 4 / 5, rel=1e-3)
    assert row["retained_mass"] == pytest.approx((4 * before["retained_mass"] + 0.4) / 5, rel=1e-3)
    assert row["slowest_group_fullest_rank"] == pytest.approx(before["fullest_rank"])
    assert before["fullest_rank"] > row["fullest_rank"] > 0.5 * before["fullest_rank"]


def test_routing_weighs_ranks_by_their_tokens(tmp_path):
    """Ranks hold 3/4 and 1/4 of the tokens and differ: their plain mean would be 0.02 off."""
    row = frame_of(tmp_path, **FEW).loc[DROP]
    assert row["dropped_share"] == pytest.approx(0.25, abs=1e-3)
    assert row["retained_mass"] == pytest.approx(0.80, abs=1e-3)
    assert row["output_error"] == pytest.approx(0.2)
    shares = routing(load(tmp_path))["topk_share"]  # 0.8 and 0.4
    assert shares.tolist() == pytest.approx([0.7] * len(shares))


def test_replicas_of_data_parallel_ranks_send_to_the_same_expert_ranks(tmp_path):
    names = ["fullest_expert", "fullest_rank", "rank_imbalance", "activated_fullest_rank", "dropped_share"]
    alone = frame_of(tmp_path, **FEW)[names]
    twice = rewritten(tmp_path, "routing", lambda row: [row, {**row, "rank": row["rank"] + 2}])[names]
    pd.testing.assert_frame_equal(twice, alone)


def test_the_output_error_of_a_batch_is_its_worst_layers(tmp_path):
    frame_of(tmp_path, cases=NATIVE, facts=whole_facts(), **FEW)
    errors = rewritten(
        tmp_path, "routing", lambda row: [{**row, "layer": layer, "output_error": layer / 10} for layer in (1, 2)]
    )
    assert errors["output_error"].item() == pytest.approx(0.2)


def test_experts_of_a_rank_are_counted_where_they_are_at_their_homes(tmp_path):
    rows = frame_of(tmp_path, cases=[*standard_cases(), FakeCase("eplb", role="replication")], **FEW)
    assert rows.loc[["native", DROP], "activated_fullest_rank"].tolist() == [4, 4]
    assert np.isnan(rows.loc["EPLB", "activated_fullest_rank"])


def test_load_is_summed_over_ranks_and_relative_to_the_models_own_mean(tmp_path):
    load_E = np.full(8, 0.5)
    load_E[3] = 1.5
    case = FakeCase("token_drop", params={"capacity_factor": 1.5}, expert_load=load_E)
    row = frame_of(tmp_path, cases=[*standard_cases(), case], **FEW).loc["token_drop capacity_factor=1.5"]
    assert (row["fullest_expert"], row["fullest_rank"]) == pytest.approx((1.5, 0.75))
    # Over the mean of the pairs that are computed the same load is more.
    assert (row["expert_imbalance"], row["rank_imbalance"]) == pytest.approx((2.4, 1.2))
    unit = routing(load(tmp_path)).query("label == 'token_drop capacity_factor=1.5'").iloc[0]
    assert unit["load_E"] * 8 / unit["num_topk_pairs"] == pytest.approx(load_E)


@pytest.mark.parametrize("of", ["batch", "layer"])
def test_the_fullest_expert_is_that_of_each_batch_and_layer(tmp_path, of):
    """Two experts that are hot in turn are hot in every batch, or layer of a model, though not on average."""
    frame_of(tmp_path, cases=NATIVE, facts=whole_facts(), **FEW)

    def in_turn(row: dict) -> list[dict]:
        units = [{**row, "layer": layer} for layer in (0, 1)]
        return [{**u, "load_E": [u["num_topk_pairs"] * (expert == u[of]) for expert in range(8)]} for u in units]

    assert rewritten(tmp_path, "routing", in_turn)["fullest_expert"].item() == pytest.approx(8)


# ---- whole models ----------------------------------------------------------------------------------------------------

# Native's MoE layers are two thirds of a pass; a policy that runs them so many times as fast gains what the law says.
SHARE, LAYERS = 2 / 3, 1.5
END_TO_END = 1 / (1 - SHARE + SHARE / LAYERS)


def test_a_pass_gains_what_amdahls_law_says_of_its_layers(tmp_path):
    store = load(write_whole(tmp_path, WHOLE_CASES, facts={"world_size": 4, "num_replicas": 2}))
    rows = cases(store).set_index("label")
    policy, native = rows.loc["token_drop capacity_factor=2.0"], rows.loc["native"]
    assert policy["speedup_median"] == pytest.approx(END_TO_END, rel=0.01)
    assert policy["by_amdahl"] == pytest.approx(END_TO_END, rel=0.02)
    assert policy["moe_speedup_median"] == pytest.approx(LAYERS, rel=0.03)
    assert native["moe_share"] == pytest.approx(SHARE, rel=0.01)
    assert native["most_by_amdahl"] == pytest.approx(1 / (1 - SHARE), rel=0.03)
    assert native["mean_rank_attention_ms"] == pytest.approx(ELSEWHERE_US["attention"] / 1e3)
    assert native["tokens_per_s"] == pytest.approx(4096 / native["median_ms"] * 1e3)
    assert native["tokens_per_s_per_rank"] == pytest.approx(native["tokens_per_s"] / 4)
    parts = timings(store).query("role == 'baseline'").groupby("quantity")["time_us"].median()
    assert parts["attention"] == pytest.approx(ELSEWHERE_US["attention"])
    assert parts["the rest"] == pytest.approx(ELSEWHERE_TOTAL_US - ELSEWHERE_US["attention"], rel=0.06)
    assert parts["MoE layers"] == pytest.approx(2 * ELSEWHERE_TOTAL_US, rel=0.02)


# ---- order and names -------------------------------------------------------------------------------------------------


def test_cases_are_read_in_order_whatever_the_order_of_the_files(tmp_path):
    """Numbers of parameters are numbers: c=6 stands before c=10."""
    more = [FakeCase("expanded_drop", params={"capacity_factor": 2.0})]
    more += [FakeCase("token_drop", params={"capacity_factor": gamma}) for gamma in (10.0, 2.0)]
    more += [FakeCase("laser", params={"c": c}) for c in (10, 6, 0.5, 1e-05)]
    assert list(frame_of(tmp_path, cases=[*standard_cases(), *more], **FEW).index) == [
        *("native", "native again", "topk", DROP),
        *(f"token_drop capacity_factor={gamma}" for gamma in (2.0, 10.0)),
        "expanded_drop capacity_factor=2.0",
        *("laser c=1e-05", "laser c=0.5", "laser c=6", "laser c=10", "balanced"),
    ]


def test_variants_of_one_policy_are_told_apart_by_what_their_labels_name(tmp_path):
    def drop(factor: float, metric: str) -> FakeCase:
        params = {"capacity_factor": factor, "metric": metric, "modality": "uniform"}
        defaults = ["modality", *(["metric"] if metric == "score" else [])]
        return FakeCase("token_drop", params=params, defaults=defaults)

    more = [drop(1.0, "score"), drop(2.0, "score"), drop(1.0, "order"), drop(2.0, "order")]
    more += [FakeCase("laser", params={"c": [6, 12]})]
    rows = frame_of(tmp_path, cases=[*standard_cases()[1:], *more], **FEW)
    names = ["topk", "token_drop metric=order", "token_drop", "laser c=[6, 12]"]
    assert list(rows["family_label"].dropna().unique()) == names
    assert rows["family"].nunique() == 4


def test_a_place_in_a_sweep_names_every_swept_key():
    point = {"policies.0.capacity_factor": 1.0, "policies.1.capacity_factor": 2.0, "workload.peak_load": None}
    assert point_parts(point) == ("capacity factor 1.0", "capacity factor 2.0", "no peak load")
