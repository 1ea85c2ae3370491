"""The order of timing, and phases that add up, on a clock that tests turn by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep_bench.measure.protocol import BREAKDOWN, PLAIN, order, plan
from moe_ep_bench.models import load_model, preset_names
from moe_ep_bench.records import TOTAL, UNACCOUNTED
from moe_ep_bench.timer import PhaseRecorder
from moe_ep_bench.workload import peak_load, top_k_load
from moe_ep_bench.workload.balanced import balanced_scores


class HandClock:
    """A clock whose microseconds tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def stamp(self) -> float:
        return self.now

    def wait(self) -> None:
        pass

    def between_us(self, start: float, end: float) -> float:
        return end - start


def test_nested_phases_are_taken_out_of_what_surrounds_them() -> None:
    clock = HandClock()
    recorder = PhaseRecorder(clock)

    def spend(us: float) -> None:
        clock.now += us

    inner = recorder.wrap("metadata", lambda: spend(5))

    def outer_work() -> None:
        spend(2)
        inner()
        spend(3)

    outer = recorder.wrap("permute", outer_work)
    recorder.begin()
    spend(1)
    outer()
    outer()
    spend(4)
    recorder.end()
    assert recorder.times_us() == {"permute": 10, "metadata": 10, UNACCOUNTED: 5, TOTAL: 25}


def test_a_recorder_begins_anew() -> None:
    clock = HandClock()
    recorder = PhaseRecorder(clock)
    for _ in range(2):
        recorder.begin()
        clock.now += 7
        recorder.end()
        assert recorder.times_us() == {UNACCOUNTED: 7, TOTAL: 7}


def test_a_phase_that_raises_is_left() -> None:
    recorder = PhaseRecorder(HandClock())

    def fail() -> None:
        raise ZeroDivisionError

    recorder.begin()
    with pytest.raises(ZeroDivisionError):
        recorder.wrap("experts", fail)()
    recorder.clock.now += 3
    recorder.end()
    assert recorder.times_us()[UNACCOUNTED] == 3


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))
@settings(derandomize=True, deadline=None)
def test_every_batch_is_timed_equally_often(num_batches: int, iterations: int, breakdowns: int) -> None:
    steps = plan(num_batches, iterations, min(breakdowns, iterations))
    assert len(set(steps)) == len(steps)
    for batch in range(num_batches):
        kinds = [step.kind for step in steps if step.batch == batch]
        assert kinds.count(PLAIN) == iterations
        assert kinds.count(BREAKDOWN) == min(breakdowns, iterations)


@pytest.mark.parametrize("num_cases", range(1, 13))
def test_every_case_takes_every_place_and_follows_every_other_equally_often(num_cases: int) -> None:
    rounds = 1 + num_cases % 2
    orders = [order(num_cases, turn) for turn in range(num_cases * rounds)]
    for row in orders:
        assert sorted(row) == list(range(num_cases))
    for place in range(num_cases):
        assert Counter(row[place] for row in orders) == dict.fromkeys(range(num_cases), rounds)
    follows = Counter(pair for row in orders for pair in itertools.pairwise(row))
    assert follows == dict.fromkeys(itertools.permutations(range(num_cases), 2), rounds)


@given(st.integers(1, 60), st.sampled_from([8, 16, 64]), st.integers(1, 8))
@settings(derandomize=True, deadline=None, max_examples=30)
def test_balanced_scores_keep_their_values_and_level_the_load(num_tokens: int, num_experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    scores_TE = torch.softmax(3 * torch.randn(num_tokens, num_experts, generator=generator), dim=1)
    balanced_TE = balanced_scores(scores_TE, top_k)
    assert torch.equal(balanced_TE.sort(dim=1).values, scores_TE.sort(dim=1).values)
    load_E = top_k_load(balanced_TE, top_k)
    assert load_E.max() - load_E.min() <= 1
    assert num_tokens * top_k % num_experts or peak_load(load_E) == 1


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_scales_its_sizes_and_nothing_else(name: str) -> None:
    model = load_model(name)
    small = model.scaled(0.25)
    assert (small.num_experts, small.top_k, small.num_layers) == (model.num_experts, model.top_k, model.num_layers)
    assert small.hidden_size == model.hidden_size // 4
    assert small.scale == 0.25
    assert bool(small.shared_ffn_hidden_size) == bool(model.shared_ffn_hidden_size)


def test_presets_have_the_published_sizes() -> None:
    sizes = {
        name: (m.num_layers, m.hidden_size, m.num_experts, m.top_k, m.ffn_hidden_size, m.shared_ffn_hidden_size)
        for name in preset_names()
        for m in [load_model(name)]
    }
    assert sizes == {
        "olmoe-1b-7b": (16, 2048, 64, 8, 1024, 0),  # arXiv 2409.02060
        "deepseek-v2-lite": (27, 2048, 64, 6, 1408, 2 * 1408),  # arXiv 2405.04434
        "mixtral-8x7b": (32, 4096, 8, 2, 14336, 0),  # arXiv 2401.04088
    }
