"""Virtual ranks side by side: hand-made cases, and laws for any legs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ep_bench.cost_model.timeline import (
    PHASE_OF_MEETING,
    Chain,
    Leg,
    compose,
    compose_alike,
    legs_of,
    median_legs,
    phase_of_meeting,
    side_by_side,
)
from moe_ep_bench.schema import TOTAL


def test_a_run_is_cut_where_ranks_meet_and_what_was_not_sent_is_left_out() -> None:
    segments = [
        ("gate", 3.0), ("policy", 2.0), ("permute", 1.0), ("wait_metadata", 0.5), ("metadata", 4.0), ("permute", 5.0),
        ("wait_dispatch", 0.1), ("dispatch", 9.0), ("experts", 7.0), ("wait_combine", 0.1), ("combine", 9.0),
        ("permute", 6.0), ("unaccounted", 0.2), ("permute", 1.0),
    ]  # fmt: skip
    legs, meetings = legs_of(segments)
    assert meetings == ["wait_metadata", "wait_dispatch", "wait_combine"]
    assert legs == [
        {"gate": 3.0, "policy": 2.0, "permute": 1.0},
        {"metadata": 4.0, "permute": 5.0},
        {"experts": 7.0},
        {"permute": 7.0, "unaccounted": 0.2},
    ]


def by_rank(times: Leg) -> list[Leg]:
    """Of all ranks' times those of each."""
    num_ranks = max(map(np.size, times.values()))
    each = {phase: np.broadcast_to(time_us, num_ranks).tolist() for phase, time_us in times.items()}
    return [{phase: times_us[rank] for phase, times_us in each.items()} for rank in range(num_ranks)]


legs = st.fixed_dictionaries({"gate": st.floats(0, 100), "experts": st.floats(0, 100)})


@given(st.data(), st.integers(1, 5), st.integers(0, 4))
def test_phases_add_up_and_all_ranks_leave_a_meeting_in_step(data: st.DataObject, num_ranks: int, count: int) -> None:
    meetings = data.draw(st.permutations(list(PHASE_OF_MEETING)))[:count]
    legs_R = [[data.draw(legs) for _ in range(count + 1)] for _ in range(num_ranks)]
    link_us = {name: np.array(data.draw(st.lists(st.floats(0, 50), min_size=num_ranks, max_size=num_ranks)))
               for name in meetings}  # fmt: skip
    composed = by_rank(compose([Chain(side_by_side(legs_R), meetings, link_us)]))
    for times in composed:
        assert times[TOTAL] == pytest.approx(sum(value for phase, value in times.items() if phase != TOTAL))
        assert min(times.values()) >= 0
    for name in meetings:
        assert min(times[name] for times in composed) == 0, "somebody comes last"
    # An oracle: simulate each rank's clock from meeting to meeting.
    clock = [0.0] * num_ranks
    for number in range(count + 1):
        clock = [now + sum(legs_R[rank][number].values()) for rank, now in enumerate(clock)]
        if number < count:
            begin = max(clock)
            clock = [begin + link_us[meetings[number]][rank] for rank in range(num_ranks)]
    assert [times[TOTAL] for times in composed] == pytest.approx(clock)


def test_runs_of_a_rank_are_put_together_phase_by_phase() -> None:
    times = (1.0, 8.0), (5.0, 2.0), (2.0, 3.0)
    runs = [[{"gate": gate, "policy": policy}, {"experts": 9.0}] for gate, policy in times]
    assert median_legs(runs) == [{"gate": 2.0, "policy": 3.0}, {"experts": 9.0}]
    assert median_legs([[{"gate": 1.0}], [{}], [{"gate": 3.0}]]) == [{"gate": 1.0}]


# Two micro-batches that overlap

ORDER = ["wait_policy", "wait_metadata", "wait_dispatch", "wait_combine"]


def drawn_chain(
    random: np.random.Generator, meetings: list[str], num_ranks: int, held: float = 0.0, *, whole: bool = True
) -> Chain:
    """A chain of whole microseconds, with shared experts ahead of the first meeting."""

    def us(most: int) -> float:
        return float(random.integers(0, most)) if whole else float(random.uniform(0, most))

    legs_R: list[list[Leg]] = [
        [
            {"gate": us(9), "experts": us(40), **({"shared": us(12)} if number == 0 else {})}
            for number in range(len(meetings) + 1)
        ]
        for _ in range(num_ranks)
    ]
    link_us = {name: np.array([us(30) for _ in range(num_ranks)]) for name in meetings}
    held_by = {name: held for name in meetings if "wait_d" in name or "wait_c" in name}
    return Chain(side_by_side(legs_R), meetings, link_us, held_by)


