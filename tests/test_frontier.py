"""The frontier of dropping beside brute force, and as a bound on every policy that only drops."""

from __future__ import annotations

import itertools
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from policy_cases import random_scores
from torch import Tensor

from moe_ep_bench.analysis import cases
from moe_ep_bench.analysis.columns import render
from moe_ep_bench.analysis.tables import tables
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import ROUTING
from moe_ep_bench.cli import main
from moe_ep_bench.config import label_of
from moe_ep_bench.errors import OK
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.policies.selection import top_k_map
from moe_ep_bench.workload.frontier import Frontier, joint, top_k_pairs

RANK_E = torch.arange(8) // 2  # four ranks


def frontier_of(scores_TE: Tensor, rank_E: Tensor = RANK_E, top_k: int = 2) -> Frontier:
    """Of tokens that lie on three source ranks."""
    context = RoutingContext(top_k=top_k)
    return Frontier.of([top_k_pairs(part, top_k_map(part, context)) for part in scores_TE.tensor_split(3)], rank_E)


@pytest.mark.parametrize("kind", ["softmax", "levels", "zero rows"])
def test_no_choice_of_pairs_keeps_more(kind: str) -> None:
    scores_TE = random_scores(kind, 4, 8, seed=6)
    score_N, expert_N = top_k_pairs(scores_TE, top_k_map(scores_TE, RoutingContext(top_k=2)))
    frontier, num_pairs = frontier_of(scores_TE), len(score_N)
    most = [-1.0] * (num_pairs + 1)
    for chosen in itertools.product([False, True], repeat=num_pairs):
        chosen_N = torch.tensor(chosen)
        fullest = int(RANK_E[expert_N[chosen_N]].bincount(minlength=4).max())
        kept = float(score_N[chosen_N].double().sum())
        for load in range(fullest, num_pairs + 1):
            most[load] = max(most[load], kept)
    total = most[-1] or 1.0
    assert [frontier.kept(load) for load in range(num_pairs + 1)] == pytest.approx([one / total for one in most])
    assert frontier.mean_load == num_pairs / 4


def test_no_set_of_experts_keeps_more() -> None:
    scores_TE = random_scores("softmax", 7, 8, seed=2)
    map_TE = top_k_map(scores_TE, RoutingContext(top_k=2))
    mass_E = (scores_TE * map_TE).double().sum(dim=0)
    for count in range(9):
        best = max(float(mass_E[list(chosen)].sum()) for chosen in itertools.combinations(range(8), count))
        assert frontier_of(scores_TE).kept_by_experts(count) == pytest.approx(best / float(mass_E.sum()))


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "token_drop", "capacity_factor": 0.6},
        {"name": "token_drop", "capacity_factor": 0.6, "granularity": "device", "metric": "order"},
        {"name": "expert_drop", "fraction": 0.4},
        {"name": "lynx", "num_dropped": 2},
        {"name": "dynamic_skip", "beta": 0.7},
        {"name": "pruned", "k0": 1},
    ],
    ids=lambda spec: spec["name"],
)
def test_no_policy_that_only_drops_lies_beyond_the_frontier(spec: dict) -> None:
    scores_TE = random_scores("softmax", 60, 8, seed=3)
    frontier = frontier_of(scores_TE)
    map_TE = make_policy(spec).route(scores_TE, RoutingContext(top_k=2, num_ranks=4)).map_TE
    kept = float((scores_TE * map_TE).double().sum()) / frontier.by_experts[-1]
    load_E = map_TE.sum(dim=0)
    assert kept < 1
    assert kept <= frontier.kept(int(load_E.view(4, 2).sum(dim=1).max())) + 1e-9
    assert kept <= frontier.kept_by_experts(int((load_E > 0).sum())) + 1e-9


