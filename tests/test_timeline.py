"""Virtual ranks side by side: hand-made cases, and laws for any legs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ep_bench.cost_model.timeline import PHASE_OF_MEETING, compose, legs_of, median_legs
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


legs = st.fixed_dictionaries({"gate": st.floats(0, 100), "experts": st.floats(0, 100)})


@given(st.data(), st.integers(1, 5), st.integers(0, 4))
def test_phases_add_up_and_all_ranks_leave_a_meeting_in_step(data: st.DataObject, num_ranks: int, count: int) -> None:
    meetings = data.draw(st.permutations(list(PHASE_OF_MEETING)))[:count]
    legs_R = [[data.draw(legs) for _ in range(count + 1)] for _ in range(num_ranks)]
    link_us = {name: np.array(data.draw(st.lists(st.floats(0, 50), min_size=num_ranks, max_size=num_ranks)))
               for name in meetings}  # fmt: skip
    composed = compose(legs_R, meetings, link_us)
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
