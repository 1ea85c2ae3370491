"""Claims about replayed recordings: which tokens make up a batch, what skew they have, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from test_workload import assert_rows_are_distributions_without_ties, digest_of
from trace_files import tokens_of, write_trace

from moe_ep_bench.workload.replay import RecordedWorkload, deal, draw_steps
from moe_ep_bench.workload.tail import TAILS
from moe_ep_bench.workload.trace import open_trace

few_examples = settings(max_examples=15)


EXPERTS, K = 16, 3
SHAPE = {
    "length_S": [7, 20, 1, 12, 20],
    "num_experts": EXPERTS,
    "top_k": K,
    "sharpness": 0.7,
    "popularity": 1.2,
    "decimals": 2,
}


def save(path, **of):
    """Write a recording of a domain called like its file."""
    return write_trace(path, **{**SHAPE, "domain": path.stem, **of})


@pytest.fixture
def trace(tmp_path):
    return save(tmp_path / "toy.safetensors")


def recorded(path, **changes):
    fields = {"layer": 1, "num_experts": EXPERTS, "top_k": K, "num_tokens": 50, "num_batches": 2, "seed": 0}
    paths = path if isinstance(path, list | tuple) else [path]
    return RecordedWorkload(
        [*map(open_trace, paths)], **{**fields, "tail": "popularity", "order": "shuffled", **changes}
    )


@pytest.mark.parametrize("tail", TAILS)
def test_the_top_k_of_a_batch_are_the_recorded_experts_in_their_order(trace, tail):
    workload = recorded(trace, tail=tail, num_tokens=150)
    ids_TK, scores_TK = workload.traces[0].read_layer(1)
    assert (np.diff(scores_TK.astype(float), axis=1) == 0).any(), "the file should hold ties"
    for index in range(2):
        scores_TE = workload.batch(index).scores_TE
        token_T = tokens_of(workload, index)
        assert_rows_are_distributions_without_ties(scores_TE)
        best = scores_TE.topk(K + 1, dim=1)
        np.testing.assert_array_equal(best.indices[:, :K].numpy(), ids_TK[token_T])
        np.testing.assert_allclose(best.values[:, :K].numpy(), scores_TK[token_T].astype(np.float32), rtol=3e-7)
        assert (best.values[:, K] < best.values[:, K - 1]).all()


def test_the_uniform_tail_is_flat_and_the_popularity_tail_follows_the_recording(trace):
    load_E = np.bincount(open_trace(trace).read_layer(1)[0].ravel(), minlength=EXPERTS)
    means = {}
    for tail in TAILS:
        scores_TE = recorded(trace, tail=tail, num_tokens=60).batch(0).scores_TE.double()
        below_TE = scores_TE < scores_TE.topk(K, dim=1).values[:, -1:]
        means[tail] = (scores_TE * below_TE).sum(0) / below_TE.sum(0)
    assert means["popularity"][load_E.argmax()] > 2 * means["popularity"][load_E.argmin()]
    assert means["uniform"].max() < 2 * means["uniform"].min()


def test_normalised_scores_get_the_share_that_the_user_names(tmp_path):
    path = save(tmp_path / "toy.safetensors", normalised=True, decimals=None)
    workload = recorded(path, topk_share=0.85)
    scores_TE = workload.batch(0).scores_TE
    assert_rows_are_distributions_without_ties(scores_TE)
    best_TK = scores_TE.topk(K, dim=1).values
    torch.testing.assert_close(best_TK.sum(1), torch.full((50,), 0.85), rtol=0, atol=1e-6)
    token_T = tokens_of(workload, 0)
    ratio_TK = best_TK.numpy() / workload.traces[0].read_layer(1)[1][token_T].astype(np.float32)
    np.testing.assert_allclose(ratio_TK, 0.85, rtol=2e-3)
    assert workload.describe()["targets"] == {"topk_share": 0.85}


@pytest.mark.parametrize(("tail", "digest"), [("popularity", "01df247fc3c3e16f"), ("uniform", "40ef65545a4d6771")])
def test_the_bytes_of_one_recordings_sequences_are_what_they_always_were(trace, tail, digest):
    assert digest_of(recorded(trace, tail=tail, num_tokens=150)) == digest


# Mixtures


def pools_of(lengths_of):
    """Pools side by side, in the numbering of all tokens together."""
    pools, offset = [], 0
    for length_S in lengths_of:
        end_S = offset + np.cumsum(length_S)
        pools.append(np.stack([end_S - length_S, end_S], axis=1))
        offset = int(end_S[-1])
    return pools


def slow_mixture(pools, num_tokens, num_batches):
    """The rule in words: tokens one by one."""
    taken = [0] * len(pools)
    for index in range(num_batches):
        random = np.random.default_rng(index)
        orders = [[] for _ in pools]
        pieces, tokens = [], 0
        while tokens < num_tokens:
            source = taken.index(min(taken))
            orders[source] = orders[source] or random.permutation(len(pools[source])).tolist()
            sequence = orders[source].pop(0)
            pieces.append([])
            for token in range(*pools[source][sequence]):
                if tokens < num_tokens:
                    pieces[-1].append(token)
                    tokens += 1
                    taken[source] += 1
        yield [pieces[place] for place in random.permutation(len(pieces))] if len(pools) > 1 else pieces


@st.composite
def mixtures(draw):
    return pools_of(draw(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=3)))


@few_examples
@given(mixtures(), st.integers(1, 80))
def test_sequences_come_from_the_recording_with_the_fewest_tokens(pools, num_tokens):
    batches = deal(pools, num_tokens, map(np.random.default_rng, range(4)), in_order=False)
    for pieces, expected in zip(batches, slow_mixture(pools, num_tokens, 4), strict=True):
        assert [list(range(first, end)) for first, end in pieces] == expected


# Decode


def slow_steps(pools, num_requests, per_request, num_steps, random):
    """Slots that count down, one step after the other."""
    pool_B = random.permutation([index for index, requests in enumerate(num_requests) for _ in range(requests)])
    streams = random.spawn(len(pools))
    starts = [[] for _ in pools]  # where each slot's first request starts
    for pool, stream, requests, found in zip(pools, streams, num_requests, starts, strict=True):
        places_S = [end - start - per_request + 1 for start, end in pool]
        while len(found) < requests:
            clock = [
                time / places for time, places in zip(stream.exponential(size=len(places_S)), places_S, strict=True)
            ]
            for sequence in sorted(range(len(clock)), key=clock.__getitem__)[: requests - len(found)]:
                found.append((sequence, pool[sequence, 0] + stream.integers(places_S[sequence])))
    orders = [[] for _ in pools]
    at, steps = {}, []
    for step in range(num_steps):
        for slot, index in enumerate(pool_B):
            pool, order = pools[index], orders[index]
            if step == 0:
                at[slot] = starts[index].pop(0)
            else:
                sequence, token = at[slot]
                at[slot] = sequence, token + per_request
            sequence, token = at[slot]
            if token + per_request > pool[sequence, 1]:
                order.extend([] if order else streams[index].permutation(len(pool)).tolist())
                sequence = order.pop(0)
                at[slot] = sequence, pool[sequence, 0]
        steps.append([at[slot][1] for slot in range(len(pool_B))])
    return steps


@few_examples
@given(mixtures(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_slots_step_through_sequences_side_by_side(pools, per_request, most, seed):
    pools = [pool * 4 for pool in pools]  # long enough for all
    num_requests = [1 + (index + most) % 4 for index in range(len(pools))]
    first_NB = draw_steps(pools, num_requests, per_request, 30, np.random.default_rng(seed))
    assert first_NB.tolist() == slow_steps(pools, num_requests, per_request, 30, np.random.default_rng(seed))
    fewer_NB = draw_steps(pools, num_requests, per_request, 7, np.random.default_rng(seed))
    np.testing.assert_array_equal(fewer_NB, first_NB[:7])


def test_a_slot_is_a_sequence_and_stays_on_its_rank(trace):
    workload = recorded(trace, arrangement="decode", tokens_per_request=2, num_tokens=14, num_batches=5)
    assert workload.batch(4).sequence_id_T.tolist() == [slot for slot in range(7) for _ in range(2)]
    dealt = [[workload.rank_batch(index, rank, 3).sequence_id_T.tolist() for rank in range(3)] for index in range(5)]
    assert all(ranks == dealt[0] for ranks in dealt)


# Refused


DECODE = {"arrangement": "decode"}
# What the error names: a file or none, and the key; then what is wrong.
WRONG = {
    "experts": ("toy.safetensors: num_experts: ", {"num_experts": 32}),
    "part of a request": ("num_tokens: ", {**DECODE, "tokens_per_request": 4}),
    "long requests": ("toy.safetensors: tokens_per_request: ", {**DECODE, "tokens_per_request": 25}),
    "no full scores": ("toy.safetensors: tail: ", {"tail": "recorded"}),
    "no share": ("normalised.safetensors: topk_share: ", {"paths": ["normalised"]}),
    "a share below K/E": ("topk_share: ", {"paths": ["normalised"], "topk_share": 0.1}),
    "another model": ("other.safetensors: model: ", {"paths": ["toy", "other"]}),
    "another score": ("normalised.safetensors: score: ", {"paths": ["toy", "normalised"]}),
    "other layers": ("one.safetensors: layers: ", {"paths": ["toy", "one"], "layer": 0}),
    "too few": ("trace: expected a request of each", {**DECODE, "paths": ["toy", "more"], "num_tokens": 1}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_go_together_is_one_line_that_names_it(trace, tmp_path, name):
    begin, change = WRONG[name]
    save(tmp_path / "normalised.safetensors", normalised=True, decimals=None)
    save(tmp_path / "other.safetensors", model="other")
    save(tmp_path / "more.safetensors")
    save(tmp_path / "one.safetensors", num_layers=1)
    change = {**change}
    paths = change.pop("paths", ["toy"])
    text = refusal(recorded, [tmp_path / f"{path}.safetensors" for path in paths], **change)
    assert text.removeprefix(f"{tmp_path}/").startswith(begin)
