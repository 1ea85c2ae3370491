"""Padding tokens from the config to the table: who computes them, who is told, and what is said of the cost."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from results_builder import shown_text
from test_emulate import emulate
from test_route import write_recordings
from test_run import launch

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.analysis.notes import READING
from moe_ep_bench.bench.comparison import RANKS, ROUTING, Comparison
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.route import route
from moe_ep_bench.cli import main
from moe_ep_bench.policies import Routing, RoutingContext, make_policy
from moe_ep_bench.runtime.exit_codes import OK, USER_ERROR

TOKENS, PADDING, TOP_K = 12, 3, 6
POLICIES = [
    {"name": "topk"},
    {"name": "token_drop", "capacity_factor": 2.0},
    {"name": "oea", "k0": 2},
]
# Those that are routed only, and not run.
OTHERS = [
    {"name": "expanded_drop", "capacity_factor": 2.0},
    {"name": "megatron_drop", "capacity_factor": 1.0},
    {"name": "laser", "eps_high": 0.9, "t_fix": 0.05, "c": 20},
    {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 1, "budget": 2},
]
CONFIG = {
    "name": "padding",
    "model": {"preset": "deepseek-v2-lite", "scale": 0.03125},
    "workload": {
        "kind": "synthetic",
        "tokens_per_rank": TOKENS,
        "num_batches": 2,
        "sequence_length": 1,
        "padding_per_rank": PADDING,
    },
    "layer": {"dtype": "float32", "ep_size": 2},
    "policies": POLICIES,
    "measure": {"iterations": 1, "breakdown_iterations": 0, "warmup": 0, "timeout_s": 60},
    "emulate": {"links": "h100-nvlink4"},
}


def write_config(folder: Path, **workload: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "workload": {**CONFIG["workload"], **workload}}))
    return path


def rows_of(out: Path) -> pd.DataFrame:
    """All routing rows, with their case's label."""
    described = json.loads((out / "run.json").read_text())
    rows = pd.concat(pq.read_table(path).to_pandas() for path in sorted((out / "routing").glob("*.parquet")))
    labels = rows.case_id.map({key: case["label"] for key, case in described["cases"].items()})
    return rows.assign(label=labels).sort_values(["label", "rank", "batch"]).reset_index(drop=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("padding"))


@pytest.fixture(scope="module")
def outs(config: Path) -> dict[str, Path]:
    """The same comparisons on two real ranks, two emulated and two virtual ones."""
    outs = {name: config.parent / name for name in ("run", "emulate", "route")}
    for done in (
        launch(config, "--out", outs["run"], timeout=600),
        emulate(config, "--out", outs["emulate"]),
    ):
        assert done.returncode == OK, done.stderr
    route(config, outs["route"], [f"policies={json.dumps(POLICIES + OTHERS)}"])
    return outs


@pytest.fixture(scope="module")
def rows(outs: dict[str, Path]) -> pd.DataFrame:
    """Those of the real ranks; ``test_every_scope_routes_padded_batches_alike`` holds the others to them."""
    return rows_of(outs["run"])


def column(rows: pd.DataFrame, name: str) -> list:
    return [list(value) if isinstance(value, np.ndarray) else value for value in rows[name]]


SAME = ["load_E", "load_R", "num_pairs", "padding_pairs", "num_dropped_pairs", "num_tokens", "crossing_copies"]
SAME += ["num_topk_pairs", "tokens_without_expert"]
ALIKE = ["retained_mass_topk", "experts_per_token", "topk_share", "entropy"]


@pytest.mark.parametrize("other", ["emulate", "route"])
def test_every_scope_routes_padded_batches_alike(other: str, outs: dict[str, Path]) -> None:
    real, others = (rows_of(outs[name]).set_index(["label", "rank", "batch"]) for name in ("run", other))
    shared = real.index.intersection(others.index)
    # Routed alone, the ceiling and the noise case are not there.
    assert len(real) - len(shared) == (2 * 2 * 2 if other == "route" else 0)
    for name in SAME:
        assert column(real.loc[shared], name) == column(others.loc[shared], name), name
    pd.testing.assert_frame_equal(real.loc[shared, ALIKE], others.loc[shared, ALIKE], rtol=1e-6)


def test_masked_padding_selects_nothing_and_native_computes_it_always(rows: pd.DataFrame) -> None:
    is_policy = ~rows.policy.isin(["native", "native_balanced"])
    assert (rows[is_policy].padding_pairs == 0).all()
    assert (rows[~is_policy].padding_pairs == PADDING * TOP_K).all()
    native = rows[rows.label == "native"]
    assert (native.num_pairs == TOKENS * TOP_K).all()


def test_fidelity_speaks_of_valid_tokens_whatever_padding_computes(rows: pd.DataFrame) -> None:
    assert (rows.num_tokens == TOKENS - PADDING).all()
    assert (rows.num_topk_pairs == (TOKENS - PADDING) * TOP_K).all()
    exact = rows[rows.label.isin(["native", "topk"])]
    assert (exact.retained_mass_topk == 1).all()
    assert (exact.num_dropped_pairs == 0).all()
    assert (exact.experts_per_token == TOP_K).all()
    assert (rows.tokens_without_expert <= TOKENS - PADDING).all()
    # What scores say of tokens is said of the same tokens everywhere.
    for metric in ("topk_share", "entropy", "regime_single_head"):
        of_model = rows[rows.label != "native, balanced scores"]
        assert (of_model.groupby(["rank", "batch"])[metric].nunique() == 1).all()


