"""Padding tokens from the config to the table: who computes them, who is told, and what is said of the cost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from results_builder import shown_text
from test_emulate import emulate
from test_run import launch

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.analysis.notes import READING
from moe_ep_bench.bench.route import route
from moe_ep_bench.runtime.exit_codes import OK

TOKENS, PADDING, TOP_K = 12, 3, 6
POLICIES = [
    {"name": "topk"},
    {"name": "token_drop", "capacity_factor": 2.0},
    {"name": "oea", "k0": 2},
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
    route(config, outs["route"], [])
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
    assert (rows.num_tokens == TOKENS - PADDING).all()
    assert rows[rows.batch == 0].reference_error.max() < 1e-4
    assert rows[rows.label == "topk"].output_error.max() < 1e-6


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
