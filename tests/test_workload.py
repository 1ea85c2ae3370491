"""Claims about workloads: what skew they have, which bytes they make, what they refuse."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from moe_ep_bench.workload import (
    TAILS,
    RecordedWorkload,
    SyntheticWorkload,
    deal,
    open_trace,
    peak_load,
    top_k_load,
    top_k_share,
)
from moe_ep_bench.workload.randomness import separate_ties
from moe_ep_bench.workload.synthetic import softmax
from moe_ep_bench.workload.tail import fill_tail, fit_top_k, water_fill

few_examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)

TRACES = Path(__file__).parents[2] / "shared" / "traces"
INTENT, GPT_OSS = TRACES / "deepseek-v2-lite-intent.safetensors", TRACES / "gpt-oss-20b-mixed.safetensors"
needs_traces = pytest.mark.skipif(not INTENT.is_file(), reason="no recorded traces in ../shared/traces")


def synthetic(**changes):
    fields = {"num_experts": 64, "top_k": 6, "num_tokens": 2048, "num_batches": 2, "sequence_length": 100, "seed": 0}
    return SyntheticWorkload(**{**fields, "peak_load": 3.0, **changes})


def assert_rows_are_distributions_without_ties(scores_TE):
    assert scores_TE.dtype == torch.float32
    assert (scores_TE > 0).all()
    torch.testing.assert_close(scores_TE.sum(1), torch.ones(len(scores_TE)), rtol=0, atol=1e-6)
    assert (scores_TE.sort(dim=1).values.diff(dim=1) > 0).all()


# Skew


def test_peak_load_is_the_busiest_experts_load_over_the_mean():
    scores_TE = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.4, 0.1, 0.3, 0.2]])
    load_E = top_k_load(scores_TE, 2)
    assert load_E.tolist() == [2, 1, 1, 0]
    assert peak_load(load_E) == 2.0
    assert top_k_share(scores_TE, 2) == pytest.approx(0.75)


# Dealing

sequence_lengths = st.lists(st.integers(1, 40), max_size=30)


def ids_of(length_S):
    return torch.arange(len(length_S)).repeat_interleave(torch.tensor(length_S, dtype=torch.int64))


@few_examples
@given(sequence_lengths, st.integers(1, 9))
def test_dealing_gives_every_token_to_one_rank_and_keeps_sequences_whole_and_in_order(length_S, num_ranks):
    ids_T = ids_of(length_S)
    dealt = deal(ids_T, num_ranks)
    assert len(dealt) == num_ranks
    assert torch.equal(torch.cat(dealt).sort().values, torch.arange(len(ids_T)))
    for indices in dealt:
        assert (indices.diff() > 0).all()
    assert sum(ids_T[indices].unique().numel() for indices in dealt) == len(length_S)


@few_examples
@given(sequence_lengths, st.integers(1, 9))
def test_ranks_differ_by_at_most_the_longest_sequence(length_S, num_ranks):
    tokens = [len(indices) for indices in deal(ids_of(length_S), num_ranks)]
    assert max(tokens) - min(tokens) <= max(length_S, default=0)


def test_a_sequence_goes_to_the_emptiest_rank_and_the_lowest_on_ties():
    dealt = deal(ids_of([5, 2, 2, 1, 4]), 3)
    assert [indices.tolist() for indices in dealt] == [[0, 1, 2, 3, 4], [5, 6, 9], [7, 8, 10, 11, 12, 13]]


def test_a_rank_may_get_nothing():
    assert [len(indices) for indices in deal(ids_of([3]), 2)] == [3, 0]


def test_dealing_refuses_scattered_sequences_and_no_ranks():
    with pytest.raises(ValueError, match="sequence_id_T: expected the tokens of a sequence side by side"):
        deal(torch.tensor([0, 1, 0]), 2)
    with pytest.raises(ValueError, match="num_ranks: expected at least 1, got 0"):
        deal(torch.tensor([0]), 0)


def test_ranks_together_hold_the_same_scores_however_many_they_are():
    batch = synthetic().batch(0)
    for num_ranks in (1, 3, 8):
        together = torch.cat(deal(batch, num_ranks)).sort().values
        assert torch.equal(batch.scores_TE[together], batch.scores_TE)


# Synthetic


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_tokens", "target"),
    [
        (64, 6, 2048, 1.3),
        (64, 6, 2048, 3.0),
        (64, 6, 2048, 64 / 6),
        (128, 8, 1000, 5.5),
        (8, 2, 4096, 2.0),
        (256, 8, 512, 32.0),
        (16, 1, 300, 7.0),
        (16, 4, 20, 3.0),
    ],
)
def test_synthetic_batches_meet_their_peak_load(num_experts, top_k, num_tokens, target):
    workload = synthetic(num_experts=num_experts, top_k=top_k, num_tokens=num_tokens, peak_load=target)
    one_token = num_experts / (num_tokens * top_k)
    for index in range(workload.num_batches):
        scores_TE = workload.batch(index).scores_TE
        assert_rows_are_distributions_without_ties(scores_TE)
        achieved = peak_load(top_k_load(scores_TE, top_k))
        assert achieved == pytest.approx(target, abs=max(0.01 * target, one_token) + 1e-9)


def test_without_a_target_only_chance_skews():
    assert 1.0 < synthetic(peak_load=None).achieved()["peak_load"] < 1.3


def test_hot_experts_stay_hot_but_batches_differ():
    first, second = synthetic().batch(0).scores_TE, synthetic().batch(1).scores_TE
    assert top_k_load(first, 6).argmax() == top_k_load(second, 6).argmax()
    assert not torch.equal(first, second)


def test_synthetic_sequences_have_their_length():
    assert synthetic(num_tokens=250).batch(0).sequence_id_T.bincount().tolist() == [100, 100, 50]


def test_a_batch_is_the_same_bytes_whenever_it_is_made():
    fresh = synthetic().batch(1)
    torch.manual_seed(7)
    again = synthetic()
    again.batch(0)
    assert torch.equal(again.batch(1).scores_TE, fresh.scores_TE)
    assert synthetic().fingerprint() == again.fingerprint()
    assert len(again.fingerprint()) == 16


@pytest.mark.parametrize("change", [{"seed": 1}, {"sequence_length": 99}, {"peak_load": 3.5}, {"num_batches": 1}])
def test_the_fingerprint_tells_workloads_apart(change):
    assert synthetic(**change).fingerprint() != synthetic().fingerprint()


def test_a_peak_load_below_noise_is_refused_with_the_range_that_can_be_met():
    workload = synthetic(peak_load=1.0)
    with pytest.raises(ValueError, match=r"^peak_load: expected 1\.\d+ to 10\.6667 .*, got 1$") as error:
        workload.batch(0)
    least = float(str(error.value).split()[2])
    assert peak_load(top_k_load(synthetic(peak_load=least).batch(0).scores_TE, 6)) == pytest.approx(least, rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak_load": 11.0}, r"peak_load: expected 1 to 10.6667 \(experts / top_k\), got 11"),
        ({"peak_load": float("nan")}, "peak_load: expected 1 to 10.6667"),
        ({"top_k": 65}, r"top_k: expected 1 to 64 \(the experts\), got 65"),
        ({"num_tokens": 0}, "num_tokens: expected at least 1, got 0"),
        ({"sequence_length": 0}, "sequence_length: expected at least 1, got 0"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
    ],
)
def test_synthetic_fields_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        synthetic(**change)


def test_logits_far_apart_still_give_positive_scores_in_their_order():
    logits_TE = np.array([[0.0, 300.0, 1.0, 299.0], [1e5, -1e5, 0.0, 1.0]])
    scores_TE = softmax(logits_TE)
    assert_rows_are_distributions_without_ties(torch.from_numpy(scores_TE))
    np.testing.assert_array_equal(scores_TE.argsort(axis=1), logits_TE.argsort(axis=1))


def test_there_are_no_batches_beyond_the_last():
    for index in (-1, 2):
        with pytest.raises(IndexError, match="batch: expected 0 to 1"):
            synthetic().batch(index)


def test_a_synthetic_workload_describes_itself():
    facts = json.loads(json.dumps(synthetic().describe()))
    assert facts["kind"] == "synthetic"
    assert facts["tail_model"] is None
    assert facts["targets"] == {"peak_load": 3.0}
    assert facts["achieved"]["peak_load"] == pytest.approx(3.0, rel=0.01)
    assert 6 / 64 < facts["achieved"]["topk_share"] < 1
    assert "peak load 3" in facts["description"]
    assert "\n" not in facts["description"]


# Ties and tails


@few_examples
@given(st.integers(0, 2**32 - 1))
def test_ties_are_parted_as_a_slow_loop_would(seed):
    random = np.random.default_rng(seed)
    order_TE = random.permuted(np.tile(np.arange(6.0), (5, 1)), axis=1)
    scores_TE = np.sort(random.choice([0.1, 0.2, np.nextafter(np.float32(0.2), 1), 0.5], (5, 6)).astype(np.float32))
    scores_TE = np.take_along_axis(scores_TE, order_TE.astype(int), axis=1)  # ascending in the order's sense
    expected_TE = scores_TE.copy()
    for row, order in zip(expected_TE, order_TE, strict=True):
        ascending = np.argsort(order)
        for below, above in pairwise(ascending):
            if row[above] <= row[below]:
                row[above] = np.nextafter(row[below], np.float32(2))
    separate_ties(scores_TE, order_TE)
    np.testing.assert_array_equal(scores_TE, expected_TE)


@few_examples
@given(st.integers(0, 2**32 - 1))
def test_water_filling_finds_the_level_that_bisection_finds(seed):
    random = np.random.default_rng(seed)
    shares_TE = random.random((4, 7)) ** 4 + 1e-6
    caps_TE = random.random((4, 7)) + 0.01
    mass_T = caps_TE.sum(axis=1) * [0.05, 0.5, 0.9, 1.0]
    low_T, high_T = np.zeros(4), np.full(4, 1e9)
    for _ in range(200):
        level_T = (low_T + high_T) / 2
        over_T = np.minimum(level_T[:, None] * shares_TE, caps_TE).sum(axis=1) > mass_T
        low_T, high_T = np.where(over_T, low_T, level_T), np.where(over_T, level_T, high_T)
    filled_TE = water_fill(shares_TE, caps_TE, mass_T)
    np.testing.assert_allclose(filled_TE, np.minimum(low_T[:, None] * shares_TE, caps_TE), atol=1e-9)
    np.testing.assert_allclose(filled_TE.sum(axis=1), mass_T)


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
    fitted = fit_top_k(recorded_TK, num_experts)
    filled_TE = fill_tail(ids_TK, fitted.scores_TK, random.random(num_experts) + 1e-3, random)
    scores_TE = torch.from_numpy(filled_TE)
    assert_rows_are_distributions_without_ties(scores_TE)
    best = scores_TE.topk(top_k, dim=1)
    np.testing.assert_array_equal(best.indices.numpy(), ids_TK)
    np.testing.assert_array_equal(best.values.numpy(), fitted.scores_TK)


def test_rows_that_leave_room_for_a_tail_keep_their_scores_and_others_are_counted():
    recorded_TK = np.array(
        [
            [0.3, 0.2, 0.1],  # fits
            [0.25, 0.125, 0.125],  # fits, with a tie
            [0.6, 0.5, 0.1],  # more than all
            [1.0, 0.0, 0.0],  # all, and nothing for the rest
            [0.5, 0.01, 0.01],  # 7 experts below 0.01 cannot hold 0.48
        ]
    )
    fitted = fit_top_k(recorded_TK, 10)
    assert (fitted.rows_scaled, fitted.rows_raised) == (2, 2)
    np.testing.assert_array_equal(fitted.scores_TK[0], recorded_TK[0].astype(np.float32))
    tied = np.float32(0.125)
    np.testing.assert_array_equal(fitted.scores_TK[1], [np.float32(0.25), np.nextafter(tied, np.float32(1)), tied])
    np.testing.assert_allclose(fitted.scores_TK[2], recorded_TK[2] / 1.2, rtol=1e-5)
    assert fitted.scores_TK[4, 0] == 0.5
    level = 0.5 / (2 + 7 * 0.99)  # the two raised, and seven just below
    np.testing.assert_allclose(fitted.scores_TK[4, 1:], [level, level], rtol=1e-5)


# Recorded: a small file of our own

LAYERS, TOKENS, EXPERTS, K = 2, 60, 16, 3
LENGTHS = [7, 20, 1, 12, 20]


def trace_parts(score="softmax, not renormalised"):
    random = np.random.default_rng(0)
    odds = np.exp(random.normal(size=(LAYERS, TOKENS, EXPERTS)) + 1.5 * random.normal(size=EXPERTS))
    scores = odds / odds.sum(axis=2, keepdims=True)
    ids = np.argsort(-scores, axis=2)[..., :K]
    scores = np.take_along_axis(scores, ids, axis=2)
    if "over the top-k" in score:
        scores /= scores.sum(axis=2, keepdims=True)
    tensors = {
        "expert_ids": ids.astype(np.uint8),
        "scores": np.round(scores, 2).astype(np.float16) if "over" not in score else scores.astype(np.float16),
        "sequence_id": np.repeat([4, 0, 7, 8, 2], LENGTHS).astype(np.int32),
        "position": np.concatenate([np.arange(length) for length in LENGTHS]).astype(np.int32),
    }
    metadata = {
        "format": "moe-trace-v1",
        "model": "toy",
        "num_experts": str(EXPERTS),
        "top_k": str(K),
        "score": score,
        "phase": "prefill",
        "domain": "tests",
        "source": "nowhere",
        "licence": "none",
    }
    return tensors, metadata


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "toy.safetensors"
    save_file(*_saved(*trace_parts(), path))
    return path


@pytest.fixture
def normalised_trace(tmp_path):
    path = tmp_path / "toy-normalised.safetensors"
    save_file(*_saved(*trace_parts("softmax over the top-k"), path))
    return path


def _saved(tensors, metadata, path):
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, metadata


def recorded(path, **changes):
    fields = {"layer": 1, "num_experts": EXPERTS, "top_k": K, "num_tokens": 50, "num_batches": 2, "seed": 0}
    return RecordedWorkload(path, **{**fields, "tail": "popularity", **changes})


@pytest.mark.parametrize("tail", TAILS)
def test_the_top_k_of_a_batch_are_the_recorded_experts_in_their_order(trace, tail):
    workload = recorded(trace, tail=tail, num_tokens=150)
    ids_TK, scores_TK = workload.trace.read_layer(1)
    assert (np.diff(scores_TK.astype(float), axis=1) == 0).any(), "the file should hold ties"
    for index in range(2):
        scores_TE = workload.batch(index).scores_TE
        token_T, _ = workload.draw(index)
        assert_rows_are_distributions_without_ties(scores_TE)
        best = scores_TE.topk(K + 1, dim=1)
        np.testing.assert_array_equal(best.indices[:, :K].numpy(), ids_TK[token_T])
        np.testing.assert_allclose(best.values[:, :K].numpy(), scores_TK[token_T].astype(np.float32), rtol=3e-7)
        assert (best.values[:, K] < best.values[:, K - 1]).all()


def test_batches_are_whole_recorded_sequences_with_the_last_one_cut(trace):
    workload = recorded(trace)
    token_T, sequence_id_T = workload.draw(0)
    assert len(token_T) == 50
    starts = np.cumsum([0, *LENGTHS])
    taken = [token_T[sequence_id_T == sequence] for sequence in range(sequence_id_T[-1] + 1)]
    for place, tokens in enumerate(taken):
        which = list(starts).index(tokens[0])
        length = LENGTHS[which] if place < len(taken) - 1 else len(tokens)
        assert tokens.tolist() == list(range(starts[which], starts[which] + length))
    assert not np.array_equal(token_T, workload.draw(1)[0])


def test_a_short_recording_is_gone_through_as_often_as_it_takes_and_says_so(trace):
    workload = recorded(trace, num_tokens=3 * TOKENS)
    token_T, sequence_id_T = workload.draw(0)
    assert np.bincount(token_T).tolist() == [3] * TOKENS
    assert sequence_id_T[-1] == 3 * len(LENGTHS) - 1
    facts = workload.describe()
    assert facts["recording"]["passes_per_batch"] == 3.0
    assert "uses the recording 3.00 times" in facts["description"]


def test_recorded_batches_are_the_same_bytes_whenever_they_are_made(trace):
    fresh = recorded(trace).batch(1)
    again = recorded(trace)
    again.batch(0)
    assert torch.equal(again.batch(1).scores_TE, fresh.scores_TE)
    assert torch.equal(again.batch(1).sequence_id_T, fresh.sequence_id_T)
    assert recorded(trace).fingerprint() == again.fingerprint() != recorded(trace, seed=1).fingerprint()


def test_a_token_that_comes_again_keeps_its_top_k_but_not_its_tail(tmp_path):
    tensors, metadata = trace_parts()
    tensors["sequence_id"][:] = 0  # one sequence only: both batches are the recording in its order
    path = tmp_path / "toy.safetensors"
    save_file(*_saved(tensors, metadata, path))
    workload = recorded(path, num_tokens=TOKENS)
    first, second = (workload.batch(index).scores_TE.topk(K + 1, dim=1) for index in range(2))
    assert torch.equal(first.values[:, :K], second.values[:, :K])
    assert torch.equal(first.indices[:, :K], second.indices[:, :K])
    assert not torch.equal(first.indices[:, K], second.indices[:, K])


def test_the_uniform_tail_is_flat_and_the_popularity_tail_follows_the_recording(trace):
    batches = {tail: recorded(trace, tail=tail, num_tokens=TOKENS).batch(0).scores_TE.double() for tail in TAILS}
    popularity_E = torch.bincount(
        torch.from_numpy(open_trace(trace).read_layer(1)[0].ravel()).long(), minlength=EXPERTS
    )

    def mean_tail(scores_TE):
        below_TE = scores_TE < scores_TE.topk(K, dim=1).values[:, -1:]
        return (scores_TE * below_TE).sum(0) / below_TE.sum(0)

    hot, cold = popularity_E.argmax(), popularity_E.argmin()
    means = {tail: mean_tail(scores_TE) for tail, scores_TE in batches.items()}
    assert means["popularity"][hot] > 2 * means["popularity"][cold]
    assert means["uniform"].max() < 2 * means["uniform"].min()


def test_a_recorded_workload_describes_itself_and_gives_no_path_away(trace):
    text = json.dumps(recorded(trace).describe())
    facts = json.loads(text)
    assert facts["kind"] == "recorded"
    assert facts["tail_model"] == "popularity"
    assert facts["recording"]["file"] == "toy.safetensors"
    assert len(facts["recording"]["sha256"]) == 64
    for word in ("toy", "tests", "prefill", "layer 1", "nowhere", "none", "popularity tail"):
        assert word in facts["description"]
    assert str(trace.parent) not in text


def test_mended_rows_are_counted_in_the_description(tmp_path):
    tensors, metadata = trace_parts()
    tensors["scores"][1, 5] = [1, 0, 0]
    tensors["scores"][1, 6] = [0.5, 0.01, 0]
    path = tmp_path / "toy.safetensors"
    save_file(*_saved(tensors, metadata, path))
    facts = recorded(path).describe()
    assert (facts["recording"]["rows_scaled"], facts["recording"]["rows_raised"]) == (1, 2)
    assert "1 rows scaled and 2 raised of 60" in facts["description"]


def test_normalised_scores_get_the_share_that_the_user_names(normalised_trace):
    workload = recorded(normalised_trace, topk_share=0.85)
    scores_TE = workload.batch(0).scores_TE
    assert_rows_are_distributions_without_ties(scores_TE)
    best_TK = scores_TE.topk(K, dim=1).values
    torch.testing.assert_close(best_TK.sum(1), torch.full((50,), 0.85), rtol=0, atol=1e-6)
    token_T, _ = workload.draw(0)
    ratio_TK = best_TK.numpy() / workload.trace.read_layer(1)[1][token_T].astype(np.float32)
    np.testing.assert_allclose(ratio_TK, 0.85, rtol=2e-3)
    assert workload.describe()["targets"] == {"topk_share": 0.85}


def test_normalised_scores_need_a_share_and_raw_scores_take_none(trace, normalised_trace):
    with pytest.raises(
        ValueError, match=r"topk_share: needed, .* normalised over the top-k; expected .* 0\.1875 and 1"
    ):
        recorded(normalised_trace)
    for share in (0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"topk_share: expected a number between 0\.1875 .* and 1, got"):
            recorded(normalised_trace, topk_share=share)
    with pytest.raises(ValueError, match=r"topk_share: expected none, .* got 0\.5"):
        recorded(trace, topk_share=0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 32}, "toy.safetensors: num_experts: the model has 32, the recording 16"),
        ({"top_k": 2}, "toy.safetensors: top_k: the model has 2, the recording 3"),
        ({"layer": 2}, "toy.safetensors: layer: expected 0 to 1, got 2"),
        ({"tail": "flat"}, "tail: expected popularity or uniform, got 'flat'"),
        ({"num_tokens": 0}, "num_tokens: expected at least 1, got 0"),
        ({"num_batches": 0}, "num_batches: expected at least 1, got 0"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
    ],
)
def test_a_recording_that_does_not_suit_the_fields_is_refused(trace, change, message):
    with pytest.raises(ValueError, match=message):
        recorded(trace, **change)


# Recorded: files that are wrong


def _set(part, name, value):
    def change(tensors, metadata):
        (tensors if part == "tensors" else metadata)[name] = value

    return change


def _drop(part, name):
    def change(tensors, metadata):
        del (tensors if part == "tensors" else metadata)[name]

    return change


def _poke(name, where, value):
    def change(tensors, metadata):
        tensors[name][where] = value

    return change


WRONG = {
    "missing tensor": (_drop("tensors", "scores"), "missing tensors: scores"),
    "missing metadata": (_drop("metadata", "licence"), "missing metadata: licence"),
    "wrong format": (_set("metadata", "format", "moe-trace-v9"), "format: expected moe-trace-v1, got moe-trace-v9"),
    "no number": (_set("metadata", "top_k", "six"), "top_k: expected a number in the metadata, got 'six'"),
    "other top_k": (_set("metadata", "top_k", "4"), "top_k: the metadata says 4, expert_ids has 3"),
    "too few experts": (_set("metadata", "num_experts", "3"), r"num_experts: expected more than top_k \(3\), got 3"),
    "id dtype": (
        _set("tensors", "expert_ids", np.zeros((LAYERS, TOKENS, K), np.int32)),
        "expert_ids: expected dtype U8, got I32",
    ),
    "score dtype": (
        _set("tensors", "scores", np.zeros((LAYERS, TOKENS, K), np.float32)),
        "scores: expected dtype F16, got F32",
    ),
    "score shape": (
        _set("tensors", "scores", np.zeros((LAYERS, TOKENS, K + 1), np.float16)),
        r"scores: expected shape \(2, 60, 3\) to agree with expert_ids, got \(2, 60, 4\)",
    ),
    "score dimensions": (
        _set("tensors", "scores", np.zeros((TOKENS, K), np.float16)),
        r"scores: expected 3 dimensions, got shape \(60, 3\)",
    ),
    "sequence shape": (
        _set("tensors", "sequence_id", np.zeros(TOKENS - 1, np.int32)),
        r"sequence_id: expected shape \(60,\) to agree with expert_ids, got \(59,\)",
    ),
    "position shape": (
        _set("tensors", "position", np.zeros(TOKENS + 1, np.int32)),
        r"position: expected shape \(60,\) to agree with expert_ids, got \(61,\)",
    ),
    "scattered sequence": (
        _poke("sequence_id", 59, 4),
        "sequence_id: expected the tokens of a sequence side by side, got one in several runs",
    ),
    "id out of range": (_poke("expert_ids", (1, 7, 2), 16), "layer 1: token 7: expert_ids: expected 0 to 15, got 16"),
    "repeated expert": (
        _poke("expert_ids", (1, 7), [3, 5, 3]),
        r"layer 1: token 7: expert_ids: expected distinct experts, got \[3, 5, 3\]",
    ),
    "NaN": (_poke("scores", (1, 7, 0), np.nan), "layer 1: token 7: scores: expected finite, non-negative values, got"),
    "infinite": (
        _poke("scores", (1, 7), [np.inf, 0, -np.inf]),
        "layer 1: token 7: scores: expected finite, non-negative",
    ),
    "negative": (
        _poke("scores", (1, 7, 2), -0.1),
        "layer 1: token 7: scores: expected finite, non-negative values, got",
    ),
    "unsorted": (_poke("scores", (1, 7), [0.1, 0.3, 0.2]), "layer 1: token 7: scores: expected descending values, got"),
    "sum over 1": (
        _poke("scores", (1, 7), [0.9, 0.8, 0.7]),
        r"layer 1: token 7: scores: expected the sum of part of a softmax \(at most 1\), got 2.4",
    ),
    "not normalised": (
        _set("metadata", "score", "softmax over the top-k"),
        r"layer 1: token \d+: scores: expected the sum of a softmax over the top-k \(1\), got",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(tmp_path, name):
    change, message = WRONG[name]
    tensors, metadata = trace_parts()
    change(tensors, metadata)
    path = tmp_path / "wrong.safetensors"
    save_file(*_saved(tensors, metadata, path))
    with pytest.raises(ValueError, match=f"^[^\n]*wrong.safetensors: {message}[^\n]*$"):
        recorded(path, topk_share=0.5 if name == "not normalised" else None)


def test_an_empty_recording_is_refused(tmp_path):
    _, metadata = trace_parts()
    empty = np.zeros((LAYERS, 0, K))
    ids_T = np.zeros(0, np.int32)
    tensors = {"expert_ids": empty.astype(np.uint8), "scores": empty.astype(np.float16)}
    path = tmp_path / "empty.safetensors"
    save_file({**tensors, "sequence_id": ids_T, "position": ids_T}, path, metadata)
    with pytest.raises(
        ValueError, match=r"empty\.safetensors: expert_ids: expected at least one layer, token and expert"
    ):
        open_trace(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"toy.safetensors: no such file$"):
        open_trace(tmp_path / "toy.safetensors")


@pytest.mark.parametrize("damage", ["not safetensors", "truncated", "damaged header", "empty"])
def test_a_damaged_file_is_refused(trace, damage):
    whole = trace.read_bytes()
    damaged = {
        "not safetensors": b"PK\x03\x04 something else",
        "truncated": whole[:-10],
        "damaged header": whole[:20] + b"####" + whole[24:],
        "empty": b"",
    }
    trace.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"^[^\n]*toy.safetensors: not a whole, readable safetensors file [^\n]*$"):
        open_trace(trace)


def test_only_the_layer_that_is_asked_for_is_read(tmp_path):
    tensors, metadata = trace_parts()
    tensors["scores"][1] = np.nan
    path = tmp_path / "toy.safetensors"
    save_file(*_saved(tensors, metadata, path))
    recorded(path, layer=0).batch(0)
    with pytest.raises(ValueError, match="layer 1: token 0: scores"):
        recorded(path, layer=1)


# Recorded: real models


@needs_traces
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("layer", [0, 23])  # in layer 23 some recorded scores are 0
def test_real_routing_is_replayed_to_the_letter(layer, tail):
    workload = RecordedWorkload(INTENT, layer, 64, 6, num_tokens=4096, num_batches=1, tail=tail, seed=0)
    scores_TE = workload.batch(0).scores_TE
    assert_rows_are_distributions_without_ties(scores_TE)
    token_T, _ = workload.draw(0)
    best = scores_TE.topk(7, dim=1)
    np.testing.assert_array_equal(best.indices[:, :6].numpy(), workload.trace.read_layer(layer)[0][token_T])
    assert (best.values[:, 6] < best.values[:, 5]).all()


@needs_traces
def test_the_recorded_peak_load_of_deepseek_v2_lite_is_what_was_measured():
    trace = open_trace(INTENT)
    peaks = []
    for layer in range(trace.num_layers):
        workload = RecordedWorkload(INTENT, layer, 64, 6, trace.num_tokens, num_batches=1, tail="uniform", seed=0)
        peaks.append(peak_load(top_k_load(workload.batch(0).scores_TE, 6)))
    assert 3.5 < np.mean(peaks) < 5.6


@needs_traces
def test_gpt_oss_needs_its_top_k_share():
    fields = {"layer": 5, "num_experts": 32, "top_k": 4, "num_tokens": 2048, "num_batches": 1, "seed": 0}
    with pytest.raises(ValueError, match=r"gpt-oss-20b-mixed\.safetensors: topk_share: needed"):
        RecordedWorkload(GPT_OSS, **fields, tail="popularity")
    workload = RecordedWorkload(GPT_OSS, **fields, tail="popularity", topk_share=0.6)
    assert workload.achieved()["topk_share"] == pytest.approx(0.6, abs=1e-6)
    assert 1.5 < workload.achieved()["peak_load"] < 4
