"""Claims about batches larger than memory: a rank's tokens made alone are those that dealing the whole batch gives."""

from __future__ import annotations

import tracemalloc
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_recorded import EXPERTS, K, save
from test_workload import peak_load, top_k_load, top_k_share

from moe_ep_bench.workload import scores as scores_module
from moe_ep_bench.workload import synthetic as synthetic_module
from moe_ep_bench.workload.batch import TokenBatch, Workload, deal_pieces
from moe_ep_bench.workload.replay import RecordedWorkload
from moe_ep_bench.workload.scores import Run, gumbel_noise
from moe_ep_bench.workload.synthetic import SyntheticWorkload
from moe_ep_bench.workload.trace import open_trace

few_examples = settings(max_examples=4)


@contextmanager
def sizes(chunk_scores=2**16, solved_scores=2**26, kept_scores=2**23):
    chunks = patch.multiple(scores_module, _CHUNK_SCORES=chunk_scores, _KEPT_SCORES=kept_scores)
    with chunks, patch.object(synthetic_module, "SOLVED_SCORES", solved_scores):
        yield


@pytest.fixture(autouse=True, scope="module")
def few_rows():
    """What targets are solved on is small, so that it neither takes the time nor hides other memory."""
    with patch.multiple(synthetic_module, _COPYING_ROWS=(128, 256), _REFERENCE_ROWS=512):
        yield


chunk_sizes = st.sampled_from([50, 300, 2048, 2**16])


def assert_ranks_are_dealt(streamed: Workload, whole: Workload, index, num_ranks):
    batch = whole.batch(index)
    ranks = [streamed.rank_batch(index, rank, num_ranks) for rank in range(num_ranks)]
    start_P, rank_P = deal_pieces(
        torch.unique_consecutive(batch.sequence_id_T, return_counts=True)[1].numpy(), num_ranks
    )
    rank_T = np.repeat(rank_P, np.diff(start_P))
    for number, rank in enumerate(ranks):
        tokens_T = torch.from_numpy(np.flatnonzero(rank_T == number))
        assert torch.equal(rank.scores_TE, batch.scores_TE[tokens_T])
        assert torch.equal(rank.sequence_id_T, batch.sequence_id_T[tokens_T])
    tokens_R = [tokens.num_tokens for tokens in ranks]
    assert streamed.tokens_of_ranks(index, num_ranks).tolist() == tokens_R


# Synthetic


def synthetic(**changes):
    fields = {"num_experts": 16, "top_k": 3, "num_tokens": 300, "num_batches": 3, "sequence_length": 7, "seed": 0}
    peak = {} if "batch_peak_load" in changes else {"peak_load": 2.5}
    return SyntheticWorkload(**fields | peak | changes)


KINDS = {
    "experts that no word of random numbers ends with": {"num_experts": 18},
    "alike neighbours, placed and sharp": {"neighbour_overlap": 1.6, "rank_load": (4, 1.3), "topk_share": 0.6},
    "solved batch by batch": {
        "batch_peak_load": 2.5,
        "neighbour_overlap": 1.6,
        "rank_load": (4, 1.3),
        "topk_share": 0.6,
    },
    "rank load": {"rank_load": (4, 1.4), "peak_load": 3.0},
    "no skew": {"peak_load": None},
    "a power law": {"pattern": "power_law_1.2", "peak_load": None},
    "groups": {"num_groups": 4, "top_groups": 3, "topk_share": 0.5},
}


@pytest.mark.parametrize("kind", KINDS)
@settings(few_examples, max_examples=3)
@given(
    st.integers(150, 350),
    st.one_of(st.integers(1, 20), st.sampled_from([128, 1000])),
    st.integers(0, 2),
    st.integers(1, 64),
    chunk_sizes,
    st.sampled_from([0, 2**23]),
)
def test_a_ranks_synthetic_tokens_are_those_it_is_dealt(
    kind, num_tokens, sequence_length, index, num_ranks, chunk_scores, kept_scores
):
    if "neighbour_overlap" in KINDS[kind]:
        sequence_length += 1
    fields = {"num_tokens": num_tokens, "sequence_length": sequence_length, **KINDS[kind]}
    whole = synthetic(**fields)
    with sizes(chunk_scores, kept_scores=kept_scores):
        streamed = synthetic(**fields)
        assert_ranks_are_dealt(streamed, whole, index, num_ranks)


@settings(few_examples)
@given(st.sets(st.integers(0, 399), min_size=1), chunk_sizes)
def test_noise_of_scattered_rows_is_that_of_all_rows_drawn_at_once(rows, chunk_scores):
    runs = [Run(row, row + 1) for row in sorted(rows)]
    with sizes(kept_scores=0):
        (whole_TE,) = gumbel_noise(3, 1, [Run(0, 400)], 18)
    with sizes(chunk_scores):
        noise_TE = np.concatenate(list(gumbel_noise(3, 1, runs, 18)))
    np.testing.assert_array_equal(noise_TE, whole_TE[sorted(rows)])


