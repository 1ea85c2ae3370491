"""Spare slots that layers share: a budget goes where the planned fullest rank falls most."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from moe_ep_bench.bench import point as points
from moe_ep_bench.bench.checks import ROUTING, VIRTUAL
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import MOST_OF_MEAN, Point
from moe_ep_bench.bench.routing import Router
from moe_ep_bench.cli import main
from moe_ep_bench.errors import OK
from moe_ep_bench.facts.words import case_label, spare_words
from moe_ep_bench.placement import fullest_by_spare, rank_load, replicate, spread_over_layers
from tests.trace_files import write_trace

CPU = torch.device("cpu")
NUM_RANKS, NUM_EXPERTS, NUM_LAYERS = 4, 8, 5


def some_loads(seed: int, num_layers: int = 3, num_batches: int = 2) -> np.ndarray:
    """Skewed pairs of each layer, batch and expert."""
    random = np.random.default_rng(seed)
    popularity_LE = random.gamma(0.7, size=(num_layers, NUM_EXPERTS)) + 0.05
    return random.poisson(40 * popularity_LE[:, None], size=(num_layers, num_batches, NUM_EXPERTS)).astype(float)


def curves(load_LBE: np.ndarray, plan: str, most: int) -> np.ndarray:
    sizes = {"most": most, "num_ranks": NUM_RANKS, "num_groups": 1}
    return np.array([fullest_by_spare(plan, load_BE, **sizes) for load_BE in load_LBE])


@pytest.mark.parametrize("budget", range(7))
@pytest.mark.parametrize("seed", range(6))
def test_no_division_has_a_smaller_sum_of_fullest_ranks(seed: int, budget: int) -> None:
    fullest_LF = curves(some_loads(seed), "eplb", 4)
    chosen = spread_over_layers(fullest_LF, budget)
    divisions = [one for one in itertools.product(range(5), repeat=3) if sum(one) <= budget]
    sums = {one: sum(fullest_F[spare] for fullest_F, spare in zip(fullest_LF, one, strict=True)) for one in divisions}
    assert sums[chosen] == pytest.approx(min(sums.values()), rel=1e-12)


@pytest.mark.parametrize("plan_name", ["eplb", "variance"])
@pytest.mark.parametrize("mean", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_budget_is_never_worse_than_as_many_slots_in_every_layer(seed: int, mean: int, plan_name: str) -> None:
    """On the batches that it knows, by its own aim."""
    fullest_LF = curves(some_loads(seed, num_layers=4, num_batches=3), plan_name, 2 * mean)
    spare_L = spread_over_layers(fullest_LF, 4 * mean)
    assert sum(spare_L) <= 4 * mean
    assert fullest_LF[range(4), spare_L].sum() <= fullest_LF[:, mean].sum() * (1 + 1e-12)


def test_slots_that_help_nowhere_are_not_given() -> None:
    """Ranks that are equal without a replica gain nothing by any."""
    fullest_LF = curves(np.full((3, 1, NUM_EXPERTS), 10.0), "eplb", 4)
    assert spread_over_layers(fullest_LF, 6) == (0, 0, 0)
    one_busy = np.full((3, 1, NUM_EXPERTS), 10.0)
    one_busy[1, 0, 3] = 100
    spare_L = spread_over_layers(curves(one_busy, "eplb", 4), 2)
    assert spare_L[0] == spare_L[2] == 0 < spare_L[1]


# ---- in a run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    trace = write_trace(
        tmp_path / "one.safetensors", length_S=(40, 25, 55), num_layers=NUM_LAYERS, popularity=1.4, sharpness=0.6
    )
    workload = {"kind": "recorded", "trace": str(trace), "layer": "all", "tail": "popularity"}
    emulate = {"links": "h100-nvlink4", "device": "h100-sxm", "replication": [{"spare_budget": 0.6, "window": 2}]}
    parts = {
        "model": {"num_experts": NUM_EXPERTS, "top_k": 3, "hidden_size": 64, "ffn_hidden_size": 32},
        "workload": {**workload, "num_tokens": 20, "num_batches": 3},
        "layer": {"ep_size": NUM_RANKS},
        "policies": [{"name": "topk"}],
        "emulate": emulate,
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(parts))
    return path


def replicated(point: Point) -> Any:
    return next(case for case in point.cases if case.replication is not None)


def test_each_layer_is_planned_with_its_share_of_the_budget(config: Path) -> None:
    """By the loads that native has in the window of the first plan, counted in every layer by routing it."""
    points = plan(config, [], VIRTUAL, on_cpu=True)
    assert len(points) == NUM_LAYERS
    known = (-2, -1)
    counts = [[Router(point, CPU).native_counts(batch).sum(axis=0) for batch in known] for point in points]
    load_LBE = np.array(counts, dtype=float)
    for point, load_BE in zip(points, load_LBE, strict=True):
        assert point.workload.loads([point.layer], known).tolist() == [load_BE.tolist()]
    spare_L = spread_over_layers(curves(load_LBE, "eplb", 3), 3)
    assert 0 in spare_L
    for point, load_BE, spare in zip(points, load_LBE, spare_L, strict=True):
        case = replicated(point)
        assert point.spare_here(case.replication) == spare
        sizes = {"num_slots": NUM_EXPERTS + spare * NUM_RANKS, "num_ranks": NUM_RANKS}
        expected_P = replicate(load_BE.mean(axis=0), **sizes)
        assert Router(point, CPU).slots(case, 0).expert_P.tolist() == expected_P.tolist()
        assert rank_load(load_BE, expected_P, NUM_RANKS).sum() == pytest.approx(load_BE.sum())


def test_memory_is_that_of_all_layers_slots(config: Path) -> None:
    for point in plan(config, [], VIRTUAL, on_cpu=True):
        facts = point.case_facts(replicated(point))
        mean = sum(facts.spare_by_layer) / NUM_LAYERS
        assert facts.extra_bytes_per_rank == pytest.approx(mean * point.expert_bytes * point.model.num_moe_layers)
        assert mean <= 0.6


def test_a_layer_gets_no_more_than_some_times_the_mean(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most, of_layer = [], points.fullest_by_spare
    monkeypatch.setattr(
        points, "fullest_by_spare", lambda *args, **sizes: (most.append(sizes["most"]), of_layer(*args, **sizes))[1]
    )
    monkeypatch.setattr(points, "_DIVIDED", {})
    (point, *_) = plan(config, ["emulate.replication=[{spare_budget: 1}]", "workload.num_batches=2"], VIRTUAL)
    assert max(point.spare_by_layer(replicated(point).replication)) <= MOST_OF_MEAN
    assert most == [MOST_OF_MEAN] * NUM_LAYERS, "more are not even planned for"


def test_the_answer_says_which_layers_got_slots(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["emulate", str(config), "--out", str(tmp_path / "out")]) == OK
    assert main(["show", str(tmp_path / "out")]) == OK
    cases = json.loads(next((tmp_path / "out").rglob("run.json")).read_text())["cases"].values()
    divided = next(case for case in cases if case["role"] == "replication")
    said = spare_words(divided["spare_by_layer"], divided["spare_layers"])
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"EPLB, 0.6 spare per layer and rank, window=2: {said}" in shown


def test_a_division_names_layers_as_the_model_does_also_those_that_are_not_asked_about(tmp_path: Path) -> None:
    sizes = {"length_S": (40, 25, 55), "num_experts": 64, "top_k": 6, "num_layers": 3}
    trace = write_trace(tmp_path / "one.safetensors", **sizes, source_layers="3,7,9")
    workload = {"kind": "recorded", "trace": str(trace), "layer": 1, "tail": "popularity", "num_tokens": 20}
    emulate = {"links": "h100-nvlink4", "device": "h100-sxm", "replication": [{"spare_budget": 1, "window": 2}]}
    parts = {"model": {"preset": "deepseek-v2-lite"}, "layer": {"ep_size": 4}, "policies": [{"name": "topk"}]}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**parts, "workload": {**workload, "num_batches": 3}, "emulate": emulate}))
    (point,) = plan(path, [], VIRTUAL)
    facts = point.case_facts(replicated(point))
    assert len(facts.spare_by_layer) == 3
    assert facts.spare_layers == [3, 7, 9]


def test_words_of_a_division() -> None:
    assert (
        spare_words([0, 2, 1, 0, 1]) == "4 spare slots of a rank in 3 of 5 recorded layers (2 in row 1; 1 in rows 2, 4)"
    )
    named = spare_words([0, 2, 1, 0, 1], range(3, 8))
    assert named == "4 spare slots of a rank in 3 of 5 recorded layers (2 in layer 4; 1 in layers 5, 7)"
    assert spare_words([0, 0]) == "0 spare slots of a rank in 0 of 2 recorded layers"


@pytest.mark.parametrize(
    ("replication", "more", "expected"),
    [
        ("{}", (), "give either spare_per_rank or spare_budget"),
        ("{spare_per_rank: 1, spare_budget: 1}", (), "give either spare_per_rank or spare_budget"),
        ("{spare_budget: 0}", (), "spare_budget: expected greater than 0"),
        ("{spare_budget: 7}", (), "emulate.replication: spare_budget: expected at most 6, with which every rank"),
        ("{spare_budget: 0.1}", (), "emulate.replication.0.spare_budget: expected at least 1 / 5"),
        ("{spare_budget: 1}", ("workload.order=shuffled",), "spare_budget: expected a recording, by arrival"),
        (
            "{spare_budget: 1}",
            ("workload={kind: synthetic, num_tokens: 8, peak_load: 2}",),
            "emulate.replication.0.spare_budget: expected a recording, by arrival",
        ),
    ],
)
def test_budgets_that_cannot_be_are_refused(
    config: Path, replication: str, more: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        plan(config, [f"emulate.replication=[{replication}]", *more], ROUTING)


def test_labels_tell_budgets_from_slots_of_every_layer(config: Path) -> None:
    wanted = "emulate.replication=[{spare_budget: 1}, {spare_per_rank: 1}]"
    (point, *_) = plan(config, [wanted], ROUTING)
    labels = [case_label(point.case_facts(case)) for case in point.cases if case.replication is not None]
    assert labels == ["EPLB, 1 spare per layer and rank", "EPLB, 1 spare per rank"]
