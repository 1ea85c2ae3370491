"""What any modelled answer must do when a question changes, from the command line to the table of cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from moe_ep_bench.analysis.cases import cases, load, timings
from moe_ep_bench.cli import main
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.errors import OK
from moe_ep_bench.schema import ALL

FACTORS = [1.0, 1.5, 2.0, 64.0]
DROPS = [{"name": name, "capacity_factor": FACTORS} for name in ("token_drop", "expanded_drop")]
AS_TOP_K = [{"name": "oea", "k0": 8}, {"name": "pruned", "k0": 8}, {"name": "xshare", "k0": 1, "budget": 64}]
USUAL: dict[str, Any] = {
    "name": "physics",
    "model": {"preset": "olmoe-1b-7b"},
    "workload": {"kind": "synthetic", "num_tokens": 2048, "peak_load": 3.0, "num_batches": 2, "seed": 1},
    "layer": {"ep_size": 8},
    "policies": [{"name": "topk"}, *DROPS, *AS_TOP_K],
    "emulate": {"device": "h100-sxm", "links": "h100-nvlink4"},
}
ROUTED = ["dropped_share", "retained_mass", "fullest_rank", "fullest_expert", "activated_experts"]
Answers = Callable[..., pd.DataFrame]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Cases by label, of ``USUAL`` with other keys (``workload__peak_load=2``), each question asked once."""
    known: dict[str, pd.DataFrame] = {}

    def ask(command: str = "emulate", **changes: Any) -> pd.DataFrame:
        config = json.loads(json.dumps(USUAL))
        for key, value in changes.items():
            *sections, name = key.split("__")
            (config[sections[0]] if sections else config)[name] = value
        text = json.dumps([command, config])
        if text not in known:
            folder = tmp_path_factory.mktemp(command)
            (folder / "config.yaml").write_text(json.dumps(config))
            assert main([command, str(folder / "config.yaml"), "--out", str(folder / "out")]) == OK
            known[text] = cases(load(folder / "out")).set_index("label", drop=False).assign(folder=folder / "out")
        return known[text]

    return ask


def native_ms(rows: pd.DataFrame) -> float:
    return rows.loc["native", "median_ms"]


def of_factors(rows: pd.DataFrame, policy: str) -> pd.DataFrame:
    return rows[rows["policy"] == policy].sort_values("capacity_factor")


@pytest.mark.slow
def test_what_binds_nothing_is_the_models_top_k_and_its_routing_alone_takes_longer(answers: Answers) -> None:
    rows, device = answers(), Device.load("h100-sxm")
    unbound = rows.loc[["token_drop capacity_factor=64.0", "pruned k0=8"]]
    assert (unbound["dropped_share"] == 0).all()
    np.testing.assert_allclose(unbound["median_ms"], rows.loc["topk", "median_ms"], rtol=1e-12)
    num_scores = 2048 // 8 * 64
    routing_us = device.routing_us(num_scores, by_policy=True) - device.routing_us(num_scores, by_policy=False)
    assert (rows.loc["topk", "median_ms"] - native_ms(rows)) * 1e3 == pytest.approx(routing_us)
    alike = rows.loc[["topk", "token_drop capacity_factor=64.0", *rows.index[rows["policy"].isin(["oea", "xshare"])]]]
    assert (alike[ROUTED].nunique() == 1).all()


@pytest.mark.parametrize("policy", ["token_drop", "expanded_drop"])
def test_more_capacity_drops_less_keeps_more_and_takes_longer(answers: Answers, policy: str) -> None:
    rows = of_factors(answers(), policy)
    assert rows["dropped_share"].is_monotonic_decreasing
    assert rows["retained_mass"].is_monotonic_increasing
    assert rows["median_ms"].is_monotonic_increasing


@pytest.mark.slow
def test_routing_knows_neither_links_nor_device_nor_the_clock(answers: Answers) -> None:
    usual, routed = answers()[ROUTED], answers("route")
    shared = [label for label in routed.index if label in usual.index]
    assert len(shared) == len(USUAL["policies"][1:3]) * len(FACTORS) + len(AS_TOP_K) + 1
    others = [routed, *(answers(emulate={**USUAL["emulate"], "bandwidth_scale": scale}) for scale in (0.1, 10))]
    for other in others:
        pd.testing.assert_frame_equal(other.loc[shared, ROUTED], usual.loc[shared], check_dtype=False)
    fast_to_slow = [native_ms(rows) for rows in (others[2], answers(), others[1])]
    assert (np.diff(fast_to_slow) > 0).all()


@pytest.mark.slow
def test_larger_batches_take_longer_but_less_a_token(answers: Answers) -> None:
    sizes = (256, 1024, 4096, 16384)
    times = np.array([native_ms(answers(workload__num_tokens=size, policies=[{"name": "topk"}])) for size in sizes])
    assert (np.diff(times) > 0).all()
    assert (np.diff(np.array(sizes) / times) > 0).all()


@pytest.mark.slow
def test_skew_slows_native_alone_and_makes_capacities_drop_more(answers: Answers) -> None:
    by_skew = [answers(workload__peak_load=load) for load in (1.5, 3.0, 6.0)]
    assert (np.diff([native_ms(rows) for rows in by_skew]) > 0).all()
    assert len({rows.loc["balanced", "median_ms"] for rows in by_skew}) == 1
    dropped = np.stack([of_factors(rows, "token_drop")["dropped_share"] for rows in by_skew])
    assert (np.diff(dropped, axis=0) >= 0).all()
    assert (np.diff(dropped[:, 0]) > 0).all()


@pytest.mark.slow
def test_solving_adds_its_time_and_another_batch_nothing(answers: Answers) -> None:
    how = [{"spare_per_rank": 1, "balancer": "lp", "solve_us": solve_us} for solve_us in (0.0, 50.0)]
    rows = answers(emulate={**USUAL["emulate"], "replication": how})
    at_once, later = rows.loc[rows["role"] == "replication", "median_ms"].sort_values()
    assert (later - at_once) * 1e3 == pytest.approx(50.0)
    assert (rows.loc[rows["role"] == "replication", "dropped_share"] == 0).all()
    two, three = (timings(load(asked["folder"].iloc[0])) for asked in (answers(), answers(workload__num_batches=3)))
    first = [one[(one["quantity"] == ALL) & (one["batch"] < 2)]["time_us"].to_numpy() for one in (two, three)]
    np.testing.assert_allclose(*first, rtol=1e-12)