@pytest.mark.parametrize(
    ("kind", "sequence_length"),
    [("no skew", 3), ("solved batch by batch", 2000), ("rank load", 3), ("groups", 2000)],
)
def test_a_batch_that_is_solved_in_part_is_the_same_for_all_ranks(kind, sequence_length):
    fields = {"num_tokens": 1200, "sequence_length": sequence_length, **KINDS[kind]}
    with sizes(chunk_scores=160, solved_scores=16 * 400):
        whole = synthetic(**fields)
        for num_ranks in (1, 5, 64):
            assert_ranks_are_dealt(synthetic(**fields), whole, 1, num_ranks)


def test_the_targets_of_a_large_batch_are_met_on_the_solved_part_and_nearly_on_the_rest():
    fields = {"batch_peak_load": 2.5, "num_tokens": 16000, "topk_share": 0.6, "sequence_length": 16}
    with sizes(chunk_scores=16 * 500, solved_scores=16 * 4000):
        scores_TE = synthetic(**fields).batch(0).scores_TE
    assert peak_load(top_k_load(scores_TE[:4000], 3)) == pytest.approx(2.5, rel=0.0101)
    assert top_k_share(scores_TE[:4000], 3) == pytest.approx(0.6, abs=2e-3)
    # Of 12,000 tokens 0.47 go to the busiest expert: a standard deviation is 1 %, of 4,000 it is 1.7 %.
    assert peak_load(top_k_load(scores_TE[4000:], 3)) == pytest.approx(2.5, rel=0.06)
    assert top_k_share(scores_TE[4000:], 3) == pytest.approx(0.6, abs=0.02)
    solved_alone = synthetic(**{**fields, "num_tokens": 4000}).batch(0).scores_TE
    assert torch.equal(solved_alone, scores_TE[:4000])


# Recorded


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Two domains: a few long sequences, and many short ones."""
    folder = tmp_path_factory.mktemp("traces")
    return [
        save(folder / "long.safetensors", length_S=[40, 1, 55], seed=0, full=True),
        save(folder / "short.safetensors", length_S=[4, 6, 5, 8, 3, 9, 7, 30], seed=1, full=True),
    ]


def recorded(paths, **changes):
    fields = {"layer": 0, "num_experts": EXPERTS, "top_k": K, "num_tokens": 120, "num_batches": 3, "seed": 0}
    return RecordedWorkload([*map(open_trace, paths)], **{**fields, "tail": "uniform", "order": "shuffled", **changes})


@pytest.mark.parametrize("arrangement", ["sequences", "decode"])
@pytest.mark.parametrize(("num_recordings", "tail"), [(1, "popularity"), (2, "uniform"), (2, "recorded")])
@few_examples
@given(st.integers(5, 300), st.integers(1, 4), st.integers(0, 2), st.integers(1, 64), chunk_sizes)
def test_a_ranks_recorded_tokens_are_those_it_is_dealt(
    recordings, num_recordings, tail, arrangement, num_tokens, per_request, index, num_ranks, chunk_scores
):
    fields = {"num_tokens": num_tokens, "tail": tail, "arrangement": arrangement}
    if arrangement == "decode":
        fields |= {"num_tokens": num_tokens * per_request, "tokens_per_request": per_request}
    whole = recorded(recordings[:num_recordings], **fields)
    with sizes(chunk_scores):
        streamed = recorded(recordings[:num_recordings], **fields)
        assert_ranks_are_dealt(streamed, whole, index, num_ranks)


# Memory


def peak_bytes(action):
    """Most memory that was held at once beyond what was there before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        action()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def go_through(batches):
    for batch in batches:
        assert isinstance(batch, TokenBatch)


@pytest.mark.parametrize("kind", ["synthetic", "alike neighbours", "recorded", "decode"])
def test_memory_is_bounded_by_a_ranks_tokens(recordings, kind):
    num_tokens, num_ranks = 2**14, 64
    make = {
        "synthetic": lambda: synthetic(num_tokens=num_tokens, sequence_length=64),
        "alike neighbours": lambda: synthetic(num_tokens=num_tokens, sequence_length=64, neighbour_overlap=1.6),
        "recorded": lambda: recorded(recordings, num_tokens=num_tokens, num_batches=1),
        "decode": lambda: recorded(
            recordings, num_tokens=num_tokens, num_batches=1, arrangement="decode", tokens_per_request=8
        ),
    }[kind]
    with sizes(chunk_scores=2**11, solved_scores=2**13, kept_scores=0):  # as of large batches
        whole = make()
        of_batch = peak_bytes(lambda: whole.batch(0))
        assert of_batch > num_tokens * EXPERTS * 4
        streamed = make()
        of_ranks = peak_bytes(lambda: go_through(streamed.rank_batch(0, rank, num_ranks) for rank in range(num_ranks)))
        assert of_ranks < of_batch / 4, (of_ranks, of_batch)
