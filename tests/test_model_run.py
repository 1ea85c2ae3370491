"""``run`` with ``scope: model``, from the command line to the files and the table that it leaves."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import test_run
import torch
from test_run import launch
from trace_files import write_trace

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.bench.description import held_here
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import RANKS
from moe_ep_bench.cli import main
from moe_ep_bench.errors import OK
from moe_ep_bench.facts import TimedFacts
from moe_ep_bench.facts.words import title_words
from moe_ep_bench.schema import (
    LAYER_PHASES,
    MODEL_PHASES,
    PHASES,
    ROUTING_SCHEMA,
    SAMPLES_SCHEMA,
    TOTAL,
    UNACCOUNTED,
)

CONFIG = {
    "name": "tiny",
    "scope": "model",
    "model": {"preset": "deepseek-v2-lite", "scale": 0.03125},
    "whole": {"num_layers": 3},
    "workload": {"kind": "synthetic", "num_tokens": 200, "num_batches": 2, "peak_load": 4.0, "sequence_length": 24},
    "layer": {"dtype": "float32"},
    "policies": [{"name": "topk"}, {"name": "token_drop", "capacity_factor": 1.0}],
    "measure": {"iterations": 1, "breakdown_iterations": 1, "warmup": 1, "timeout_s": 60},
}
DECODE = {"whole__context_length": 40, "workload__sequence_length": 1, "workload__num_tokens": 12}
NUM_CASES = 5  # native, native again, two policies, balanced
DENSE, MOE = [0], [1, 2]
KEY = ["rank", "batch", "iteration"]


write_config = partial(test_run.write_config, base=CONFIG)


def parts(out: Path, folder: str) -> pd.DataFrame:
    return pd.concat(pd.read_parquet(path) for path in sorted((out / folder).glob("*.parquet")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results directory of one prefill run on two ranks."""
    folder = tmp_path_factory.mktemp("run")
    done = launch(write_config(folder), "--out", folder / "out")
    assert done.returncode == OK, done.stderr
    return folder / "out"


def phases_of(out: Path) -> pd.DataFrame:
    """Rows of phases, of every layer; totals and what no phase covers left out."""
    rows = parts(out, "cases")
    return rows[rows.phase.isin(PHASES)]


def closed_totals(out: Path, **tolerance: float) -> pd.Series:
    """Totals of instrumented iterations, which the phases of all layers and what no phase covers add up to."""
    rows, key = parts(out, "cases").query("kind == 'breakdown'"), ["case_id", *KEY]
    rows = rows[rows.phase.isin([*PHASES, UNACCOUNTED, TOTAL])]
    totals, others = (of.groupby(key).time_us.sum() for of in (rows[rows.phase == TOTAL], rows[rows.phase != TOTAL]))
    np.testing.assert_allclose(others, totals, **tolerance)
    return totals


@pytest.mark.slow
def test_layers_and_the_rest_close_against_the_total(finished: Path) -> None:
    cases, layers = parts(finished, "cases"), phases_of(finished)
    assert list(cases.columns) == SAMPLES_SCHEMA.names
    assert cases.case_id.nunique() == layers.case_id.nunique() == NUM_CASES
    plain, breakdown = cases[cases.kind == "plain"], cases[cases.kind == "breakdown"]
    assert set(plain.phase) == {TOTAL}
    assert len(plain) == NUM_CASES * 2 * 2  # ranks, batches
    assert set(breakdown.phase) == {*LAYER_PHASES, *MODEL_PHASES, TOTAL, UNACCOUNTED} - {"wait_policy"}
    assert len(closed_totals(finished, atol=1.0)) == NUM_CASES * 2 * 2
    phases = layers.groupby(layers.layer.fillna(-1).astype(int)).phase.agg(set).to_dict()
    assert phases.keys() == {-1, *DENSE, *MOE}
    assert phases[-1] == {"embedding", "rest", "output"}
    assert phases[0] == {"attention", "dense", "rest"}
    assert phases[1] == phases[2] == {*LAYER_PHASES, "attention", "rest", "moe_rest"} - {"wait_policy"}


