"""From what virtual ranks took one after another to when each would have done what side by side.

A rank's run of the layer is cut into *legs* where ranks meet: the sum of a batch-wide policy's statistics, the gather
of counts, the two exchanges. A meeting begins when the last rank has come. What the meeting itself takes comes from a
model of the links, because nothing was sent.

A *chain* is one micro-batch's way through all ranks, leg by leg. **One chain** is the layer without overlap: a rank
waits from its arrival until the meeting begins, and then for what it gets. **Two chains** are two micro-batches that
take turns (``two_batch``: DeepSeek's two streams, SGLang's two-batch overlap, vLLM's dual-batch overlap). On every rank
computation goes A's first leg, B's first leg, A's second, B's second, and so on; dispatches and combines go in the same
order, one at a time on every rank's links; sums and gathers are small, and go beside them. While an exchange is under
way it holds some of a rank's streaming multiprocessors, and computation takes 1 / (1 - their share) as long. Shared
experts may be computed *beside* their layer's dispatch: once a rank has come there, ahead of whatever it computes next.

Phases add up to a rank's total. What it computes is computation; else what of an exchange is under way there is
``dispatch`` or ``combine``, so that what is hidden counts for nothing; else it waits for the exchange that its next leg
needs. A layer that stands alone is one of many alike (``repeated``): its time is what one more takes.

Laws (tests/test_timeline.py): nothing is faster than all of a rank's computation, or than all exchanges; two equal
halves without held SMs are never slower than both in one, and halve it where exchange and computation are equal.

A pass of a whole model is cut likewise, at the meetings of all its MoE layers in order: phases and meetings are then
(layer, phase), as (3, "wait_dispatch").

Chains of cases that pass the same phases may be worked out at once (``Chain.stacked``).

Shapes: R = ranks, C = cases.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.schema import PHASES, TOTAL, PhaseKey, layer_and_phase, phase_key

# The phase of what ranks do once they have met.
PHASE_OF_MEETING = {name: phase.meets for name, phase in PHASES.items() if phase.meets is not None}

# What stands in for these moves nothing; their time is the model's alone. On a rank's links they go one at a time.
EXCHANGES = ("dispatch", "combine")

# Layers alike, one after another, of which as many more say what one takes.
_ALIKE = 4

Leg = dict[PhaseKey, Any]
"""Microseconds by phase: of a rank, or float64 [R] of all."""


def phase_of_meeting(meeting: PhaseKey) -> PhaseKey:
    """The phase of what ranks do once they have met there, in the same layer."""
    layer, wait = layer_and_phase(meeting)
    return phase_key(layer, PHASE_OF_MEETING[wait])


def legs_of(segments: Sequence[tuple[PhaseKey, Any]]) -> tuple[list[Leg], list[PhaseKey]]:
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
        elif phase not in EXCHANGES:
            legs[-1][name] += time_us
    return legs, meetings


@dataclass(frozen=True)
class RankTime:
    """What one rank's run took, or all ranks' runs.

    Attributes:
        legs, meetings: see ``legs_of``.
        beside: what ``schema.BESIDE_TOTAL`` names; nothing of one that is modelled.
    """

    legs: list[Leg]
    meetings: list[PhaseKey]
    beside: Mapping[str, Any] = field(default_factory=dict)


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


def side_by_side(legs_R: Sequence[Sequence[Leg]]) -> list[Leg]:
    """The legs of all ranks as those of one, whose values are float64 [R]; 0 where a rank has no such phase."""
    return [
        {phase: np.array([leg.get(phase, 0.0) for leg in leg_R]) for phase in dict.fromkeys(itertools.chain(*leg_R))}
        for leg_R in zip(*legs_R, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Chain:
    """One micro-batch's way through all ranks.

    Attributes:
        legs: of all ranks, one more than meetings.
        meetings: as ``legs_of`` gives them, the same for every rank.
        link_us: what each meeting takes on the links, by name: float64 [R], from when it begins until the rank has all
            it gets.
        held: of meetings by name, the share of a rank's streaming multiprocessors that they hold; else none.
        beside: of meetings by name, what ranks compute beside them, by phase.
    """

    legs: Sequence[Leg]
    meetings: Sequence[PhaseKey]
    link_us: Mapping[PhaseKey, NDArray[np.float64]]
    held: Mapping[PhaseKey, Any] = field(default_factory=dict)
    beside: Mapping[PhaseKey, Leg] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """[R], or [C, R] of stacked ones."""
        return np.broadcast_shapes((1,), *(np.shape(time_us) for leg in self.legs for time_us in leg.values()))

    @property
    def outline(self) -> tuple[Any, ...]:
        """Equal where chains pass the same phases and meetings, which hold multiprocessors or none alike."""
        is_held = tuple(bool(self.held.get(meeting)) for meeting in self.meetings)
        beside = tuple((meeting, tuple(leg)) for meeting, leg in self.beside.items())
        return tuple(map(tuple, self.legs)), tuple(self.meetings), is_held, beside

    @staticmethod
    def stacked(chains: Sequence[Chain], num_ranks: int) -> Chain:
        """Chains with one outline as one, whose values are [C, R], and what is held [C, 1]."""

        def joined(values_C: Sequence[Mapping[PhaseKey, Any]]) -> dict[PhaseKey, NDArray[np.float64]]:
            return {
                key: np.stack([np.broadcast_to(values[key], num_ranks) for values in values_C]) for key in values_C[0]
            }

        first = chains[0]
        return Chain(
            [joined(legs) for legs in zip(*(chain.legs for chain in chains), strict=True)],
            first.meetings,
            joined([chain.link_us for chain in chains]),
            {meeting: np.array([[chain.held[meeting]] for chain in chains]) for meeting in first.held},
            {meeting: joined([chain.beside[meeting] for chain in chains]) for meeting in first.beside},
        )

    def with_shared_beside(self) -> Chain:
        """The same with what the shared experts take ahead of a dispatch moved beside it."""
        legs, beside = [dict(leg) for leg in self.legs], {}
        for number, meeting in enumerate(self.meetings):
            layer, wait = layer_and_phase(meeting)
            if PHASE_OF_MEETING[wait] == "dispatch":
                shared = phase_key(layer, "shared")
                ahead_us = sum(leg.pop(shared, 0.0) for leg in legs[: number + 1])
                beside[meeting] = {shared: ahead_us} if np.any(ahead_us) else {}
        return replace(self, legs=legs, beside=beside)

    def repeated(self, times: int) -> Chain:
        """So many like it, one after another: the last leg of each and the first of the next are one."""
        first, *inner, last = self.legs if len(self.legs) > 1 else (*self.legs, {})
        joined: Leg = {phase: last.get(phase, 0.0) + first.get(phase, 0.0) for phase in {**last, **first}}
        return replace(
            self, legs=[first, *[*inner, joined] * (times - 1), *inner, last], meetings=[*self.meetings] * times
        )


def compose(chains: Sequence[Chain]) -> Leg:
    """Let all ranks run side by side.

    Args:
        chains: one, or two with the same meetings, which take turns.

    Returns:
        Microseconds by phase, waiting included, and ``total``, when a rank is done: float64 [R] each, or [C, R].
    """
    ranks = _Ranks(chains[0].shape)
    under_way: list[_Meeting | None] = [None] * len(chains)
    for number in range(len(chains[0].meetings) + 1):
        for place, chain in enumerate(chains):
            if (needed := under_way[place]) is not None:
                ranks.wait_for(needed)
            ranks.compute(chain.legs[number])
            if number < len(chain.meetings):
                meeting = chain.meetings[number]
                under_way[place] = ranks.meet(meeting, chain.link_us[meeting], chain.held.get(meeting, 0.0))
                if meeting in chain.beside:
                    ranks.compute(chain.beside[meeting])
    return ranks.done()


def compose_alike(chains: Sequence[Chain]) -> Leg:
    """What one more layer takes of each rank among many alike, by phase and ``total``: halves overlap across layers."""
    if not chains[0].meetings:
        return compose(chains)
    few, many = (compose([chain.repeated(times) for chain in chains]) for times in (_ALIKE, 2 * _ALIKE))
    return {phase: (time_us - few.get(phase, 0.0)) / _ALIKE for phase, time_us in many.items()}


@dataclass(frozen=True, eq=False)
class _Meeting:
    """When it begins on each rank, and when the rank has all it gets."""

    name: PhaseKey
    begin_us_R: NDArray[np.float64]
    link_us_R: NDArray[np.float64]
    held: Any

    @property
    def end_us_R(self) -> NDArray[np.float64]:  # noqa: N802
        return self.begin_us_R + self.link_us_R


class _Ranks:
    """The clock of every rank's computation, its exchanges, and what its time went into."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.now_R = np.zeros(shape)
        self.times: Leg = defaultdict(lambda: np.zeros(shape))
        # The last ones, of one chain each: those before them ended ahead of whatever comes.
        self.exchanges: list[_Meeting] = []

    def compute(self, leg: Leg) -> None:
        work_us_R = np.zeros_like(self.now_R) + sum(leg.values())
        end_us_R = self._end_of(work_us_R)
        slower_R = np.divide(end_us_R - self.now_R, work_us_R, out=np.ones_like(work_us_R), where=work_us_R > 0)
        is_held = any(np.any(exchange.held) for exchange in self.exchanges)
        for phase, time_us in leg.items():
            self.times[phase] = self.times[phase] + (time_us * slower_R if is_held else time_us)
        self.now_R = end_us_R

    def _end_of(self, work_us_R: NDArray[np.float64]) -> NDArray[np.float64]:
        """When work that begins now is done, slower where an exchange holds some of the multiprocessors."""
        now_R, left_R = self.now_R.copy(), work_us_R.copy()
        for exchange in self.exchanges:
            if np.any(exchange.held):
                for until_R, speed in ((exchange.begin_us_R, 1.0), (exchange.end_us_R, 1.0 - exchange.held)):
                    took_R = np.minimum(np.maximum(until_R - now_R, 0.0), left_R / speed)
                    now_R, left_R = now_R + took_R, np.maximum(left_R - took_R * speed, 0.0)
        return now_R + left_R

    def meet(self, name: PhaseKey, link_us_R: NDArray[np.float64], held: Any) -> _Meeting:
        """It begins once all ranks have come, an exchange on each rank once the one before it is over there."""
        begin_us_R = np.zeros_like(self.now_R) + self.now_R.max(axis=-1, keepdims=True)
        if is_exchange := layer_and_phase(phase_of_meeting(name))[1] in EXCHANGES:
            for before in self.exchanges[-1:]:
                begin_us_R = np.maximum(begin_us_R, before.end_us_R)
        meeting = _Meeting(name, begin_us_R, np.asarray(link_us_R, dtype=np.float64), held)
        if is_exchange:
            self.exchanges = [*self.exchanges[-1:], meeting]
        return meeting

    def wait_for(self, meeting: _Meeting) -> None:
        """Every rank is idle until it has all it gets there."""
        now_R, begin_us_R, end_us_R = self.now_R, meeting.begin_us_R, meeting.end_us_R
        idle_R = np.maximum(begin_us_R - now_R, 0.0)
        for other in self.exchanges:
            if other is not meeting:
                busy_R = np.minimum(other.end_us_R, begin_us_R) - np.maximum(now_R, other.begin_us_R)
                busy_R = np.clip(busy_R, 0.0, idle_R)
                self.times[phase_of_meeting(other.name)] += busy_R
                idle_R = idle_R - busy_R
        self.times[meeting.name] += idle_R
        # What is left of it: all, where the rank was there when it began.
        left_R = np.where(now_R <= begin_us_R, meeting.link_us_R, np.maximum(end_us_R - now_R, 0.0))
        self.times[phase_of_meeting(meeting.name)] += left_R
        self.now_R = np.maximum(now_R, end_us_R)

    def done(self) -> Leg:
        return {**self.times, TOTAL: self.now_R}
