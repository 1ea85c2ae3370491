"""Routing without timing: from a config to rows, a table and figures; every number beside a slow, obvious one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import test_run
import torch
from safetensors.numpy import load_file
from trace_files import write_trace

import plot_results
from moe_ep_bench import balancers
from moe_ep_bench.analysis.cases import load, routing
from moe_ep_bench.analysis.columns import render
from moe_ep_bench.analysis.tables import tables
from moe_ep_bench.bench.commands import route
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import ROUTING
from moe_ep_bench.cli import main
from moe_ep_bench.errors import OK, USER_ERROR
from moe_ep_bench.machine import provenance
from moe_ep_bench.placement import rank_load, replicate
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.workload.importers import ASSUMED

CONFIG = {
    "name": "tiny",
    "model": {"preset": "deepseek-v2-lite"},
    "workload": {"kind": "synthetic", "num_tokens": 96, "num_batches": 2, "peak_load": 4.0, "sequence_length": 8},
    "layer": {"ep_size": 4},
    "policies": [{"name": "token_drop", "capacity_factor": 1.0}, {"name": "oea", "k0": 2}],
}
# Three layers of two recordings, requests that decode, and fields with several values.
FULL = {
    **CONFIG,
    "workload": {
        "kind": "recorded",
        "order": "shuffled",
        "trace": ["a.safetensors", "b.safetensors"],
        "layer": "all",
        "tail": "popularity",
        "arrangement": "decode",
        "tokens_per_request": 2,
        "num_tokens": 16,
        "num_batches": 1,
        "image_share": 0.5,
    },
    "policies": [
        {"name": "laser", "eps_high": 0.9, "t_fix": 0.2, "c": [6, 12]},
        {"name": "token_drop", "capacity_factor": 1.0, "modality": "image_first"},
        {"name": "xshare", "scope": "request", "k0": 1, "request_budget": [1, 4]},
    ],
    "sweep": {"workload.num_tokens": [16, 96]},
}


def write_config(folder: Path, base: dict = CONFIG, **changes: object) -> Path:
    return test_run.write_config(folder, base, **changes)


def write_recordings(folder: Path, domain: str = "domain") -> None:
    for name, seed in (("a", 1), ("b", 2)):
        lengths = {"length_S": (30, 24, 18, 40, 25), "num_layers": 3, "num_experts": 64, "top_k": 6}
        write_trace(folder / f"{name}.safetensors", **lengths, seed=seed, domain=f"{domain} {name}")


def rows_of(out: Path) -> pd.DataFrame:
    return pd.concat(pq.read_table(path).to_pandas() for path in sorted((out / "routing").glob("*.parquet")))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("route")
    write_recordings(folder)
    route(write_config(folder, FULL), folder / "out", [])
    return folder / "out"


# ---- routing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_what_the_whole_batch_decides_does_not_depend_on_the_ranks(num_ranks: int, tmp_path: Path) -> None:
    """Native and OEA as one call over all tokens of the batch, without any ranks."""
    config = write_config(tmp_path, layer__ep_size=num_ranks)
    batches = routing(load(route(config, tmp_path / "out", []).root)).set_index(["label", "batch"])
    workload = plan(config, [], ROUTING)[0].workload
    for label, spec in (("native", {"name": "topk"}), ("oea k0=2", {"name": "oea", "k0": 2})):
        for batch in range(2):
            scores_TE = workload.batch(batch).scores_TE
            map_TE = make_policy(spec).route(scores_TE, RoutingContext(top_k=6)).map_TE
            found = batches.loc[(label, batch)]
            assert found["load_E"].tolist() == map_TE.sum(dim=0).tolist()
            top_k_TE = make_policy({"name": "topk"}).route(scores_TE, RoutingContext(top_k=6)).map_TE
            mass = (scores_TE * map_TE).double().sum() / (scores_TE * top_k_TE).double().sum()
            assert found["retained_mass"] == pytest.approx(float(mass))
            assert found["activated_experts"] == int(map_TE.any(dim=0).sum())
            missing_T, added_T = (top_k_TE & ~map_TE).sum(dim=1), (map_TE & ~top_k_TE).sum(dim=1)
            rerouted_T = torch.minimum(missing_T, added_T)
            assert found["rerouted_share"] == pytest.approx(float(rerouted_T.sum() / top_k_TE.sum()))
            assert found["dropped_share"] == pytest.approx(float((missing_T - rerouted_T).sum() / top_k_TE.sum()))


def test_rows_are_the_schema_s_and_name_the_layer_and_the_mode(full: Path) -> None:
    rows = rows_of(full)
    assert (set(rows["mode"]), set(rows["layer"])) == ({"route"}, {0, 1, 2})
    assert (rows["num_image_tokens"] * 2 == rows["num_tokens"]).all()  # Of two tokens the first.
    assert (rows["image_load_E"].map(sum) <= rows["load_E"].map(sum)).all()
    assert rows.groupby(["case_id", "batch"])["num_tokens"].sum().isin([16, 96]).all()


def test_layers_are_one_comparison_whatever_their_order(full: Path, tmp_path: Path) -> None:
    write_recordings(tmp_path)
    route(write_config(tmp_path, FULL, sweep={"workload.layer": [2, 0, 1], **FULL["sweep"]}), tmp_path / "out", [])
    one, other = (
        [(two.facts.layer, two.facts.workload.layers, two.facts.title) for two in load(out).comparisons]
        for out in (full, tmp_path / "out")
    )
    assert one == other
    assert [layer for layer, *_ in other] == [0, 0]


def test_replicas_have_the_ranks_of_emulated_ones_and_keep_every_pair(tmp_path: Path) -> None:
    """Two batches, each planned for the other; EPLB's even shares, and those of the linear program."""
    replication = [{"spare_per_rank": 1}, {"spare_per_rank": 1, "balancer": "lp"}, {"spare_per_rank": 16}]
    config = write_config(tmp_path, emulate={"replication": replication})
    store = load(route(config, tmp_path / "out", []).root)
    routed = routing(store)
    static, lp = (routed[routed["label"] == f"EPLB{how}, 1 spare per rank"] for how in ("", " + LP (100 us to solve)"))
    native = routed[routed["label"] == "native"]
    counts = [row["pairs_RR"].reshape(4, 4) for _, row in native.iterrows()]
    load_BE = np.stack(native["load_E"].to_list())
    for index, (even_R, split_R) in enumerate(zip(static["load_R"], lp["load_R"], strict=True)):
        plan = replicate(load_BE[1 - index], num_slots=68, num_ranks=4)
        # Whole pairs of each source rank in turn: at most one off for each slot and source.
        assert np.abs(even_R - rank_load(load_BE[index], plan, 4)).max() <= 17 * 4
        loads_RE = np.pad(load_BE[index][None], ((0, 3), (0, 0)))
        assert split_R.max() == balancers.lp(plan, loads_RE).pairs_P.reshape(4, -1).sum(axis=1).max()
        assert split_R.max() <= even_R.max()
        assert split_R.max() < counts[index].sum(axis=0).max()
    for rows in (static, lp):
        assert (rows["dropped_share"] == 0).all()
        assert rows["num_pairs"].tolist() == native["num_pairs"].tolist()