def test_the_layer_equals_the_dense_reference_and_native_on_valid_tokens(outs: dict[str, Path]) -> None:
    rows = rows_of(outs["run"])
    assert rows[rows.batch == 0].reference_error.max() < 1e-4
    assert rows[rows.label == "topk"].output_error.max() < 1e-6
    assert rows[rows.label == "oea k0=2"].output_error.min() > 1e-3
    assert rows_of(outs["emulate"]).query("batch == 0").reference_error.max() < 1e-4


def routings(planned: Comparison, spec: dict, index: int, kept: int) -> list[Routing]:
    """All ranks' routing of the first ``kept`` tokens of each, as if there were no others."""
    policy, size = make_policy(spec), {"top_k": TOP_K, "num_ranks": planned.ep_size}
    ranks = list(planned.workload.rank_batches(index, planned.world_size))
    given = [
        (tokens.scores_TE[:kept], RoutingContext(**size, rank=rank, request_id_T=tokens.sequence_id_T[:kept]))
        for rank, tokens in enumerate(ranks)
    ]
    stats = [policy.batch_stats(*pair) for pair in given]
    total_SE = None if stats[0] is None else torch.stack(stats).sum(dim=0)
    return [policy.route(*pair, total_SE) for pair in given]


def test_masked_padding_changes_no_valid_tokens_routing(config: Path, outs: dict[str, Path]) -> None:
    """It is as if padding were not there."""
    rows = rows_of(outs["route"])
    (planned,) = plan(config, [], RANKS, 2, on_cpu=True)
    for spec, index in itertools.product(POLICIES + OTHERS, range(2)):
        mine = rows[(rows.label == make_policy(spec).label) & (rows.batch == index)]
        expected = routings(planned, spec, index, TOKENS - PADDING)
        assert column(mine, "load_E") == [one.map_TE.sum(dim=0).tolist() for one in expected], spec
        assert mine["num_pairs"].tolist() == [int(one.map_TE.sum()) for one in expected]


def test_padding_that_leaves_no_valid_token_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, padding_per_rank=TOKENS)
    for command in (["run", "--nproc", "1", "--set", "layer.ep_size=1"], ["emulate"], ["route"]):
        assert main([command[0], str(config), "--out", str(tmp_path / "out"), *command[1:]]) == USER_ERROR
        (printed,) = capsys.readouterr().err.splitlines()
        assert "workload.padding_per_rank: expected less than the 12 tokens that rank 0 has in batch 0" in printed
        assert not (tmp_path / "out").exists()


def test_ranks_without_tokens_route_nothing(tmp_path: Path) -> None:
    few = write_config(tmp_path, tokens_per_rank=None, num_tokens=1, padding_per_rank=0)
    rows = rows_of(route(few, tmp_path / "out", []).root)
    native = rows[rows.label == "native"]
    assert native[native["rank"] == 0].num_tokens.eq(1).all()
    empty = native[native["rank"] == 1]
    assert empty.num_tokens.eq(0).all()
    assert empty.num_pairs.eq(0).all()


def test_a_recorded_decode_step_is_padded_likewise(tmp_path: Path) -> None:
    write_recordings(tmp_path)
    raw = yaml.safe_load(write_config(tmp_path).read_text())
    sizes = {key: raw["workload"][key] for key in ("tokens_per_rank", "num_batches", "padding_per_rank")}
    recorded = {"kind": "recorded", "trace": "a.safetensors", "layer": 1, "arrangement": "decode", "tail": "popularity"}
    # Sequences of the recording are few.
    raw |= {"workload": {**recorded, **sizes, "tokens_per_rank": 2, "padding_per_rank": 1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw))
    (planned,) = plan(tmp_path / "config.yaml", [], ROUTING)
    assert planned.title.endswith("decode, popularity tail, 1 padding a rank, layer 1")
    rows = rows_of(route(tmp_path / "config.yaml", tmp_path / "out", []).root)
    assert (rows.num_tokens == 1).all()
    assert (rows[rows.label == "native"].padding_pairs == TOP_K).all()
    assert (rows[rows.label == "topk"].padding_pairs == 0).all()


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_the_table_says_what_padding_costs_from_the_rows(outs: dict[str, Path]) -> None:
    text, frame, rows = shown_text(outs["run"]), cases(load(outs["run"])), rows_of(outs["run"])
    assert "3 of 12 tokens a rank are padding, masked from policies" in text
    of_case = dict(list(rows.groupby("label")))
    counts = {}
    for label in ("native", "topk"):
        loads_B = of_case[label].groupby("batch").load_E.apply(lambda loads: np.sum(loads.tolist(), axis=0))
        counts[label] = np.mean([(load.reshape(2, -1) > 0).sum(axis=1).max() for load in loads_B])
    shown = frame[frame["case_id"].isin(of_case["native"]["case_id"])]
    assert shown["activated_fullest_rank"].tolist() == [counts["native"]]
    assert counts["topk"] < counts["native"]
    assert text.count(f"{READING}; native spends 25.0 % of its pairs on it") == 1
