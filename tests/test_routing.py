"""Claims about ranks' tokens and traffic: what is kept, made anew or routed side by side changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_run import write_config

from moe_ep_bench.bench.description import routed_facts
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import BALANCED, NATIVE, RANKS, ROUTING, VIRTUAL, Point
from moe_ep_bench.bench.routing import Router
from moe_ep_bench.bench.traffic import _stats_key, route_layer
from moe_ep_bench.errors import UserError
from moe_ep_bench.policies import make_policy
from moe_ep_bench.policies.xshare import XShare

CPU = torch.device("cpu")
POLICIES = [{"name": "token_drop", "capacity_factor": 1.0}, {"name": "lynx", "num_dropped": 8}]


def planned(folder: Path, backend: str) -> Point:
    config = write_config(folder, layer__ep_size=4, policies=POLICIES, emulate={"links": "h100-nvlink4"})
    return plan(config, [], backend, on_cpu=True)[0]


def seen_of(comparison: Point, few: int | None = None) -> list[tuple]:
    """Of every case in both batches its traffic and metrics, as plain values; and the ranks' tokens."""
    router, rows = Router(comparison, CPU, few), []
    with torch.inference_mode():
        for index in range(2):
            for traffic in route_layer(router, comparison.cases, None, index):
                rows.append((traffic.counts_RP.tolist(), traffic.num_tokens_R, traffic.frontier, repr(traffic.rows_R)))
            rows += [tuple(router.tokens(None, index, rank).context.request_id_T.tolist()) for rank in range(4)]
    return rows


@pytest.mark.parametrize("backend", [VIRTUAL, ROUTING])
def test_ranks_in_threads_give_the_same_traffic(backend: str, tmp_path: Path) -> None:
    comparison, seen = planned(tmp_path, backend), []
    for num_threads in (1, 3, torch.get_num_threads()):
        torch.set_num_threads(num_threads)
        seen.append(seen_of(comparison))
        assert torch.get_num_threads() == num_threads
    assert seen[0] == seen[1] == seen[2]
    assert len({repr(row) for row in seen[0]}) > 8, "batches, ranks and policies differ"


def test_a_few_tokens_are_of_every_rank_from_its_first_to_its_last(tmp_path: Path) -> None:
    comparison = planned(tmp_path, VIRTUAL)
    for rank in range(4):
        few, whole = (Router(comparison, CPU, few=few).tokens(None, 0, rank) for few in (3, None))
        rows = torch.linspace(0, whole.num_tokens - 1, 3).long()
        assert torch.equal(few.workload_scores_TE, whole.workload_scores_TE[rows])
        assert rows[-1] == whole.num_tokens - 1


def test_ranks_of_several_groups_are_those_of_their_own(tmp_path: Path) -> None:
    config = write_config(tmp_path, layer__ep_size=2, policies=POLICIES)
    router = Router(plan(config, [], RANKS, 4, on_cpu=True)[0], CPU)
    tokens_R = [router.tokens(None, 0, rank) for rank in range(4)]
    assert [(tokens.rank, tokens.context.rank) for tokens in tokens_R] == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_routing_sees_scores_as_they_are_and_layers_what_their_logits_say(tmp_path: Path) -> None:
    for backend in (ROUTING, VIRTUAL):
        comparison = planned(tmp_path, backend)
        first = Router(comparison, CPU).tokens(None, 0, 0)
        seen = first.seen_by(comparison.cases[0])
        assert (seen.score_function is None) == (backend == ROUTING)
        torch.testing.assert_close(seen.scores_TE, first.workload_scores_TE, rtol=1e-5, atol=1e-7)


