"""Fields of policies by layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from policy_cases import random_scores
from trace_files import write_trace

from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import ROUTING
from moe_ep_bench.config import label_of
from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.kernels import form_of
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.policies.contract import ByLayer
from moe_ep_bench.presets import expand_policies


@pytest.mark.parametrize(
    ("name", "fields", "of_layers"),
    [
        ("token_drop", {"capacity_factor": {"0-1": 0.5, 2: 1}}, [{"capacity_factor": c} for c in (0.5, 0.5, 1)]),
        ("budget_drop", {"max_lost_mass": {"0": 0.3, "1": 0.0}}, [{"max_lost_mass": 0.3}, {"max_lost_mass": 0.0}]),
        (
            "laser",
            {"eps_high": 1, "t_fix": {"0": 0, "1": 1}, "c": {"0": 4, "1": 8}},
            [{"eps_high": 1, "t_fix": 0, "c": 4}, {"eps_high": 1, "t_fix": 1, "c": 8}],
        ),
        ("xshare", {"k0": {"0": 1, "1": 2}, "budget": 1}, [{"k0": 1, "budget": 1}, {"k0": 2, "budget": 1}]),
    ],
)
def test_each_layer_is_routed_by_its_own_values(name: str, fields: dict, of_layers: list[dict]) -> None:
    policy, scores_TE = make_policy({"name": name, **fields}), random_scores("softmax", 40, 8, seed=1)
    for layer, own in enumerate(of_layers):
        context = RoutingContext(top_k=2, num_ranks=4, layer_fraction=layer / len(of_layers))
        expected = make_policy({"name": name, **own}).route(scores_TE, context)
        for form in (policy, form_of(policy, "cpu")):
            for stats_SE in (None, form.batch_stats(scores_TE, context)):
                found = form.route(scores_TE, context, stats_SE)
                assert torch.equal(found.map_TE, expected.map_TE)
                assert torch.equal(found.weights_TE, expected.weights_TE)
    elsewhere = RoutingContext(top_k=2, num_ranks=4, layer_fraction=0.9)
    with pytest.raises(ValueError, match=r"one of which stands at 0\.9 of its depth; got"):
        policy.route(scores_TE, elsewhere)
    stated = json.loads(json.dumps(policy.params()))
    bands = stated.pop("by_layer")
    rebuilt = make_policy({"name": name, **stated, **bands})
    assert rebuilt == policy
    assert hash(rebuilt) == hash(policy)


def test_labels_tell_policies_by_layer_apart() -> None:
    rising, falling = ({str(n): 1 + sign * n / 10 for n in range(9)} for sign in (1, -1))
    factors = [1.0, {"0": 1.0, "1": 2.0}, {"0-1": 3}, rising, falling]
    policies = expand_policies([{"name": "token_drop", "capacity_factor": factors}])
    labels = [label_of(policy) for policy in policies]
    assert labels[:3] == [f"token_drop capacity_factor={words}" for words in ("1.0", "0:1/1:2", "0-1:3")]
    assert len(set(labels)) == 5
    assert all(" " not in label.partition(" ")[2] for label in labels)
    assert ByLayer([1, 1, 2]).bands() == {"0-1": 1, "2": 2}


def test_a_config_by_layer_needs_as_many_layers(tmp_path: Path) -> None:
    recorded = write_trace(tmp_path / "a.safetensors", length_S=(8,) * 20, num_layers=3, top_k=2)
    config = {
        "model": {"num_experts": 8, "top_k": 2, "hidden_size": 8, "ffn_hidden_size": 8},
        "workload": {"kind": "recorded", "trace": str(recorded), "layer": 2, "tail": "uniform", "num_tokens": 16},
        "layer": {"ep_size": 2},
        "policies": [{"name": "token_drop", "capacity_factor": {"0-1": 1.0, "2": 0.5}}],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (comparison,) = plan(tmp_path / "config.yaml", [], ROUTING)
    assert round(comparison.layer_fraction(None) * 3) == 2
    for change, expected in (
        ("policies.0.capacity_factor={0-1: 1.0}", "expected values for the 3 MoE layers, got values for 2"),
        ("workload={kind: synthetic, num_tokens: 16}", "expected one value, for synthetic scores"),
    ):
        load_experiments(tmp_path / "config.yaml", [change], on_cpu=True)
        with pytest.raises(ValueError, match=expected):
            plan(tmp_path / "config.yaml", [change], ROUTING)
