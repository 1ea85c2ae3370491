"""Claims about synthetic workloads: every target is met, none disturbs another, and what cannot be met is said."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, gumbel_r, kstest
from test_workload import assert_rows_are_distributions_without_ties

from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.errors import UserError
from moe_ep_bench.metrics import shared_by_neighbours
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.policies.selection import top_k_map
from moe_ep_bench.workload import solving
from moe_ep_bench.workload import synthetic as synthetic_module
from moe_ep_bench.workload.long_run import long_run_loads
from moe_ep_bench.workload.motion import Motion
from moe_ep_bench.workload.scores import Run, chosen_experts, expert_loads, gumbel_noise, softmax
from moe_ep_bench.workload.synthetic import SyntheticWorkload
from moe_ep_bench.workload.targets import Skews

few_examples = settings(max_examples=15)


def synthetic(**changes):
    fields = {"num_experts": 64, "top_k": 6, "num_tokens": 2048, "num_batches": 2, "sequence_length": 128, "seed": 0}
    peak = {} if "batch_peak_load" in changes else {"peak_load": 3.0}
    return SyntheticWorkload(**fields | peak | changes)


def chosen(scores_E, top_k, num_groups=1, top_groups=1):
    """The model's own top-k of one token, spelled out."""
    size = len(scores_E) // num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(num_groups)]
    value = {
        g: sum(sorted((scores_E[e] for e in groups[g]), reverse=True)[: top_k // top_groups]) for g in range(num_groups)
    }
    best = sorted(range(num_groups), key=lambda g: -value[g])[:top_groups]
    allowed = [e for g in best for e in groups[g]]
    return set(sorted(allowed, key=lambda e: -scores_E[e])[:top_k])


def loads(batch, top_k, **groups):
    load = [0] * batch.scores_TE.shape[1]
    for row in batch.scores_TE.tolist():
        for expert in chosen(row, top_k, **groups):
            load[expert] += 1
    return np.array(load)


def peak(load, num_ranks=None):
    load_R = load if num_ranks is None else load.reshape(num_ranks, -1).sum(axis=1)
    return load_R.max() / load_R.mean()


def shared(batch, top_k):
    """Experts shared by tokens side by side, of one sequence and of two."""
    sets = [chosen(row, top_k) for row in batch.scores_TE.tolist()]
    pairs = list(pairwise(zip(batch.sequence_id_T.tolist(), sets, strict=True)))
    return ([len(here & there) for (name, here), (other, there) in pairs if (name == other) == same] for same in (1, 0))


# The model's top-k


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"topk_share": 0.5},
        {"batch_peak_load": 3.0},
        {"neighbour_overlap": 2.0},
        {"rank_load": (4, 1.5)},
        {"motion": Motion("hotspot", 1)},
    ],
    ids=lambda changes: next(iter(changes), "peak_load"),
)
def test_loads_that_are_counted_without_scores_are_those_of_the_scores(changes):
    workload = synthetic(num_history=2, **changes)
    for index in (-2, -1, 1):
        counted_E = workload.loads_without_scores(index)
        assert counted_E.tolist() == loads(workload.batch(index), workload.top_k).tolist()
        assert counted_E.sum() == 2048 * 6


def test_loads_that_hang_on_scores_are_not_counted_without_them():
    for changes in (
        {"num_groups": 4, "top_groups": 2},
        {"peak_load": 1},
        {"peak_load": None, "pattern": "power_law_1.2"},
    ):
        assert synthetic(**changes).loads_without_scores(0) is None


@few_examples
@given(st.sampled_from([(8, 2, 4, 1), (16, 4, 4, 2), (12, 6, 3, 2), (16, 3, None, None)]), st.integers(0, 2**20))
def test_top_k_looks_only_into_the_best_groups(shape, seed):
    num_experts, top_k, num_groups, top_groups = shape
    random = np.random.default_rng(seed)
    noise_TE, bias_E = random.gumbel(size=(9, num_experts)), random.normal(size=num_experts)
    selection = RoutingContext(top_k=top_k, num_groups=num_groups, top_groups=top_groups)
    for sharpness in (0.3, 1.0, 3.0):
        map_TE = chosen_experts(noise_TE + bias_E, selection, sharpness)
        for row_E, scores_E in zip(map_TE, np.exp(sharpness * (noise_TE + bias_E)), strict=True):
            assert set(np.flatnonzero(row_E)) == chosen(scores_E.tolist(), top_k, num_groups or 1, top_groups or 1)
        load_E = expert_loads([noise_TE[:4], noise_TE[4:]], bias_E, selection, sharpness)
        np.testing.assert_array_equal(load_E, map_TE.sum(axis=0))


