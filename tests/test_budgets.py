"""Fields by layer, and factors that a recording gives for a budget."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from policy_cases import random_scores
from trace_files import write_trace

from moe_ep_bench.bench.comparison import ROUTING
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.routing import CaseRouter, Share
from moe_ep_bench.cli import main
from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.kernels import form_of
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.policies.by_layer import ByLayer
from moe_ep_bench.presets import expand_policies
from moe_ep_bench.runtime.exit_codes import OK, USER_ERROR
from moe_ep_bench.workload.derived import Setting, compared_policies, derive_factors, judge, needed_factors
from moe_ep_bench.workload.trace import open_trace

# ---- fields by layer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "of_layers"),
    [
        ("token_drop", {"capacity_factor": {"0-1": 0.5, 2: 1}}, [{"capacity_factor": c} for c in (0.5, 0.5, 1)]),
        ("budget_drop", {"max_lost_mass": [0.3, 0.0]}, [{"max_lost_mass": 0.3}, {"max_lost_mass": 0.0}]),
        (
            "laser",
            {"eps_high": 1, "t_fix": [0, 1], "c": {"0": 4, "1": 8}},
            [{"eps_high": 1, "t_fix": 0, "c": 4}, {"eps_high": 1, "t_fix": 1, "c": 8}],
        ),
        ("xshare", {"k0": [1, 2], "budget": 1}, [{"k0": 1, "budget": 1}, {"k0": 2, "budget": 1}]),
    ],
)
def test_each_layer_is_routed_by_its_own_values(name: str, fields: dict, of_layers: list[dict]) -> None:
    policy, scores_TE = make_policy({"name": name, **fields}), random_scores("softmax", 40, 8, seed=1)
    for layer, own in enumerate(of_layers):
        context = RoutingContext(top_k=2, num_ranks=4, layer_fraction=layer / len(of_layers))
        expected = make_policy({"name": name, **own}).route(scores_TE, context)
        for form in (policy, form_of(policy, "cpu"), form_of(policy, "cpu", "torch")):
            for stats_SE in (None, form.batch_stats(scores_TE, context)):
                found = form.route(scores_TE, context, stats_SE)
                assert torch.equal(found.map_TE, expected.map_TE)
                assert torch.equal(found.weights_TE, expected.weights_TE)
    elsewhere = RoutingContext(top_k=2, num_ranks=4, layer_fraction=0.9)
    with pytest.raises(ValueError, match=r"one of which stands at 0\.9 of its depth; got"):
        policy.route(scores_TE, elsewhere)
    rebuilt = make_policy({"name": name, **json.loads(json.dumps(policy.params()))})
    assert rebuilt == policy
    assert hash(rebuilt) == hash(policy)


def test_every_layer_of_a_model_is_given_its_own_values() -> None:
    policy = make_policy({"name": "token_drop", "capacity_factor": [0.5, 1.0, 2.0]})
    case = SimpleNamespace(policy=policy, is_padded=False, told=lambda context: context)
    given = {}
    stack = SimpleNamespace(
        take=lambda layers: None,
        forms=(),
        route=lambda layer, logits_TE, here, context: given.update({layer: here}),
    )
    shares = {}
    for layer in range(3):
        context = RoutingContext(top_k=2, request_id_T=torch.arange(4), layer_fraction=layer / 3)
        shares[layer] = Share(layer, 0, context, torch.rand(4, 8), "softmax")
    CaseRouter(case, None, seed=0).enter(stack, shares, 0)
    assert [here.capacity_factor for here in given.values()] == [0.5, 1.0, 2.0]


def test_a_list_in_a_list_is_by_layer_and_labels_tell_policies_apart() -> None:
    factors = [1.0, [1.0, 2.0], {"0-1": 3}, [1 + layer / 10 for layer in range(9)], [1.8 - n / 10 for n in range(9)]]
    policies = expand_policies([{"name": "token_drop", "capacity_factor": factors}])
    labels = [policy.label for policy in policies]
    assert labels[:3] == [f"token_drop capacity_factor={words}" for words in ("1.0", "0:1/1:2", "0-1:3")]
    assert len(set(labels)) == 5
    assert all(" " not in label.partition(" ")[2] for label in labels)
    assert ByLayer([1, 1, 2]).bands() == {"0-1": 1, "2": 2}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"0-1": 1, "3-4": 1}, "capacity_factor: expected 2 or 2-LAST for the next band of layers, got '3-4'"),
        ({"early": 1}, "capacity_factor: expected 0 or 0-LAST for the next band of layers, got 'early'"),
        ([1.0, -1.0], "capacity_factor: expected at least 0, got -1.0"),
        ([], "capacity_factor: expected a number for each layer, got []"),
    ],
)
def test_wrong_values_by_layer_are_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match="capacity_factor") as error:
        make_policy({"name": "token_drop", "capacity_factor": value})
    assert str(error.value) == message


def test_a_config_by_layer_needs_as_many_layers(tmp_path: Path) -> None:
    recorded = random_trace(tmp_path / "a.safetensors", num_layers=3)
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


# ---- a budget on a recording -----------------------------------------------------------------------------------------


def random_trace(path: Path, num_layers: int = 2) -> Path:
    """Twenty sequences of eight tokens; 8 experts, top-2."""
    return write_trace(path, length_S=(8,) * 20, num_layers=num_layers, top_k=2)


SETTING = Setting(num_ranks=4, num_tokens=40)


@pytest.mark.parametrize("granularity", ["device", "expert"])
def test_a_derived_factor_is_the_least_that_keeps_the_budget(granularity: str, tmp_path: Path) -> None:
    path, setting = random_trace(tmp_path / "a.safetensors"), Setting(4, 40, granularity)
    derived, trace = derive_factors(path, 0.05, setting), open_trace(path)

    def lost(factor: float, batches: list) -> float:
        policy = make_policy({"name": "token_drop", "granularity": granularity, "capacity_factor": factor})
        shares = []
        for parts in batches[::2]:
            maps = [policy.route(part, setting.context(trace, rank)).map_TE for rank, part in enumerate(parts)]
            kept = sum(float((part * map_TE).sum()) for part, map_TE in zip(parts, maps, strict=True))
            shares.append(1 - kept / sum(float(part.sum()) for part in parts))
        return float(np.mean(shares))

    layers = list(setting.layers(trace))
    assert len(layers[0]) == 4  # of five sequences each
    for batches, factor in zip(layers, derived.layers, strict=True):
        assert lost(factor, batches) <= 0.05 < lost(factor - 0.002, batches)
    both = [lost(derived.common, batches) for batches in layers]
    assert np.mean(both) <= 0.05 < np.mean([lost(derived.common - 0.002, batches) for batches in layers])
    needed = needed_factors(layers[0][0], setting, 2)
    assert (len(needed), needed["share"].sum()) == (2 * 40, pytest.approx(1))


def test_budget_drop_keeps_its_budget_in_each_batch_and_nothing_beats_the_frontier(tmp_path: Path) -> None:
    path = random_trace(tmp_path / "a.safetensors")
    rows = judge(path, 0.05, SETTING, compared_policies(0.05, derive_factors(path, 0.05, SETTING), SETTING))
    found = rows.set_index("method").to_dict("index")
    assert found["native"]["lost"] == pytest.approx(0, abs=1e-6)
    assert found["budget_drop"]["most_lost"] <= 0.05 + 1e-6
    assert (rows["above"] >= -1e-9).all()
    assert found["native"]["fullest"] > found["budget_drop"]["fullest"] >= found["frontier"]["fullest"]
    assert found["frontier"]["fullest"] >= found["frontier, spread"]["fullest"]


def test_thresholds_for_a_budget_are_an_entry_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = random_trace(tmp_path / "a.safetensors")
    arguments = ["trace", "thresholds", str(path), "--budget", "5%", "--ep", "4", "--tokens", "40"]
    assert main(arguments) == OK
    text = capsys.readouterr().out
    assert "# budget_drop" in text
    (policy,) = expand_policies(yaml.safe_load(text))
    assert policy.by_layer["capacity_factor"] == tuple(derive_factors(path, 0.05, SETTING).layers)
    for wrong, message in (
        (["--ep", "3"], "ep: expected a divisor"),
        (["--budget", "2"], "--budget: expected a share"),
    ):
        assert main([*arguments, *wrong]) == USER_ERROR
        assert message in capsys.readouterr().err
    assert main([*arguments, "--tokens", "100"]) == USER_ERROR
    assert "tokens: expected at most half of the 160 recorded" in capsys.readouterr().err
