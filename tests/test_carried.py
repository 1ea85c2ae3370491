"""Claims about ``carry_loads``: a batch starts from what all batches before it left, on every backend alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hf_models import tiny
from oracles import expected_routing
from test_run import launch

from moe_ep_bench.bench.comparison import ROUTING, Comparison
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.cli import main
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.quality.routed import RouterCall, routed

LASER = {"name": "laser", "eps_high": 1, "t_fix": 0, "c": 12}
CONFIG = """
name: carried
model: {preset: olmoe-1b-7b, scale: 0.015625}
workload: {kind: synthetic, peak_load: 3, tokens_per_rank: 24, num_batches: 3, sequence_length: 8}
layer: {ep_size: 2, dtype: float32}
policies:
  - {name: laser, eps_high: 1, t_fix: 0, c: 12}
  - {name: laser, eps_high: 1, t_fix: 0, c: 12, carry_loads: true, load_scope: [rank, all]}
emulate: {links: h100-nvlink4, device: h20}
measure: {iterations: 1, breakdown_iterations: 1, warmup: 1}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("carried") / "carried.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def from_route(config: Path) -> pd.Series:
    assert main(["route", str(config), "--out", str(config.parent / "routed")]) == 0
    return loads(config.parent / "routed")


def loads(directory: Path) -> pd.Series:
    """Load of each expert by policy, batch and rank."""
    rows = pd.concat(map(pd.read_parquet, (directory / "routing").glob("*.parquet")))
    rows = rows[rows["policy"] == "laser"]
    return rows.set_index(["policy_params", "batch", "rank"])["load_E"].map(np.asarray).sort_index()


def expected(comparison: Comparison, scope: str | None) -> list[list[int]]:
    """Loads by batch and rank, each token after the other; ``scope``: whose loads outlive a batch."""
    kept_RE, found = torch.zeros(2, 64), []
    for batch in range(3):
        before_RE = {None: torch.zeros(2, 64), "rank": kept_RE, "all": kept_RE.sum(0).expand(2, 64)}[scope].clone()
        for rank, tokens in enumerate(comparison.rank_batches(None, batch)):
            context = RoutingContext(top_k=8, num_ranks=2, rank=rank, load_E=before_RE[rank])
            load_E = expected_routing(LASER, tokens.scores_TE, context).map_TE.sum(0)
            kept_RE[rank] += load_E
            found.append(load_E.tolist())
    return found


def test_routes_from_the_loads_that_earlier_batches_left(config: Path, from_route: pd.Series, tmp_path: Path) -> None:
    (comparison,) = plan(config, [], ROUTING)
    of_params = {params: list(map(list, rows)) for params, rows in from_route.groupby(level=0)}
    assert len(of_params) == 3
    for params, rows in of_params.items():
        scope = next((one for one in ("rank", "all") if f'"{one}"' in params and "carry_loads" in params), None)
        scope = "rank" if scope is None and "carry_loads" in params else scope
        assert rows == expected(comparison, scope), params
    assert len({repr(rows) for rows in of_params.values()}) == 3
    assert main(["emulate", str(config), "--out", str(tmp_path / "modelled")]) == 0
    pd.testing.assert_series_equal(loads(tmp_path / "modelled"), from_route)


def test_two_real_ranks_carry_the_same_loads(config: Path, from_route: pd.Series, tmp_path: Path) -> None:
    """Over gloo: which batch is timed first, and how often, changes nothing."""
    done = launch(config, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    found = loads(tmp_path / "run")
    assert len(found) == 3 * 3 * 2, "policies, batches and ranks"
    pd.testing.assert_series_equal(found, from_route)


@pytest.mark.parametrize("scope", [None, "rank", "all"])
def test_steps_of_a_model_carry_loads(scope: str | None) -> None:
    """Two sequences on two ranks, step by step: every step starts from what the steps before it left."""
    model, calls = tiny("olmoe"), []
    carries = {} if scope is None else {"carry_loads": True, "load_scope": scope}
    policy = make_policy({**LASER, "c": 8, **carries})
    with torch.inference_mode(), routed(model, policy, num_ranks=2, arrangement="decode", observe=calls.append):
        model(torch.arange(12).view(2, 6))
    for call in calls:
        assert isinstance(call, RouterCall)
        kept_RE = torch.zeros(2, 8)
        for step in range(6):
            starts = {None: torch.zeros(2, 8), "rank": kept_RE, "all": kept_RE.sum(0).expand(2, 8)}[scope].clone()
            for rank, token in enumerate((step, 6 + step)):
                context = RoutingContext(top_k=call.context.top_k, load_E=starts[rank])
                map_TE = expected_routing({**LASER, "c": 8}, call.scores_TE[token : token + 1], context).map_TE
                assert torch.equal(call.routing.map_TE[token], map_TE[0])
                kept_RE[rank] += map_TE[0]