def stepped(chains: list[Chain], step: float = 0.25) -> list[float]:
    """An oracle: when each rank is done, by a clock that goes on in small steps.

    Every rank has a list of what it computes, in order, each with the exchange that it needs; a meeting begins once
    all ranks have come, exchanges one at a time on each rank in the order of their chains.
    """
    (num_ranks,), meetings = chains[0].shape, list(chains[0].meetings)
    tasks: list[list[tuple[float, tuple[int, int] | None, tuple[int, int] | None]]] = []
    for rank in range(num_ranks):
        tasks.append([])
        for number in range(len(meetings) + 1):
            for place, chain in enumerate(chains):
                needs = (place, number - 1) if number else None
                comes_to = (place, number) if number < len(meetings) else None
                tasks[rank].append((sum(by_rank(chain.legs[number])[rank].values()), needs, comes_to))
                if number < len(meetings) and (beside := chain.beside.get(meetings[number])):
                    tasks[rank].append((sum(by_rank(beside)[rank].values()), None, None))
    queue = [(place, number) for number, name in enumerate(meetings) for place in range(len(chains))
             if PHASE_OF_MEETING[name] in ("dispatch", "combine")]  # fmt: skip
    left_R, place_R, now = [tasks[rank][0][0] for rank in range(num_ranks)], [0] * num_ranks, 0.0
    come: dict[tuple[int, int], set[int]] = {}
    end_R: dict[tuple[int, int], np.ndarray] = {}
    done_R = [np.nan] * num_ranks

    def settle() -> bool:
        """All that happens at this moment; whether anything did."""
        moved = False
        for rank in range(num_ranks):
            while place_R[rank] < len(tasks[rank]):
                _, needs, comes_to = tasks[rank][place_R[rank]]
                if (needs is not None and (needs not in end_R or end_R[needs][rank] > now + 1e-9)) or left_R[
                    rank
                ] > 1e-9:
                    break
                if comes_to is not None:
                    come.setdefault(comes_to, set()).add(rank)
                place_R[rank] += 1
                moved = True
                if place_R[rank] < len(tasks[rank]):
                    left_R[rank] = tasks[rank][place_R[rank]][0]
                else:
                    done_R[rank] = now
        for key, ranks in come.items():
            if len(ranks) == num_ranks:
                if key not in end_R:
                    end_R[key] = np.full(num_ranks, np.nan)
                before = queue[: queue.index(key)][-1:] if key in queue else []
                for rank in range(num_ranks):
                    if np.isnan(end_R[key][rank]) and all(
                        one in end_R and end_R[one][rank] <= now + 1e-9 for one in before
                    ):
                        end_R[key][rank] = now + chains[key[0]].link_us[meetings[key[1]]][rank]
                        moved = True
        return moved

    while np.isnan(done_R).any():
        while settle():
            pass
        for rank in range(num_ranks):
            if place_R[rank] < len(tasks[rank]):
                needs = tasks[rank][place_R[rank]][1]
                if needs is None or (needs in end_R and end_R[needs][rank] <= now + 1e-9):
                    held = max([chains[key[0]].held.get(meetings[key[1]], 0.0) for key, end in end_R.items()
                                if end[rank] > now + 1e-9], default=0.0)  # fmt: skip
                    left_R[rank] = max(0.0, left_R[rank] - step * (1 - held))
        now += step
    return done_R


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("held", [0.0, 0.5])
def test_two_micro_batches_are_done_when_a_clock_in_small_steps_says(seed: int, held: float) -> None:
    random = np.random.default_rng(seed)
    meetings = ORDER[int(random.integers(0, 3)) :]
    chains = [drawn_chain(random, meetings, 3, held) for _ in range(2)]
    if seed % 2:
        chains = [chain.with_shared_beside() for chain in chains]
    composed = by_rank(compose(chains))
    assert [times[TOTAL] for times in composed] == pytest.approx(stepped(chains), abs=1e-6)
    for times in composed:
        assert times[TOTAL] == pytest.approx(sum(value for phase, value in times.items() if phase != TOTAL))
        assert min(times.values()) >= 0


