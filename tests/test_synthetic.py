"""Claims about synthetic workloads: every target is met, none disturbs another, and what cannot be met is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import gumbel_r, kstest
from test_workload import assert_rows_are_distributions_without_ties

from moe_ep_bench.workload import SyntheticWorkload, deal
from moe_ep_bench.workload.batch import deal_sequences
from moe_ep_bench.workload.noise import CorrelatedNoise, HeldNoise, Noise
from moe_ep_bench.workload.randomness import Run
from moe_ep_bench.workload.skew import TopK, balanced_scores

few_examples = settings(max_examples=15)


def synthetic(**changes):
    fields = {"num_experts": 64, "top_k": 6, "num_tokens": 2048, "num_batches": 2, "sequence_length": 128, "seed": 0}
    return SyntheticWorkload(**{**fields, "peak_load": 3.0, **changes})


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


def fullest(load, num_ranks):
    ranks = [sum(part) for part in np.split(load, num_ranks)]
    return max(ranks) * num_ranks / sum(ranks)


# The model's top-k


@few_examples
@given(st.sampled_from([(8, 2, 4, 1), (16, 4, 4, 2), (12, 6, 3, 2), (16, 3, 1, 1)]), st.integers(0, 2**20))
def test_top_k_looks_only_into_the_best_groups(shape, seed):
    num_experts, top_k, num_groups, top_groups = shape
    logits_TE = np.random.default_rng(seed).normal(size=(9, num_experts))
    selection = TopK(top_k, num_groups, top_groups) if num_groups > 1 else TopK(top_k)
    for factor in (0.3, 1.0, 3.0):
        map_TE = selection.chosen(logits_TE, factor)
        for row_E, scores_E in zip(map_TE, np.exp(factor * logits_TE), strict=True):
            assert set(np.flatnonzero(row_E)) == chosen(scores_E.tolist(), top_k, num_groups, top_groups)


# Targets


SHAPES = [(1.5, 64, 6, 512), (9.0, 128, 8, 256)]
CORNERS = [(64 / 6, 64, 6, 256), (7.0, 16, 1, 300), (3.0, 16, 4, 20)]


@pytest.mark.parametrize(
    ("family", "peak_load", "num_experts", "top_k", "num_tokens"),
    [(family, *shape) for family in ("lognormal", "zipf", "dirichlet") for shape in SHAPES]
    + [("lognormal", *shape) for shape in CORNERS],
)
def test_every_family_meets_its_peak_load(family, peak_load, num_experts, top_k, num_tokens):
    sizes = {"num_experts": num_experts, "top_k": top_k, "num_tokens": num_tokens}
    workload = synthetic(family=family, peak_load=peak_load, **sizes)
    for index in range(2):
        batch = workload.batch(index)
        assert_rows_are_distributions_without_ties(batch.scores_TE)
        load = loads(batch, top_k)
        one_token = num_experts / (num_tokens * top_k)
        assert load.max() / load.mean() == pytest.approx(peak_load, abs=max(0.01 * peak_load, one_token) + 1e-9)


@pytest.mark.parametrize("num_groups", [None, 4])
def test_the_peak_load_is_met_under_the_models_groups(num_groups):
    groups = {} if num_groups is None else {"num_groups": num_groups, "top_groups": 2}
    workload = synthetic(num_experts=32, top_k=4, num_tokens=512, peak_load=4.0, topk_share=0.5, **groups)
    load = loads(workload.batch(0), 4, **groups)
    assert load.max() / load.mean() == pytest.approx(4.0, rel=0.011)
    assert workload.achieved()["peak_load"] == pytest.approx(4.0, rel=0.011)
    assert workload.achieved()["topk_share"] == pytest.approx(0.5, abs=0.01)
    if num_groups:
        ungrouped = loads(workload.batch(0), 4)
        assert not np.array_equal(ungrouped, load), "the groups make no difference"


@pytest.mark.parametrize(("num_ranks", "load"), [(2, 1.2), (64, 3.0)])
def test_the_fullest_rank_gets_its_load(num_ranks, load):
    workload = synthetic(rank_load=(num_ranks, load))
    assert fullest(loads(workload.batch(0), 6), num_ranks) == pytest.approx(load, rel=0.02)
    # Later batches have the same experts in the same places, and noise of their own.
    assert fullest(loads(workload.batch(1), 6), num_ranks) == pytest.approx(load, rel=0.08)
    assert workload.achieved()["peak_load"] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("share", [0.12, 0.95])
def test_the_top_k_hold_the_share_asked_for_and_choices_stay(share):
    plain, sharp = synthetic().batch(0), synthetic(topk_share=share).batch(0)
    best_TK = torch.tensor([sorted(row)[-6:] for row in sharp.scores_TE.tolist()])
    assert best_TK.sum(1).mean().item() == pytest.approx(share, abs=2e-3)
    assert torch.equal(plain.scores_TE.argsort(1), sharp.scores_TE.argsort(1))
    assert (sharp.scores_TE.sort(1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize("entropy", [0.2, 0.97])
def test_scores_have_the_entropy_asked_for(entropy):
    workload = synthetic(entropy=entropy)
    scores_TE = workload.batch(0).scores_TE.double().numpy()
    assert np.mean(-(scores_TE * np.log(scores_TE)).sum(1) / np.log(64)) == pytest.approx(entropy, abs=2e-3)
    assert workload.achieved()["entropy"] == pytest.approx(entropy, abs=2e-3)


@pytest.mark.parametrize(("overlap", "sequence_length"), [(1.7, 128), (5.5, 2)])
def test_neighbours_share_as_many_experts_as_asked_for(overlap, sequence_length):
    workload = synthetic(neighbour_overlap=overlap, sequence_length=sequence_length, num_tokens=4096)
    batch = workload.batch(1)
    sets = [chosen(row, 6) for row in batch.scores_TE.tolist()]
    sequence = batch.sequence_id_T.tolist()
    shared = [len(sets[t] & sets[t - 1]) for t in range(1, len(sets)) if sequence[t] == sequence[t - 1]]
    assert np.mean(shared) == pytest.approx(overlap, rel=0.08)
    assert workload.achieved()["neighbour_overlap"] == pytest.approx(np.mean([overlap, np.mean(shared)]), rel=0.08)
    apart = [len(sets[t] & sets[t - 1]) for t in range(1, len(sets)) if sequence[t] != sequence[t - 1]]
    if len(apart) > 500:  # Speculative requests: tokens of different ones are strangers.
        assert np.mean(apart) < 0.6 * overlap
    load = loads(batch, 6)
    assert load.max() / load.mean() == pytest.approx(3.0, rel=0.011)


def test_correlated_noise_is_gumbel_noise_token_by_token():
    noise_TE = np.concatenate(list(CorrelatedNoise(1, 0, 4000, 4, 2, 0.8).chunks([Run(0, 4000)])))
    assert kstest(noise_TE[1::2, 0], gumbel_r.cdf).pvalue > 0.01
    assert kstest(noise_TE[::2, 3], gumbel_r.cdf).pvalue > 0.01
    assert np.corrcoef(noise_TE[::2, 1], noise_TE[1::2, 1])[0, 1] > 0.7
    assert abs(np.corrcoef(noise_TE[1:-1:2, 1], noise_TE[2::2, 1])[0, 1]) < 0.05
    assert abs(np.corrcoef(noise_TE[:, 0], noise_TE[:, 1])[0, 1]) < 0.05


# Skew that moves


def hottest(workload, index):
    return set(np.argsort(loads(workload.batch(index), 6))[-8:])


def test_with_drift_other_experts_become_hot_and_the_peak_load_stays():
    still, slow, new = (synthetic(drift=drift, num_batches=4) for drift in (0.0, 0.1, 1.0))
    assert len(hottest(still, 0) & hottest(still, 3)) >= 7
    assert len(hottest(slow, 0) & hottest(slow, 1)) > len(hottest(new, 0) & hottest(new, 1))
    assert torch.equal(slow.batch(0).scores_TE, still.batch(0).scores_TE)
    load = loads(slow.batch(3), 6)
    assert load.max() / load.mean() == pytest.approx(3.0, rel=0.011)


def test_every_so_many_batches_one_is_a_burst():
    workload = synthetic(num_batches=6, burst_every=3, burst_peak_load=8.0, num_tokens=512)
    peaks = [load.max() / load.mean() for load in (loads(workload.batch(index), 6) for index in range(6))]
    assert [round(peak) for peak in peaks] == [3, 3, 8, 3, 3, 8]


# Counting and balancing on the host


@few_examples
@given(
    st.integers(1, 60),
    st.sampled_from([(8, None, None), (5, None, None), (8, 4, 2), (8, 4, 4), (2, 4, 1), (6, 2, 1)]),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.integers(0, 9),
)
def test_counting_the_top_k_in_one_pass_is_marking_and_summing(num_tokens, selection, factor, seed):
    random = np.random.default_rng(seed)
    noise_TE, bias_E = random.gumbel(size=(num_tokens, 32)), random.normal(size=32)
    chosen_TE = TopK(*selection).chosen(noise_TE + bias_E, factor)
    np.testing.assert_array_equal(TopK(*selection).loads(noise_TE, bias_E, factor), chosen_TE.sum(axis=0))


@few_examples
@given(st.integers(0, 50), st.sampled_from([6, 8, 64]), st.integers(1, 6), st.integers(0, 9))
def test_balanced_scores_are_each_tokens_own_with_its_best_dealt_in_turn(num_tokens, num_experts, top_k, seed):
    scores_TE = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    balanced_TE = balanced_scores(scores_TE, top_k)
    for token, (own_E, found_E) in enumerate(zip(scores_TE, balanced_TE, strict=True)):
        place_E = (token * top_k + torch.arange(num_experts)) % num_experts
        assert torch.equal(found_E[place_E], own_E.sort(descending=True).values)


def test_noise_that_is_kept_is_the_noise():
    fields, runs = (3, 1, 700, 16), [Run(0, 40), Run(90, 91), Run(300, 700)]
    kept, made = (np.concatenate(list(noise.chunks(runs))) for noise in (HeldNoise(*fields), Noise(*fields)))
    np.testing.assert_array_equal(kept, made)


# Dealing in shares


@few_examples
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=60),
    st.integers(1, 6),
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=4),
)
def test_ranks_get_their_shares_as_nearly_as_whole_sequences_allow(length_S, num_ranks, shares):
    ids_T = torch.arange(len(length_S)).repeat_interleave(torch.tensor(length_S))
    share_R = [shares[rank % len(shares)] for rank in range(num_ranks)]
    if not any(share_R):
        with pytest.raises(ValueError, match="shares: expected one above 0"):
            deal(ids_T, num_ranks, shares)
        return
    dealt = deal(ids_T, num_ranks, shares)
    assert torch.equal(torch.cat(dealt).sort().values, torch.arange(len(ids_T)))
    assert all((indices.diff() > 0).all() for indices in dealt)
    num_pieces, num_active = sum(ids_T[indices].unique().numel() for indices in dealt), sum(map(bool, share_R))
    assert num_pieces == max(len(length_S), min(num_active, len(ids_T))), "a sequence is cut only for an empty rank"
    assert sum(len(indices) > 0 for indices in dealt) == min(num_active, num_pieces)
    fills = []
    for indices, share in zip(dealt, share_R, strict=True):
        assert share > 0 or len(indices) == 0
        if share:
            fills.append((len(indices) / share, share))
    for fill, share in fills:
        assert fill - min(other for other, _ in fills) <= max(length_S) / share + 1e-9


@few_examples
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 9), st.integers(1, 7))
def test_equal_sequences_are_dealt_in_turn_as_one_by_one(length, num_sequences, last, num_ranks):
    length_S = np.array([*[length] * (num_sequences - 1), min(last, length)])
    one_by_one = deal_sequences(length_S, num_ranks, [1.0])
    np.testing.assert_array_equal(deal_sequences(length_S, num_ranks), one_by_one)


@pytest.mark.parametrize(
    ("length_S", "num_ranks", "tokens"),
    [([4096] * 8, 16, [2048] * 16), ([9], 4, [2, 2, 2, 3]), ([4, 1], 3, [2, 2, 1]), ([1, 1], 3, [1, 1, 0])],
)
def test_the_longest_sequences_are_cut_evenly_where_a_rank_would_be_empty(length_S, num_ranks, tokens):
    ids_T = torch.arange(len(length_S)).repeat_interleave(torch.tensor(length_S))
    assert [len(indices) for indices in deal(ids_T, num_ranks)] == tokens


# What cannot be


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_load": 11.0}, r"peak_load: expected 1 to 10.6667 \(experts / top_k\), got 11"),
        ({"peak_load": float("nan")}, "peak_load: expected 1 to 10.6667"),
        ({"family": "uniform"}, "family: uniform has no skew to solve for; expected no peak_load"),
        ({"topk_share": 0.09}, r"topk_share: expected a number between 0.09375 .* and 1, got 0.09"),
        ({"topk_share": 0.5, "entropy": 0.5}, "topk_share, entropy: expected one of the two at most"),
        (
            {"neighbour_overlap": 0.1},
            r"neighbour_overlap: expected \S+ \(what tokens share by chance .* below 6, got 0.1",
        ),
        (
            {"neighbour_overlap": 2.0, "sequence_length": 1},
            "neighbour_overlap: expected a sequence_length of at least 2",
        ),
        (
            {"rank_load": (8, 1.0)},
            r"rank_load: expected about 1\.\d\d to 2\.\d\d on 8 ranks with this peak load, got 1",
        ),
        ({"rank_load": (7, 1.5)}, "rank_load: expected a number of ranks from 2 on that divides the 64 experts, got 7"),
        (
            {"rank_load": (8, 1.5), "drift": 0.1},
            "rank_load: places the experts itself, once; expected no placement, drift",
        ),
        (
            {"rank_load": (8, 1.5), "num_groups": 4, "top_groups": 2},
            "rank_load: expected none for a model with 4 groups of experts",
        ),
        ({"burst_every": 3}, "burst_every, burst_peak_load: expected both or none"),
        ({"burst_every": 2, "burst_peak_load": 20.0}, "burst_peak_load: expected 1 to 10.6667"),
    ],
)
def test_targets_that_cannot_be_met_say_what_can(changes, message):
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        synthetic(**changes).batch(0)