def test_random_policies_draw_anew_for_every_batch_rank_and_layer(tmp_path: Path) -> None:
    comparison = planned(tmp_path, ROUTING)
    drawing = make_policy({"name": "token_drop", "capacity_factor": 1.0, "metric": "random"})
    router, case = Router(comparison, CPU), replace(comparison.cases[0], rule=drawing)
    made = [router.tokens(None, index, rank) for index in range(2) for rank in range(4)]
    made += [replace(made[0], layer=layer) for layer in (0, 1)]
    drawn = [float(torch.rand(1, generator=router.context(case, tokens).generator)) for tokens in made]
    assert len(set(drawn)) == len(drawn) == 2 * 4 + 2
    assert float(torch.rand(1, generator=router.context(case, made[0]).generator)) == drawn[0], "and alike once more"


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-30b-a3b"])
def test_what_cases_share_is_what_each_would_find_alone(model: str, tmp_path: Path) -> None:
    """The model's own choice is worked out once for all cases, sums' consequences once for all ranks."""
    policies = [
        {"name": "topk"},
        *({"name": "token_drop", "capacity_factor": 0.8, **how} for how in ({}, {"metric": "random"})),
        {"name": "expanded_drop", "capacity_factor": 0.8, "num_candidates": 3, "scope": "global"},
        {"name": "budget_drop", "max_dropped": 0.2},
        {"name": "oea", "k0": 2},
        {"name": "laser", "eps_high": 0.6, "t_fix": 0.3, "c": 16},
        {"name": "xshare", "k0": 1, "budget": 16},
        {"name": "lynx", "num_dropped": 8},
    ]
    sizes = {"workload__num_tokens": 90, "workload__padding_per_rank": 2, "workload__num_batches": 1}
    config = write_config(
        tmp_path,
        model={"preset": model},
        policies=policies,
        layer__ep_size=4,
        emulate={"links": "h100-nvlink4"},
        **sizes,
    )
    comparison = plan(config, [], VIRTUAL, on_cpu=True)[0]
    router = Router(comparison, CPU)
    with torch.inference_mode():
        of_cases = route_layer(router, comparison.cases, None, 0)
        for case, traffic in zip(comparison.cases, of_cases, strict=True):
            alone = Router(comparison, CPU)  # in torch, by the policy's own definition
            tokens_R = [alone.tokens(None, 0, rank).seen_by(case) for rank in range(4)]
            policy, contexts = case.policy or NATIVE, [alone.context(case, tokens) for tokens in tokens_R]
            stats = [
                policy.batch_stats(tokens.scores_TE, context)
                for tokens, context in zip(tokens_R, contexts, strict=True)
            ]
            summed = None if stats[0] is None else sum(stats)
            for rank, tokens in enumerate(tokens_R):
                expected = policy.route(tokens.scores_TE, alone.context(case, tokens), summed)
                assert torch.equal(router.chosen(case, tokens, [summed]), expected.map_TE), case.label
                assert traffic.rows_R[rank]["load_E"].tolist() == expected.map_TE.sum(dim=0).tolist(), case.label


def test_balanced_loads_are_even_over_ranks_of_any_sizes(tmp_path: Path) -> None:
    sizes = {"workload__num_tokens": None, "workload__tokens_of_ranks": [9, 0, 61, 30], "workload__num_batches": 1}
    config = write_config(tmp_path, layer__ep_size=4, emulate={"links": "h100-nvlink4"}, **sizes)
    comparison = plan(config, [], VIRTUAL, on_cpu=True)[0]
    balanced = next(case for case in comparison.cases if case.role == BALANCED)
    (traffic,) = route_layer(Router(comparison, CPU), [balanced], None, 0)
    load_E = traffic.counts_RP.sum(axis=0)
    assert load_E.sum() == 100 * comparison.model.top_k
    assert load_E.max() - load_E.min() <= 1


def test_ranks_have_unequal_tokens_by_one_number(tmp_path: Path) -> None:
    """Data-parallel attention's imbalance is a fact of its own, beside that of the experts."""
    asked = {"workload__num_tokens": 100, "workload__tokens_of_ranks": 1.6, "workload__num_batches": 2}
    config = write_config(tmp_path, layer__ep_size=4, emulate={"links": "h100-nvlink4"}, **asked)
    comparison = plan(config, [], VIRTUAL, on_cpu=True)[0]
    assert comparison.tokens_R.max() == 40
    assert (comparison.rank_tokens == comparison.tokens_R).all()
    assert routed_facts(comparison).fullest_tokens == 1.6
    same = plan(config, ["workload.tokens_of_ranks=1.7"], VIRTUAL, on_cpu=True)[0]
    assert same.comparison_id != comparison.comparison_id
    with pytest.raises(UserError, match=r"workload\.tokens_of_ranks: expected 1 to 4, the number of ranks, got 5"):
        plan(config, ["workload.tokens_of_ranks=5"], VIRTUAL, on_cpu=True)
    with pytest.raises(UserError, match="give either tokens_per_rank or num_tokens, or tokens_of_ranks as a list"):
        plan(config, ["workload.num_tokens=null"], VIRTUAL, on_cpu=True)


def test_a_class_of_a_users_own_shares_no_statistics_by_what_it_inherits() -> None:
    """It may count otherwise, by fields that the class above does not know."""

    class Own(XShare):
        pass

    def key_of(policy: Any) -> Any:
        case: Any = SimpleNamespace(policy=policy)
        return _stats_key(case)

    assert key_of(XShare(k0=1, budget=4)) == (1, "full", None)
    assert key_of(Own(k0=1, budget=4)) is None
    assert key_of(None) is None