def test_means_over_batches_lie_below_the_joint_frontier_and_some_on_it() -> None:
    batches = [frontier_of(random_scores("softmax", 20, 8, seed=seed) ** power) for seed, power in ((4, 1), (5, 3))]
    load_N, kept_N = joint([batch.curve() for batch in batches])
    assert load_N[0] == 0
    assert kept_N[-1] == pytest.approx(1)
    points = [list(zip(*batch.curve(), strict=True)) for batch in batches]
    gaps = []
    for (one_load, one_kept), (other_load, other_kept) in itertools.product(*points):
        load, place = (one_load + other_load) / 2, torch.searchsorted(load_N, (one_load + other_load) / 2 - 1e-9)
        before = max(int(place) - 1, 0)
        width = float(load_N[place] - load_N[before]) or 1.0
        share = (load - float(load_N[before])) / width
        bound = float(kept_N[before]) + share * float(kept_N[place] - kept_N[before])
        gaps.append(bound - (one_kept + other_kept) / 2)
    assert min(gaps) > -1e-9
    assert min(gaps) < 1e-9
    # Equal loads in both batches do not reach it: that is what adapting to a batch is worth.
    equal = [(a[1] + b[1]) / 2 for a, b in zip(*points, strict=True) if a[0] == b[0]]
    assert len(equal) < len(kept_N)


def test_a_batch_without_pairs_loses_nothing() -> None:
    empty = Frontier.of([(torch.zeros(0), torch.zeros(0, dtype=torch.int64))], RANK_E)
    assert (empty.kept(0), empty.kept_by_experts(0), len(empty.by_load)) == (1.0, 1.0, 1)
    assert empty.curve()[1][-1] == 1.0


# ---- rows and tables -------------------------------------------------------------------------------------------------

DROPS = [
    {"name": "token_drop", "capacity_factor": [0.8, 1.5], "granularity": ["expert", "device"]},
    {"name": "budget_drop", "max_lost_mass": 0.05},
]
TINY = {
    "name": "tiny",
    "model": {"preset": "deepseek-v2-lite"},
    "workload": {"kind": "synthetic", "num_tokens": 96, "num_batches": 2, "peak_load": 4.0, "sequence_length": 8},
    "layer": {"ep_size": 4},
    "policies": [*DROPS, {"name": "load_only"}],
    "emulate": {"device": "h100-sxm", "links": "h100-nvlink4", "replication": [{"spare_per_rank": 1}]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``route`` and ``emulate`` wrote."""
    folder = tmp_path_factory.mktemp("frontier")
    (folder / "config.yaml").write_text(yaml.safe_dump(TINY))
    for command in ("route", "emulate"):
        assert main([command, str(folder / "config.yaml"), "--out", str(folder / command)]) == OK
    return folder


@pytest.mark.slow
def test_route_and_emulate_hold_each_policy_against_the_frontier_of_its_batches(folder: Path) -> None:
    routed, emulated = (
        cases.cases(cases.load(folder / command)).set_index("label") for command in ("route", "emulate")
    )
    (comparison,) = plan(folder / "config.yaml", [], ROUTING)
    expected: dict[str, list[float]] = {}
    for index in range(2):
        parts = [comparison.workload.rank_batch(index, rank, 4).scores_TE for rank in range(4)]
        contexts = [RoutingContext(top_k=6, num_ranks=4, rank=rank) for rank in range(4)]
        pairs = [top_k_pairs(one, top_k_map(one, context)) for one, context in zip(parts, contexts, strict=True)]
        frontier = Frontier.of(pairs, torch.arange(64) // 16)
        for policy in comparison.experiment.make_policies():
            if policy.name == "budget_drop":
                continue  # its ranks decide together
            maps = [policy.route(one, context).map_TE for one, context in zip(parts, contexts, strict=True)]
            kept = (
                sum(float((one * map_TE).sum()) for one, map_TE in zip(parts, maps, strict=True))
                / frontier.by_experts[-1]
            )
            load_R = torch.cat(maps).sum(dim=0).view(4, 16).sum(dim=1)
            expected.setdefault(label_of(policy), []).append(frontier.kept(int(load_R.max())) - kept)
    for label, found in expected.items():
        assert routed.loc[label, "below_frontier"] == pytest.approx(sum(found) / 2, abs=1e-6)
        assert emulated.loc[label, "below_frontier"] == pytest.approx(sum(found) / 2, abs=1e-6)
    assert routed.loc["native", "below_frontier"] == pytest.approx(0, abs=1e-6)
    assert routed.loc["token_drop capacity_factor=0.8", "below_frontier"] > 0.01
    for frame in (routed, emulated):  # experts with several homes have no frontier
        assert pd.isna(frame.loc["EPLB, 1 spare per rank", "below_frontier"])
    assert pd.isna(emulated.loc["balanced", "below_frontier"])
    assert "below frontier" in render(tables(cases.load(folder / "route")), "text")
