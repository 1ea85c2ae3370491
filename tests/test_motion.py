"""Popularity that moves over batches: batch 0 is as without, loads keep their shape, and how much moves is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_run import CONFIG, routing_of, write_config

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.bench.checks import VIRTUAL
from moe_ep_bench.bench.description import routed_facts
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.cli import main
from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.errors import OK
from moe_ep_bench.workload.motion import Motion, overlap
from moe_ep_bench.workload.synthetic import SyntheticWorkload

E, K = 64, 4
SIZES = {"num_experts": E, "top_k": K, "num_tokens": 8192, "num_batches": 12, "sequence_length": 32, "seed": 5}
MOTIONS = [Motion("hotspot", 4), Motion("burst", 4), Motion("drift", 3.0)]


def workload(motion: Motion | None, **changes: Any) -> SyntheticWorkload:
    return SyntheticWorkload(motion=motion, **{**SIZES, "peak_load": 4.0, **changes})


def loads(found: SyntheticWorkload, index: int) -> np.ndarray:
    ids_TK = found.batch(index).scores_TE.topk(K, dim=1).indices
    return torch.bincount(ids_TK.flatten(), minlength=E).double().numpy() / len(ids_TK)


@pytest.mark.parametrize("motion", MOTIONS, ids=lambda motion: motion.kind)
def test_batches_keep_the_shape_of_the_loads_and_the_first_is_as_without_motion(motion: Motion) -> None:
    still, moving = workload(None), workload(motion)
    assert torch.equal(moving.batch(0).scores_TE, still.batch(0).scores_TE)
    expected_E = np.sort(loads(still, 0))
    for index in (3, 4, 11):
        assert np.sort(loads(moving, index)) == pytest.approx(expected_E, abs=0.012)
        assert loads(moving, index).max() * E / K == pytest.approx(4.0, rel=0.06)
    assert moving.load_overlap == pytest.approx(
        overlap(np.array([loads(moving, index) for index in range(12)])), abs=0.03
    )
    assert still.load_overlap is None


def test_a_hotspot_stays_for_its_turn_and_a_burst_comes_back() -> None:
    popularity_E = np.random.default_rng(0).normal(size=E)

    def places(motion: Motion, num_batches: int = 12, num_groups: int | None = None) -> list[list[int]]:
        return [motion.places(index, popularity_E, 5, num_groups).tolist() for index in range(num_batches)]

    turns = places(MOTIONS[0])
    assert [turns.index(one) for one in turns] == [0] * 4 + [4] * 4 + [8] * 4
    assert turns[0] == list(range(E))
    bursts = places(MOTIONS[1])
    assert [bursts.index(one) for one in bursts] == [0, 0, 0, 3] * 3
    for of_batch in (*turns, *bursts, *places(MOTIONS[2])):
        assert sorted(of_batch) == list(range(E))
    for of_batch in places(MOTIONS[0], num_groups=8):
        groups = np.reshape(of_batch, (8, 8)) // 8
        assert (groups == groups[:, :1]).all(), "groups stay together"


def test_drift_halves_its_correlation_in_a_half_life() -> None:
    """Of 4,096 experts, spelled out: popularity follows the order of normal numbers, so that its correlation does."""
    popularity_E = np.random.default_rng(1).normal(size=4096)
    drift = Motion("drift", 3.0)
    moved = {index: popularity_E[drift.places(index, popularity_E, 5, None)] for index in (-6, -3, -1, 0, 1, 3, 6, 9)}
    assert moved[0].tolist() == popularity_E.tolist()
    spans = {(0, 3): 0.5, (0, 6): 0.25, (6, 9): 0.5, (0, 1): 0.5 ** (1 / 3)}
    spans |= {(-6, -3): 0.5, (-3, 0): 0.5, (-1, 0): 0.5 ** (1 / 3), (-3, 3): 0.25}  # batches that plans know
    for (first, later), expected in spans.items():
        assert np.corrcoef(moved[first], moved[later])[0, 1] == pytest.approx(expected, abs=0.04)


def test_groups_drift_and_so_do_experts_inside_them() -> None:
    """64 groups of 64: those that stand together stay so, and both orders lose half of their correlation."""
    popularity_E = np.random.default_rng(1).normal(size=4096) + np.repeat(np.random.default_rng(2).normal(size=64), 64)
    drift, of_group_G = Motion("drift", 3.0), popularity_E.reshape(64, 64).mean(axis=1)
    assert drift.places(0, popularity_E, 5, 64).tolist() == list(range(4096))
    place_E = drift.places(3, popularity_E, 5, 64)
    assert sorted(place_E) == list(range(4096))
    group_GE = place_E.reshape(64, 64) // 64
    assert (group_GE == group_GE[:, :1]).all(), "groups stay together"
    assert np.corrcoef(of_group_G, of_group_G[group_GE[:, 0]])[0, 1] == pytest.approx(0.5, abs=0.25)
    own_GE = (popularity_E.reshape(64, 64) - of_group_G[:, None]).ravel()
    home_GE = np.empty(4096)
    home_GE.reshape(64, 64)[group_GE[:, 0]] = own_GE[place_E].reshape(64, 64)  # each group back at its place
    assert np.corrcoef(own_GE, home_GE)[0, 1] == pytest.approx(0.5, abs=0.05)


def test_overlap_is_what_stays_on_its_expert() -> None:
    assert overlap(np.array([[3.0, 1, 0], [1, 3, 0], [1, 3, 0]])) == pytest.approx((2 / 4 + 1) / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"motion": "drift"}, "workload.motion, workload.motion_batches: expected both or none, got one"),
        (
            {"motion": "burst", "motion_batches": 1},
            "expected a whole number from 2 on for burst, got 1",
        ),
        ({"motion": "hotspot", "motion_batches": 1.5}, "expected a whole number from 1 on for hotspot, got 1.5"),
        (
            {"motion": "drift", "motion_batches": 3, "peak_load": None},
            "motion: expected a skew beside it that can move",
        ),
        ({"motion": "drift", "motion_batches": 3, "peak_load": None, "skew": "W1_hot_expert_set"}, "prescribes all lo"),
    ],
)
def test_what_cannot_move_is_one_line(tmp_path: Path, capsys, changes: dict[str, Any], message: str) -> None:
    config = write_config(tmp_path, **{f"workload__{key}": value for key, value in changes.items()})
    assert main(["route", str(config), "--out", str(tmp_path / "out")]) != OK
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_results_say_what_moves_and_how_much(tmp_path: Path) -> None:
    config = write_config(tmp_path, workload__motion="hotspot", workload__motion_batches=2, layer__ep_size=4)
    assert load_experiments(config, (), on_cpu=True)[0].workload.motion == "hotspot"
    assert main(["route", str(config), "--out", str(tmp_path / "out")]) == OK
    (facts,) = json.loads((tmp_path / "out" / "run.json").read_text())["comparisons"].values()
    assert facts["workload"]["targets"]["motion"] == {"hotspot": 2}
    assert 0.5 < facts["load_overlap"] < 1
    words = cases(load(tmp_path / "out"))["workload_words"].iloc[0]
    assert "motion hotspot of 2 batches" in words
    assert f"neighbouring batches share {facts['load_overlap']:.0%} of their loads" in words
    assert CONFIG["workload"]["num_batches"] == 3


@pytest.mark.slow
def test_a_plan_is_stale_in_the_batch_in_which_the_hotspot_moves(tmp_path: Path) -> None:
    """Planned anew in every batch for the one before it, replicas fit all batches but the first of a turn."""
    plan = {"spare_per_rank": 2, "window": 1, "every": 1}
    still = {"workload__peak_load": 6.0, "workload__num_tokens": 4096, "workload__num_batches": 9, "layer__ep_size": 4}
    moving = {"workload__motion": "hotspot", "workload__motion_batches": 3, "emulate": {"replication": [plan]}}
    config = write_config(tmp_path, **still, **moving)
    assert main(["route", str(config), "--out", str(tmp_path / "out")]) == OK
    rows = routing_of(tmp_path / "out")
    of_plan = rows[rows.label.str.startswith("EPLB")].groupby("batch").load_R.sum()
    fullest = {batch: load_R.max() / load_R.mean() for batch, load_R in of_plan.items()}
    assert min(fullest[3], fullest[6]) > max(fullest[batch] for batch in (1, 2, 4, 5, 7, 8)) + 0.05


def test_models_say_what_moves_in_all_their_layers(tmp_path: Path) -> None:
    smaller = [
        "whole.num_layers=3", "layer.ep_size=4", "workload.tokens_per_rank=40", "workload.sequence_length=20",
        "workload.num_batches=3", "emulate.device=h100-sxm", "emulate.links=h100-nvlink4",
    ]  # fmt: skip
    moves = ["workload.peak_load=3", "workload.skew=null", "workload.motion=hotspot", "workload.motion_batches=1"]
    (moving,) = plan(Path("configs/model-prefill.yaml"), smaller + moves, VIRTUAL, on_cpu=True)
    overlaps = [one.load_overlap for one in moving.workloads.values()]
    assert len(overlaps) > 1
    assert routed_facts(moving).load_overlap == pytest.approx(np.mean(overlaps))
    patterns = [
        f"workload={{kind: synthetic, skew: W1_hot_expert_set, num_tokens: 64, num_batches: 2, seed: {seed}}}"
        for seed in (0, 0, 1)
    ]
    found = [
        routed_facts(plan(Path("configs/model-prefill.yaml"), [*smaller[:2], *smaller[5:], pattern], VIRTUAL)[0])
        for pattern in patterns
    ]
    assert found[0].routing_checksum == found[1].routing_checksum != found[2].routing_checksum
