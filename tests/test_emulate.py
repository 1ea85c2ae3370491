"""Emulated ranks from the command line to the table, and beside real ranks of the same config."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from results_builder import label_in, shown_text
from test_run import cases_of, environment, routing_of, write_config

from moe_ep_bench.analysis.columns import short_labels
from moe_ep_bench.balancers import MOVING
from moe_ep_bench.bench import emulated_ranks
from moe_ep_bench.bench.measure import Case
from moe_ep_bench.bench.meetings import exchange_us
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import VIRTUAL, Point
from moe_ep_bench.bench.result import Result
from moe_ep_bench.bench.virtual_ranks import VirtualRanks
from moe_ep_bench.cli import main
from moe_ep_bench.config import RebalanceConfig, ReplicationConfig, WaterfillConfig, label_of
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.cost_model.timeline import RankTime
from moe_ep_bench.errors import OK
from moe_ep_bench.layer.backend import LayerBackend
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.policies.contract import params_of
from moe_ep_bench.runtime.attempts import Loss
from moe_ep_bench.schema import LAYER_PHASES, TOTAL, UNACCOUNTED

LINKS = {"emulate": {"links": "h100-nvlink4"}}
H100 = {"links": "h100-nvlink4", "device": "h100-sxm"}


def emulate(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "moe_ep_bench", "emulate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(), check=False)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("emulate")
    config = write_config(folder, layer__ep_size=4, workload__num_batches=2, **LINKS)
    done = emulate(config, "--out", folder / "out")
    assert done.returncode == OK, done.stderr
    return folder / "out"


@pytest.mark.slow
def test_every_rank_and_batch_has_all_phases_that_add_up(emulated: Path) -> None:
    rows = cases_of(emulated)
    assert set(rows["mode"]) == {"emulated"}
    assert rows.case_id.nunique() == 7
    plain, breakdown = rows[rows.kind == "plain"], rows[rows.kind == "breakdown"]
    assert len(plain) == 7 * 4 * 2  # cases, ranks, batches; iterations were put together
    assert set(breakdown.phase) == {*LAYER_PHASES, TOTAL, UNACCOUNTED} - {"wait_policy"}
    keys = ["case_id", "rank", "batch", "iteration"]
    parts = breakdown[breakdown.phase != TOTAL].groupby(keys).time_us.sum()
    totals = breakdown[breakdown.phase == TOTAL].set_index(keys).time_us
    pd.testing.assert_series_equal(parts, totals.sort_index(), check_names=False)
    pd.testing.assert_series_equal(plain.set_index(keys).time_us.sort_index(), totals.sort_index(), check_names=False)
    waits = breakdown[breakdown.phase == "wait_dispatch"].groupby(["case_id", "batch", "iteration"]).time_us
    assert (waits.min() == 0).all(), "the last rank waits for nobody"
    assert (waits.max() > 0).all()
    text = shown_text(emulated)
    sent = "Modelled links: fp32, NCCL all-to-all, one copy per (token, expert) pair, no overlap."
    how = "emulated (one device for all ranks, the all-to-all is modelled)"
    for said in (how, sent, "4 ranks", "links/h100-nvlink4"):
        assert said in text
    routing = pd.concat(map(pd.read_parquet, (emulated / "routing").iterdir()))
    assert (routing.reference_error.notna() == (routing.batch == 0)).all(), "few tokens of one batch are checked"


@pytest.mark.parametrize("experts", ["grouped", "te"])
def test_a_case_that_raises_in_its_check_is_left_out_and_the_others_stay(experts: str) -> None:
    """Transformer Engine's experts multiply in TF32: what is an error of others is its rounding."""
    errors = {"raises": lambda: [][0], "wrong": lambda: 1.0, "no number": lambda: float("nan"), "right": lambda: 0.0}
    errors |= {"rounded": lambda: 0.0013}
    ranks, recorded = VirtualRanks.__new__(VirtualRanks), []
    ranks.point, ranks.errors, ranks.result = (
        SimpleNamespace(workloads=[0, 1], layer_backend=LayerBackend(experts)),
        {},
        Result(),
    )
    ranks.cases, ranks.begin = [Case(SimpleNamespace(case_id=name), ranks) for name in errors], lambda case_id: None
    ranks.job = SimpleNamespace(
        record_failure=lambda error: (recorded.append(error), Loss("failed", "IndexError: no 0"))[1]
    )
    ranks.small = SimpleNamespace(error=lambda case, layer: errors[case.case_id]())
    ranks.check()
    differs = "output differs from the dense reference by {} in layer 0"
    reasons = {"raises": "IndexError: no 0", "wrong": differs.format(1), "no number": differs.format("nan")}
    reasons |= {} if experts == "te" else {"rounded": differs.format("0.0013")}
    unmeasured = ranks.result.unmeasured
    assert {status for status, _ in unmeasured.values()} == {"failed"}
    assert {case_id: words.partition(", allowed")[0] for case_id, (_, words) in unmeasured.items()} == reasons
    assert [type(error) for error in recorded] == [IndexError]
    assert [case.case_id for case in ranks.cases] == ["right", "rounded"][: 1 + (experts == "te")]
    assert {key: error for key, error in ranks.errors.items() if error == error and "rounded" not in key} == {
        ("wrong", 0): 1.0, ("right", 0): 0.0, ("right", 1): 0.0
    }  # fmt: skip


