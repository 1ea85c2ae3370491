"""Claims about workloads: what skew they have, which bytes they make, what they refuse."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.policies.selection import TopK, top_k_map
from moe_ep_bench.workload.batch import (
    TokenBatch,
    balanced_scores,
    deal_pieces,
    deal_sequences,
    dealing_orders,
    image_tokens,
    spread_tokens,
)
from moe_ep_bench.workload.tail import fill_tail, fit_top_k, keep_top_k_ahead

few_examples = settings(max_examples=15)


def top_k_load(scores_TE, top_k):
    """How many tokens have each expert among their best: int64 [E]."""
    return scores_TE.topk(top_k, dim=1).indices.flatten().bincount(minlength=scores_TE.shape[1])


def peak_load(load_E):
    return load_E.max().item() * len(load_E) / load_E.sum().item()


def top_k_share(scores_TE, top_k):
    """Share of a token's score mass that its best experts hold, mean over tokens."""
    return (scores_TE.double().topk(top_k, dim=1).values.sum(1) / scores_TE.double().sum(1)).mean().item()


def digest_of(workload):
    """16 hex digits over the bytes of all batches."""
    digests = ""
    for index in range(workload.num_batches):
        batch = workload.batch(index)
        parts = repr(tuple(batch.scores_TE.shape)).encode(), batch.scores_TE.numpy(), batch.sequence_id_T.numpy()
        digests += hashlib.sha256(b"".join(map(bytes, parts))).hexdigest()
    return hashlib.sha256(digests.encode()).hexdigest()[:16]


def assert_rows_are_distributions_without_ties(scores_TE):
    assert scores_TE.dtype == torch.float32
    assert (scores_TE > 0).all()
    torch.testing.assert_close(scores_TE.sum(1), torch.ones(len(scores_TE)), rtol=0, atol=1e-6)
    assert (scores_TE.sort(dim=1).values.diff(dim=1) > 0).all()


# Padding


@pytest.mark.parametrize(("num_tokens", "num_padding"), [(5, 0), (5, 1), (5, 4), (0, 0), (0, 3)])
def test_the_last_tokens_of_a_rank_are_padding_and_keep_their_scores(num_tokens, num_padding):
    tokens = TokenBatch(torch.rand(num_tokens, 4), torch.arange(num_tokens))
    padded = tokens.with_padding(num_padding)
    assert padded.scores_TE is tokens.scores_TE
    assert padded.sequence_id_T is tokens.sequence_id_T
    valid_T = [True] * num_tokens if padded.valid_T is None else padded.valid_T.tolist()
    of_tokens = min(num_padding, num_tokens)
    assert valid_T == [True] * (num_tokens - of_tokens) + [False] * of_tokens


def test_the_first_tokens_of_every_sequence_are_images():
    sequence_id_T = torch.tensor([7, 7, 7, 7, 3, 3, 9])
    assert image_tokens(sequence_id_T, 0.5).tolist() == [1, 1, 0, 0, 1, 0, 0]
    assert image_tokens(sequence_id_T, 0.4).tolist() == [1, 1, 0, 0, 1, 0, 0], "rounded"
    assert image_tokens(sequence_id_T, 1.0).tolist() == [1] * 7


# Dealing


@few_examples
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 6))
def test_ranks_get_as_many_tokens_as_nearly_as_whole_sequences_allow(length_S, num_ranks):
    start_P, rank_P = deal_pieces(np.array(length_S), num_ranks)
    length_P, num_tokens = np.diff(start_P), sum(length_S)
    assert (start_P[0], start_P[-1]) == (0, num_tokens)
    assert set(np.cumsum(length_S)) <= set(start_P), "a sequence ends where a piece ends"
    assert len(length_P) == max(len(length_S), min(num_ranks, num_tokens)), "a sequence is cut only for an empty rank"
    fill_R = np.bincount(rank_P, length_P, minlength=num_ranks)
    assert (fill_R > 0).sum() == min(num_ranks, len(length_P))
    assert fill_R.max() - fill_R.min() <= max(length_S)


@pytest.mark.parametrize(("length_S", "rank_S"), [([10, 1, 1, 1], [0, 1, 1, 1]), ([2, 2, 2, 9], [0, 1, 0, 1])])
def test_each_sequence_goes_to_the_rank_with_the_fewest_tokens_so_far(length_S, rank_S):
    assert deal_sequences(np.array(length_S), 2).tolist() == rank_S


# Balancing


