"""One routing, whoever runs it: real ranks, emulated ones and virtual ones, with padding and with carried loads.

A batch starts from the loads that all batches before it left, where a policy carries them (``carry_loads``).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hf_models import tiny
from oracles import expected_routing
from results_builder import shown_text
from test_emulate import emulate
from test_run import launch, routing_of, write_config

from moe_ep_bench.analysis.notes import READING
from moe_ep_bench.bench.commands import route
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import ROUTING
from moe_ep_bench.bench.tokens import tokens
from moe_ep_bench.errors import OK
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.quality.routed import RouterCall, routed

TOKENS, PADDING, TOP_K, NUM_EXPERTS = 12, 3, 6, 64
LASER = {"name": "laser", "eps_high": 1, "t_fix": 0, "c": 12}
# Whether loads outlive a batch, by how a policy's label begins.
CARRIED = {"laser e": False, "laser carry_loads=True e": True}
CHANGES = {
    "workload": {"kind": "synthetic", "peak_load": 3, "tokens_per_rank": TOKENS, "num_batches": 3}
    | {"sequence_length": 1, "padding_per_rank": PADDING},
    "layer__ep_size": 2,
    "policies": [
        {"name": "topk"},
        {"name": "token_drop", "capacity_factor": 2.0},
        {"name": "oea", "k0": 2},
        LASER,
        {**LASER, "carry_loads": True},
    ],
    "measure": {"iterations": 1, "breakdown_iterations": 0, "warmup": 0, "timeout_s": 60},
    "emulate": {"links": "h100-nvlink4"},
}


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same comparison on two real ranks, two emulated and two virtual ones; and its config."""
    folder = tmp_path_factory.mktemp("scopes")
    config = write_config(folder, **CHANGES)
    outs = {name: folder / name for name in ("run", "emulate", "route")}
    for done in (launch(config, "--out", outs["run"], timeout=600), emulate(config, "--out", outs["emulate"])):
        assert done.returncode == OK, done.stderr
    route(config, outs["route"], [])
    return {**outs, "config": config}


SAME = ["load_E", "load_R", "num_pairs", "padding_pairs", "num_dropped_pairs", "num_tokens", "crossing_copies"]
SAME += ["num_topk_pairs", "tokens_without_expert"]
ALIKE = ["retained_mass_topk", "experts_per_token", "topk_share", "entropy"]


@pytest.mark.slow
@pytest.mark.parametrize("other", ["emulate", "route"])
def test_every_scope_routes_alike(other: str, outs: dict[str, Path]) -> None:
    """On real ranks over gloo: which batch is timed first, and how often, changes nothing."""
    real, others = (routing_of(outs[name]).set_index(["label", "rank", "batch"]) for name in ("run", other))
    shared = real.index.intersection(others.index)
    # Routed alone, the balanced and the noise case are not there.
    assert len(real) - len(shared) == (2 * 2 * 3 if other == "route" else 0)
    for name in SAME:
        assert (
            real.loc[shared, name]
            .map(np.ndarray.tolist if name.startswith("load") else int)
            .equals(others.loc[shared, name].map(np.ndarray.tolist if name.startswith("load") else int))
        ), name
    pd.testing.assert_frame_equal(real.loc[shared, ALIKE], others.loc[shared, ALIKE], rtol=1e-6)


def test_masked_padding_selects_nothing_and_native_computes_it_always(outs: dict[str, Path]) -> None:
    rows = pd.concat(map(pd.read_parquet, (outs["run"] / "routing").iterdir()))
    is_policy = ~rows.policy.isin(["native", "native_balanced"])
    assert (rows[is_policy].padding_pairs == 0).all()
    assert (rows[~is_policy].padding_pairs == PADDING * TOP_K).all()
    assert (rows[rows.policy == "native"].num_pairs == TOKENS * TOP_K).all()
    assert (rows.num_tokens == TOKENS - PADDING).all()
    assert rows[rows.batch == 0].reference_error.max() < 1e-4
    assert rows[rows.policy == "topk"].output_error.max() < 1e-6
    text = shown_text(outs["run"])
    assert "3 padding a rank" in text
    assert text.count(f"{READING}; native spends 25.0 % of its pairs on it") == 1


def test_batches_start_from_the_loads_that_earlier_ones_left(outs: dict[str, Path]) -> None:
    """By batch and rank, each token after the other."""
    (comparison,) = plan(outs["config"], [], ROUTING)
    rows = routing_of(outs["run"]).query("policy == 'laser'")
    rows = rows.sort_values(["batch", "rank"])
    loads = {label: rows[rows.label.str.startswith(label)].load_E.map(np.ndarray.tolist) for label in CARRIED}
    for label, carries in CARRIED.items():
        kept_RE, expected = torch.zeros(2, NUM_EXPERTS), []
        for batch in range(3):
            before_RE = kept_RE.clone() if carries else torch.zeros(2, NUM_EXPERTS)
            for rank in range(2):
                made = tokens(comparison, None, batch, rank, torch.device("cpu"))
                mask_T = made.context.token_mask_T
                context = RoutingContext(TOP_K, 2, rank, load_E=before_RE[rank], token_mask_T=mask_T)
                load_E = expected_routing({**LASER, "carry_loads": carries}, made.scores_TE, context).map_TE.sum(0)
                kept_RE[rank] += load_E
                expected.append(load_E.tolist())
        assert loads[label].tolist() == expected, label
    assert len({repr(found.tolist()) for found in loads.values()}) == 2


@pytest.mark.parametrize("carries", [False, True])
def test_steps_of_a_model_carry_loads(carries: bool) -> None:
    """Two sequences on two ranks, step by step: every step starts from what the steps before it left."""
    model, calls = tiny("olmoe"), []
    policy = make_policy({**LASER, "c": 8, "carry_loads": carries})
    with torch.inference_mode(), routed(model, policy, num_ranks=2, arrangement="decode", observe=calls.append):
        model(torch.arange(12).view(2, 6))
    for call in calls:
        assert isinstance(call, RouterCall)
        kept_RE = torch.zeros(2, 8)
        for step in range(6):
            starts = kept_RE.clone() if carries else torch.zeros(2, 8)
            for rank, token in enumerate((step, 6 + step)):
                context = RoutingContext(top_k=call.context.top_k, load_E=starts[rank])
                spec = {**LASER, "c": 8, "carry_loads": carries}
                map_TE = expected_routing(spec, call.scores_TE[token : token + 1], context).map_TE
                assert torch.equal(call.routing.map_TE[token], map_TE[0])
                kept_RE[rank] += map_TE[0]