# Noise


@pytest.mark.parametrize("copying", [0.0, 0.7])
def test_noise_is_gumbel_noise_token_by_token_and_copied_inside_sequences(copying):
    (noise_TE,) = gumbel_noise(1, 0, [Run(0, 4000)], 4, sequence_length=2, copying=copying)
    assert kstest(noise_TE[1::2, 0], gumbel_r.cdf).pvalue > 0.01
    assert kstest(noise_TE[::2, 3], gumbel_r.cdf).pvalue > 0.01
    assert (noise_TE[::2] == noise_TE[1::2]).mean() == pytest.approx(copying, abs=0.02)
    assert not (noise_TE[1:-1:2] == noise_TE[2::2]).any(), "neighbours of different sequences"
    assert abs(np.corrcoef(noise_TE[:, 0], noise_TE[:, 1])[0, 1]) < 0.05


def test_scores_of_logits_far_apart_are_positive_and_sort_as_they_do():
    (scores_E,) = softmax(np.array([[0.0, -150.0, -300.0, 1.0]]))
    assert (scores_E > 0).all()
    assert np.argsort(scores_E).tolist() == [2, 1, 0, 3]


# Targets


@pytest.mark.parametrize(
    ("peak_load", "num_experts", "top_k", "num_tokens"),
    [(1.5, 64, 6, 512), (9.0, 128, 8, 256), (64 / 6, 64, 6, 256), (7.0, 16, 1, 300), (3.0, 16, 4, 20)],
)
def test_the_peak_load_of_a_batch_is_met_to_a_percent_or_a_token(peak_load, num_experts, top_k, num_tokens):
    workload = synthetic(batch_peak_load=peak_load, num_experts=num_experts, top_k=top_k, num_tokens=num_tokens)
    for index in range(2):
        batch = workload.batch(index)
        assert_rows_are_distributions_without_ties(batch.scores_TE)
        one_token = num_experts / (num_tokens * top_k)
        tolerance = max(0.01 * peak_load, one_token) + 1e-9
        assert peak(loads(batch, top_k)) == pytest.approx(peak_load, abs=tolerance)


@pytest.mark.parametrize(("num_ranks", "load"), [(2, 1.2), (64, 3.0)])
def test_the_fullest_rank_gets_its_load(num_ranks, load):
    workload = synthetic(rank_load=(num_ranks, load), batch_peak_load=3.0)
    assert peak(loads(workload.batch(0), 6), num_ranks) == pytest.approx(load, rel=0.02)
    # Later batches have the same experts in the same places, and noise of their own.
    assert peak(loads(workload.batch(1), 6), num_ranks) == pytest.approx(load, rel=0.08)
    assert peak(loads(workload.batch(0), 6)) == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize(("num_ranks", "load"), [(2, 1.1), (16, 1.8), (32, 2.4)])
