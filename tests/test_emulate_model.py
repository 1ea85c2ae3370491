"""``emulate`` with ``scope: model``: whole models on virtual ranks, from the command line to the table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_model_run import closed_totals, parts, phases_of, write_config

from moe_ep_bench.bench.emulated_ranks import ModelledRanks
from moe_ep_bench.bench.measure import measure_point
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import VIRTUAL
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.errors import OK
from moe_ep_bench.schema import LAYER_PHASES, MODEL_PHASES, TOTAL, UNACCOUNTED

PREFILL = Path("configs/model-prefill.yaml")
LINKS = {"links": "h100-nvlink4"}
MODELLED = {**LINKS, "device": "h100-sxm"}
RANKS, BATCHES, NUM_CASES, MOE = 4, 2, 5, [1, 2]
# The first layers of configs/model-prefill.yaml, narrower, with two policies of its eight.
SMALLER = [
    "model.scale=0.03125", "whole.num_layers=3", "layer.ep_size=4", "workload.tokens_per_rank=40",
    "workload.sequence_length=20", "workload.num_batches=2", "measure.iterations=1", "measure.breakdown_iterations=1",
    "layer.dtype=float32",
    "policies=[{name: token_drop, capacity_factor: 1.0}, {name: lynx, num_dropped: 8}]",
]  # fmt: skip


def emulate(config: Path, out: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "moe_ep_bench", "emulate", config, "--out", out]
    command += [argument for override in overrides for argument in ("--set", override)]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("emulate") / "out"
    done = emulate(PREFILL, out, *SMALLER)
    assert done.returncode == OK, done.stderr
    assert "Modelled links: " in done.stdout
    return out


@pytest.mark.slow
def test_layers_and_the_rest_close_against_the_total(finished: Path) -> None:
    cases, layers = parts(finished, "cases"), phases_of(finished)
    assert set(cases["mode"]) == {"emulated"}
    assert cases.case_id.nunique() == layers.case_id.nunique() == NUM_CASES
    plain, breakdown = cases[cases.kind == "plain"], cases[cases.kind == "breakdown"]
    assert len(plain) == NUM_CASES * RANKS * BATCHES
    assert set(breakdown.phase) == {*LAYER_PHASES, *MODEL_PHASES, TOTAL, UNACCOUNTED}
    totals = closed_totals(finished)
    assert plain.set_index(totals.index.names).time_us.sort_index().equals(totals)
    of_lynx = layers[layers.policy == "lynx"]
    phases = of_lynx.groupby(of_lynx.layer.fillna(-1).astype(int)).phase.agg(set).to_dict()
    assert phases[-1] == {"embedding", "rest", "output"}
    assert phases[0] == {"attention", "dense", "rest"}
    assert phases[1] == phases[2] == {*LAYER_PHASES, "attention", "rest", "moe_rest"}
    # Somebody comes last to every meeting of every layer.
    waits = layers[layers.phase.str.startswith("wait_")].groupby(["case_id", "batch", "layer", "phase"]).time_us
    assert (waits.min() == 0).all()
    described = json.loads((finished / "run.json").read_text())["cases"]
    balanced = [case_id for case_id, case in described.items() if case["role"] == "balanced"]  # nobody waits long there
    assert (waits.max().drop(balanced, level="case_id") > 0).all()
    assert len(waits) == (NUM_CASES * 3 + 1) * BATCHES * len(MOE)


def test_a_layers_transfers_take_what_its_own_bytes_take_on_the_links(finished: Path) -> None:
    routing, layers = parts(finished, "routing"), phases_of(finished)
    run = json.loads((finished / "run.json").read_text())
    assert (run["mode"], run["scope"]) == ("emulated", "model")
    row_bytes, links = 64 * 4, Links.load("h100-nvlink4")  # hidden states of 2,048 float32 numbers, narrower
    found = layers[layers.phase.isin(["dispatch", "combine"])].set_index(["case_id", "batch", "layer"]).sort_index()
    seen = set()
    for place, rows in routing.sort_values("rank").groupby(["case_id", "batch", "layer"]):
        pairs_RR = np.array(rows.load_R.tolist(), dtype=np.float64)
        sent = links.all_to_all_us(pairs_RR * row_bytes) + links.all_to_all_us(pairs_RR * 4)
        times = found.loc[place].sort_values("rank")
        np.testing.assert_allclose(times[times.phase == "dispatch"].time_us, sent)
        np.testing.assert_allclose(times[times.phase == "combine"].time_us, links.all_to_all_us(pairs_RR.T * row_bytes))
        seen.add(tuple(pairs_RR.flat))
    assert len(seen) > NUM_CASES * BATCHES, "layers send alike"


DECODE = {"whole__context_length": 40, "workload__sequence_length": 1, "workload__num_tokens": 22}


@pytest.mark.parametrize("changes", [{}, DECODE], ids=["prefill", "decode"])
def test_a_pass_takes_what_its_layers_and_the_rest_take(changes: dict, tmp_path: Path) -> None:
    config = write_config(tmp_path, model__scale=1, layer__ep_size=4, emulate=MODELLED, **changes)
    (comparison,) = plan(config, [], VIRTUAL, on_cpu=True)
    lengths_R = comparison.lengths_of_ranks(0)
    assert sum(map(sum, lengths_R)) == comparison.num_tokens
    begun: list[str] = []
    ranks = ModelledRanks(comparison, comparison.cases, torch.device("cpu"), begun.append)
    measure_point(ranks, ranks.begin)
    routed = len(comparison.workloads) * comparison.workload.num_batches
    assert len(begun) == comparison.iterations_per_case * len(comparison.cases) + routed
    total, times = ranks.result.columns[TOTAL], ranks.result.times
    slowest_us = [times_RSC[..., total].max(axis=0) for times_RSC in times.values()]
    native_us, again_us, topk_us, drop_us, _ = slowest_us
    assert (native_us == again_us).all()
    assert (native_us > 0).all()
    assert (drop_us < topk_us).all()
    native_RBC = times[comparison.cases[0].case_id][:, comparison.workload.num_batches :]
    parts_RBC = np.delete(native_RBC, [total, total + 1, total + 2], axis=-1)
    np.testing.assert_allclose(np.nansum(parts_RBC, axis=-1), native_RBC[..., total])