@few_examples
@given(st.integers(0, 50), st.sampled_from([6, 8, 64]), st.integers(1, 6), st.integers(0, 9))
def test_balanced_scores_are_each_tokens_own_with_its_best_dealt_in_turn(num_tokens, num_experts, top_k, seed):
    scores_TE = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    balanced_TE = balanced_scores(scores_TE, top_k)
    order_OE = torch.from_numpy(dealing_orders(num_experts, top_k))
    of_round = math.lcm(num_experts, top_k) // top_k
    for token, (own_E, found_E) in enumerate(zip(scores_TE, balanced_TE, strict=True)):
        place_E = order_OE[token // of_round % len(order_OE)]
        place_E = place_E[(token * top_k + torch.arange(num_experts)) % num_experts]
        assert torch.equal(found_E[place_E], own_E.sort(descending=True).values)
    load_E = top_k_load(balanced_TE, top_k)
    assert load_E.max() - load_E.min() <= 1


@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups", "num_ranks"),
    [(128, 8, (), 16), (64, 6, (), 8), (256, 8, (8, 4), 32), (384, 8, (), 32), (160, 6, (8, 3), 8)],
)
def test_balanced_scores_share_ranks_as_drawn_experts_do_and_stay_within_groups(num_experts, top_k, groups, num_ranks):
    order_OE = dealing_orders(num_experts, top_k, *groups)
    assert all(sorted(order_E) == list(range(num_experts)) for order_E in order_OE)
    dealt = order_OE[:, : num_experts // top_k * top_k].reshape(-1, top_k)
    assert len({tuple(sorted(experts)) for experts in dealt}) > 0.95 * len(dealt), "sets of experts differ"
    if not groups:
        per_rank = num_experts // num_ranks
        missed = math.comb(num_experts - per_rank, top_k) / math.comb(num_experts, top_k)
        spread = np.mean([len({*(experts // per_rank)}) for experts in dealt])
        assert spread == pytest.approx(num_ranks * (1 - missed), rel=0.01)
    if groups == (8, 4):
        assert {len({*(experts // (num_experts // 8))}) for experts in dealt} == {4}
        scores_TE = torch.rand(64, num_experts, generator=torch.Generator().manual_seed(0))
        context = RoutingContext(top_k=top_k, num_groups=8, top_groups=4)
        map_TE = TopK().route(balanced_scores(scores_TE, top_k, *groups), context).map_TE
        assert map_TE.sum(dim=0).unique().tolist() == [2], "the rule of groups chooses the best, whose loads are even"


def test_balanced_scores_of_many_ranks_with_few_tokens_are_balanced_together():
    """A decode step: a token on each of 16 ranks, 8 of 128 experts each."""
    scores_TE = torch.rand(1, 128, generator=torch.Generator().manual_seed(0))
    loads = [top_k_load(balanced_scores(scores_TE, 8, first=rank), 8) for rank in range(16)]
    assert torch.stack(loads).sum(dim=0).unique().tolist() == [1]


# Ties and tails


@few_examples
@given(st.integers(0, 2**32 - 1), st.sampled_from([10, 1e4]), st.floats(0, 6))
def test_any_recorded_row_gets_a_tail_below_its_top_k(seed, steps, sharpness):
    """Coarse steps make ties and zeros; sharpness goes from flat rows to one-expert rows."""
    num_experts, top_k = 12, 4
    random = np.random.default_rng(seed)
    odds_TE = np.exp(sharpness * random.normal(size=(30, num_experts)))
    recorded_TK = -np.sort(-odds_TE / odds_TE.sum(axis=1, keepdims=True), axis=1)[:, :top_k]
    recorded_TK = (np.round(recorded_TK * steps) / steps).astype(np.float16).astype(np.float64)
    ids_TK = np.argsort(random.random((30, num_experts)), axis=1)[:, :top_k]
    fitted_TK = fit_top_k(recorded_TK, num_experts)
    filled_TE = fill_tail(
        ids_TK, fitted_TK, random.random(num_experts) + 1e-3, random.random((30, 12)), RoutingContext(top_k=4)
    )
    scores_TE = torch.from_numpy(filled_TE)
    assert_rows_are_distributions_without_ties(scores_TE)
    best = scores_TE.topk(top_k, dim=1)
    np.testing.assert_array_equal(best.indices.numpy(), ids_TK)
    np.testing.assert_array_equal(best.values.numpy(), fitted_TK)


@pytest.mark.parametrize("top_groups", [1, 2, 4])
def test_groups_of_recorded_experts_stay_ahead_of_all_others(top_groups):
    """The top-k of a replay are the recorded experts also where a model chooses among groups first."""
    random, num_experts, top_k = np.random.default_rng(top_groups), 32, 4
    context = RoutingContext(top_k=top_k, num_groups=8, top_groups=top_groups)
    # A selection bias may put any experts ahead, in as many groups as a token is allowed.
    group_TG = np.argsort(random.random((200, 8)), axis=1)[:, :top_groups]
    inside_TN = (group_TG[:, :, None] * 4 + np.arange(4)).reshape(200, -1)
    ids_TK = np.take_along_axis(inside_TN, np.argsort(random.random(inside_TN.shape), axis=1)[:, :top_k], axis=1)
    full_TE = random.dirichlet(np.ones(num_experts), 200).astype(np.float32)
    best_TK = -np.sort(-np.take_along_axis(full_TE, ids_TK, axis=1), axis=1)
    ids_TK = np.take_along_axis(ids_TK, np.argsort(-np.take_along_axis(full_TE, ids_TK, axis=1), axis=1), axis=1)
    expected_TE = np.zeros((200, num_experts), dtype=bool)
    np.put_along_axis(expected_TE, ids_TK, True, axis=1)
    fitted_TK = fit_top_k(best_TK.astype(np.float64), num_experts)
    for scores_TE in (
        keep_top_k_ahead(ids_TK, full_TE, context),
        fill_tail(ids_TK, fitted_TK, np.ones(num_experts), random.random((200, num_experts)), context),
    ):
        np.testing.assert_array_equal(top_k_map(torch.from_numpy(scores_TE), context).numpy(), expected_TE)
    assert (top_k_map(torch.from_numpy(full_TE), context).numpy() != expected_TE).any(axis=1).sum() > 100


def test_rows_that_leave_room_for_a_tail_keep_their_scores_and_others_are_mended():
    recorded_TK = np.array(
        [
            [0.3, 0.2, 0.1],  # fits
            [0.25, 0.125, 0.125],  # fits, with a tie
            [0.6, 0.5, 0.1],  # more than all
            [1.0, 0.0, 0.0],  # all, and nothing for the rest
            [0.5, 0.01, 0.01],  # 7 experts below 0.01 cannot hold 0.48
        ]
    )
    fitted_TK = fit_top_k(recorded_TK, 10)
    np.testing.assert_array_equal(fitted_TK[0], recorded_TK[0].astype(np.float32))
    tied = np.float32(0.125)
    np.testing.assert_array_equal(fitted_TK[1], [np.float32(0.25), np.nextafter(tied, np.float32(1)), tied])
    np.testing.assert_allclose(fitted_TK[2], recorded_TK[2] / 1.2, rtol=1e-5)
    assert fitted_TK[4, 0] == 0.5
    level = 0.5 / (2 + 7 * 0.99)  # the two raised, and seven just below
    np.testing.assert_allclose(fitted_TK[4, 1:], [level, level], rtol=1e-5)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_ranks_that_were_given_their_tokens_get_them_in_order(lengths: list[int], data: st.DataObject) -> None:
    """As if rows were handed out one by one; sequences are cut where a rank has its tokens."""
    num_tokens, num_ranks = sum(lengths), data.draw(st.integers(1, 5))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_tokens), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    tokens_R = np.diff([0, *cuts, num_tokens])
    start_P, rank_P = deal_pieces(np.array(lengths), num_ranks, tokens_R)
    owner_T = np.repeat(rank_P, np.diff(start_P))
    assert owner_T.tolist() == [rank for rank, tokens in enumerate(tokens_R) for _ in range(tokens)]
    starts = [0, *np.cumsum(lengths), *np.cumsum(tokens_R)]
    assert start_P.tolist() == sorted(set(starts)), "no piece is of two sequences or two ranks"


@settings(max_examples=60)
@given(st.integers(1, 5000), st.integers(1, 64), st.floats(0, 1), st.integers(0, 5))
def test_the_fullest_rank_has_its_share_and_all_tokens_are_dealt(
    num_tokens: int, num_ranks: int, part: float, seed: int
) -> None:
    fullest = 1 + part * (num_ranks - 1)
    tokens_R = spread_tokens(num_tokens, num_ranks, fullest, seed)
    assert (len(tokens_R), tokens_R.sum(), tokens_R.min() >= 0) == (num_ranks, num_tokens, True)
    assert tokens_R.max() <= math.ceil(fullest * num_tokens / num_ranks)
    assert abs(tokens_R.max() - fullest * num_tokens / num_ranks) <= 1
    assert (tokens_R == spread_tokens(num_tokens, num_ranks, fullest, seed)).all()


def test_a_spread_of_one_is_even_and_one_of_all_ranks_gives_one_rank_everything() -> None:
    assert spread_tokens(32, 4, 1.0, seed=0).tolist() == [8, 8, 8, 8]
    assert sorted(spread_tokens(32, 4, 4.0, seed=0).tolist()) == [0, 0, 0, 32]
    orders = {tuple(spread_tokens(400, 4, 1.6, seed)) for seed in range(8)}
    assert len(orders) > 1, "which rank is fullest is drawn"
    assert {tuple(sorted(one)) for one in orders} == {(53, 76, 111, 160)}
    with pytest.raises(UserError, match=r"expected 1 to 4, the number of ranks, got 4\.5"):
        spread_tokens(32, 4, 4.5, seed=0)