def test_the_fullest_rank_gets_its_load_where_a_model_routes_by_groups(num_ranks, load):
    workload = synthetic(rank_load=(num_ranks, load), num_groups=8, top_groups=3, batch_peak_load=4.0, num_tokens=4096)
    for index in range(2):
        map_TE = top_k_map(workload.batch(index).scores_TE, workload.selection)
        groups_T = map_TE.reshape(len(map_TE), 8, -1).any(dim=2).sum(dim=1)
        assert groups_T.max() == 3, "of as many groups as before"
        assert peak(map_TE.sum(0).numpy(), num_ranks) == pytest.approx(load, rel=0.06 if index else 0.02)
        assert peak(map_TE.sum(0).numpy()) == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_experts_change_places_within_their_group_and_groups_change_places(num_ranks):
    load_E = np.random.default_rng(0).integers(1, 100, 64) ** 2
    hot_rank, size = num_ranks - 1, 8
    packed = solving.place_in_groups(load_E, num_ranks, {2: 1.1, 4: 1.2, 8: 1.45, 16: 2.0}[num_ranks], hot_rank, 8)
    assert sorted(packed.tolist()) == list(range(64))
    drawn_in = (packed // size).reshape(8, size)
    assert (drawn_in == drawn_in[:, :1]).all(), "a place's group is one drawn group"
    load_R = load_E[packed].reshape(num_ranks, -1).sum(axis=1)
    assert load_R.argmax() == hot_rank or load_R.max() <= 1.02 * load_R[hot_rank]


def test_no_other_group_may_have_a_fuller_rank_than_the_hot_one():
    """The heaviest group could have a rank of 10 pairs, but one of another group then has 14."""
    load_E = np.array([8, 8, 2, 2, 13, 1, 1, 1, 2, 2, 2, 2])
    mean = load_E.sum() / 6
    with pytest.raises(UserError, match=rf"expected about {14 / mean:.2f} to {16 / mean:.2f} on 6 ranks"):
        solving.place_in_groups(load_E, 6, 10 / mean, 0, 3)
    load_R = load_E[solving.place_in_groups(load_E, 6, 14 / mean, 0, 3)].reshape(6, 2).sum(axis=1)
    assert (load_R[0], load_R.max()) == (14, 14)


@pytest.mark.parametrize(("kind", "apart"), [("batch_peak_load", 2e-3), ("peak_load", 1e-2)])
@pytest.mark.parametrize("share", [0.12, 0.95])
def test_the_top_k_hold_the_share_asked_for_and_choices_stay(share, kind, apart):
    plain, sharp = (synthetic(**{kind: 3.0}, **more).batch(0) for more in ({}, {"topk_share": share}))
    best_TK = torch.tensor([sorted(row)[-6:] for row in sharp.scores_TE.tolist()])
    assert best_TK.sum(1).mean().item() == pytest.approx(share, abs=apart)
    assert torch.equal(plain.scores_TE.argsort(1), sharp.scores_TE.argsort(1))
    assert (sharp.scores_TE.sort(1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize("kind", ["batch_peak_load", "peak_load"])
@pytest.mark.parametrize(("overlap", "sequence_length"), [(1.7, 128), (5.5, 2)])
def test_neighbours_share_as_many_experts_as_asked_for(overlap, sequence_length, kind):
    sizes = {"sequence_length": sequence_length, "num_tokens": 4096}
    workload = synthetic(neighbour_overlap=overlap, **{kind: 3.0}, **sizes)
    batch = workload.batch(1)
    together, apart = shared(batch, 6)
    assert np.mean(together) == pytest.approx(overlap, rel=0.03)
    if len(apart) > 500:  # Speculative requests: tokens of different ones are strangers.
        assert np.mean(apart) < 0.6 * overlap
    assert kind == "peak_load" or peak(loads(batch, 6)) == pytest.approx(3.0, rel=0.011)


SHIPPED = [(preset, name) for preset in Skews.names() for name in Skews.named(preset).by_name()]


@pytest.mark.parametrize(("preset", "name"), SHIPPED)
def test_shipped_skews_are_met_to_two_percent_and_chance(preset: str, name: str) -> None:
    """Cuts too: what capacities drop, and what they leave on the fullest rank."""
    model = ModelSpec.named(preset)
    targets = Skews.named(preset).by_name()[name].targets()
    ranks, cuts = targets.pop("rank_load", None), targets.pop("cuts", ())
    sizes = {key: getattr(model, key) for key in ("num_experts", "top_k", "num_groups", "top_groups")}
    workload = SyntheticWorkload(
        **sizes, **targets, num_tokens=32768, num_batches=1, sequence_length=128, seed=0,
        rank_load=ranks and (ranks["ep_size"], ranks["load"]),
        cuts=tuple((cut["capacity_factor"], cut["dropped_share"], cut.get("rank_load")) for cut in cuts),
    )  # fmt: skip
    batch = workload.batch(0)
    map_TE = top_k_map(batch.scores_TE, workload.selection)
    pairs, num_shared = shared_by_neighbours(map_TE, batch.sequence_id_T)
    load_E = map_TE.sum(dim=0).numpy()
    achieved = {
        "peak_load": peak(load_E),
        "topk_share": float((batch.scores_TE * map_TE).sum() / batch.scores_TE.sum()),
        "neighbour_overlap": num_shared / pairs,
    }
    near = 0.02 + 3 / load_E.max() ** 0.5
    assert {key: achieved[key] for key in targets} == pytest.approx(targets, rel=near)
    if ranks:
        assert peak(load_E, ranks["ep_size"]) == pytest.approx(ranks["load"], rel=near)
    for cut in cuts:
        dropped, kept = cut_by_hand(load_E.tolist(), cut["capacity_factor"], ranks["ep_size"] if ranks else 1)
        assert dropped == pytest.approx(cut["dropped_share"], rel=near, abs=5e-3)
        assert "rank_load" not in cut or kept == pytest.approx(cut["rank_load"], rel=near)


def cut_by_hand(load_E: Sequence[float], factor: float, num_ranks: int) -> tuple[float, float]:
    """What a capacity drops of all pairs and leaves on the fullest rank over the mean before it, expert by expert."""
    capacity, total = factor * sum(load_E) / len(load_E), sum(load_E)
    kept_R = [0.0] * num_ranks
    for expert, load in enumerate(load_E):
        kept_R[expert * num_ranks // len(load_E)] += min(load, capacity)
    return 1 - sum(kept_R) / total, max(kept_R) * num_ranks / total


@pytest.mark.parametrize(("seed", "num_experts"), [(0, 64), (1, 128), (2, 256)])
def test_a_profile_has_the_numbers_that_it_was_made_for(seed: int, num_experts: int) -> None:
    drawn_E = np.random.default_rng(seed).lognormal(sigma=0.7, size=num_experts)
    peak_load, dropped = drawn_E.max() / drawn_E.mean(), {f: cut_by_hand(drawn_E, f, 1)[0] for f in (1.0, 1.5)}
    load_E = solving.load_profile(num_experts, peak_load, dropped)
    assert (np.diff(load_E) <= 0).all()
    assert load_E.min() > 0
    assert load_E.max() == pytest.approx(peak_load, rel=1e-6)
    assert {f: cut_by_hand(load_E, f, 1)[0] for f in dropped} == pytest.approx(dropped, rel=5e-3)
    wanted = {f: cut_by_hand(drawn_E, f, 4)[1] for f in (np.inf, 1.0, 1.5)}
    placed_E = solving.place_for_cuts(load_E, 4, wanted, np.random.default_rng(3))
    assert sorted(placed_E) == sorted(load_E)
    assert {f: cut_by_hand(placed_E, f, 4)[1] for f in wanted} == pytest.approx(wanted, rel=0.02)


# The long run


def exact_loads(odds_E, top_k):
    """Expected loads over the mean of K draws without replacement, order by order."""
    share_E = np.zeros(len(odds_E))

    def draw(left, chance, missing):
        for expert in left if missing else ():
            own = chance * odds_E[expert] / sum(odds_E[other] for other in left)
            share_E[expert] += own
            draw(left - {expert}, own, missing - 1)

    draw(frozenset(range(len(odds_E))), 1.0, top_k)
    return share_E * len(odds_E) / top_k


@pytest.mark.parametrize("top_k", [1, 3, 5, 6])
@pytest.mark.parametrize("strength", [0.0, 1.0, 4.0])
def test_expected_loads_are_those_of_draws_without_replacement(top_k, strength):
    bias_E = strength * np.random.default_rng(top_k).normal(size=6)
    expected_E = exact_loads(np.exp(bias_E), top_k)
    np.testing.assert_allclose(long_run_loads(bias_E + 7, top_k), expected_E, rtol=1e-4)


def test_expected_loads_hold_where_some_experts_are_always_chosen_and_others_never():
    load_E = long_run_loads(np.array([900.0, 0.0, 0.0, 0.0, -900.0]), 2)
    np.testing.assert_allclose(load_E, [2.5, 2.5 / 3, 2.5 / 3, 2.5 / 3, 0.0], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("preset", ModelSpec.names())
def test_a_few_tokens_of_any_model_may_be_of_skewed_traffic(preset):
    """Of 64 batches together the popular expert's load is the traffic's, within four standard deviations of chance."""
    sizes = {key: getattr(ModelSpec.named(preset), key) for key in ("num_experts", "top_k", "num_groups", "top_groups")}
    workload = synthetic(**sizes, peak_load=2.5, num_tokens=128, num_batches=64, sequence_length=1)
    load_BE = np.stack([top_k_map(workload.batch(b).scores_TE, workload.selection).sum(0).numpy() for b in range(64)])
    wanted = 2.5 * load_BE.mean() * 64
    busiest, near = load_BE.sum(axis=0).max(), 4 * wanted**0.5 + (0.05 * wanted if workload.num_groups else 0)
    assert abs(busiest - wanted) < near
    assert np.mean([peak(load_E) for load_E in load_BE]) > 2.5, "chance adds to it"


def test_the_peak_of_a_small_batch_is_that_of_tokens_drawn_one_by_one():
    workload = synthetic(num_experts=16, top_k=2, num_tokens=32, num_batches=300, peak_load=2.0)
    ours_B = [peak(loads(workload.batch(index), 2)) for index in range(300)]
    odds_E, random = np.exp(workload._recipe(0).bias_E), np.random.default_rng(5)
    drawn_B = []
    for _ in range(300):
        drawn = [random.choice(16, 2, replace=False, p=odds_E / odds_E.sum()) for _ in range(32)]
        drawn_B.append(peak(np.bincount(np.concatenate(drawn), minlength=16)))
    error = (np.var(ours_B) / 300 + np.var(drawn_B) / 300) ** 0.5
    assert abs(np.mean(ours_B) - np.mean(drawn_B)) < 4 * error
    assert np.mean(ours_B) > 2.0 + 4 * error


@pytest.mark.parametrize("groups", [{}, {"num_groups": 8, "top_groups": 3}])
def test_batches_are_exchangeable_and_solved_for_once(groups):
    fields = {
        "num_tokens": 256,
        "topk_share": 0.5,
        "rank_load": (16, 1.6),
        "peak_load": 4.0,
        "num_batches": 40,
        **groups,
    }
    workload = synthetic(**fields)
    workload.solve(0)
    with mock.patch.object(solving, "root", side_effect=AssertionError("solved again")):
        load_BE = np.stack(
            [top_k_map(workload.batch(b).scores_TE, workload.selection).sum(0).numpy() for b in range(40)]
        )
    early_E, late_E = load_BE[::2].sum(axis=0), load_BE[1::2].sum(axis=0)
    assert chi2_contingency(np.stack([early_E, late_E])).pvalue > 0.001
    assert torch.equal(synthetic(**fields).batch(17).scores_TE, workload.batch(17).scores_TE)
    assert torch.equal(synthetic(**{**fields, "num_tokens": 64}).batch(17).scores_TE, workload.batch(17).scores_TE[:64])
    assert peak(load_BE.sum(axis=0), 16) == pytest.approx(1.6, rel=0.06)


# Balance


@pytest.mark.parametrize("groups", [{}, {"num_groups": 8, "top_groups": 4, "num_experts": 256, "top_k": 8}])
@pytest.mark.parametrize("share", [None, 0.6])
def test_a_peak_load_of_one_is_exactly_balanced_on_all_ranks_and_on_each(groups: dict, share: float | None) -> None:
    workload = synthetic(peak_load=1.0, topk_share=share, num_tokens=4096, **groups)
    free = synthetic(peak_load=None, topk_share=share, num_tokens=4096, **groups)
    for index in range(2):
        batch = workload.batch(index)
        assert_rows_are_distributions_without_ties(batch.scores_TE)
        load_E = top_k_map(batch.scores_TE, workload.selection).sum(dim=0)
        assert load_E.tolist() == [4096 * workload.top_k // workload.num_experts] * workload.num_experts
        own = workload.rank_batch(index, 3, 8).scores_TE
        assert set(top_k_map(own, workload.selection).sum(dim=0).tolist()) == {512 * workload.top_k // len(load_E)}
        # A token's scores are its own; only which expert has which is dealt.
        assert torch.equal(batch.scores_TE.sort(dim=1).values, free.batch(index).scores_TE.sort(dim=1).values)
    if share is not None and not groups:
        map_TE = top_k_map(batch.scores_TE, workload.selection)
        assert float((batch.scores_TE * map_TE).sum()) == pytest.approx(share * 4096, rel=0.02)


# What cannot be


@pytest.mark.parametrize(
    ("changes", "key", "got"),
    [
        ({"peak_load": 11.0}, "peak_load", "11"),
        ({"peak_load": float("nan")}, "peak_load", "nan"),
        ({"batch_peak_load": 1.001}, "batch_peak_load", "1.001"),
        ({"batch_peak_load": 11.0}, "batch_peak_load", "11"),
        ({"batch_peak_load": 3.0, "peak_load": 3.0}, "peak_load, batch_peak_load", "both"),
        ({"peak_load": None, "rank_load": (8, 1.5)}, "rank_load", "1.5 alone"),
        ({"peak_load": 1.0, "neighbour_overlap": 2.0}, "neighbour_overlap", "dealt in turn"),
        ({"topk_share": 0.09}, "topk_share", "0.09"),
        ({"neighbour_overlap": 0.1}, "neighbour_overlap", "0.1"),
        ({"neighbour_overlap": 6.0}, "neighbour_overlap", "6"),
        ({"neighbour_overlap": 2.0, "sequence_length": 1}, "neighbour_overlap", "1"),
        ({"rank_load": (8, 4.0)}, "rank_load", "4"),
        ({"cuts": ((1.0, 0.01, None), (1.5, 0.001, None))}, "cuts", "0.01 at 1"),
        ({"cuts": ((1.0, 0.3, 3.0), (1.5, 0.15, 1.0)), "rank_load": (8, 1.5)}, "rank_load, cuts", "%"),
        ({"rank_load": (7, 1.5)}, "rank_load", "7"),
        ({"rank_load": (8, 9.0)}, "rank_load", "9"),
        ({"rank_load": (8, 3.5), "num_groups": 4, "top_groups": 2}, "rank_load", "4 groups, got 3.5"),
        ({"rank_load": (8, 1.05), "num_groups": 4, "top_groups": 2}, "rank_load", "4 groups, got 1.05"),
        (
            {"rank_load": (8, 1.5), "num_groups": 4, "top_groups": 2, "cuts": ((1.0, 0.2, None),)},
            "rank_load, cuts",
            "4 groups",
        ),
        ({"rank_load": (4, 3.0), "num_groups": 4, "top_groups": 2}, "rank_load", "on 4 ranks"),
        ({"rank_load": (12, 1.8), "num_groups": 8, "top_groups": 3, "num_experts": 96}, "rank_load", "of 8; got 12"),
    ],
)
def test_targets_that_cannot_be_met_name_the_key_and_the_value(changes, key, got):
    with pytest.raises(ValueError, match=f"^{key}: (expected|no) [^\n]*{got}[^\n]*$"):
        synthetic(**changes).batch(0)


# Patterns

E, K, T = 32, 4, 4096


def of_pattern(pattern: str, **fields: Any) -> SyntheticWorkload:
    known = {"num_experts": E, "top_k": K, "num_tokens": T, "num_batches": 8, "sequence_length": 64, "seed": 3}
    return SyntheticWorkload(pattern=pattern, **{**known, **fields})


def quotas(found: SyntheticWorkload, index: int) -> np.ndarray:
    sizes = found.num_experts, found.top_k, found.num_tokens, found.seed
    return synthetic_module.quotas(found.pattern, index, *sizes)


@pytest.mark.parametrize("exponent", [1.01, 1.2])
@pytest.mark.parametrize("num_tokens", [4, T])
def test_power_law_loads_are_its_quotas(exponent: float, num_tokens: int) -> None:
    found = of_pattern(f"power_law_{exponent}", num_tokens=num_tokens)
    quota_E = quotas(found, 0)
    assert quota_E.sum() == num_tokens * K
    assert (quota_E >= 0).all()
    assert (quota_E <= num_tokens).all()
    ids_TK = found.batch(0).scores_TE.topk(K, dim=1).indices
    assert torch.bincount(ids_TK.flatten(), minlength=E).tolist() == quota_E.tolist()
    assert not np.array_equal(quota_E, quotas(found, 1))


def test_power_laws_are_as_skewed_as_the_distribution_says() -> None:
    """Sorted weights lie at the inverse distribution function of evenly spread shares, computed number by number."""
    size, total = 256, T * K
    for exponent in (1.01, 1.2):
        many = [quotas(of_pattern(f"power_law_{exponent}", num_experts=size, seed=seed), 0) for seed in range(40)]
        low, high = 1.0 ** (1 - exponent), (0.8 * T) ** (1 - exponent)
        exact = [(low + (high - low) * (place + 0.5) / size) ** (1 / (1 - exponent)) for place in range(size)]
        median = float(np.median(exact)) / sum(exact) * total
        assert np.median(many) == pytest.approx(median, rel=0.25)


CONFIG = {
    "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 256, "num_batches": 1, "skew": "power_law_1.2"},
    "layer": {"ep_size": 4},
    "policies": [{"name": "token_drop", "capacity_factor": 1.0}],
}


def test_a_pattern_is_a_skew_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    (experiment,) = load_experiments(path, (), on_cpu=True)
    assert experiment.workload.skew == "power_law_1.2"
    for change, message in (
        ("workload.peak_load=3", "skew: power_law_1.2 prescribes all loads; expected no peak_load"),
        ("workload.skew=megatron_w1", "workload.skew: expected "),
    ):
        with pytest.raises(UserError, match=message):
            load_experiments(path, [change], on_cpu=True)
    with pytest.raises(UserError, match=r"skew: power_law_1\.2 knows no groups of experts; the model has 8"):
        of_pattern("power_law_1.2", num_groups=8)