def written(out: Path) -> dict[str, str]:
    """The job that wrote each case."""
    rows = cases_of(out)
    return dict(zip(rows.case_id, rows.run_id, strict=True))


def test_modelled_comparisons_are_kept_as_they_finish_and_the_end_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    modelled, sweep = H100, {"workload.seed": [0, 1]}
    config, out = write_config(tmp_path, layer__ep_size=4, emulate=modelled, sweep=sweep), tmp_path / "out"
    comparisons, model = plan(config, [], VIRTUAL, on_cpu=True), emulated_ranks.modelled_time

    def until_interrupted(comparison: Point, *arguments: object) -> RankTime:
        if comparison.comparison_id != comparisons[0].comparison_id:
            raise KeyboardInterrupt
        return model(comparison, *arguments)

    monkeypatch.setattr(emulated_ranks, "modelled_time", until_interrupted)
    assert main(["emulate", str(config), "--out", str(out)]) == 128 + signal.SIGINT
    kept = written(out)
    assert set(kept) == {case.case_id for case in comparisons[0].cases}
    assert "moe-ep-bench: stopped: what is finished is kept" in capfd.readouterr().err
    monkeypatch.setattr(emulated_ranks, "modelled_time", model)
    assert main(["emulate", str(config), "--out", str(out)]) == OK
    assert {name: when for name, when in written(out).items() if name in kept} == kept


LP = {"spare_per_rank": 1, "balancer": "lp"}
REPLICATION = [{"spare_per_rank": 1}, LP, {**LP, "solve_us": 7}]
MODELLED = {"emulate": {"links": "h20-nvlink4", "device": "h20", "replication": REPLICATION}}


@pytest.fixture(scope="module")
def modelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modelled")
    config = write_config(folder, layer__ep_size=4, workload__num_batches=2, **MODELLED)
    assert main(["emulate", str(config), "--out", str(folder / "out")]) == OK
    return folder / "out"


def test_a_modelled_device_runs_nothing_and_says_so(modelled: Path, emulated: Path) -> None:
    text = shown_text(modelled)
    assert "modelled (nothing was run)" in text
    assert "devices/h20" in text
    assert not (modelled / "conditions").exists()
    ours, measured = routing_of(modelled), routing_of(emulated, point=0)
    pd.testing.assert_frame_equal(ours[ours.label.isin(measured.label)].reset_index(drop=True), measured)
    assert ours.reference_error.isna().all() if "reference_error" in ours else True


def test_replicas_cost_memory_in_every_layer_of_the_model(modelled: Path) -> None:
    cases = json.loads((modelled / "run.json").read_text())["cases"].values()
    extra = {label_in(case): case["extra_bytes_per_rank"] for case in cases}
    model = ModelSpec.named("deepseek-v2-lite").scaled(1 / 32)
    one_expert = 3 * model.hidden_size * model.ffn_hidden_size * 4
    assert {extra.pop(one) for one in list(extra) if one.startswith("EPLB")} == {one_expert * model.num_moe_layers}
    assert set(extra.values()) == {None}


