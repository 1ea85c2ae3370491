"""From what virtual ranks took one after another to when each would have done what side by side.

A rank's run of the layer is cut into *legs* where ranks meet: the sum of a batch-wide policy's
statistics, the gather of counts, the two all-to-alls. A meeting begins when the last rank has
come; what a rank stood there before is waiting. What the meeting itself takes comes from a model
of the links, because nothing was sent.

A pass of a whole model is cut likewise, at the meetings of all its MoE layers in order: phases and meetings are then
(layer, phase), as (3, "wait_dispatch").

Shapes: R = ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.schema import PHASES, TOTAL, PhaseKey, layer_and_phase, phase_key

# The phase of what ranks do once they have met.
PHASE_OF_MEETING = {name: phase.meets for name, phase in PHASES.items() if phase.meets is not None}

# What stands in for these moves nothing; their time is the model's alone.
_NOTHING_SENT = ("dispatch", "combine")

Leg = dict[PhaseKey, float]


def phase_of_meeting(meeting: PhaseKey) -> PhaseKey:
    """The phase of what ranks do once they have met there, in the same layer."""
    layer, wait = layer_and_phase(meeting)
    return phase_key(layer, PHASE_OF_MEETING[wait])


def legs_of(segments: Sequence[tuple[PhaseKey, float]]) -> tuple[list[Leg], list[PhaseKey]]:
    """Cut one run at its meetings.

    Args:
        segments: phase and microseconds of every stretch, in order (``PhaseRecorder.segments_us``).

    Returns:
        Microseconds by phase between meetings, and the meetings between them, by name: one fewer.
    """
    legs: list[Leg] = [defaultdict(float)]
    meetings: list[PhaseKey] = []
    for name, time_us in segments:
        _, phase = layer_and_phase(name)
        if phase in PHASE_OF_MEETING:
            meetings.append(name)
            legs.append(defaultdict(float))
        elif phase not in _NOTHING_SENT:
            legs[-1][name] += time_us
    return legs, meetings


@dataclass(frozen=True)
class RankTime:
    """What one rank's run took.

    Attributes:
        legs, meetings: see ``legs_of``.
        beside: what ``schema.BESIDE_TOTAL`` names; nothing of one that is modelled.
    """

    legs: list[Leg]
    meetings: list[PhaseKey]
    beside: Mapping[str, float] = field(default_factory=dict)


def median_legs(runs: Sequence[Sequence[Leg]]) -> list[Leg]:
    """What a rank's legs take typically: the median over runs of every phase of every leg.

    The slowest of many ranks is the slowest of many noisy times: taken run by run it would be too slow, the more so
    the more alike ranks are. Runs of one rank are therefore put together before ranks are.
    """
    if len(runs) == 1:
        return [dict(leg) for leg in runs[0]]
    return [
        {phase: float(np.median([run[number].get(phase, 0.0) for run in runs])) for phase in leg}
        for number, leg in enumerate(runs[0])
    ]


def compose(
    legs_R: Sequence[Sequence[Leg]], meetings: Sequence[PhaseKey], link_us: Mapping[PhaseKey, NDArray[np.float64]]
) -> list[Leg]:
    """Let all ranks run side by side.

    Args:
        legs_R: the legs of each rank, one more than meetings.
        meetings: as ``legs_of`` gives them, the same for every rank.
        link_us: what each meeting takes on the links, by name: float64 [R], from when it begins until the
            rank has all it gets.

    Returns:
        For each rank microseconds by phase, waiting included, and ``total``: when the rank is done.
    """
    num_ranks = len(legs_R)
    times: list[Leg] = [defaultdict(float) for _ in range(num_ranks)]
    now_R = np.zeros(num_ranks)
    for number in range(len(meetings) + 1):
        for rank, legs in enumerate(legs_R):
            for phase, time_us in legs[number].items():
                times[rank][phase] += time_us
            now_R[rank] += sum(legs[number].values())
        if number == len(meetings):
            break
        meeting, begin = meetings[number], now_R.max()
        held_in = phase_of_meeting(meeting)
        for rank in range(num_ranks):
            times[rank][meeting] += begin - now_R[rank]
            times[rank][held_in] += link_us[meeting][rank]
        now_R = begin + link_us[meeting]
    for rank in range(num_ranks):
        times[rank][TOTAL] = float(now_R[rank])
    return [dict(time) for time in times]