@given(st.integers(0, 2**32), st.integers(1, 4), st.floats(0, 0.9))
def test_nothing_is_faster_than_all_of_one_resource(seed: int, num_ranks: int, held: float) -> None:
    random = np.random.default_rng(seed)
    chains = [drawn_chain(random, ORDER, num_ranks, held, whole=False).with_shared_beside() for _ in range(2)]
    totals = compose(chains)[TOTAL]
    for rank in range(num_ranks):
        legs = [leg for chain in chains for leg in (*chain.legs, *chain.beside.values()) if leg]
        computed = sum(sum(by_rank(leg)[rank].values()) for leg in legs)
        assert totals[rank] >= computed - 1e-6
    exchanged = sum(chain.link_us[name].max() for chain in chains for name in ORDER[2:])
    assert max(totals) >= exchanged - 1e-6


def halved(chain: Chain) -> Chain:
    legs = [{phase: us / 2 for phase, us in leg.items()} for leg in chain.legs]
    return Chain(legs, chain.meetings, {name: us / 2 for name, us in chain.link_us.items()}, chain.held)


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_equal_halves_are_never_slower_than_both_in_one(seed: int, num_ranks: int) -> None:
    whole = drawn_chain(np.random.default_rng(seed), ORDER, num_ranks, whole=False)
    for together in (compose, compose_alike):
        alone_us, halves_us = together([whole])[TOTAL].max(), together([halved(whole)] * 2)[TOTAL].max()
        assert halves_us <= alone_us + 1e-6
    # Beside the dispatch that follows it a rank's work delays nobody; past sums and gathers it may.
    ahead = drawn_chain(np.random.default_rng(seed), ORDER[2:], num_ranks, whole=False)
    alone, beside = (compose([one])[TOTAL].max() for one in (ahead, ahead.with_shared_beside()))
    assert beside <= alone + 1e-6
    # All that two halves can hide: half of a layer in which exchange and computation are equal.
    five = np.full(2, 5.0)
    equal = Chain([{"experts": five}, {"experts": five}, {}], ORDER[2:], dict.fromkeys(ORDER[2:], five))
    alone, both = compose([equal]), compose_alike([halved(equal)] * 2)
    assert both[TOTAL] == pytest.approx(alone[TOTAL] / 2)
    assert both.get("dispatch", 0.0) + both.get("combine", 0.0) == pytest.approx([0.0, 0.0]), "all is hidden"


def test_what_an_exchange_holds_is_taken_from_computation() -> None:
    """By hand: while 4 us of exchange hold half of the multiprocessors, 10 us of the other half's experts take 12."""
    held = {"wait_combine": 0.5}
    first = Chain([{"gate": 2.0}, {}], ["wait_combine"], {"wait_combine": np.array([4.0])}, held)
    second = Chain([{"experts": 10.0}, {}], ["wait_combine"], {"wait_combine": np.array([1.0])}, held)
    times = compose([first, second])
    assert times["experts"] == 12.0
    assert times[TOTAL] == 2.0 + 12.0 + 1.0
    assert times["combine"] == 1.0, "the first one is hidden"


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_cases_at_once_are_as_each_by_itself(seed: int, num_ranks: int, num_cases: int, is_held: bool) -> None:
    random = np.random.default_rng(seed)
    held_C = random.uniform(0.1, 0.5, num_cases) * is_held
    cases = [
        [drawn_chain(random, ORDER, num_ranks, held, whole=False).with_shared_beside() for _ in range(2)]
        for held in held_C
    ]
    assert len({chain.outline for chains in cases for chain in chains}) == 1
    stacked = [Chain.stacked(chains, num_ranks) for chains in zip(*cases, strict=True)]
    for composed in (compose, compose_alike):
        times_CR = composed(stacked)
        for place, chains in enumerate(cases):
            alone = composed(chains)
            assert alone.keys() == times_CR.keys()
            for phase, times_R in alone.items():
                assert np.array_equal(times_R, times_CR[phase][place]), phase


def test_one_more_layer_of_many_takes_as_long_as_one_that_stands_alone_where_nothing_overlaps() -> None:
    chain = drawn_chain(np.random.default_rng(3), ORDER, 1)
    (alone,), (more,) = by_rank(compose([chain])), by_rank(compose_alike([chain]))
    assert more == pytest.approx(alone)
    assert {phase_of_meeting(name) for name in ORDER} <= set(more)