def test_finished_cases_are_not_routed_again(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    out = route(config, tmp_path / "out", []).root
    before = rows_of(out).groupby("case_id")["run_id"].unique().str[0]
    assert len(before) == 3  # native and two policies
    parts = [out / folder / f"{load(out).comparisons[0].comparison_id}.parquet" for folder in ("routing", "frontier")]
    assert {*out.rglob("*.parquet")} == {*parts}
    victim = before.index[0]
    pq.write_table(pq.read_table(parts[0]).filter(pc.field("case_id") != victim), parts[0])
    route(config, tmp_path / "out", [])
    after = rows_of(out).groupby("case_id")["run_id"].unique().str[0]
    assert {case_id for case_id in before.index if after[case_id] != before[case_id]} == {victim}
    route(config, tmp_path / "out", [], force=True)
    assert set(rows_of(out)["run_id"]).isdisjoint(after)
    route(config, tmp_path / "out", ["workload.seed=5"])
    assert len(load(out).comparisons) == 2  # a directory keeps what another config left


def test_results_of_other_code_are_refused_but_where_all_is_done_anew(tmp_path: Path, monkeypatch) -> None:
    config = write_config(tmp_path)
    route(config, tmp_path / "out", [])
    monkeypatch.setattr(provenance, "code_hash", lambda: "another")
    with pytest.raises(ValueError, match=r"holds results with code \w+, here it is another; .* or --force$"):
        route(config, tmp_path / "out", [])
    route(config, tmp_path / "out", [], force=True)
    assert load(tmp_path / "out").comparisons[0].run.hashes["code"] == "another"


# ---- table and figures ---------------------------------------------------------------------------------------------


def test_ids_alone_need_a_share_that_is_assumed_and_are_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What routes by score (oea) or counts it (mass) says that the recording had none; loads are the recording's."""
    sizes = {"num_experts": 64, "top_k": 6, "length_S": (40, 56)}
    path = write_trace(tmp_path / "a.safetensors", **sizes, normalised=True, equal=True, score=ASSUMED)
    workload = {"kind": "recorded", "trace": "a.safetensors", "layer": 0, "tail": "uniform", "num_tokens": 96}
    config = write_config(tmp_path, workload={**workload, "num_batches": 1})
    assert main(["route", str(config), "--out", str(tmp_path / "refused")]) == USER_ERROR
    assert "topk_share: expected a number, as scores are normalised" in capsys.readouterr().err
    out = route(config, tmp_path / "out", ["workload.topk_share=0.6"]).root
    shown = " ".join(render(tables(load(out)), "text").split())
    assert "scores were not recorded and are assumed equal" in shown
    assert "mass, and what policies choose by scores" in shown
    native = rows_of(out).query("policy == 'native'")
    load_E = np.bincount(load_file(path)["expert_ids"][0].ravel(), minlength=64)
    assert np.sum(native["load_E"].tolist(), axis=0).tolist() == load_E.tolist()


def test_route_draws_its_loads_and_the_configs_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    line = {"x": "batch", "y": "rank_imbalance", "by": "policy"}
    assert main(["route", str(write_config(tmp_path, figures=[line])), "--out", str(out)]) == OK
    drawn = {path.stem for path in (out / "figures").glob("*.png")}
    assert drawn == {"load", "dropped", "rank_imbalance-over-batch-by-policy"}
    rows = pd.read_csv(out / "figures" / "rank_imbalance-over-batch-by-policy.csv")
    assert set(rows["origin"]) == {"routed"}
    assert "figures in" in capsys.readouterr().out
    assert plot_results.main([str(out), "--figures", "speedup"]) == 2