def test_run_json_says_what_was_built(finished: Path) -> None:
    run = json.loads((finished / "run.json").read_text())
    assert (run["mode"], run["scope"]) == ("run", "model")
    (comparison,) = run["comparisons"].values()
    whole = comparison["whole"]
    assert (whole["num_layers"], whole["of_layers"]) == (3, 27)
    assert "first 3 of 27 layers, prefill" in title_words(TimedFacts(**comparison))


def test_every_layer_is_routed_by_scores_of_its_own_and_is_right(finished: Path) -> None:
    rows = parts(finished, "routing")
    assert list(rows.columns) == ROUTING_SCHEMA.names
    assert (rows.groupby(["case_id", "batch", "layer"]).num_tokens.sum() == 200).all()
    assert sorted(rows.layer.unique()) == MOE
    native = rows[rows.policy == "native"].groupby("layer").load_E.agg(lambda loads: np.sum(list(loads), axis=0))
    assert not np.array_equal(native[1], native[2]), "layers are routed alike"
    dropped = rows[rows.policy == "token_drop"].groupby("layer").num_dropped_pairs.sum()
    assert (dropped > 0).all()
    assert rows[rows.batch == 0].reference_error.max() < 1e-4
    # Of the logits, in the last layer's row: topk is native to the last bit, dropping is not.
    assert rows[rows.layer == 1].output_error.isna().all()
    errors = rows[rows.layer == 2].groupby("policy").output_error.max()
    assert errors["topk"] == 0
    assert errors["token_drop"] > 0.01


def test_emulated_ranks_route_every_layer_as_real_ones_do(finished: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, layer__ep_size=2, emulate={"links": "h100-nvlink4", "device": "h100-sxm"})
    assert main(["emulate", str(config), "--out", str(tmp_path / "out")]) == OK
    key = ["policy", "policy_params", "num_ranks", "rank", "batch", "layer"]
    ours, theirs = (
        rows.drop(columns=["run_id", "case_id", "comparison_id", "mode", "backend", "reference_error", "output_error"])
        .drop_duplicates(key)  # Native's second run routes as its first.
        .sort_values(key, ignore_index=True)
        for rows in (parts(tmp_path / "out", "routing"), parts(finished, "routing"))
    )
    pd.testing.assert_frame_equal(ours, theirs)


def test_the_summary_sets_the_pass_beside_its_moe_layers(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(finished)]) == OK
    printed = capsys.readouterr().out
    for text in ("pass ms", "end to end", "MoE speedup", "by Amdahl", "tokens/s"):
        assert text in printed
    rows = cases(load(finished))
    assert 0 < rows[rows.role == "baseline"].squeeze().moe_share < 1


def test_every_layer_takes_its_own_of_a_recording_for_the_same_tokens(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "toy.safetensors", length_S=(30, 40, 50, 80), num_experts=64, top_k=6)
    workload = {"kind": "recorded", "trace": str(trace), "tail": "popularity", "num_tokens": 200, "num_batches": 1}
    config = write_config(tmp_path, workload=workload)
    (one,) = plan(config, [], RANKS, 2, on_cpu=True)
    first, second = (workload.batch(0) for workload in one.workloads.values())
    assert torch.equal(first.sequence_id_T, second.sequence_id_T)
    assert not torch.equal(first.scores_TE.topk(6).indices, second.scores_TE.topk(6).indices)
    assert [one.layer_fraction(layer) for layer in one.workloads] == [0, 1 / 26]
    with pytest.raises(ValueError, match=r"expected the 3 MoE layers that are built of DeepSeek-V2-Lite; .*, got 2"):
        plan(config, ["whole.num_layers=4"], RANKS, 2, on_cpu=True)


def test_more_layers_and_a_longer_context_take_more_memory_and_are_other_comparisons(tmp_path: Path) -> None:
    made = [
        plan(write_config(tmp_path, **changes), [], RANKS, 2, on_cpu=True)[0]
        for changes in (
            {"whole__num_layers": 4}, {"whole__num_layers": 5}, DECODE, {**DECODE, "whole__context_length": 41}
        )
    ]  # fmt: skip
    fewer, more, step, longer = (held_here(one) for one in made)
    assert fewer["expert_bytes"] < more["expert_bytes"]
    assert step["cache_bytes"] < longer["cache_bytes"]
    assert len({one.comparison_id for one in made}) == 4