def test_what_moves_in_a_batch_is_counted_and_takes_its_time_over_the_links(tmp_path: Path) -> None:
    """Weights and rows of shared experts; each pair and each token is computed once all the same."""
    moving = [{"name": name, "least_pairs": 1, "solve_us": 7} for name in ("llep", "ultra", "epic")]
    moving.append({"name": "moonep", "solve_us": 7})
    settings = {"links": "h20-nvlink4", "device": "h20", "rebalance": [*moving, {"name": "waterfill"}]}
    config = write_config(tmp_path, layer__ep_size=4, workload__num_batches=1, workload__peak_load=8, emulate=settings)
    assert main(["emulate", str(config), "--out", str(tmp_path / "out")]) == OK
    rows, times = routing_of(tmp_path / "out"), cases_of(tmp_path / "out")
    labels = json.loads((tmp_path / "out/run.json").read_text())["cases"]
    times = times[times.kind == "breakdown"].assign(
        label=lambda rows: rows.case_id.map(lambda one: label_in(labels[one]))
    )
    phases = times.pivot_table(index=["label", "rank"], columns="phase", values="time_us")
    sums = {label: np.sum(own.load_R.tolist(), axis=0) for label, own in rows.groupby("label")}
    (comparison,) = plan(config, [], VIRTUAL, on_cpu=True)
    links, expert_bytes = comparison.links, comparison.expert_bytes
    for name in ("LLEP", "UltraEP", "EPIC", "MoonEP"):
        label = f"{name} (7 us to solve), 2 spare per rank{', least_pairs=1' * (name != 'MoonEP')}"
        own = rows[rows.label == label].sort_values("rank")
        assert sums[label].max() < sums["native"].max()
        assert sums[label].sum() == sums["native"].sum()
        assert (own.num_dropped_pairs == 0).all()
        moved = own.moved_weight_bytes.to_numpy()
        assert moved.any()
        assert (moved % expert_bytes == 0).all(), "whole experts"
        assert (moved <= 2 * expert_bytes).all(), "no more than the free slots of a rank"
        assert (own.slot_load_P.map(len) == 64 + 2 * 4).all()
        least_us = links.intra.time_us(moved.max())
        rows_us, _ = exchange_us(comparison, np.array(own.load_R.tolist()))
        beside_us = phases.loc[label].dispatch.to_numpy() - rows_us
        assert beside_us.max() >= least_us * (1 - 1e-9), "weights come over the links that carry the rows"
        assert (phases.loc[label].policy - phases.loc["native"].policy).round(6).eq(7).all()
    filled, native = phases.loc["shared experts by water-filling"], phases.loc["native"]
    assert filled.experts.tolist() == native.experts.tolist()
    assert filled.shared.idxmin() == sums["native"].argmax(), "the fullest rank computes fewest shared tokens"
    assert filled.shared.idxmax() == sums["native"].argmin()
    assert (filled.dispatch >= native.dispatch).all()
    assert filled.dispatch.sum() > native.dispatch.sum(), "tokens of shared experts go over the links too"


def test_ways_to_balance_that_differ_have_labels_that_differ() -> None:
    """Of any two with other fields; claims name them by label, tables may shorten it."""
    ways = [
        *(ReplicationConfig(spare_per_rank=spare, plan=plan) for spare in (1, 2) for plan in ("eplb", "variance")),
        *(
            ReplicationConfig(spare_per_rank=1, balancer=how, solve_us=us)
            for how in ("lp", "activated")
            for us in (0, 7)
        ),
        *(RebalanceConfig(name=name, spare_per_rank=spare) for name in MOVING for spare in (2, 4)),
        *(RebalanceConfig(name="ultra", least_pairs=pairs) for pairs in (1, 64)),
        *(RebalanceConfig(name="llep", solve_us=us) for us in (0, 7)),
        WaterfillConfig(name="waterfill"),
    ]
    assert len({label_of(way) for way in ways}) == len(
        {(way.name, json.dumps(params_of(way.settings()))) for way in ways}
    )
    rows = [{"policy": way.name, "settings": way.settings(), "role": "replication"} for way in ways]
    assert short_labels(pd.DataFrame(rows)).nunique() == len(ways)


def test_an_exchange_sends_rows_and_weights_there_and_results_back() -> None:
    links = Links.named("h100-nvlink4")
    model, layer = SimpleNamespace(expert_hidden_size=256), SimpleNamespace(planned_dtype="fp8", dispatch_dtype=None)
    experiment = SimpleNamespace(layer=layer)
    comparison = SimpleNamespace(links=links, model=model, device=None, sent_for=None, experiment=experiment)
    comparison.device = Device.named("h100-sxm")
    dispatch_us, combine_us = exchange_us(comparison, np.array([[0, 4], [1, 0]]))
    # Four rows of 256 bytes with a weight of 4 each; results are of two bytes a value.
    np.testing.assert_allclose(dispatch_us, [links.intra.time_us(4 * 256) + links.intra.time_us(4 * 4)] * 2)
    np.testing.assert_allclose(combine_us, [links.intra.time_us(4 * 512)] * 2)
    # Transformer Engine casts rows behind the dispatch, and so do layers that run here.
    for device in (Device.named("h100-sxm-te"), None):
        comparison.device = device
        dispatch_us, _ = exchange_us(comparison, np.array([[0, 4], [1, 0]]))
        np.testing.assert_allclose(dispatch_us, [links.intra.time_us(4 * 512) + links.intra.time_us(4 * 4)] * 2)


def test_solving_counts_where_every_rank_solves_a_batch(modelled: Path) -> None:
    samples, cases = cases_of(modelled), json.loads((modelled / "run.json").read_text())["cases"]
    policy = samples[samples.phase == "policy"].set_index("case_id").time_us
    policy_us = policy.groupby(policy.index.map(lambda case_id: label_in(cases[case_id]))).median()
    for us in (7, 100):
        of_lp = policy_us[f"EPLB + LP ({us} us to solve), 1 spare per rank"]
        assert of_lp == pytest.approx(policy_us["native"] + us)
